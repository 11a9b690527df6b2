"""What `record_traffic` will count in one training step, from layouts alone. Planning only."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen
from zero_comm import sent_of

from ._buffer_plan import BufferPlan
from ._gather_plan import choose_slots, plan_gathers
from ._model_plan import ModelPlan
from ._placement import Placement


@frozen
class PlannedOperation:
    """One kind of operation on one unit's buffers in one step, as this rank sends it."""

    unit: str  # its name
    name: str  # as `record_traffic` has it
    calls: int
    payload_numel: int
    payload_bytes: int
    padding_bytes: int


def plan_traffic(plan: ModelPlan, rank: int) -> tuple[PlannedOperation, ...]:
    """What one rank sends in a step of one micro-batch, from the second step on. Local.

    Control messages, which are flags and scalars, are left out.
    """
    gathered = gathers_of(plan)
    return tuple(
        _operation(plan, index, buffer, rank, name=name, calls=calls)
        for index, unit in enumerate(plan.units)
        for buffer in unit.buffers
        for name, calls in _operations_of(plan, index, buffer, gathered[index])
        if calls
    )


def gathers_of(plan: ModelPlan) -> list[int]:
    """How often each unit is gathered in a step."""
    groups = choose_slots(plan.uses, plan.extents, plan.limits)
    slot_of = {unit: slot for slot, units in enumerate(groups) for unit in units}
    uses = [use for use in plan.uses if use.unit in plan.extents]
    gathers = plan_gathers(uses, plan.extents, slot_of, prefetch_numel=plan.limits.prefetch_numel)
    return [sum(gather.unit == index for gather in gathers) for index in range(len(plan.units))]


def _operations_of(
    plan: ModelPlan, index: int, buffer: BufferPlan, num_gathers: int
) -> Iterator[tuple[str, int]]:
    is_sharded = plan.placements.optim is Placement.SHARDED
    if plan.resting[index] is Placement.SHARDED:
        yield "all_gather", num_gathers
    elif is_sharded and buffer.trainable:
        yield "all_gather", 1  # of what was updated
    if buffer.trainable:
        yield "reduce_scatter" if is_sharded else "all_reduce", 1


def _operation(
    plan: ModelPlan, index: int, buffer: BufferPlan, rank: int, *, name: str, calls: int
) -> PlannedOperation:
    layout, is_gather = buffer.layout, name == "all_gather"
    if is_gather:
        dtype = buffer.dtype
    elif name == "reduce_scatter":
        dtype = plan.precision.wire_of(buffer.dtype)
    else:
        dtype = plan.rests.training_of(plan.precision, buffer, plan.resting[index])
    halves = [
        sent_of(layout.splits, layout.payload_splits, rank=rank, sends_own=sends_own)
        for sends_own in (True, False)
        if name == "all_reduce" or sends_own is is_gather
    ]
    payload = sum(half.payload_numel for half in halves) * calls
    padding = sum(half.padding_numel for half in halves) * calls
    return PlannedOperation(
        unit=plan.units[index].name,
        name=name,
        calls=calls,
        payload_numel=payload,
        payload_bytes=payload * dtype.itemsize,
        padding_bytes=padding * dtype.itemsize,
    )
