"""Tensor classes that intercept uses of values which are sharded, unpublished or parked."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from functools import cache, lru_cache, partial
from typing import Any, Final, NoReturn, Protocol
from weakref import ref

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from zero_comm import Group, Reduction, all_reduce_flat
from zero_comm.calls import in_lines

from .errors import StateError
from .torch_private import (
    as_subclass_sharing_memory,
    foreach_norm,
    has_views,
    is_in_backward,
    own_parameters,
    plain_access,
    plain_call,
    storage_key,
    unscale_and_find_inf_,
    without_memory,
)


def late_optimizer() -> str:
    """Return a sentence, and a space, where an optimizer of torch's is stepping parameters.

    The optimizer that `shard()` was given steps shards, also while it calls a closure.
    """
    frame = sys._getframe()
    while frame is not None:
        optimizer = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else ()
        if any(param in _OWNERS for group in groups for param in group["params"]):
            return (
                f"This {type(optimizer).__name__} was built after shard(), or not passed to it, so "
                "it has parameters where it needs their shards: build it before, and pass it, "
                "shard(model, optimizer). "
            )
        frame = frame.f_back
    return ""


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of this shape that costs one element and reads as NaN.

    Each call makes a scalar of its own: detectors of tied weights compare addresses. Dtypes without
    NaN read as zero; only the state check protects them.
    """
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


def refuse_deepcopy() -> NoReturn:
    """Raise StateError: a copy would share our buffers."""
    raise StateError(
        "copy.deepcopy() of a sharded model: its parameters live in buffers that are shared "
        "with the optimizer and with other ranks. Build a fresh model, call "
        "zero_engine.full_state_dict(model) on all ranks, and load what rank 0 gets (others get "
        "{}) into it on rank 0; or copy before shard(). What AveragedModel "
        "and averages like it copy for, zero_engine.ShardedAverage(model, decay=...) does."
    )


def refuse_pickle() -> NoReturn:
    """Raise StateError: a file would have no values."""
    raise StateError("pickling a sharded model: save zero_engine.full_state_dict(model) instead")


# Attributes that give access to the elements.
VALUES: Final = {"data", "T", "mT", "H", "mH", "real", "imag"}
_SHAPE: Final = {"dim", "size", "numel", "is_contiguous", "stride", "__len__"}
# Functions that read no element. Any other function is taken to read.
_METADATA: Final = {
    *_SHAPE,
    *("ndimension", "nelement", "element_size", "get_device"),
    *("storage_offset", "data_ptr", "untyped_storage", "storage"),
    *("_typed_storage", "is_floating_point", "is_complex", "is_signed", "is_shared", "is_pinned"),
    *("is_inference", "is_conj", "is_neg", "has_names", "is_same_size", "is_set_to", "_is_view"),
    *("_has_compatible_shallow_copy_type",),
    *("result_type", "can_cast", "promote_types", "retain_grad", "requires_grad_"),
    *("register_hook", "register_post_accumulate_grad_hook", "__hash__", "__dir__"),
}
_FACTORIES: Final = (
    *("empty_like", "zeros_like", "ones_like", "full_like"),
    *("rand_like", "randn_like", "randint_like", "new_"),
)
_ACCESSES: Final = {"__get__", "__set__", "__delete__"}


def names_of(func: Callable) -> tuple[str, str]:
    """Return the name of a torch function, and of the attribute that it reads or sets.

    The latter is "" if it neither reads nor sets one.
    """
    name = getattr(func, "__name__", None) or str(func)
    # Of an operator's overload: DTensors call `div_.Tensor`.
    name = name.partition(".")[0]
    return name, getattr(func.__self__, "__name__", "") if name in _ACCESSES else ""  # type: ignore[attr-defined]


def _looks_at_no_element(func: Callable) -> bool:
    """Return whether a torch function reads no element: for shape, dtype and the like only."""
    name, attribute = names_of(func)
    if name in _METADATA or name.startswith(_FACTORIES):
        return True
    return bool(attribute) and (name != "__get__" or attribute not in VALUES)


# This is asked of each function that an optimizer calls on a gradient.
@lru_cache(maxsize=256)
def _reads_no_values(func: Callable) -> bool:
    """Return whether a function neither reads nor writes elements, nor returns a way to do so."""
    name = getattr(func, "__name__", "")
    return name in _SHAPE or (name == "__get__" and names_of(func)[1] not in VALUES)


