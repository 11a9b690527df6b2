"""Plan of the pieces that are stepped together and of where their state is kept. Arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Final, Literal, Required, TypedDict

import torch
from attrs import frozen

# Alignment of each entry: a cache line, and a vector of the widest kernels.
ALIGN_BYTES: Final = 64
# Alignment of state on disk, which a disk moves without a copy.
PAGE_BYTES: Final = 4096
# Parameters are cut at multiples of this, so that entries of pieces need no padding.
CUT_NUMEL: Final = 64
SHARES: Final = ("device", "host")


class Residence(Enum):
    """Memory or disk that keeps the state of a sub-group between steps."""

    # The device of its parameters.
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@frozen
class Entry:
    """A tensor of a parameter's state that has one element for each of the parameter's."""

    name: str
    dtype: torch.dtype


@frozen
class Item:
    """Description of one parameter for the plan.

    Attributes:
        numel: Elements of the parameter.
        entries: State tensors of its size, which are offloaded; other state is small and stays in
            memory.
        is_divisible: Whether it may be stepped piece by piece.
        place: Its device and the optimizer that steps it; the same for all of a sub-group.
    """

    numel: int
    entries: tuple[Entry, ...]
    is_divisible: bool
    place: str = "cpu"

    @property
    def element_bytes(self) -> int:
        """Bytes of all entries for one element."""
        return sum(entry.dtype.itemsize for entry in self.entries)

    def nbytes(self, numel: int) -> int:
        """Return the bytes of all entries of a piece of `numel` elements, each entry aligned."""
        return sum(align_up(numel * entry.dtype.itemsize) for entry in self.entries)


@frozen
class ParamRange:
    """Elements [start, stop) of a parameter, in memory order."""

    # Position of the parameter among the planned ones.
    item: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@frozen
class EntrySpan:
    """Range of one entry of one piece in the memory of its sub-group."""

    # Position of the piece in the sub-group.
    piece: int
    name: str
    dtype: torch.dtype
    offset_bytes: int
    numel: int


@frozen
class SubGroup:
    """Pieces that are read, stepped and written together: one value of a store, one step."""

    pieces: tuple[ParamRange, ...]
    entries: tuple[EntrySpan, ...]
    nbytes: int
    residence: Residence


class ResidenceOptions(TypedDict, total=False):
    """Arguments for where the state is kept; `OffloadedOptimizer` describes them."""

    state: Required[Literal["host", "disk"]]
    fraction: Mapping[str, float] | None
    subgroup_bytes: int
    small_bytes: int


@frozen
class Shares:
    """Fractions of the state on the device and on the host; the remaining state is on `rest`.

    Attributes:
        rest: Residence of the remaining state: the host, or the disk.
        device: Fraction of the bytes of state; exact to `CUT_NUMEL` elements where parameters are
            divisible, and to a parameter where not.
        host: The same for the host.
        subgroup_bytes: Most bytes of state in a sub-group, rounded up to a page on disk. A larger
            parameter that is not divisible has a sub-group to itself.
        small_bytes: A sub-group with fewer stays on the host instead of the disk.
    """

    rest: Residence
    device: float = 0.0
    host: float = 0.0
    subgroup_bytes: int = 64 * 2**20
    small_bytes: int = 2**20

    @classmethod
    def of(
        cls,
        state: str,
        fraction: Mapping[str, float] | None = None,
        subgroup_bytes: int = 64 * 2**20,
        small_bytes: int = 2**20,
    ) -> Shares:
        """Return the shares that a user asked for, once they are checked.

        Raises:
            ValueError: Unknown names, numbers that are no shares of one whole, or sizes with which
                nothing, or next to nothing, would go to disk.
        """
        fraction = fraction or {}
        if state not in ("host", "disk"):
            raise ValueError(f"state={state!r}: expected 'host' or 'disk'")
        unknown = set(fraction) - set(SHARES)
        if unknown:
            raise ValueError(
                f"fraction names {', '.join(map(repr, sorted(unknown)))}: expected 'device' or "
                f"'host'; the remaining state is kept at state={state!r}"
            )
        numbers = [float(number) for number in fraction.values()]
        if any(not 0 <= number <= 1 for number in numbers) or sum(numbers) > 1 + 1e-9:
            raise ValueError(f"fraction={dict(fraction)}: expected shares of 1, together at most 1")
        if not 0 <= 2 * small_bytes <= subgroup_bytes or subgroup_bytes < 1:
            raise ValueError(
                f"subgroup_bytes={subgroup_bytes}, small_bytes={small_bytes}: expected at least 1, "
                f"and for small ones, which stay in memory, of at most half"
            )
        device, host = (float(fraction.get(name, 0)) for name in SHARES)
        return cls(Residence(state), device, host, subgroup_bytes, small_bytes)


def plan_subgroups(items: Sequence[Item], shares: Shares) -> tuple[SubGroup, ...]:
    """Assign parameters in their order: first to the device, then to the host, then to `rest`.

    Args:
        items: One for each parameter.
        shares: Fractions of the state, and sizes of sub-groups.

    Returns:
        Sub-groups that cover every element once, in order.
    """
    groups: list[SubGroup] = []
    open_pieces: list[ParamRange] = []
    open_bytes, open_residence, open_place = 0, Residence.DEVICE, ""

    def close() -> None:
        nonlocal open_pieces, open_bytes
        if open_pieces:
            groups.append(_lay_out(open_pieces, items, open_residence, shares.small_bytes))
        open_pieces, open_bytes = [], 0

    for residence, piece in _divide_by_residence(items, shares):
        item = items[piece.item]
        if (residence, item.place) != (open_residence, open_place):
            close()
            open_residence, open_place = residence, item.place
        start = piece.start
        while True:
            numel = _fitting(item, piece.stop - start, shares.subgroup_bytes - open_bytes)
            if not numel and start < piece.stop:
                if open_pieces:
                    close()
                    continue
                numel = min(CUT_NUMEL, piece.stop - start) if item.is_divisible else item.numel
            open_pieces.append(ParamRange(piece.item, start, start + numel))
            open_bytes += item.nbytes(numel)
            start += numel
            if start >= piece.stop:
                break
    close()
    return tuple(groups)


def align_up(nbytes: int, align: int = ALIGN_BYTES) -> int:
    """The next multiple of `align`."""
    return -(-nbytes // align) * align


def _divide_by_residence(
    items: Sequence[Item], shares: Shares
) -> Iterator[tuple[Residence, ParamRange]]:
    """Yield the largest pieces whose state is all in one place, with that place, in order."""
    total = sum(item.numel * item.element_bytes for item in items)
    # Bytes of state before which the device's part ends, and the host's.
    ends = total * shares.device, total * min(1.0, shares.device + shares.host)
    residences = (Residence.DEVICE, Residence.HOST, shares.rest)
    before = 0
    for index, item in enumerate(items):
        size = item.element_bytes
        if item.is_divisible and size:
            cuts = [_cut((end - before) / size, item.numel) for end in ends]
        else:
            middle = before + item.numel * size / 2
            cuts = [item.numel if middle < end else 0 for end in ends]
        bounds = [0, *cuts, item.numel]
        spans = zip(residences, bounds, bounds[1:], strict=False)
        pieces = [(where, ParamRange(index, a, b)) for where, a, b in spans if a < b]
        yield from pieces or [(shares.rest, ParamRange(index, 0, 0))]
        before += item.numel * size


def _cut(at: float, numel: int) -> int:
    """Return the nearest element to cut at: a multiple of `CUT_NUMEL`, or the parameter's end."""
    if at >= numel:
        return numel
    return min(numel, max(0, round(at / CUT_NUMEL) * CUT_NUMEL))


def _fitting(item: Item, numel: int, capacity: int) -> int:
    """Return how many of the next elements fit: all or none if the parameter is not divisible."""
    if item.nbytes(numel) <= capacity:
        return numel
    if not item.is_divisible:
        return 0
    return max(0, capacity // item.element_bytes // CUT_NUMEL * CUT_NUMEL)


def _lay_out(
    pieces: Sequence[ParamRange], items: Sequence[Item], residence: Residence, small_bytes: int
) -> SubGroup:
    entries, offset = [], 0
    for index, piece in enumerate(pieces):
        for entry in items[piece.item].entries:
            entries.append(EntrySpan(index, entry.name, entry.dtype, offset, piece.numel))
            offset += align_up(piece.numel * entry.dtype.itemsize)
    if residence is Residence.DISK and offset < max(1, small_bytes):
        residence = Residence.HOST
    nbytes = align_up(offset, PAGE_BYTES) if residence is Residence.DISK else offset
    return SubGroup(tuple(pieces), tuple(entries), nbytes, residence)
