"""What `record_traffic` will count in one training step, from layouts alone. Planning only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from attrs import evolve, frozen
from zero_comm import Sent, even_splits, sent_of

from ._buffer_plan import BufferPlan
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


@frozen(kw_only=True)
class _Collective:
    """One that a unit launches for one of its buffers, and how often in a step."""

    name: str
    calls: int
    splits: Sequence[int]
    payload: Sequence[int]
    rank: int  # this one's, among the ranks that take part
    nodes: Sequence[int]  # of these
    itemsize: int

    def of_unit(self, unit: str) -> PlannedOperation:
        """What it sends."""
        is_gather, is_both = self.name == "all_gather", self.name == "all_reduce"
        levels = [
            sent_of(
                self.splits,
                self.payload,
                rank=self.rank,
                sends_own=sends_own,
                itemsize=self.itemsize,
                nodes=self.nodes,
            )
            for sends_own in (True, False)
            if is_both or sends_own is is_gather
        ]
        inside, across = (sum(of, Sent()) * self.calls for of in zip(*levels, strict=True))
        return PlannedOperation(unit, self.name, self.calls, inside, across)


def plan_traffic(plan: ModelPlan, rank: int) -> tuple[PlannedOperation, ...]:
    """What one rank sends in a step of one micro-batch, from the second step on. Local.

    Control messages, which are flags and scalars, are left out.

    Args:
        plan: Of the model.
        rank: Of all that train it.
    """
    counts = Counter(gather.unit for gather in plan.gathers)
    return tuple(
        collective.of_unit(unit.name)
        for index, unit in enumerate(plan.units)
        for buffer in unit.buffers
        for collective in _collectives_of(plan, index, buffer, rank, num_gathers=counts[index])
        if collective.calls
    )


def _collectives_of(
    plan: ModelPlan, index: int, buffer: BufferPlan, rank: int, *, num_gathers: int
) -> Iterator[_Collective]:
    routes, layout, placement = plan.routes, buffer.layout, plan.resting[index]
    dtype = plan.rests.training_of(plan.precision, buffer, placement)
    wire_dtype = plan.precision.wire_of(buffer.dtype)
    every = _Collective(
        name="all_gather",
        calls=1,
        splits=layout.splits,
        payload=layout.payload_splits,
        rank=routes.shard_of(rank),
        nodes=routes.nodes_of_shards(rank),
        itemsize=buffer.dtype.itemsize,
    )
    is_sharded = plan.placements.optim is Placement.SHARDED
    if placement is Placement.SHARDED and routes.node is None:
        yield evolve(every, calls=num_gathers)
    elif placement is Placement.SHARDED:
        yield evolve(every, calls=min(num_gathers, 1))  # the others find what the node has kept
        splits = even_splits(layout.numel, routes.node)
        yield evolve(
            every,
            calls=max(0, num_gathers - 1),
            splits=splits,
            payload=layout.payload_of(splits),
            rank=rank % routes.node,
            nodes=(),
        )
    elif is_sharded and buffer.trainable:
        yield every  # of what was updated
    if not buffer.trainable:
        return
    if not is_sharded:
        yield evolve(every, name="all_reduce", itemsize=dtype.itemsize)
        return
    yield evolve(every, name="reduce_scatter", itemsize=wire_dtype.itemsize)
    if routes.replicas > 1:
        shard = layout.shard(every.rank)
        splits = even_splits(shard.numel, routes.replicas)
        yield evolve(
            every,
            name="all_reduce",
            splits=splits,
            payload=layout.payload_of(splits, start=shard.start),
            rank=rank // routes.shards,
            nodes=tuple(range(routes.replicas)),
            itemsize=wire_dtype.itemsize,
        )
