"""Parameters whole: put together from the ranks' parts, or taken apart into them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from zero_comm import CommError, Handle, all_gather_flat

from ._flat_buffer import FlatBuffer
from ._parked import StateKind
from ._places import Place
from ._shard_home import AbstractShardHome


def part_of(place: Place, shard: Tensor | None = None) -> Tensor:
    """This rank's part of a parameter, as a 1-D view, maybe empty.

    Args:
        place: Which parameter.
        shard: Any flat shard of the buffer's layout; the resting values when None.
    """
    source = place.buffer.shard if shard is None else shard
    piece = place.piece
    return source[:0] if piece is None else source[piece.in_shard.as_slice()]


def refuse_parked_values(place: Place, what: str) -> None:
    """Raise StateError where a parameter's values, as the optimizer updates them, are parked."""
    has_master = place.buffer.has_masters
    place.sharded.refuse_parked(what, StateKind.MASTERS if has_master else StateKind.PARAMS)


def as_computed(place: Place) -> Tensor | None:
    """This rank's part of a parameter as the model computes with it; None: as it rests. Local.

    Encoded and decoded with the whole shard, so that it is the same as in a gather of the unit.
    """
    buffer, codec = place.buffer, place.unit.codec_of(place.buffer)
    if codec is None or place.unit.copies is not None:
        return None
    shard = buffer.shard
    return part_of(place, codec.decode(codec.encode(shard), torch.empty_like(shard)))


def launch_whole(place: Place, part: Tensor | None = None) -> Callable[..., Tensor]:
    """Launch the gather of one parameter from the ranks' parts.

    Collective, but for resting values that are exposed: those are there at once.

    Args:
        place: Which parameter.
        part: What this rank contributes, 1-D, as long as its part of the parameter; the resting
            values when None.

    Returns:
        Call it once, with `timeout_s` if need be, to wait; gives the whole in the parameter's
        shape, memory of its own.
    """
    buffer, group = place.buffer, place.group
    plan = buffer.plan.params[place.position]
    span = buffer.plan.layout.spans[place.position]
    if part is None and place.unit.copies is not None:
        return _launch_copy(place, place.unit.copies)
    exposure = place.unit.exposure if part is None else None
    part = part_of(place) if part is None else part
    shards = buffer.plan.layout.shards
    overlaps = [span.overlap(shard) for shard in shards]
    whole = torch.empty(plan.shape.numel(), dtype=part.dtype, device=group.device)
    handle: Handle[Tensor] | None = None
    if exposure is not None:
        exposure.gather(
            buffer.shard,
            whole,
            splits=[0 if overlap is None else overlap.numel for overlap in overlaps],
            starts=[
                0 if overlap is None else overlap.start - shard.start
                for overlap, shard in zip(overlaps, shards, strict=True)
            ],
        )
    elif whole.numel():
        handle = all_gather_flat(
            whole,
            splits=[0 if overlap is None else overlap.numel for overlap in overlaps],
            group=group,
            shard=part,
            tag=buffer.gather_tag,
        )

    def wait(timeout_s: float | None = None) -> Tensor:
        if handle is not None:
            try:
                handle.wait(timeout_s=timeout_s)
            except CommError as error:
                raise CommError(
                    f"gathering parameter {place.name!r} (rank {group.rank}): {error}"
                ) from error
        return whole.view(plan.shape)

    return wait


def _launch_copy(place: Place, copies: AbstractShardHome) -> Callable[..., Tensor]:
    buffer = place.buffer
    numel, dtype = buffer.plan.layout.numel, buffer.plan.dtype
    full = torch.empty(numel, dtype=dtype, device=place.group.device)
    reading = copies.read(buffer.index, full)

    def wait(timeout_s: float | None = None) -> Tensor:
        del timeout_s  # no rank is waited for
        reading.wait()
        return buffer.views_of(full)[place.position].clone()

    return wait


def launch_flat(buffer: FlatBuffer, shard: Tensor | None = None) -> Callable[[], Tensor]:
    """As `launch_buffer`; gives the whole flat buffer, 1-D."""
    layout = buffer.plan.layout
    shard = buffer.shard if shard is None else shard
    handle = all_gather_flat(
        shard.new_empty(layout.numel),
        splits=layout.splits,
        payload=layout.payload_splits,
        group=buffer.group,
        shard=shard,
        tag=buffer.gather_tag,
    )
    return handle.wait


def launch_buffer(
    buffer: FlatBuffer, shard: Tensor | None = None
) -> Callable[[], tuple[Tensor, ...]]:
    """Launch the gather of all parameters of a flat buffer as one. Collective.

    Args:
        buffer: Which parameters.
        shard: Any flat shard of its layout; the resting values when None.

    Returns:
        Call it once to wait; gives each parameter's value, views of one new tensor.
    """
    wait = launch_flat(buffer, shard)
    return lambda: buffer.views_of(wait())


def write_whole(place: Place, value: Tensor) -> None:
    """Make `value`, the same on every rank, the parameter's. Every rank calls it."""
    place.sharded.begin_write()
    place.buffer.fill(place.position, value)
    place.sharded.end_write(place.unit)
