"""What a user finds where a whole tensor would be: stand-ins that cannot be mistaken for data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from zero_comm import Group, Reduction, all_reduce_flat

from ._errors import StateError
from ._torch_compat import (
    as_subclass_sharing_memory,
    foreach_norm,
    plain_call,
    unscale_and_find_inf_,
)

# What `model.state_dict()` does about parameters whose values are elsewhere.
StateDictKind: TypeAlias = Literal["raise", "gather", "placeholders"]


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of this shape that costs one element and reads as NaN.

    Each call makes a scalar of its own: detectors of tied weights compare addresses. Dtypes
    without NaN read as zero; only the state check protects them.
    """
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


def export_empty(module: nn.Module, names: Iterable[str]) -> None:
    """Have an empty tensor of each of these in the state dict of which this is a pre-hook. Local.

    Next, torch calls `param.detach()` for every name. An attribute of the object comes before the
    method, so nothing is gathered or refused, until `end_empty_export`.
    """
    for name in names:
        param = module._parameters[name]
        assert param is not None, "its values are elsewhere"
        empty = torch.empty(0, dtype=param.dtype, device=param.device)
        vars(param)["detach"] = empty.detach


def end_empty_export(module: nn.Module) -> None:
    """Undo `export_empty`, if it was done."""
    for param in module._parameters.values():
        if param is not None:
            vars(param).pop("detach", None)


def refuse_deepcopy() -> NoReturn:
    """A copy would share our buffers."""
    raise StateError(
        "copy.deepcopy() of a sharded model: its parameters live in buffers that are shared "
        "with the optimizer and with other ranks. Build a fresh model and load "
        "zero_engine.full_state_dict(model) into it, or copy before shard(). What AveragedModel "
        "and averages like it copy for, zero_engine.ShardedAverage(model, decay=...) does."
    )


def refuse_pickle() -> NoReturn:
    """A file would hold no values."""
    raise StateError("pickling a sharded model: save zero_engine.full_state_dict(model) instead")


class GradientGuard(Tensor):
    """Stands in `param.grad` while the gradient is sharded. Any use raises.

    So torch's `clip_grad_norm_(model.parameters())` stops with a message where it would otherwise
    find no gradients and do nothing.
    """

    @classmethod
    def over(cls, stand_in: Tensor) -> Tensor:
        """A guard of the placeholder's shape, dtype and device that costs no further memory."""
        return as_subclass_sharing_memory(cls, stand_in)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer questions about shape; refuse everything that would read or write values."""
        if _is_metadata(func):
            return plain_call(func, args, kwargs or {})
        raise StateError(
            f"{getattr(func, '__name__', func)} was called on the gradient of a parameter whose "
            "gradient is sharded: after backward at stages 1 to 3 it rests in "
            "optimizer.param_groups[i]['params'][j].grad, one shard per rank. To clip, call "
            "zero_engine.clip_grad_norm_(model, max_norm) or clip_grad_value_(model, value); to "
            "drop it, optimizer.zero_grad()."
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"GradientGuard(shape={tuple(self.shape)}: the gradient is sharded)"

    def __deepcopy__(self, memo: dict) -> None:
        """A copied model starts without gradients."""


_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}  # attributes that give the elements away
_METADATA = {
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
    Tensor.is_contiguous,
    Tensor.stride,
    Tensor.__len__,
}


def _is_metadata(func: Any) -> bool:
    """Whether it neither reads nor writes elements, nor gives away a way to."""
    is_attribute = getattr(func, "__name__", "") == "__get__"
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    return (is_attribute and attribute not in _VALUES) or func in _METADATA


class GradientShard(Tensor):
    """`grad` of a parameter shard: an ordinary tensor, but for what needs all ranks.

    `torch.amp.GradScaler` works: whether any rank found an inf is agreed on where it looks. Norms
    raise, since a rank sees its own elements only.
    """

    _group: Group
    is_unscaled: bool = False  # GradScaler has taken the loss scale out
    is_touched: bool = False  # others had its elements; writes through `data` leave no other trace

    @classmethod
    def over(cls, tensor: Tensor, group: Group) -> Tensor:
        """`tensor`, the same memory, as this rank's part of a gradient."""
        shard = as_subclass_sharing_memory(cls, tensor)
        shard._group = group  # type: ignore[attr-defined]
        return shard

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass through, except for norms and the overflow check of GradScaler."""
        if func in _NORMS and (group := _group_of(args)) is not None and group.world_size > 1:
            raise StateError(
                f"{func.__name__} was called on a gradient shard: it would be the norm of this "
                f"rank's elements only (rank {group.rank} of {group.world_size}). To clip, call "
                "zero_engine.clip_grad_norm_(model, max_norm); for the local value, use "
                "grad.as_subclass(torch.Tensor)."
            )
        result = plain_call(func, args, kwargs or {})
        if not _is_metadata(func):
            for shard in _shards_in(args):
                shard.is_touched = True
        if func is unscale_and_find_inf_:
            for shard in _shards_in(args[:1]):
                shard.is_unscaled = True
            group, found_inf = _group_of(args), args[1]
            if group is not None and group.world_size > 1:
                total = found_inf.detach().reshape(1).to(group.device)
                all_reduce_flat(total, group=group, op=Reduction.SUM).wait()
                found_inf.fill_(float(total.item() > 0))
        return result

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"GradientShard({self.as_subclass(Tensor)!r})"

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.as_subclass(Tensor).detach().clone()


_NORMS = {
    torch.norm,
    torch.linalg.norm,
    torch.linalg.vector_norm,
    foreach_norm,
    torch.nn.functional.normalize,
    Tensor.norm,
}


def _shards_in(args: tuple) -> Iterator[GradientShard]:
    for arg in args:
        for candidate in arg if isinstance(arg, list | tuple) else (arg,):
            if isinstance(candidate, GradientShard):
                yield candidate


def _group_of(args: tuple) -> Group | None:
    return next((getattr(shard, "_group", None) for shard in _shards_in(args)), None)
