"""How entries of an optimizer's state are divided with their parameter: rules, and no messages."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from attrs import field, frozen
from torch import Tensor

from zero_partition.errors import PartitionError, StateError
from zero_partition.nested import describe, tensors_in
from zero_partition.plan.cuts import Cut
from zero_partition.plan.layout import ParameterPlan, Span

# NOTE(entries): an entry of a shard's state is one of four things, and its shape says which.
# One value for the whole parameter: what is no tensor, has no dim, or is called "step".
# One value per element: the shape of the shard, or as many elements in one dim.
# One slice per row, where the cut is "row", or per block, where it is "block(k)": along dim 0.
# Anything at all, where the cut keeps the whole parameter on one rank, which then has all of it.
# What is none of these has one value for the whole parameter if it has one element on every rank,
# and else no whole that we could know. A block of one element looks like the element: it is taken
# for one, which is the same but for the shape of a scalar's. Beside a parameter of one element, one
# value looks like the element too: there the same entry of larger parameters says what it is.

_SAYABLE: Final = ("int", "float", "bool", "str", "NoneType")  # what a message can carry as it is


def _as_shape(shape: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if shape is None else tuple(shape)


@frozen
class Said:
    """What a rank says about an entry that it has; attrs.asdict() of it can travel as JSON."""

    kind: str  # a tensor's dtype, or a class
    shape: tuple[int, ...] | None = field(default=None, converter=_as_shape)  # None: no tensor
    is_on_host: bool = False
    number: int | float | str | None = None
    holds_tensors: bool = False  # a list or dict of them
    nest: Any = None  # what `describe` says of one

    @property
    def described(self) -> Any:
        """As `describe` says it; None where it cannot."""
        if self.shape is not None:
            return ["tensor", self.kind.removeprefix("torch."), list(self.shape)]
        return ["plain", self.number] if self.kind in _SAYABLE else self.nest

    @classmethod
    def of(cls, value: Any) -> Said:
        """About this value."""
        if isinstance(value, Tensor):
            return cls(str(value.dtype), tuple(value.shape), value.device.type == "cpu")
        kind = type(value).__name__
        number = value if kind in _SAYABLE else None
        if not _holds_tensors(value):
            return cls(kind, number=number)
        try:
            nest = describe(value, [])
        except StateError:  # beside them there are objects of some class
            nest = None
        return cls(kind, holds_tensors=True, nest=nest)


@frozen
class TensorEntry:
    """Where the elements of a whole entry lie."""

    shape: torch.Size
    dtype: torch.dtype
    is_on_host: bool
    spans: tuple[Span, ...]  # per rank, in rank order; several have all of a value for the whole

    @property
    def splits(self) -> tuple[int, ...]:
        """Elements that each rank sends so that every one is sent once."""
        splits: list[int] = []
        for span in self.spans:
            splits.append(span.numel if span.start == sum(splits) else 0)
        return tuple(splits)

    def given_by(self, rank: int) -> Span:
        """The elements that a rank sends: all that it has, or none."""
        start = self.spans[rank].start
        return Span(start, start + self.splits[rank])


@frozen
class PlainEntry:
    """One value for the whole parameter that is no tensor."""

    value: Any  # for ranks that have none of their own


@frozen
class OwnEntry:
    """Values of which no whole is known: each rank goes on with its own."""

    said: tuple[Said | None, ...]  # per rank


Entry: TypeAlias = TensorEntry | PlainEntry | OwnEntry
Found: TypeAlias = tuple[Sequence[int], dict[int, Span]]  # the whole's shape; by rank, its elements


def plan_entry(
    param: ParameterPlan,
    key: str,
    keeps: Sequence[Span | None],
    said: Sequence[Said | None],
) -> Entry:
    """How an entry lies over the ranks, from what they say; see NOTE(entries).

    Args:
        param: The parameter whose state it is.
        key: The entry.
        keeps: Per rank, the elements of the parameter that it keeps; None if there are none.
        said: Per rank, what it has; None where it has no such entry.

    Raises:
        StateError: A rank that should have it has not, ranks have different things, or a shape that
            the cut does not explain.
    """
    numel, shares = param.shape.numel(), param.cut != Cut.FLAT and param.shape.numel() > 0
    owners = [rank for rank, span in enumerate(keeps) if span is not None or not shares]
    parts = {rank: what for rank in owners if (what := said[rank]) is not None}
    for rank in owners:
        if rank not in parts or parts[rank].kind != parts[owners[0]].kind:
            raise _refusal(param, key, said, f"rank {rank} should have what the others have")
    first = parts[owners[0]]
    if first.shape is None:
        if first.kind not in _SAYABLE and len(parts) < len(said):
            raise _refusal(param, key, said, f"a {first.kind} cannot be sent to those without it")
        if any(part.holds_tensors for part in parts.values()) and len(said) > 1:
            raise _refusal(param, key, said, f"nobody knows how tensors in a {first.kind} are cut")
        return PlainEntry(first.number)
    kept = (keeps[owners[0]] or Span(0, 0)).numel
    shard_shape = param.cut.shard_shape(param.shape, kept)
    is_as_kept = param.cut != Cut.FLAT and kept == numel and first.shape != shard_shape
    if is_as_kept or _is_for_whole(key, first.shape, shard_shape):
        found = _undivided(parts)
    else:
        found = _in_elements(param, parts, keeps) or _in_slices(param, parts, keeps)
        if found is None and math.prod(first.shape) == 1:
            found = _undivided(parts)
    if found is None:
        raise _refusal(
            param, key, said, "that is neither one value, nor one per element, row or block"
        )
    whole, spans = found
    return TensorEntry(
        torch.Size(whole),
        getattr(torch, first.kind.removeprefix("torch.")),
        first.is_on_host,
        tuple(spans.get(rank, Span(0, 0)) for rank in range(len(said))),
    )


def keys_for_whole(states: Iterable[tuple[torch.Size, Mapping[str, Any]]]) -> frozenset[str]:
    """Entries with one element beside a parameter with more, by shapes; see NOTE(entries)."""
    return frozenset(
        key
        for of_param, state in states
        for key, value in state.items()
        if math.prod(getattr(value, "shape", (0,))) == 1 < of_param.numel()
    )


def part_of_entry(
    param: ParameterPlan, key: str, value: Any, span: Span, for_whole: Collection[str] = ()
) -> Any:
    """What a rank that keeps `span` of the parameter keeps of a whole entry; see NOTE(entries).

    Args:
        param: The parameter whose state it is.
        key: The entry.
        value: All of it.
        span: The elements of the parameter that a rank keeps.
        for_whole: See `keys_for_whole`.

    Raises:
        PartitionError: A shape that the parameter's cut does not explain.
    """
    if param.cut != Cut.TENSOR and _holds_tensors(value):
        raise PartitionError(
            f"parameter {param.name!r}: optimizer state {key!r} is a {type(value).__name__} that "
            "holds tensors, of which nobody knows how to take a shard; keep them as entries of "
            "their own, call shard() before the first step, or use cut='tensor'"
        )
    if not isinstance(value, Tensor):
        return value
    part, shape = part_in_entry(param, key, value.shape, span, for_whole)
    if part.numel == value.numel() and tuple(value.shape) == shape:
        return value
    return value.reshape(-1)[part.as_slice()].clone().view(shape)


def part_in_entry(
    param: ParameterPlan,
    key: str,
    shape: Sequence[int],
    span: Span,
    for_whole: Collection[str] = (),
) -> tuple[Span, tuple[int, ...]]:
    """Which elements of a whole entry go with `span` of the parameter, and in what shape.

    As for `part_of_entry`, of a tensor of this shape.
    """
    shape, cut, numel = tuple(shape), param.cut, math.prod(shape)
    if _is_for_whole(key, shape, param.shape) or (key in for_whole and numel == 1):
        return Span(0, numel), shape
    if shape == tuple(param.shape) or (cut.kind == "block" and shape == (param.shape.numel(),)):
        return span, cut.shard_shape(param.shape, span.numel)
    if span.numel == param.shape.numel() and cut != Cut.FLAT:
        return Span(0, numel), shape  # whole: of any shape
    total, mine = _slices(param, Span(0, param.shape.numel())), _slices(param, span)
    if total is not None and mine is not None and shape and shape[0] == total.numel:
        inner = math.prod(shape[1:])
        return Span(mine.start * inner, mine.stop * inner), (mine.numel, *shape[1:])
    if numel == 1:
        return Span(0, numel), shape
    raise PartitionError(
        f"parameter {param.name!r}: optimizer state {key!r} has shape {shape}, "
        f"expected one element, the parameter's shape {tuple(param.shape)}, or one entry per row "
        f"or block where it is cut so: its cut is {str(cut)!r}. cut='tensor' keeps state of any "
        "shape"
    )


def _holds_tensors(value: Any) -> bool:
    is_nest = isinstance(value, list | tuple | dict)
    return is_nest and any(True for _ in tensors_in(value))


def _is_for_whole(key: str, shape: Sequence[int], of: Sequence[int]) -> bool:
    """Whether an entry of this shape, next to a tensor `of` that shape, is no value per element."""
    return key == "step" or (len(shape) == 0 and len(of) > 0)


def _slices(param: ParameterPlan, span: Span) -> Span | None:
    """The rows or blocks that these elements of the parameter are; None if it is not cut so."""
    if param.cut.kind not in {"row", "block"}:
        return None
    grain = param.cut.grain(param.shape)
    return Span(span.start // grain, -(-span.stop // grain))


def _undivided(parts: Mapping[int, Said]) -> Found | None:
    whole = next(iter(parts.values())).shape or ()
    if any(part.shape != whole for part in parts.values()):
        return None
    return whole, dict.fromkeys(parts, Span(0, math.prod(whole)))


def _in_elements(
    param: ParameterPlan, parts: Mapping[int, Said], keeps: Sequence[Span | None]
) -> Found | None:
    spans = {rank: keeps[rank] or Span(0, 0) for rank in parts}
    for rank, span in spans.items():
        if parts[rank].shape not in {
            (span.numel,),
            param.cut.shard_shape(param.shape, span.numel),
        }:
            return None
    return param.shape, spans


def _in_slices(
    param: ParameterPlan, parts: Mapping[int, Said], keeps: Sequence[Span | None]
) -> Found | None:
    inner = (next(iter(parts.values())).shape or ())[1:]  # what a row, or a block, looks like
    numel, spans = math.prod(inner), {}
    for rank, part in parts.items():
        slices = _slices(param, keeps[rank] or Span(0, 0))
        if slices is None or part.shape != (slices.numel, *inner):
            return None
        spans[rank] = Span(slices.start * numel, slices.stop * numel)
    total = _slices(param, Span(0, param.shape.numel()))
    return None if total is None else ((total.numel, *inner), spans)


def _refusal(
    param: ParameterPlan, key: str, said: Sequence[Said | None], reason: str
) -> StateError:
    have = "; ".join(
        f"rank {rank} has " + ("nothing" if what is None else f"{what.kind} {what.shape or ''}")
        for rank, what in enumerate(said)
    )
    return StateError(
        f"parameter {param.name!r}: optimizer state {key!r} has no whole under the cut "
        f"{str(param.cut)!r}: {have}; {reason}. cut='tensor' keeps state of any shape; "
        "local_optimizer_state(param, key) reads this rank's"
    )
