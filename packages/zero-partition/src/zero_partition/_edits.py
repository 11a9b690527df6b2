"""What was done to parameters while a context kept them whole."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Final, Protocol

import torch
from attrs import define, field
from torch import Tensor

from ._errors import LostEditError, StateError
from ._places import Place
from ._torch_compat import plain_access


class Shaped(Protocol):
    """What a parameter must be like again."""

    @property
    def shape(self) -> torch.Size:
        """Of all of it."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        ...


class Verdict(IntEnum):
    """How a rank leaves a parameter, or the context; it can travel as a byte."""

    FINE = 0
    EDITED = 1  # though nobody was to
    MISSHAPEN = 2
    RAISED = 3  # an exception passes through the context


@define(eq=False)
class Watch:
    """Remembers what parameters were like when a context was entered."""

    compares_bytes: bool  # costs a pass over them, and finds writes that autograd does not count
    _versions: dict[tuple[int, int, int], int] = field(factory=dict, init=False)
    _sums: dict[tuple[int, int, int], int] = field(factory=dict, init=False)

    def start(self, places: Iterable[Place]) -> None:
        """From here on writes count."""
        for place in places:
            self._versions[place.key] = _version_of(place)
            if self.compares_bytes:
                self._sums[place.key] = sum_of(data_of(place))

    def judge(self, place: Place, *, may_edit: bool) -> Verdict:
        """What has become of a parameter."""
        data, value = data_of(place), home_of(place)
        if data.shape != value.shape or data.dtype != value.dtype or data.device != value.device:
            return Verdict.MISSHAPEN
        if may_edit:
            return Verdict.FINE
        is_same = data.data_ptr() == value.data_ptr() and data.is_contiguous()
        is_same = is_same and _version_of(place) == self._versions[place.key]
        if is_same and self.compares_bytes:
            is_same = sum_of(data) == self._sums[place.key]
        return Verdict.FINE if is_same else Verdict.EDITED


def raise_on(
    verdict: Verdict,
    name: str,
    expected: Shaped,
    *,
    seen_on: int,
    rank: int,
    modifier: int | None,
    what: str,
) -> None:
    """Raise what a verdict of `rank` means for everyone, if anything."""
    mine = f"(seen on rank {seen_on})"
    if verdict is Verdict.RAISED:
        raise StateError(
            f"{what}: rank {rank} left the context with an exception {mine}, so all changes are "
            "dropped; its own message says why"
        )
    if verdict is Verdict.EDITED:
        raise LostEditError(
            f"{what}: rank {rank} changed parameter {name!r} {mine}; without modifier_rank "
            "changes are dropped. Pass modifier_rank=... to keep those of one rank, or change a "
            "copy"
        )
    if verdict is Verdict.MISSHAPEN and modifier in (None, rank):
        raise StateError(
            f"{what}: rank {rank} left parameter {name!r} with another shape, dtype or "
            f"device {mine}; expected shape {tuple(expected.shape)}, {expected.dtype}. A sharded "
            "model keeps its shapes: change them before shard()"
        )


def home_of(place: Place) -> Tensor:
    """The memory in which a parameter that is gathered, or rests whole, belongs."""
    buffer = place.buffer
    if place.position in buffer.held:
        return buffer.held[place.position]
    assert buffer.whole is not None, "neither gathered nor replicated"
    return buffer.views_of(buffer.whole)[place.position]


def data_of(place: Place) -> Tensor:
    """The memory that a parameter views now, whatever was done to it."""
    with plain_access():
        return place.buffer.params[place.position].data


def _version_of(place: Place) -> int:
    with plain_access():
        return place.buffer.params[place.position]._version


def sum_of(data: Tensor) -> int:
    """Over the bits, so that NaN is a value like others."""
    data = torch.view_as_real(data) if data.is_complex() else data
    return int(data.contiguous().view(_INTEGERS[data.element_size()]).sum(dtype=torch.int64))


_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
