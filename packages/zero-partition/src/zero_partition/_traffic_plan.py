"""What `record_traffic` will count in one training step, from layouts alone. Planning only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import frozen
from zero_comm import Sent, sent_of

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
    inside: Sent  # to ranks of its own node
    across: Sent  # to those of others

    @property
    def sent(self) -> Sent:
        """To whomever."""
        return self.inside + self.across


def plan_traffic(
    plan: ModelPlan, rank: int, *, ranks_per_node: int | None = None
) -> tuple[PlannedOperation, ...]:
    """What one rank sends in a step of one micro-batch, from the second step on. Local.

    Control messages, which are flags and scalars, are left out.

    Args:
        plan: Of the model.
        rank: Whose.
        ranks_per_node: Neighbours in rank order share a node; all ranks are on one when None.
    """
    gathered = gathers_of(plan)
    nodes = [of // (ranks_per_node or plan.world_size) for of in range(plan.world_size)]
    return tuple(
        _operation(plan, index, buffer, rank, nodes, name=name, calls=calls)
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
    plan: ModelPlan,
    index: int,
    buffer: BufferPlan,
    rank: int,
    nodes: Sequence[int],
    *,
    name: str,
    calls: int,
) -> PlannedOperation:
    layout, is_gather = buffer.layout, name == "all_gather"
    if is_gather:
        dtype = buffer.dtype
    elif name == "reduce_scatter":
        dtype = plan.precision.wire_of(buffer.dtype)
    else:
        dtype = plan.rests.training_of(plan.precision, buffer, plan.resting[index])
    ways = [way for way in (True, False) if name == "all_reduce" or way is is_gather]
    inside, across = (
        sum(level, Sent()) * calls
        for level in zip(
            *(
                sent_of(
                    layout.splits,
                    layout.payload_splits,
                    rank=rank,
                    sends_own=way,
                    itemsize=dtype.itemsize,
                    nodes=nodes,
                )
                for way in ways
            ),
            strict=True,
        )
    )
    return PlannedOperation(
        unit=plan.units[index].name, name=name, calls=calls, inside=inside, across=across
    )
