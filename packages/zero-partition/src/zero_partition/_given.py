"""What users give to be written, checked: whole values and parts; and whom a result is for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from zero_comm import all_gather_json, broadcast_flat

from ._errors import StateError
from ._places import Place


def for_rank(place: Place, value: Any, to_rank: int | None) -> Any:
    """The value on the rank that wants it, on all when None; None elsewhere."""
    return value if to_rank in (None, place.whole.rank) else None


def check_rank(place: Place, from_rank: int | None, what: str) -> None:
    """Raise StateError unless it is a rank of the group, or None."""
    group = place.whole
    if from_rank is not None and not 0 <= from_rank < group.world_size:
        raise StateError(
            f"{what}: expected from_rank in 0..{group.world_size - 1}, got {from_rank} (rank "
            f"{group.rank})"
        )


def given_value(
    place: Place,
    value: Any,
    expected: tuple[torch.Size, torch.dtype],
    from_rank: int | None,
    what: str,
) -> Tensor:
    """The whole value that every rank is to write, checked on all. Collective with `from_rank`.

    Args:
        place: Of which parameter it is.
        value: What the user passed on this rank.
        expected: The shape that it must have, and the dtype to give it.
        from_rank: Whose value counts; each rank's own when None.
        what: What the user called.
    """
    (shape, dtype), group = expected, place.whole
    check_rank(place, from_rank, what)
    got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    if from_rank is not None:
        got = all_gather_json(got, group=group, tag=place.sharded.access_tag)[from_rank]
    if got != f"shape {tuple(shape)}":
        whose = group.rank if from_rank is None else from_rank
        raise StateError(
            f"{what}: parameter {place.name!r}: expected a tensor of shape {tuple(shape)}, got "
            f"{got} on rank {whose} (seen on rank {group.rank})"
        )
    if from_rank is None:
        return value.detach().as_subclass(Tensor).to(group.device, dtype)
    whole = torch.empty(shape, dtype=dtype, device=group.device)
    if group.rank == from_rank:
        whole.copy_(value.detach())
    if whole.numel():
        broadcast_flat(whole.view(-1).view(torch.uint8), src=from_rank, group=group).wait()
    return whole


def copy_given(place: Place, part: Tensor, value: Any, what: str) -> None:
    """Write what was given as this rank's part into that part. Local."""
    if not isinstance(value, Tensor) or value.numel() != part.numel():
        got = f"{value.numel()} elements" if isinstance(value, Tensor) else repr(value)
        raise StateError(
            f"{what}: parameter {place.name!r}: expected this rank's part, a tensor of "
            f"{part.numel()} elements, got {got} (rank {place.whole.rank})"
        )
    with torch.no_grad():
        part.copy_(value.detach().view(part.shape))
