"""Launches as ranks tell each other of them, and the first in which two of them differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from attrs import frozen

from .calls import CAUSES, advice, how_to_find_line, in_lines
from .watch import Purpose, Recorded

_PARTED: Final = (
    "ranks launched different collectives, and each took, or waits for, what the other sent"
)


class Traced(NamedTuple):
    """A launch, as ranks tell each other."""

    number: int
    key: int
    sequence: int  # number of collectives that torch had counted before
    is_sent: bool  # False for a mark, which torch does not count
    what: str
    size: str
    tag: int | None
    call: str

    @classmethod
    def of(cls, each: Recorded) -> Traced:
        """Return what to tell of a launch."""
        is_sent, what = each.shape is not None, each.purpose.what
        place = (each.number, each.key, each.sequence)
        return cls(*place, is_sent, what, each.size, each.tag, each.call)


@frozen
class Trace:
    """The last launches of a rank."""

    rank: int
    counted: int  # number of collectives that torch has counted
    launches: Sequence[Traced]


def difference(one: Trace, other: Trace, purposes: Mapping[int, Purpose]) -> str:
    """Say where what two ranks launched first differs, and what to do; "" if it does not.

    Args:
        one: Of a rank.
        other: Of another one.
        purposes: By tag.
    """
    found = [*_differences(one, other, purposes)]
    for sides in ((one, other), (other, one)):
        found += _passed_places(*sides)
    return min(found, default=(0, ""))[1]


def _differences(
    one: Trace, other: Trace, purposes: Mapping[int, Purpose]
) -> Iterator[tuple[int, str]]:
    """The first launch of the same number that is none of the same kind."""
    theirs = {each.number: each for each in other.launches}
    for mine in one.launches:
        its = theirs.get(mine.number)
        if its is None:
            continue
        if (mine.key, mine.what, mine.call) != (its.key, its.what, its.call):
            sides = {one.rank: mine, other.rank: its}
            yield mine.number, _described(sides, purposes)
            return
        if mine.sequence != its.sequence:
            fewer, more = sorted([(mine.sequence, one.rank), (its.sequence, other.rank)])
            yield mine.number, _own_before(mine, more[1], fewer[1], more[0] - fewer[0])
            return


def _passed_places(one: Trace, other: Trace) -> Iterator[tuple[int, str]]:
    """The first launch that the other has yet to make, and by torch's count too late."""
    last = other.launches[-1].number if other.launches else 0
    for each in one.launches:
        if each.number > last and each.sequence < other.counted:
            more = other.counted - each.sequence
            yield each.number, _own_before(each, other.rank, one.rank, more)
            return


_OWN: Final = (
    "calls of torch.distributed, of DistributedDataParallel, and messages in batches are to be the "
    "same on all ranks, or in a group of their own (torch.distributed.new_group)"
)


def _own_before(each: Traced, rank: int, other: int, count: int) -> str:
    where = f"{each.what} (in {each.call})" if each.call else each.what
    return (
        f"before {where}, rank {rank} launched collectives of its own ({count}) on this group that "
        f"rank {other} did not: {_OWN}"
    )


def _described(sides: Mapping[int, Traced], purposes: Mapping[int, Purpose]) -> str:
    (first, one), (second, other) = sorted(sides.items())
    doings = [one.what, other.what]
    if one.what == other.what:
        doings = [f"{each.what} of {each.size}" for each in (one, other)]
    remedies = {
        rank: purposes[each.tag].remedy if each.tag in purposes else ""
        for rank, each in sorted(sides.items())
    }
    calls = {rank: each.call for rank, each in sorted(sides.items())}
    return in_lines(
        _PARTED,
        f"rank {first} in {doings[0]}, as number {one.number} of this group",
        f"rank {second} in {doings[1]}",
        *(advice(calls, remedies) or [CAUSES]),
        how_to_find_line() if any(remedies.values()) else "",
    )
