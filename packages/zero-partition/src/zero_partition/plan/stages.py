"""The ZeRO table (arXiv 1910.02054, section 5): a stage is a row of placements."""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Iterable
from enum import Enum, IntEnum
from typing import Any, Final, TypeVar, final

import attrs
import torch
from attrs import Attribute, field, frozen
from torch import nn
from zero_comm import Reduction

from zero_partition.errors import PartitionError
from zero_partition.torch_private import NormBase

Class = TypeVar("Class")


class Placement(Enum):
    """Where a kind of tensor rests between uses."""

    REPLICATED = "replicated"  # every rank holds all of it
    SHARDED = "sharded"  # every rank holds 1 / world_size of it


class Stage(IntEnum):
    """The names the paper gave to three placements; zero is plain data parallelism."""

    ZERO = 0
    ONE = 1
    TWO = 2
    THREE = 3


@frozen
class Placements:
    """What each rank keeps at rest."""

    params: Placement
    grads: Placement
    optim: Placement


REPLICATED, SHARDED = Placement
STAGES: Final = {
    Stage.ZERO: Placements(params=REPLICATED, grads=REPLICATED, optim=REPLICATED),
    Stage.ONE: Placements(params=REPLICATED, grads=REPLICATED, optim=SHARDED),
    Stage.TWO: Placements(params=REPLICATED, grads=SHARDED, optim=SHARDED),
    Stage.THREE: Placements(params=SHARDED, grads=SHARDED, optim=SHARDED),
}


def expects(what: str, is_fine: Callable[[Any], bool]) -> Callable[..., None]:
    """A validator of attrs: PartitionError where the value of a field is not fine."""

    def check(owner: object, attribute: Attribute, value: Any) -> None:
        if not is_fine(value):
            name = f"{type(owner).__name__}.{attribute.name}"
            raise PartitionError(f"{name}: expected {what}, got {value!r}")

    return check


def names_fields(cls: type[Class], error: type[Exception] = PartitionError) -> type[Class]:
    """Let an attrs class say of a field that it does not know what `check_names` does."""
    make: Any = cls.__init__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **fields: Any) -> None:
        check_names(cls.__name__, fields, [each.alias for each in attrs.fields(cls)], error)
        make(self, *args, **fields)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def check_names(
    path: str, given: Iterable[Any], known: Iterable[str], error: type[Exception]
) -> None:
    """Every name given is known; the error shows the nearest, and all there are."""
    known = sorted(known)
    for name in given:
        if name not in known:
            near = nearest(name, known)
            raise error(
                f"{path}.{name}: unknown{f'; did you mean {near!r}?' if near else '.'} "
                f"Known here: {', '.join(known)}"
            )


def nearest(name: Any, known: Iterable[str]) -> str | None:
    """The known name that a typing error most likely meant."""
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(str(name).lower(), by_lower, n=1)
    return by_lower[found[0]] if found else None


def is_whole_number(value: object, minimum: int) -> bool:
    """Whether it is an int, and no bool, of at least this."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _is_factor(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


_FLOATING: Final = expects(
    "a floating-point torch.dtype",
    lambda value: value is None or (isinstance(value, torch.dtype) and value.is_floating_point),
)
_FACTOR: Final = expects(
    "a finite number above 0, or None for the number of ranks",
    lambda value: value is None or _is_factor(value),
)
_BOOL: Final = expects("a bool", lambda value: isinstance(value, bool))


@final
@frozen
class Scaling:
    """One reduction of gradients: divide, combine the ranks' by `op`, multiply."""

    divisor_before: float
    op: Reduction
    after: float


@names_fields
@frozen(kw_only=True)
class Precision:
    """How numbers are kept and combined; 16-bit parameters have fp32 masters (arXiv 1710.03740).

    Norm layers with running statistics (batch norm, and instance norm that tracks them) stay as
    they are, parameters and buffers, and compute so: their input is converted to the dtype of the
    statistics, and their output back. Other buffers stay as they are, and so does what they meet.

    Args:
        params: Floating-point parameters are converted to it; as they are when None.
        masters: The optimizer updates shards of this dtype, from which trainable parameters are
            rounded after each step, and gradients are added up in it. It updates the parameters
            themselves when None, or where they are of this dtype.
        reduce: Gradients travel between ranks, and are averaged, in it; in that of their parameter
            when None.
        outputs: Floating-point tensors that the model returns are converted to it; as they are when
            None.
        cast_inputs: Floating-point tensors with which the model is called, in tuples, lists, dicts
            and what torch's pytrees know, are converted to `params`, where that is given. So does
            FSDP2's `cast_forward_inputs`, and so is a call of a part of the model left alone.
        predivide_factor: Gradients are divided by it before ranks are added up: what keeps a sum
            over many ranks within fp16. The sum is multiplied by it over the number of ranks for a
            mean. The number of ranks itself when None: a mean is not rounded again afterwards.
        reduces_mean: Gradients are averaged over the ranks; added up when False. Stage 0
            does that once per step: all micro-batches but the last must be inside `no_sync`.

    Raises:
        PartitionError: Names the field, what was expected and what came.
    """

    params: torch.dtype | None = field(default=None, validator=_FLOATING)
    masters: torch.dtype | None = field(default=torch.float32, validator=_FLOATING)
    reduce: torch.dtype | None = field(default=None, validator=_FLOATING)
    outputs: torch.dtype | None = field(default=None, validator=_FLOATING)
    cast_inputs: bool = field(default=True, validator=_BOOL)
    predivide_factor: float | None = field(default=1.0, validator=_FACTOR)
    reduces_mean: bool = field(default=True, validator=_BOOL)

    def dtypes_of(self, model: nn.Module) -> dict[int, torch.dtype]:
        """In which the model computes with each of its parameters, by their ids."""
        kept = {id(p) for norm in self.kept_norms(model) for p in norm.parameters()}
        return {
            id(p): self.params
            if self.params and p.is_floating_point() and id(p) not in kept
            else p.dtype
            for p in model.parameters()
        }

    def kept_norms(self, model: nn.Module) -> list[nn.Module]:
        """The norm layers that compute as they are in a model that is converted."""
        return [
            module
            for module in model.modules()
            if self.params and isinstance(module, NormBase) and module.running_mean is not None
        ]

    def master_of(self, dtype: torch.dtype) -> torch.dtype | None:
        """Of the masters of trainable parameters of this dtype, None if they have none."""
        return self.masters if dtype.is_floating_point and dtype != self.masters else None

    def wire_of(self, dtype: torch.dtype) -> torch.dtype:
        """In which gradients of parameters of this dtype travel."""
        return self.reduce if self.reduce and dtype.is_floating_point else dtype

    def scaling_of(self, world_size: int) -> Scaling:
        """What is done to gradients around their reduction over so many ranks. Arithmetic only."""
        divisor = float(world_size) if self.predivide_factor is None else self.predivide_factor
        if divisor == 1.0:
            return Scaling(1.0, Reduction.MEAN if self.reduces_mean else Reduction.SUM, 1.0)
        after = divisor / world_size if self.reduces_mean else divisor
        return Scaling(divisor, Reduction.SUM, after)


AS_IT_IS: Final = Precision(masters=None)
