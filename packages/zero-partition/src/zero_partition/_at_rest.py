"""What a parameter is while it rests sharded: a class that notices every use of its values."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ._guards import refuse_deepcopy, refuse_pickle
from ._torch_compat import as_subclass_sharing_memory, plain_call

# NOTE(class): a parameter at rest keeps its identity and becomes an instance of a subclass of its
# own class, which it leaves when it is unsharded. So `module.weight is param`, isinstance() and
# memory stay as they are, a whole parameter is exactly what the user made, and while it rests torch
# hands every function that is called on it to `__torch_function__`. There the values are gathered
# and put in its place, or the use is refused by name. Two class assignments per use of a unit cost
# 0.2 µs per parameter; nothing of torch is patched (docs/decisions/0010-use-outside-the-unit.md).


class Owner(Protocol):
    """What is known of a parameter that may rest sharded."""

    @property
    def name(self) -> str:
        """The first of its names."""
        ...

    @property
    def is_trainable(self) -> bool:
        """Whether the optimizer steps it."""
        ...

    @property
    def is_gathered(self) -> bool:
        """Whether its own memory is whole, for the user."""
        ...

    @property
    def is_at_rest(self) -> bool:
        """Whether its values are elsewhere."""
        ...

    def value(self, tensor: Tensor, what: str, *, needs_grad: bool) -> Tensor:
        """What stands in for it, or for its `data`, in a call of `what`. Collective."""
        ...

    def refuse_write(self, what: str) -> NoReturn:
        """It was to be written by a call of `what`."""
        ...


# The one table of the package: parameters are asked about by themselves, from any module's code.
# Nothing is set on the user's objects, and nothing in it keeps a model alive.
_OWNERS: Final = WeakIdKeyDictionary()


def record_owner(tensor: Tensor, owner: Owner) -> None:
    """`tensor` is the parameter, or stands for it."""
    _OWNERS[tensor] = owner


def forget_owner(tensor: Tensor) -> None:
    """It is an ordinary one again."""
    _OWNERS.pop(tensor, None)


def find_owner(tensor: Tensor) -> Any:
    """What was recorded of this very tensor; None if nothing was."""
    return _OWNERS.get(tensor)


class AtRest:
    """Mixed into the class of a parameter for as long as it rests sharded."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer questions about shape; put whole values where values are used."""
        kwargs, (name, attribute) = kwargs or {}, names_of(func)
        if looks_at_no_element(name, attribute):
            return plain_call(func, args, kwargs)
        if attribute == "data":
            data: Any = plain_call(func, args, kwargs)
            return _guard_data(args[0], data)
        if name in _AUTOGRAD or name in _PRINTS:
            return _as_plain(func, args, kwargs)
        if name in _LIKE and not isinstance(args[0], AtRest):
            return func(*_replace(args, _plain), **_replace(kwargs, _plain))
        if name in _CONVERSIONS:
            converted = plain_call(func, args, kwargs)
            if converted is args[0] or not isinstance(converted, Tensor):  # type() is a string
                return converted
        return _use(func, attribute or name, args, kwargs)

    def __deepcopy__(self, memo: dict) -> Any:
        if not _is_gathered(self):  # type: ignore[arg-type]
            refuse_deepcopy()
        return _as_plain(copy.deepcopy, (self, memo), {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not _is_gathered(self):  # type: ignore[arg-type]
            refuse_pickle()
        return _as_plain(type(self).__mro__[2].__reduce_ex__, (self, protocol), {})


class AtRestData(AtRest, Tensor):  # type: ignore[misc]
    """`param.data` of a parameter at rest: the same stand-in, without autograd."""


def names_of(func: Callable) -> tuple[str, str]:
    """What a torch function is called, and the attribute it reads or sets, "" if it does not."""
    name = getattr(func, "__name__", str(func))
    return name, getattr(func.__self__, "__name__", "") if name in _ACCESSES else ""  # type: ignore[attr-defined]


def looks_at_no_element(name: str, attribute: str) -> bool:
    """Whether a torch function of these names asks for shape, dtype and the like only."""
    if name in _METADATA or name.startswith(_FACTORIES):
        return True
    return bool(attribute) and (name != "__get__" or attribute not in _VALUES)


@functools.cache
def rest_type(cls: type[nn.Parameter]) -> type[nn.Parameter]:
    """What a parameter of this class is at rest. Named like it: messages and `repr` show it."""
    names = {"__slots__": (), "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls)(cls.__name__, (AtRest, cls), names)


def rest_type_of(param: nn.Parameter) -> type[nn.Parameter]:
    """As `rest_type`; its own class where Python cannot change it, and uses go unnoticed."""
    own = type(param)
    try:
        param.__class__ = rest_type(own)
    except TypeError:
        return own
    param.__class__ = own
    return rest_type(own)


def _use(func: Callable, name: str, args: tuple, kwargs: dict) -> Any:
    """Call what reads values, or writes them, with whole ones."""
    is_write = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
    written = (args[:1] if args else kwargs) if is_write else kwargs.get("out")
    for tensor in _tensors_in(written):
        if isinstance(tensor, AtRest) and not _is_gathered(tensor):
            _owner_of(tensor).refuse_write(name)
    found = _tensors_in((args, kwargs))
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in found)

    def substitute(tensor: Tensor) -> Tensor:
        if _is_gathered(tensor) and (is_write or not needs_grad):
            return tensor  # its memory is whole: nothing to put in its place
        return _owner_of(tensor).value(tensor, name, needs_grad=needs_grad)

    args, kwargs = _replace(args, substitute), _replace(kwargs, substitute)
    if any(isinstance(tensor, AtRest) for tensor in _tensors_in((args, kwargs))):
        return plain_call(func, args, kwargs)
    return func(*args, **kwargs)


def _owner_of(tensor: Tensor) -> Owner:
    owner: Owner | None = find_owner(tensor)
    assert owner is not None, "only a unit's parameters, and their data, are ever at rest"
    return owner


def _is_gathered(tensor: Tensor) -> bool:
    return _owner_of(tensor).is_gathered


def _plain(tensor: Tensor) -> Tensor:
    return as_subclass_sharing_memory(Tensor, tensor)


def _guard_data(param: Tensor, data: Tensor) -> Tensor:
    if _is_gathered(param):
        return data
    guarded = as_subclass_sharing_memory(AtRestData, data)
    record_owner(guarded, _owner_of(param))
    return guarded


def _as_plain(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Call what treats parameters as places in a graph, and runs the user's code besides.

    Disabling the class for the call, as elsewhere, would disable it for that code too.
    """
    found = [tensor for tensor in _tensors_in((args, kwargs)) if isinstance(tensor, AtRest)]
    types = [type(tensor) for tensor in found]
    for tensor, at_rest in zip(found, types, strict=True):
        tensor.__class__ = at_rest.__mro__[2]  # what comes after the two of ours
    try:
        return func(*args, **kwargs)
    finally:
        for tensor, at_rest in zip(found, types, strict=True):
            if at_rest is AtRestData or _owner_of(tensor).is_at_rest:
                tensor.__class__ = at_rest


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors_in(item)]
    return []


def _replace(value: Any, substitute: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with something in the place of every parameter at rest."""
    if isinstance(value, AtRest):
        return substitute(value)  # type: ignore[arg-type]
    if isinstance(value, dict):
        return {key: _replace(item, substitute) for key, item in value.items()}
    if isinstance(value, list | tuple) and any(isinstance(t, AtRest) for t in _tensors_in(value)):
        items = [_replace(item, substitute) for item in value]
        make = getattr(value, "_make", type(value))  # tuples with names take no iterable
        return make(items)
    return value


# Attributes that give the elements away.
_VALUES: Final = {"data", "T", "mT", "H", "mH", "real", "imag"}
# Functions that look at no element. Whatever is not here is taken to read.
_METADATA: Final = {
    *("dim", "ndimension", "size", "numel", "nelement", "__len__", "element_size", "get_device"),
    *("is_contiguous", "stride", "storage_offset", "data_ptr", "untyped_storage", "storage"),
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
_CONVERSIONS: Final = {
    *("to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "cpu", "cuda"),
    *("int", "long", "short", "char", "byte", "bool"),
}
# Of the other argument they take the dtype, the device or the shape.
_LIKE: Final = {"to", "type_as", "view_as", "reshape_as", "expand_as"}
_ACCESSES: Final = {"__get__", "__set__", "__delete__"}
_PRINTS: Final = {"__repr__", "__format__"}
_AUTOGRAD: Final = {"grad", "backward"}
_WRITES: Final = {
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__"),
    *("__imod__", "__ipow__", "__imatmul__", "__iand__", "__ior__", "__ixor__"),
    *("__ilshift__", "__irshift__"),
}
