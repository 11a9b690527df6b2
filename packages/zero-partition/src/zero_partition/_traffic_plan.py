"""What `record_traffic` will count in one training step, from layouts alone. Planning only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from attrs import frozen
from zero_comm import AbstractCodec, Sent, even_splits, sent_by_levels, sent_of

from ._buffer_plan import BufferPlan
from ._gather_plan import Gather, choose_slots, plan_gathers
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


def plan_traffic(plan: ModelPlan, rank: int) -> tuple[PlannedOperation, ...]:
    """What one rank sends in a step of one micro-batch, from the second step on. Local.

    Control messages, which are flags and scalars, are left out.

    Args:
        plan: Of the model.
        rank: Whose, of all that train it.
    """
    gathered = Counter(gather.unit for gather in gathers_of(plan))
    return tuple(
        PlannedOperation(unit=unit.name, name=name, calls=calls, inside=inside, across=across)
        for index, unit in enumerate(plan.units)
        for buffer in unit.buffers
        for name, calls, (inside, across) in _operations_of(
            plan, index, buffer, rank, gathered[index]
        )
        if calls
    )


def gathers_of(plan: ModelPlan) -> tuple[Gather, ...]:
    """Of a step."""
    groups = choose_slots(plan.uses, plan.extents, plan.limits)
    slot_of = {unit: slot for slot, units in enumerate(groups) for unit in units}
    uses = [use for use in plan.uses if use.unit in plan.extents]
    return plan_gathers(uses, plan.extents, slot_of, prefetch_numel=plan.limits.prefetch_numel)


def _operations_of(
    plan: ModelPlan, index: int, buffer: BufferPlan, rank: int, num_gathers: int
) -> Iterator[tuple[str, int, tuple[Sent, Sent]]]:
    """Names, how often, and what all of these calls send inside a node and across."""
    routes, layout = plan.routes, buffer.layout
    is_sharded = plan.placements.optim is Placement.SHARDED
    shards = _Ranks(
        layout.splits,
        layout.payload_splits,
        routes.shard_rank(rank),
        tuple(of // routes.per_node for of in range(routes.shards)),
    )
    if plan.resting[index] is Placement.SHARDED:
        local = num_gathers - 1 if routes.has_secondary and num_gathers else 0
        codec = routes.codec_of(buffer)
        inside, across = shards.send(buffer.dtype, num_gathers - local, sends_own=True, codec=codec)
        if local:
            splits = even_splits(layout.numel, routes.per_node)
            payload = layout.payload_of(splits)
            node = _Ranks(splits, payload, rank % routes.per_node, (0,) * routes.per_node)
            inside += node.send(buffer.dtype, local, sends_own=True)[0]
        yield "all_gather", num_gathers, (inside, across)
    elif is_sharded and buffer.trainable:  # of what was updated
        codec = plan.codec_of_updates(index, buffer)
        yield "all_gather", 1, shards.send(buffer.dtype, 1, sends_own=True, codec=codec)
    if not buffer.trainable:
        return
    if not is_sharded:
        dtype = plan.rests.training_of(plan.precision, buffer, plan.resting[index])
        yield "all_reduce", 1, shards.all_reduce(dtype)
        return
    dtype = plan.precision.wire_of(buffer.dtype)
    codec = routes.wire.codec_of_gradients(dtype)
    if codec is not None and routes.num_replicas == 1:
        hops = sent_by_levels(
            layout.splits,
            layout.payload_splits,
            rank=rank,
            ranks_per_node=routes.per_node,
            codec=codec,
        )
        yield "reduce_scatter", 1, hops
        return
    yield "reduce_scatter", 1, shards.send(dtype, 1, sends_own=False, codec=codec)
    if routes.num_replicas > 1:
        shard = layout.shard(routes.shard_rank(rank))
        splits = even_splits(shard.numel, routes.num_replicas)
        payload = layout.payload_of(splits, start=shard.start)
        nodes = tuple(range(routes.num_replicas))
        replicas = _Ranks(splits, payload, routes.replica(rank), nodes)
        yield "all_reduce", 1, replicas.all_reduce(dtype, codec=codec)


@frozen
class _Ranks:
    """Ranks that exchange a buffer, and which of them this one is."""

    splits: Sequence[int]
    payload: Sequence[int]
    rank: int
    nodes: Sequence[int]

    def send(
        self,
        dtype: torch.dtype,
        calls: int,
        *,
        sends_own: bool,
        codec: AbstractCodec | None = None,
    ) -> tuple[Sent, Sent]:
        """Inside a node and across, of so many calls; see `sent_of`."""
        inside, across = sent_of(
            self.splits,
            self.payload,
            rank=self.rank,
            sends_own=sends_own,
            itemsize=dtype.itemsize,
            nodes=self.nodes,
            codec=codec,
        )
        return inside * calls, across * calls

    def all_reduce(
        self, dtype: torch.dtype, *, codec: AbstractCodec | None = None
    ) -> tuple[Sent, Sent]:
        """A reduce-scatter and an all-gather."""
        both = (self.send(dtype, 1, sends_own=way, codec=codec) for way in (True, False))
        (inside, across), (more_inside, more_across) = both
        return inside + more_inside, across + more_across
