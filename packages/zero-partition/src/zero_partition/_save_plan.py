"""How many bytes of parameters and optimizer state each rank gives to a checkpoint. Planning."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from attrs import frozen

from ._buffer_plan import BufferPlan
from ._cut import Cut
from ._memory_plan import loco_bytes
from ._model_plan import ModelPlan
from ._placement import Placement
from ._state_parts import BATCH_BYTES
from ._updater import MASTER


@frozen(kw_only=True)
class PlannedSave:
    """What one rank gives when all is saved; every element is given once, by one rank."""

    num_bytes: int  # all, errors of encoding too: what it writes, or copies to write it later
    batch_bytes: int  # most that is read together, where that takes memory of its own


def plan_save(plan: ModelPlan, rank: int) -> PlannedSave:
    """Say what `plan_parts` will say of a rank's parts, from the second step on. Local."""
    if plan.routes.replica(rank):
        return PlannedSave(num_bytes=0, batch_bytes=0)
    sizes = [
        size
        for unit, placement in zip(plan.units, plan.resting, strict=True)
        for buffer in unit.buffers
        for size in _sizes_of(plan, buffer, placement, rank)
    ]
    total = sum(sizes)
    errors = _loco_bytes(plan, rank) if plan.group_of else 0
    return PlannedSave(
        num_bytes=total + errors,
        batch_bytes=min(total, max(BATCH_BYTES, *sizes, 0) if sizes else 0),
    )


def _loco_bytes(plan: ModelPlan, rank: int) -> int:
    """Of what `loco_state` gives: errors, and for each buffer the number of its reductions."""
    buffers = [buffer for unit in plan.units for buffer in unit.buffers if buffer.trainable]
    kept = [num_bytes for buffer in buffers if (num_bytes := loco_bytes(plan, buffer, rank))]
    return sum(num_bytes + torch.int64.itemsize for num_bytes in kept)


def _sizes_of(
    plan: ModelPlan, buffer: BufferPlan, placement: Placement, rank: int
) -> Iterator[int]:
    """Of each run of elements that the rank gives, in bytes."""
    dtype = plan.rests.training_of(plan.precision, buffer, placement)
    pieces = {piece.index: piece.in_tensor.numel for piece in buffer.layout.pieces(rank)}
    is_whole = plan.placements.optim is Placement.REPLICATED
    for position, param in enumerate(buffer.params):
        mine = pieces.get(position, 0)
        shape = tuple(param.shape) if is_whole else param.cut.shard_shape(param.shape, mine)
        group = plan.group_of.get(param.name, -1) if buffer.trainable else -1
        entries = {
            each.name: each for each in plan.state.of_kind.get((group, len(shape), dtype), ())
        }
        master = entries.pop(MASTER, None)  # is written as the parameter
        yield mine * (dtype if master is None else master.dtype).itemsize
        owner = _first_with(buffer, position)
        for entry in entries.values():
            numel = math.prod(entry.shape_for(shape))
            if is_whole:  # every rank has it: each gives an equal run
                given = numel * (rank + 1) // plan.world_size - numel * rank // plan.world_size
            elif entry.name == "step" or not entry.shape:  # one value for the whole parameter
                given = numel if rank == owner else 0
            else:
                given = numel if mine else 0
            yield given * entry.dtype.itemsize


def _first_with(buffer: BufferPlan, position: int) -> int:
    """The first rank that has state of a parameter."""
    param, span = buffer.params[position], buffer.layout.spans[position]
    if param.cut == Cut.FLAT or not param.shape.numel():
        return 0  # all have
    shards = enumerate(buffer.layout.shards)
    return next(rank for rank, shard in shards if span.overlap(shard) is not None)