class StandIn:
    """Mixin of the class of a tensor without its values in memory: intercepts every use of them."""

    __slots__ = ()
    _answers = staticmethod(_looks_at_no_element)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer questions about shape; pass what would read or write values to `_on_use`."""
        if cls._answers(func):
            return plain_call(func, args, kwargs or {})
        return cls._on_use(func, *names_of(func), args, kwargs or {})

    @classmethod
    def _on_use(cls, func: Any, name: str, attribute: str, args: tuple, kwargs: dict) -> Any:
        """Handle a use of values, by a torch function of this name or a read of this attribute."""
        raise NotImplementedError


@cache
def stand_in_type(kind: type[StandIn], cls: type[Tensor]) -> type[Any]:
    """Return a tensor's class with `kind` mixed in. Messages and `repr` show the same name."""
    names = {"__slots__": (), "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls)(cls.__name__, (kind, cls), names)


class NameOnly(StandIn, Tensor):  # type: ignore[misc]
    """Value in a state dict of a parameter that is sharded: name, shape, dtype and device.

    Libraries ask a state dict for names, often on one rank, where nothing can be gathered. It has
    no memory. A use of its values raises; loading it into its own parameter changes nothing, as
    with the views that torch's `state_dict()` gives.
    """

    param: Tensor
    # Text for errors: names the parameter, and says how to read its values.
    remedy: str

    @classmethod
    def of(cls, param: Tensor, remedy: str) -> NameOnly:
        """Make one for a parameter or buffer."""
        # On the meta device, torch itself refuses `other.data = named`, which asks `other` alone.
        named = without_memory(cls, param.shape, param.dtype, "meta")
        named.param, named.remedy = param, remedy
        return named

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Be on the parameter's device; else answer as any stand-in does."""
        attribute = names_of(func)[1]
        if attribute == "device" or attribute.startswith("is_"):
            return getattr(torch.empty(0, device=args[0].param.device), attribute)
        return super().__torch_function__(func, types, args, kwargs)

    @staticmethod
    def _answers(func: Callable) -> bool:
        return _looks_at_no_element(func) and names_of(func)[0] not in _NEED_MEMORY

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make a new tensor that is like it, as `zeros_like` does, and refuse all else."""
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name.startswith(_FACTORIES):
            device = kwargs.get("device") or args[0].param.device
            like = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
            return func(like, *args[1:], **{**kwargs, "device": device})
        return cls._on_use(func, name, "", args, kwargs)

    @classmethod
    def _on_use(cls, func: Any, name: str, attribute: str, args: tuple, kwargs: dict) -> NoReturn:
        named = next(t for t in tensors_among((args, kwargs)) if isinstance(t, NameOnly))
        named._refuse(attribute or name)

    def _refuse(self, name: str) -> NoReturn:
        raise StateError(f"{name} was called on a value of state_dict(): {self.remedy}")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"NameOnly(shape={tuple(self.shape)}, dtype={self.dtype}: the values are sharded)"

    def __format__(self, format_spec: str) -> str:
        return repr(self)

    def __deepcopy__(self, memo: dict) -> NoReturn:
        self._refuse("copy.deepcopy")

    def __reduce_ex__(self, proto: Any) -> NoReturn:
        self._refuse("pickling")


_NEED_MEMORY: Final = {
    *("data_ptr", "untyped_storage", "storage", "_typed_storage", "is_set_to", "new_tensor")
}


def export(module: nn.Module, values: Mapping[str, Callable[[], Tensor]]) -> None:
    """Let the state dict of which this is a pre-hook have these values. Local.

    Next, torch calls `param.detach()` for every name. An attribute of the object comes before the
    method, so nothing is gathered or refused, until `end_export`.

    Args:
        module: The module that owns the parameters.
        values: For some of them, by attribute: functions that return their values.
    """
    for attribute, make in values.items():
        vars(own_parameters(module)[attribute])["detach"] = make


def end_export(module: nn.Module, *_: Any) -> None:
    """Undo `export`, if it was done. May be a post-hook itself."""
    for param in own_parameters(module).values():
        if param is not None:
            vars(param).pop("detach", None)


# Functions that change every element of a gradient alike, so that they apply to a shard as well;
# function -> what is done to the shard.
_ELEMENTWISE: Final = {
    **{name: name for name in ("zero_", "mul_", "div_")},
    "__imul__": "mul_",
    "__itruediv__": "div_",
    **{f"_foreach_{name}": name for name in ("zero_", "mul_", "div_")},
}


class GradientGuard(StandIn, Tensor):  # type: ignore[misc]
    """Placeholder in `param.grad` while the gradient is sharded; a use of its values raises.

    So torch's `clip_grad_norm_(model.parameters())` stops with a message where it would otherwise
    find no gradients and do nothing. Operations that are the same for a shard as for the full
    gradient are applied to the shard: `zero_()`, and `mul_()` and `div_()` by a number.

    Autograd adds to what it finds in `param.grad`. What it adds to a guard is kept in `received`.
    """

    _answers = staticmethod(_reads_no_values)
    # Sum of what autograd has added, as this rank computed it; None: nothing.
    received: Tensor | None
    # Does `zero_`, `mul_` or `div_` to the gradient itself.
    scale: Callable[[str, Any], None]

    @classmethod
    def like(cls, param: Tensor, scale: Callable[[str, Any], None]) -> GradientGuard:
        """Make a guard of a parameter's shape, dtype and device. It has no memory."""
        guard = without_memory(cls, param.shape, param.dtype, param.device)
        guard.received, guard.scale = None, scale
        return guard

    def pop_received(self) -> Tensor | None:
        """Return what autograd has added, if anything, and forget it."""
        received, self.received = self.received, None
        return received

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Keep what autograd adds, which calls no `__torch_function__`; refuse all else."""
        if func is _ADD_ and isinstance(args[0], GradientGuard):
            guard, grad = args[:2]
            with torch.no_grad():
                guard.received = grad if guard.received is None else guard.received + grad
            return guard
        # Autograd adds so with create_graph=True.
        if func is _ADD and isinstance(args[0], GradientGuard):
            guard, grad = args[:2]
            return grad if guard.received is None else guard.received + grad
        name, attribute = names_of(func)
        result = cls._on_use(func, name, attribute, args, kwargs or {})
        # Operators over lists are declared to return nothing.
        return None if name.startswith("_foreach_") else result

    @classmethod
    def _on_use(cls, func: Any, name: str, attribute: str, args: tuple, kwargs: dict) -> Any:
        if name in ("requires_grad_", "detach_") and not any(args[1:]):
            return args[0]
        written = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
        operands = args[1:] or tuple(kwargs.values()) or (None,)
        if name in _ELEMENTWISE and all(map(_is_one_number, operands)):
            for tensor in written:
                if isinstance(tensor, GradientGuard):
                    tensor.scale(_ELEMENTWISE[name], operands[0])
                else:
                    func([tensor], *operands)
            return args[0]
        called = f"{name if attribute in {'', 'grad'} else attribute} was called on the gradient"
        called += " of a parameter whose gradient is sharded"
        by_hook = (
            "an optimizer that steps inside backward, by a hook, has no reduced gradients there: "
            "let it step after backward"
        )
        if late := late_optimizer():
            raise StateError(in_lines(late + called, by_hook if is_in_backward() else ""))
        if func in _NORMS:
            raise StateError(
                f"{called}. To clip, call zero_engine.clip_grad_norm_(model, max_norm) in place of "
                "torch's function; for the gradient whole, zero_engine.full_grad(param)"
            )
        raise StateError(
            in_lines(
                f"{called}, as gradients are at stages 1 to 3. After backward the gradient is in "
                "optimizer.param_groups[i]['params'][j].grad, one shard per rank",
                "to read it whole: zero_engine.full_grad(param)",
                "to edit it: set_full_grad(param, value) or update_full_grads(model, function)",
                "to clip: zero_engine.clip_grad_norm_(model, max_norm) or "
                "clip_grad_value_(model, value)",
                "to drop it: optimizer.zero_grad()",
                by_hook,
            )
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"GradientGuard(shape={tuple(self.shape)}: the gradient is sharded)"

    def __deepcopy__(self, memo: dict) -> None:
        """Return None: a copied model starts without gradients."""


def _is_one_number(operand: Any) -> bool:
    """Return whether the operand is one number for all elements, or None where there is none."""
    if isinstance(operand, Tensor):
        return not operand.dim() and not isinstance(operand, GradientGuard)
    return operand is None or isinstance(operand, int | float)


_ADD_: Final = torch.ops.aten.add_.Tensor
_ADD: Final = torch.ops.aten.add.Tensor


class GradientShard(Tensor):
    """Gradient of a parameter shard: an ordinary tensor, but for functions that need all ranks.

    `torch.amp.GradScaler` works: where it looks for an inf, ranks agree on whether any has found
    one. Norms raise, since a rank sees its own elements only.
    """

    # Groups over which the model's gradients are sharded.
    _groups: tuple[Group, ...]
    # Whether GradScaler has divided it by the loss scale.
    is_unscaled: bool = False
    # Whether other code had its elements; writes through `data` leave no other trace.
    is_touched: bool = False

    @classmethod
    def over(cls, tensor: Tensor, groups: Sequence[Group]) -> Tensor:
        """Return `tensor`, the same memory, as this rank's part of a gradient.

        Args:
            tensor: Plain.
            groups: Reductions over one after the other reach all ranks that have a part.
        """
        shard = as_subclass_sharing_memory(cls, tensor)
        shard._groups = tuple(group for group in groups if group.world_size > 1)  # type: ignore[attr-defined]
        return shard

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass through, except for norms and the overflow check of GradScaler."""
        if func in _NORMS and (groups := _divided_over(args)):
            raise StateError(
                f"{func.__name__} was called on a gradient shard: it would be the norm of this "
                f"rank's elements only (rank {groups[0].rank} of {groups[0].world_size}). To "
                "clip, call zero_engine.clip_grad_norm_(model, max_norm); for the local value, use "
                "grad.as_subclass(torch.Tensor)."
            )
        with plain_access():
            result = func(*args, **(kwargs or {}))
        if not _reads_no_values(func):
            for shard in _shards_in(args):
                shard.is_touched = True
        if func is unscale_and_find_inf_:
            for shard in _shards_in(args[:1]):
                shard.is_unscaled = True
            found_inf = args[1]
            if groups := _divided_over(args):
                total = found_inf.detach().reshape(1).to(groups[0].device)
                for group in groups:
                    all_reduce_flat(total, group=group, op=Reduction.SUM).wait()
                found_inf.fill_(float(total.item() > 0))
        return result

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"GradientShard({self.as_subclass(Tensor)!r})"

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.as_subclass(Tensor).detach().clone()


# Functions of all elements; the result for a shard would be of this rank's elements only.
_REDUCTIONS: Final = {
    *("norm", "linalg_norm", "linalg_vector_norm", "sum", "mean", "prod", "std", "var"),
    *("max", "min", "amax", "amin"),
    *("median", "argmax", "argmin", "count_nonzero", "_foreach_norm"),
}
_NO_WRITES: Final = {"requires_grad_", "detach_", "share_memory_", "rename_"}


class ShardOfParam(Tensor):
    """Base of the optimizer's parameters between steps; it intercepts writes and norms.

    A write waits until no rank reads the shards, and is published before the next read. Functions
    whose result would be of this rank's elements only raise, as they do for gradients.
    """

    # Weak reference to the `ShardedModel`, whose class is in the layer above.
    sharded: Callable[[], Any]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function on the plain tensors; views of a shard are noticed likewise."""
        kwargs, (name, attribute) = kwargs or {}, names_of(func)
        shards = [t for t in tensors_among((args, kwargs)) if isinstance(t, ShardOfParam)]
        if (model := shards[0].sharded()) is None:
            return plain_call(func, args, kwargs)
        group = model.group
        if name in _REDUCTIONS and group.world_size > 1:
            raise StateError(
                f"{name} was called on a parameter of the optimizer's, which is a shard: it would "
                f"be of this rank's elements only (rank {group.rank} of {group.world_size}). For "
                "the whole, zero_engine.full_param(param) of the model's parameter; for the local "
                "value, param.as_subclass(torch.Tensor)"
            )
        if written := _written_among(ShardOfParam, name, attribute, args, kwargs):
            model.begin_shard_write(written)
        with plain_access():
            result = func(*args, **kwargs)
            for view in tensors_among(result) if attribute in ("", "data") else ():
                _show_as_view(view, shards)
        return result


def _is_write(name: str) -> bool:
    return name in _WRITES or (name.endswith("_") and not name.endswith("__"))


def _written_among(
    kind: type[Any], name: str, attribute: str, args: tuple, kwargs: dict
) -> list[Any]:
    """Return the tensors of this kind that a torch function writes to; see `names_of`."""
    is_write = _is_write(name) and name not in _NO_WRITES
    is_write |= attribute == "data" and name == "__set__"
    among = tensors_among((args[:1] if args else kwargs) if is_write else kwargs.get("out"))
    return [tensor for tensor in among if isinstance(tensor, kind)]


def _shares_memory(found: Any, tensor: Tensor) -> bool:
    """Return whether this is a plain tensor with the memory of another one; local."""
    return (
        type(found) is Tensor
        and found.layout is torch.strided
        and storage_key(found.untyped_storage()) == storage_key(tensor.untyped_storage())
    )


def _show_as_view(found: Tensor, shards: list[ShardOfParam]) -> None:
    """Let a view of a shard notice writes as the shard does."""
    # An empty shard, too, so that all ranks notice the same writes.
    for shard in shards:
        if _shares_memory(found, shard):
            found.__class__ = ViewOfShard
            found.sharded = shard.sharded  # type: ignore[attr-defined]


class ViewOfShard(ShardOfParam):
    """View of a shard of the optimizer's parameters, such as `param.data`."""


class ParamShard(ShardOfParam, nn.Parameter):  # type: ignore[misc]
    """Parameter of the optimizer between its steps; within a step it is a plain Parameter."""

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        with plain_access():
            return nn.Parameter(self.detach().clone(), self.requires_grad)

    def __reduce_ex__(self, proto: Any) -> Any:
        return copy.deepcopy(self).__reduce_ex__(proto)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"ParamShard({self.as_subclass(Tensor)!r})"


_NORMS = {
    torch.norm,
    torch.linalg.norm,
    torch.linalg.vector_norm,
    foreach_norm,
    torch.nn.functional.normalize,
    Tensor.norm,
}


def note_own_write(part: Tensor) -> None:
    """Note that only we have written to the elements of a gradient shard until now."""
    part.is_touched = False  # type: ignore[attr-defined]


def note_new_gradient(part: Tensor) -> None:
    """Note that GradScaler has not yet divided a gradient shard by the loss scale."""
    part.is_unscaled = False  # type: ignore[attr-defined]


def _shards_in(args: tuple) -> list[GradientShard]:
    found: list[GradientShard] = []
    for arg in args:
        if isinstance(arg, GradientShard):
            found.append(arg)
        elif isinstance(arg, list | tuple):
            found += [tensor for tensor in arg if isinstance(tensor, GradientShard)]
    return found


def _divided_over(args: tuple) -> tuple[Group, ...]:
    """Return the groups over which these gradients are sharded; none where one rank has them."""
    return next((getattr(shard, "_groups", ()) for shard in _shards_in(args)), ())


# NOTE(class): a sharded parameter keeps its identity and becomes an instance of a subclass of its
# own class. When it is unsharded it gets its own class again. So `module.weight is param`,
# isinstance() and memory stay as they are, and a whole parameter is exactly what the user made.
# While it is sharded, torch passes every function that is called on it to `__torch_function__`.
# There the values are gathered and passed instead, or the use is refused by name. Two class
# assignments per use of a unit cost 0.2 µs per parameter; nothing of torch is patched
# (docs/decisions/0010-use-outside-the-unit.md).


# The one table of the package, since any code may ask about a parameter by itself. Nothing is set
# on the user's objects, and nothing in it keeps a model alive: it has a parameter's name and,
# weakly, a `ParamRef`, whose class is in the layer above.
_OWNERS: Final = WeakIdKeyDictionary()


def record_owner(tensor: Tensor, owner: Any) -> None:
    """Record the owner of a tensor that is the parameter, or stands for it."""
    _OWNERS[tensor] = owner.name, ref(owner)


def forget_owner(tensor: Tensor) -> None:
    """Drop what was recorded of a tensor, which is an ordinary one again."""
    _OWNERS.pop(tensor, None)


def find_owner(tensor: Tensor) -> Any:
    """Return the owner that was recorded of this very tensor; None if none was.

    Raises:
        StateError: The model it belonged to was deleted.
    """
    found = _OWNERS.get(tensor)
    if found is None:
        return None
    name, owner = found[0], found[1]()
    if owner is None:
        raise StateError(
            f"parameter {name!r}: the sharded model that kept its values was deleted, and they "
            "went with it; keep the model for as long as its parameters are used"
        )
    return owner


_CONVERSIONS: Final = {
    *("to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "cpu", "cuda"),
    *("int", "long", "short", "char", "byte", "bool"),
}
# Conversions that take the dtype, the device or the shape of the other argument.
_LIKE: Final = {"to", "type_as", "view_as", "reshape_as", "expand_as"}
_PRINTS: Final = {"__repr__", "__format__"}
_AUTOGRAD: Final = {"grad", "backward"}
_WRITES: Final = {
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__"),
    *("__imod__", "__ipow__", "__imatmul__", "__iand__", "__ior__", "__ixor__"),
    *("__ilshift__", "__irshift__"),
}


class ShardedParam(StandIn):
    """Mixin of the class of a parameter for as long as it is sharded."""

    __slots__ = ()

    @classmethod
    def _on_use(cls, func: Any, name: str, attribute: str, args: tuple, kwargs: dict) -> Any:
        """Call the function with gathered values in place of parameters whose values it uses."""
        if attribute == "data":
            return _guard_data(args[0], plain_call(func, args, kwargs))
        if name in _PRINTS and (text := _describe(args[0])):
            return text
        if name in _AUTOGRAD or name in _PRINTS:
            return _as_plain(func, args, kwargs)
        if name in _LIKE and not isinstance(args[0], ShardedParam):
            plain = partial(as_subclass_sharing_memory, Tensor)
            return func(*_replace(args, plain), **_replace(kwargs, plain))
        if (same := unconverted(func, name, args, kwargs)) is not None:
            return same
        return _use(func, attribute or name, args, kwargs)

    def __deepcopy__(self, memo: dict) -> Any:
        if not _owner_of(self).is_gathered:  # type: ignore[arg-type]
            refuse_deepcopy()
        return _as_plain(copy.deepcopy, (self, memo), {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not _owner_of(self).is_gathered:  # type: ignore[arg-type]
            refuse_pickle()
        return _as_plain(type(self).__mro__[3].__reduce_ex__, (self, protocol), {})


class Unpublished(StandIn):
    """Mixin of the class of a replicated parameter while shards of it were written.

    Each rank has written its own part, so that a use has to be preceded by a gather. Most uses are
    in a call of the model, which begins with that gather; others may be anywhere.
    """

    __slots__ = ()

    @classmethod
    def _on_use(cls, func: Any, name: str, attribute: str, args: tuple, kwargs: dict) -> Any:
        for tensor in tensors_among((args, kwargs)):
            if isinstance(tensor, Unpublished):
                # This publishes all parameters, and gives them back their classes.
                _owner_of(tensor).sharded.follow_shard_writes()
        return func(*args, **kwargs)


class ShardedParamData(ShardedParam, Tensor):  # type: ignore[misc]
    """Value of `param.data` of a sharded parameter: the same mixin, without autograd."""


def _plain(tensor: Tensor) -> Tensor:
    with plain_access():
        return tensor.as_subclass(Tensor)


class ReadOnlyValue(Tensor):
    """Full values of a sharded parameter that its `detach()` gave; a write to them would be lost.

    Views of it are read-only as well. All other results are plain tensors.
    """

    # Weak reference to the `ParamRef`.
    owner: Callable[[], Any]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse a write; else call the function on the plain values."""
        kwargs, (name, attribute) = kwargs or {}, names_of(func)
        for written in _written_among(ReadOnlyValue, name, attribute, args, kwargs):
            if (owner := written.owner()) is not None:
                owner.sharded.outside.refuse_write(owner, f"detach().{attribute or name}")
        found = [t for t in tensors_among((args, kwargs)) if isinstance(t, ReadOnlyValue)]
        result: Any
        if all(issubclass(kind, ReadOnlyValue) for kind in types):
            result = plain_call(func, args, kwargs)
        else:
            # Other classes, such as that of a sharded parameter, handle the call.
            args, kwargs = (_replace(each, _plain, ReadOnlyValue) for each in (args, kwargs))
            result = func(*args, **kwargs)
        if name in ("numpy", "__array__"):
            result.flags.writeable = False
        for given in found:
            given.mark_views(result)
        return result

    @classmethod
    def of(cls, owner: Any, values: Any) -> Any:
        """Return these values of a parameter, the same object where it is a plain tensor."""
        if type(values) is Tensor:
            values.__class__ = cls
            values.owner = ref(owner)  # type: ignore[attr-defined]
        return values

    def mark_views(self, result: Any) -> None:
        """Make views of these values among the results of a function read-only."""
        for view in tensors_among(result):
            if _shares_memory(view, self):
                view.__class__ = ReadOnlyValue
                view.owner = self.owner  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.as_subclass(Tensor).clone()

    def __reduce_ex__(self, proto: Any) -> Any:
        return copy.deepcopy(self).__reduce_ex__(proto)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return repr(self.as_subclass(Tensor))


def unconverted(func: Callable, name: str, args: tuple, kwargs: dict) -> Any:
    """Return what a conversion gives that has nothing to convert, else None.

    That is the tensor itself, or the name of its type, which `type()` returns.
    """
    if name not in _CONVERSIONS:
        return None
    converted = plain_call(func, args, kwargs)
    return converted if converted is args[0] or not isinstance(converted, Tensor) else None


def sharded_type_of(param: nn.Parameter) -> type[nn.Parameter]:
    """Return the class that a parameter has while it is sharded.

    It is the parameter's own class where Python cannot change that, and uses go unnoticed.
    """
    own, sharded_type = type(param), stand_in_type(ShardedParam, type(param))
    with contextlib.suppress(TypeError):
        param.__class__ = sharded_type
        param.__class__ = own
        return sharded_type
    return own


def _use(func: Callable, name: str, args: tuple, kwargs: dict) -> Any:
    """Call a function that reads or writes values with gathered values."""
    is_write = _is_write(name)
    written = (args[:1] if args else kwargs) if is_write else kwargs.get("out")
    for tensor in tensors_among(written):
        if isinstance(tensor, ShardedParam) and not (owner := _owner_of(tensor)).is_gathered:
            owner.sharded.outside.refuse_write(owner, name)
    found = tensors_among((args, kwargs))
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in found)

    def substitute(tensor: Tensor) -> Tensor:
        owner = _owner_of(tensor)
        if owner.is_gathered and (is_write or not needs_grad):
            # Its memory is whole, so that nothing is put in its place.
            return tensor
        return owner.sharded.outside.value(owner, tensor, name, needs_grad=needs_grad)

    args, kwargs = _replace(args, substitute), _replace(kwargs, substitute)
    if any(isinstance(tensor, ShardedParam) for tensor in tensors_among((args, kwargs))):
        return plain_call(func, args, kwargs)
    result = func(*args, **kwargs)
    owner = _owner_of(found[0]) if name == "detach" else None
    return result if owner is None or owner.is_gathered else ReadOnlyValue.of(owner, result)


def _describe(param: Tensor) -> str:
    """Return the text that stands for a sharded parameter's values; empty if they are gathered."""
    name, owner = _OWNERS[param][0], _OWNERS[param][1]()
    what = f"{name!r}, shape {tuple(param.shape)}, {param.dtype}"
    if owner is None:  # printing must not fail, as in a debugger
        return f"{what}: the sharded model that kept its values was deleted"
    if owner.is_gathered:
        return ""
    ranks = owner.group.world_size
    return f"{what}: sharded over {ranks} rank{'s' * (ranks > 1)}; full_param(param) gathers it"


def _owner_of(tensor: Tensor) -> Any:
    owner = find_owner(tensor)
    assert owner is not None, "only a unit's parameters, and their data, are ever sharded"
    return owner


def _guard_data(param: Tensor, data: Any) -> Tensor:
    owner = _owner_of(param)
    if owner.is_gathered:
        return data
    guarded = as_subclass_sharing_memory(ShardedParamData, data)
    record_owner(guarded, owner)
    return guarded


def _as_plain(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Call a function that treats parameters as nodes of a graph, in their own classes.

    Such a function also runs the user's code. `__torch_function__` is not disabled for the call, as
    it is for other functions, since it would be disabled for that code, too.
    """
    found = [tensor for tensor in tensors_among((args, kwargs)) if isinstance(tensor, ShardedParam)]
    types = [type(tensor) for tensor in found]
    for tensor, sharded_type in zip(found, types, strict=True):
        # The tensor's own class comes after three of ours.
        tensor.__class__ = sharded_type.__mro__[3]
    try:
        return func(*args, **kwargs)
    finally:
        for tensor, sharded_type in zip(found, types, strict=True):
            if sharded_type is ShardedParamData or _owner_of(tensor).buffer.has_sharded_types:
                tensor.__class__ = sharded_type


def tensors_among(value: Any) -> list[Tensor]:
    """Tensors among the arguments of a torch function; long lists of numbers cost little."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        items = (item for item in value if type(item) not in _NUMBERS)
        return [tensor for item in items for tensor in tensors_among(item)]
    return []


_NUMBERS: Final = {int, float, bool}


def _replace(
    value: Any, substitute: Callable[[Tensor], Tensor], kind: type[Any] = ShardedParam
) -> Any:
    """Return the same structure with a substitute for every tensor of a kind."""
    if isinstance(value, kind):
        return substitute(value)
    if isinstance(value, dict):
        return {key: _replace(item, substitute, kind) for key, item in value.items()}
    if isinstance(value, list | tuple) and any(isinstance(t, kind) for t in tensors_among(value)):
        items = [_replace(item, substitute, kind) for item in value]
        # Named tuples take no iterable.
        make = getattr(value, "_make", type(value))
        return make(items)
    return value


class Bound:
    """Base of hooks of one model on one rank: copying or pickling one would share our buffers."""

    def __deepcopy__(self, memo: dict) -> NoReturn:
        refuse_deepcopy()

    def __reduce__(self) -> NoReturn:
        refuse_pickle()


# NOTE(stand-ins): a storage could be resized to no bytes under its tensors, and all views would be
# valid again when it is resized back. But few of torch's functions check for it. The others read
# address 0, which ends the process, and a graph or a kept `param.data` may do so. So the tensors
# that we know are made to view one NaN each, and get a class that raises. A storage that any other
# tensor views is not freed (docs/decisions/0030-parked-tensors-keep-their-identity.md).


class ParkedTensor(StandIn):
    """Mixin of the class of a tensor for as long as its values are parked."""

    __slots__ = ()

    @classmethod
    def _on_use(cls, func: Any, name: str, attribute: str, args: tuple, kwargs: dict) -> NoReturn:
        _refuse(attribute or name)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}: parked)"  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict) -> NoReturn:
        _refuse("copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("pickling")


def _refuse(name: str) -> NoReturn:
    raise StateError(
        f"{name} was called on a tensor whose values offload_states() has parked; call "
        "zero_engine.reload_states(model) on every rank first"
    )


@frozen
class View:
    """Class of a tensor, and its place in its storage, before its values were parked."""

    tensor: Tensor
    whole_type: type[Tensor]
    place: tuple[int, torch.Size, tuple[int, ...]]  # offset, size, stride

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        """Record the class and the place that a tensor has now."""
        place = int(tensor.storage_offset()), tensor.size(), tensor.stride()
        return cls(tensor, type(tensor), place)


class StateKind(Enum):
    """Kinds of training state."""

    # Stored parameters: shards at stage 3, whole buffers at other stages.
    PARAMS = "params"
    # What the optimizer updates, where that is not the parameters.
    MASTERS = "masters"
    # Gradients that wait for the optimizer, or for their reduction.
    GRADS = "grads"
    # The optimizer's own tensors; step counts and other single numbers stay.
    OPTIM = "optim"
    # Slots and reduction buffers, which are given back, and made again when needed.
    BUFFERS = "buffers"


class Backup(Protocol):
    """Storage for bytes while they are parked. Local; used by one thread.

    All tensors are 1-D, uint8, contiguous, on the model's device.
    """

    def allocate(self, sizes: Mapping[str, int]) -> None:
        """Allocate space for values of so many bytes, by key. Called once, before all else."""

    def write(self, key: str, source: Tensor, *, non_blocking: bool) -> None:
        """Copy `source`, whose memory is freed right afterwards.

        Args:
            key: One of those for which space was allocated.
            source: As many bytes as were allocated for the key.
            non_blocking: Whether the copy may be left to the current stream.
        """

    def read(self, key: str, into: Tensor, *, non_blocking: bool) -> None:
        """Copy the bytes of a key into `into`. After an error they can be read again."""

    def close(self) -> None:
        """Release everything: all has been read, or is no longer needed."""


@define(eq=False)
class ParkedStorage:
    """One storage, and the tensors of ours that view it."""

    key: str
    kind: StateKind
    num_bytes: int
    device: torch.device
    views: list[View]
    # None: its memory was freed.
    storage: torch.UntypedStorage | None

    @property
    def is_free(self) -> bool:
        """Return whether no tensor views the memory, after `replace_by_placeholders`."""
        return self.storage is not None and not has_views(self.storage)

    def replace_by_placeholders(self) -> None:
        """Make our tensors view placeholders; the objects and their shapes stay."""
        for tensor in (view.tensor for view in self.views):
            tensor.data = placeholder(tensor.shape, tensor.dtype, tensor.device)
            # Where Python cannot change the class, only the NaN shows it.
            with contextlib.suppress(TypeError):
                tensor.__class__ = stand_in_type(ParkedTensor, type(tensor))  # type: ignore[assignment]

    def give_up(self, backup: Backup, *, non_blocking: bool) -> None:
        """Write the bytes to the backup, and free the memory."""
        assert self.storage is not None, "storages are given up once"
        backup.write(self.key, _view(self.storage, torch.uint8), non_blocking=non_blocking)
        self.storage = None

    def put_back(self, backup: Backup, *, non_blocking: bool) -> None:
        """Read the bytes if the memory was freed, and make every tensor view its values again."""
        if self.storage is None:
            memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
            backup.read(self.key, memory, non_blocking=non_blocking)
            self.storage = memory.untyped_storage()
        for view in self.views:
            view.tensor.__class__ = view.whole_type
            view.tensor.data = _view(self.storage, view.tensor.dtype, *view.place)


@define(eq=False)
class Parked:
    """The parked state of one model."""

    kinds: frozenset[StateKind]
    backup: Backup
    storages: list[ParkedStorage]
    # Functions that remove the hooks that are there meanwhile.
    removers: list[Callable[[], None]] = field(factory=list, init=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that were freed."""
        return sum(s.num_bytes for s in self.storages if s.storage is None)

    @property
    def stand_in_bytes(self) -> int:
        """Bytes of the placeholders of parked tensors: one element each."""
        return sum(v.tensor.element_size() for s in self.storages for v in s.views)

    @property
    def gone(self) -> frozenset[int]:
        """Ids of the tensors whose memory was freed."""
        gone = (view for s in self.storages if s.storage is None for view in s.views)
        return frozenset(id(view.tensor) for view in gone)

    def among(self, kinds: Collection[StateKind]) -> list[str]:
        """Return which of these kinds are parked, by name."""
        return [kind.value for kind in StateKind if kind in self.kinds and kind in kinds]


def _view(storage: torch.UntypedStorage, dtype: torch.dtype, *place: Any) -> Tensor:
    """Return a view of all of a storage, or of an offset with a size and strides in it."""
    blank = torch.empty(0, dtype=dtype, device=storage.device)
    return blank.set_(storage, *place)  # type: ignore[call-overload,no-any-return]
