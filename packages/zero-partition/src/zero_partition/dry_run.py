"""Plan one rank's memory (as `memory_report` reports it), traffic and saves from layouts alone.

Planning only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from attrs import define, evolve, frozen
from zero_comm import AbstractCodec, Sent, even_splits
from zero_comm.planning import sent_by_levels, sent_of

from zero_partition.memory.seams import MASTER, OffloadedBytes
from zero_partition.plan.cuts import Cut
from zero_partition.plan.layout import BufferPlan, ParameterPlan
from zero_partition.plan.slots import (
    ENCODED_IN_FLIGHT,
    PlannedGather,
    PlannedGradients,
    ReductionPlan,
    choose_slots,
    plan_gathers,
    slot_bytes,
    slot_conflicts,
)
from zero_partition.plan.stages import Placement
from zero_partition.setup.model_plan import ModelPlan
from zero_partition.values.runs import BATCH_BYTES

from .report import MemoryReport, encoded_bytes


def stepped_params(
    plan: ModelPlan, buffer: BufferPlan, rank: int
) -> Iterator[tuple[ParameterPlan, tuple[int, ...]]]:
    """Yield a buffer's parameters, and the shape that a rank of the shards steps of each."""
    if plan.placements.optim is Placement.REPLICATED:
        yield from ((param, tuple(param.shape)) for param in buffer.params)
        return
    pieces = {piece.index: piece for piece in buffer.layout.pieces(rank)}
    for position, param in enumerate(buffer.params):
        piece = pieces.get(position)
        is_absent = piece is None and param.shape.numel() > 0
        if is_absent and param.cut != Cut.FLAT:
            # It has no gradient there, and no state.
            continue
        numel = 0 if piece is None else piece.in_tensor.numel
        yield param, param.cut.shard_shape(param.shape, numel)


def state_bytes(
    plan: ModelPlan, param: ParameterPlan, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[int, int]:
    """Return bytes of one parameter's optimizer state: per element or row, and single numbers.

    Args:
        plan: Of the model.
        param: Without a param group it has no state.
        shape: Of the tensor that the optimizer steps for it.
        dtype: Of that tensor.
    """
    group = plan.group_of.get(param.name)
    return (0, 0) if group is None else plan.state.bytes_of((group, len(shape), dtype), shape)


@frozen
class PlannedOperation:
    """One kind of operation on one unit's buffers in one step, as this rank sends it."""

    unit: str
    # Name of the operation, as in `record_traffic`.
    name: str
    calls: int
    # What is sent to ranks of this rank's node, and to ranks of other nodes.
    inside: Sent
    across: Sent

    @property
    def sent(self) -> Sent:
        """Return what is sent in all, inside the node and across nodes."""
        return self.inside + self.across


def plan_traffic(plan: ModelPlan, rank: int) -> tuple[PlannedOperation, ...]:
    """Plan what one rank sends in a step of one micro-batch, from the second step on. Local.

    Control messages, which are flags and scalars, are left out.

    Args:
        plan: Of the model.
        rank: The rank that sends, among all that train the model.
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


def gathers_of(plan: ModelPlan) -> tuple[PlannedGather, ...]:
    """Return the gathers of one step, in the order of uses."""
    groups = choose_slots(plan.uses, plan.extents, plan.limits)
    slot_of = {unit: slot for slot, units in enumerate(groups) for unit in units}
    uses = [use for use in plan.uses if use.unit in plan.extents]
    return plan_gathers(uses, plan.extents, slot_of, prefetch_numel=plan.limits.prefetch_numel)


def _operations_of(
    plan: ModelPlan, index: int, buffer: BufferPlan, rank: int, num_gathers: int
) -> Iterator[tuple[str, int, tuple[Sent, Sent]]]:
    """Yield each operation's name, number of calls, and what all of them send; see `sent_of`."""
    routes, layout = plan.routes.of(buffer), buffer.layout
    is_sharded = plan.placements.optim is Placement.SHARDED
    shards = _Ranks(
        layout.splits,
        layout.payload_splits,
        routes.shard_rank(rank),
        routes.nodes,
    )
    if plan.param_placements[index] is Placement.SHARDED:
        local = num_gathers - 1 if routes.has_secondary and num_gathers else 0
        codec = routes.codec_of(buffer)
        inside, across = shards.send(buffer.dtype, num_gathers - local, sends_own=True, codec=codec)
        if local:
            splits = even_splits(layout.numel, routes.per_node)
            payload = layout.payload_of(splits)
            node = _Ranks(splits, payload, rank % routes.per_node, (0,) * routes.per_node)
            inside += node.send(buffer.dtype, local, sends_own=True)[0]
        yield "all_gather", num_gathers, (inside, across)
    elif is_sharded and buffer.trainable:
        # The gather of what a step has updated.
        codec = plan.codec_of_updates(index, buffer)
        yield "all_gather", 1, shards.send(buffer.dtype, 1, sends_own=True, codec=codec)
    if not buffer.trainable:
        return
    if not is_sharded:
        dtype = plan.policy.main_dtype_of(plan.precision, buffer, plan.param_placements[index])
        yield "all_reduce", 1, shards.all_reduce(dtype)
        return
    dtype = plan.precision.wire_of(buffer)
    codec = routes.wire.codec_of_gradients(dtype)
    if codec is not None and routes.num_replicas == 1 and not routes.positions:
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
    """Ranks that exchange a buffer, and the position of this rank among them."""

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
        """Return what `calls` calls send, inside the node and across nodes; see `sent_of`."""
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
        """Return what an all-reduce sends, which is a reduce-scatter and an all-gather."""
        both = (self.send(dtype, 1, sends_own=way, codec=codec) for way in (True, False))
        (inside, across), (more_inside, more_across) = both
        return inside + more_inside, across + more_across


@frozen(kw_only=True)
class PlannedMemory:
    """One rank's bytes at the moments of training, without activations and the model's buffers.

    `step_peak_bytes` is of the device. It includes the gradient that autograd has made last and
    what travels in another dtype, but not what the optimizer allocates to step.
    """

    # Between steps, with gradients dropped, from the second step on.
    at_rest: MemoryReport
    # While gradients wait for the optimizer.
    before_step: MemoryReport
    # Peak of the device while a full model on it is sharded.
    init_peak_bytes: int
    step_peak_bytes: int


def plan_memory(
    plan: ModelPlan,
    rank: int,
    *,
    offload: OffloadedBytes | None = None,
    params_host_bytes: int = 0,
    params_disk_bytes: int = 0,
) -> PlannedMemory:
    """Compute one rank's bytes at the moments of training, by kind. Local.

    Every trainable parameter is taken to get a gradient in every backward.

    Args:
        plan: Of the model.
        rank: The rank that has the bytes, among all that train the model.
        offload: Bytes of the offloaded optimizer state, if it is offloaded.
        params_host_bytes: Host memory of offloaded shards of parameters, in bytes.
        params_disk_bytes: Files of offloaded shards of parameters, in bytes.
    """
    counts = _Counts(plan, rank, has_offload=offload is not None)
    for index, unit in enumerate(plan.units):
        for buffer in unit.buffers:
            counts.add(index, buffer)
    slots = choose_slots(plan.uses, plan.extents, plan.limits)
    num_ranks, reductions = plan.routes.whole, _plan_reductions(plan)
    working = MemoryReport(
        params_bytes=counts.params,
        gradients_bytes=0,
        optimizer_bytes=counts.state + (offload.device_bytes if offload else 0),
        padding_bytes=counts.padding,
        slots_bytes=sum(slot_bytes(slots, plan.extents)),
        secondary_bytes=_secondary_bytes(plan, rank),
        reduction_bytes=reductions.pool.num_bytes
        + counts.accumulators
        + counts.shards
        + counts.shard_padding,
        encoded_bytes=_encoded_bytes(plan),
        loco_bytes=counts.loco,
        gathered_bytes=0,
        scalars_bytes=counts.scalars + num_ranks * counts.num_flags * (num_ranks > 1),
        parked_bytes=0,
        num_slot_conflicts=slot_conflicts(slots, plan.extents, plan.limits),
        trained_bytes_per_rank=plan.trained_bytes_per_rank,
        host_bytes=(offload.host_bytes if offload else 0) + params_host_bytes + counts.host_grads,
        disk_bytes=(offload.disk_bytes if offload else 0) + params_disk_bytes,
    )
    in_backward = evolve(
        working,
        encoded_bytes=0,
        gradients_bytes=counts.grads,
        padding_bytes=working.padding_bytes + counts.shard_padding,
        reduction_bytes=working.reduction_bytes - counts.grads - counts.shard_padding,
    )
    at_rest, before_step = working, in_backward
    if not plan.keeps_free_memory:
        at_rest = evolve(working, slots_bytes=0, encoded_bytes=0, reduction_bytes=0)
        # A node's copies are made of what is in slots.
        has_copies = plan.routes.has_secondary
        before_step = in_backward if has_copies else evolve(in_backward, slots_bytes=0)
        if plan.placements.optim is Placement.SHARDED:
            before_step = evolve(before_step, reduction_bytes=0)
    return PlannedMemory(
        at_rest=at_rest,
        before_step=before_step,
        init_peak_bytes=_init_peak_bytes(plan, rank),
        step_peak_bytes=in_backward.total_bytes
        + reductions.peak_bytes
        - reductions.pool.num_bytes
        + max(counts.on_their_way, _publishing_bytes(plan)),
    )


def _secondary_bytes(plan: ModelPlan, rank: int) -> int:
    """Return bytes of the secondary shards: of units whose slot another unit takes in a step."""
    if not plan.routes.has_secondary:
        return 0
    kept = {gather.unit for gather in gathers_of(plan) if gather.released is not None}
    size = plan.routes.per_node
    return sum(
        even_splits(buffer.layout.numel, size)[rank % size] * buffer.dtype.itemsize
        for unit in kept
        for buffer in plan.units[unit].buffers
    )


def _encoded_bytes(plan: ModelPlan) -> int:
    """Return bytes of encoded shards that are in flight between steps.

    They are of gathers that are launched before the first use of a step.
    """
    if plan.routes.reads_peers and not plan.policy.params:
        # No gather is launched ahead.
        return 0
    ahead = [gather.unit for gather in gathers_of(plan) if gather.launched < 0]
    return sum(
        sum(map(codec.wire_bytes, buffer.layout.splits))
        for unit in ahead
        for buffer in plan.units[unit].buffers
        if (codec := plan.routes.of(buffer).codec_of(buffer)) is not None
    )


def _publishing_bytes(plan: ModelPlan) -> int:
    """Return the most bytes, at a time, of updated shards that are gathered encoded.

    They are of replicated parameters, whose shards a step has updated.
    """
    of_units = [
        sum(
            sum(map(codec.wire_bytes, buffer.layout.splits))
            for buffer in unit.buffers
            if (codec := plan.codec_of_updates(index, buffer)) is not None
        )
        for index, unit in enumerate(plan.units)
        if plan.param_placements[index] is Placement.REPLICATED
        and any(buffer.trainable for buffer in unit.buffers)
    ]
    starts = range(max(1, len(of_units) - ENCODED_IN_FLIGHT + 1))
    return max(sum(of_units[start : start + ENCODED_IN_FLIGHT]) for start in starts)


def loco_bytes(plan: ModelPlan, buffer: BufferPlan, rank: int) -> int:
    """Return bytes of the LoCo errors of a buffer's gradients, 0 where none are kept.

    Each hop between several ranks has errors of as many elements as it encodes.
    """
    routes, splits = plan.routes, buffer.layout.splits
    codec = routes.wire.codec_of_gradients(plan.precision.wire_of(buffer))
    loco = routes.wire.loco
    if loco is None or codec is None or routes.num_replicas > 1:
        return 0
    encoded: list[int] = []
    if routes.per_node > 1:
        encoded += splits
    if routes.per_node < routes.whole:
        encoded += splits[rank % routes.per_node :: routes.per_node]
    kept = loco.kept
    return sum(4 * numel if kept is None else kept.wire_bytes(numel) for numel in encoded)


@define
class _Counts:
    """Bytes of the buffers that were added, by kind."""

    plan: ModelPlan
    # Number of this rank among all that train the model.
    rank: int
    has_offload: bool
    params: int = 0
    padding: int = 0
    state: int = 0
    scalars: int = 0
    accumulators: int = 0  # replicated gradients, padding included
    shards: int = 0  # payload of gradients' shards on the device
    shard_padding: int = 0
    host_grads: int = 0
    grads: int = 0  # payload of gradients that the optimizer reads
    num_flags: int = 0
    loco: int = 0
    # The most that gradients of one buffer take before they are in the shard.
    on_their_way: int = 0

    def add(self, index: int, buffer: BufferPlan) -> None:
        """Add one buffer of the unit at this position."""
        plan, layout, placement = self.plan, buffer.layout, self.plan.param_placements[index]
        itemsize, rank = buffer.dtype.itemsize, plan.routes.of(buffer).shard_rank(self.rank)
        payload, numel = layout.payload_splits[rank], layout.splits[rank]
        self.scalars += len(buffer.params) * itemsize
        master = plan.policy.master_of(plan.precision, buffer, placement)
        is_sharded = placement is Placement.SHARDED
        is_rounded = master is not None and not (self.has_offload or plan.keeps_free_memory)
        if not (is_sharded and (plan.policy.params or (buffer.trainable and is_rounded))):
            is_whole = placement is Placement.REPLICATED
            mine, all_mine = (layout.payload_numel, layout.numel) if is_whole else (payload, numel)
            used, unused = mine * itemsize, (all_mine - mine) * itemsize
            codec = None if is_whole else plan.routes.storage_codec_of(buffer)
            if codec is not None:
                used, unused = encoded_bytes(codec, numel, payload)
                self.scalars += itemsize
            self.params += used
            self.padding += unused
        if not buffer.trainable:
            return
        self.num_flags += len(buffer.params)
        dtype = master or buffer.dtype
        if master is not None and not self.has_offload:
            self.state += payload * dtype.itemsize
            self.padding += (numel - payload) * dtype.itemsize
        elif plan.codec_of_updates(index, buffer) is not None:
            # The shard is beside the whole buffer.
            self.params += payload * itemsize
            self.padding += (numel - payload) * itemsize
        self._add_gradients(buffer, dtype)
        self.loco += loco_bytes(plan, buffer, rank)
        if not self.has_offload:
            for param, shape in stepped_params(plan, buffer, rank):
                state, scalars = state_bytes(plan, param, shape, dtype)
                self.state += state
                self.scalars += scalars

    def _add_gradients(self, buffer: BufferPlan, dtype: torch.dtype) -> None:
        plan, layout = self.plan, buffer.layout
        rank = plan.routes.of(buffer).shard_rank(self.rank)
        payload, numel = layout.payload_splits[rank], layout.splits[rank]
        wire = plan.precision.wire_of(buffer)
        codec = plan.routes.wire.codec_of_gradients(wire)
        numels = [param.shape.numel() for param in buffer.params]
        is_sharded = plan.placements.grads is Placement.SHARDED
        # Gradients wait for the last one, to be copied together.
        wait = is_sharded and not plan.keeps_free_memory
        way = (sum if wait else max)(numels) * buffer.dtype.itemsize
        if _is_adopted(plan, buffer):
            way = 0
        if codec is not None:
            way = max(way, sum(map(codec.wire_bytes, layout.splits)))
        if plan.placements.grads is Placement.REPLICATED:
            self.accumulators += layout.numel * dtype.itemsize
        if plan.placements.optim is Placement.REPLICATED:
            self.grads += layout.payload_numel * dtype.itemsize
        elif plan.policy.grads:
            self.host_grads += numel * dtype.itemsize
            way = max(way, numel * wire.itemsize)
        else:
            self.shards += payload * dtype.itemsize
            self.shard_padding += (numel - payload) * dtype.itemsize
            self.grads += payload * dtype.itemsize
            if wire != dtype:
                way = max(way, numel * wire.itemsize)
        self.on_their_way = max(self.on_their_way, way)


def _is_adopted(plan: ModelPlan, buffer: BufferPlan) -> bool:
    """Return whether a buffer's gradient is reduced in the memory where autograd put it.

    See `BufferPlan.is_one_param`.
    """
    is_sharded = plan.placements.grads is Placement.SHARDED
    is_scaled = plan.precision.scaling_of(plan.routes.whole).divisor_before != 1.0
    is_as_it_travels = not is_scaled and plan.precision.wire_of(buffer) == buffer.dtype
    return is_sharded and is_as_it_travels and buffer.is_one_param


def _plan_reductions(plan: ModelPlan) -> ReductionPlan:
    """Plan the reductions of two backwards with gradients in the reverse order of parameters."""
    of_param: dict[str, PlannedGradients] = {}
    for unit in plan.units if plan.placements.grads is Placement.SHARDED else ():
        for buffer in unit.buffers:
            if buffer.trainable:
                num_bytes = buffer.layout.numel * plan.precision.wire_of(buffer).itemsize
                is_adopted = _is_adopted(plan, buffer)
                gradients = PlannedGradients(num_bytes, unit.is_outer, is_adopted)
                of_param |= {param.name: gradients for param in buffer.params}
    reduction = ReductionPlan.of(
        list({id(each): each for each in of_param.values()}.values()),
        keeps_free_memory=plan.keeps_free_memory,
    )
    # The second backward finds other slots free than the first.
    for _ in range(2):
        missing = Counter(map(id, of_param.values()))
        for name in reversed([name for name in plan.user_bytes if name in of_param]):
            gradients = of_param[name]
            missing[id(gradients)] -= 1
            if gradients.slot is None and (plan.keeps_free_memory or not missing[id(gradients)]):
                reduction.collect(gradients)
            if not missing[id(gradients)]:
                reduction.launch(gradients)
        reduction.flush()
    return reduction


def _init_peak_bytes(plan: ModelPlan, rank: int) -> int:
    """Return the device's peak while units are sharded one after the other.

    Parameters of units that are still to come are in the user's memory.
    """
    left, laid, peak = sum(plan.user_bytes.values()), 0, 0
    for index, unit in enumerate(plan.units):
        for buffer in unit.buffers:
            passing, rests = _laying(plan, index, buffer, rank)
            peak = max(peak, left + laid + passing)
            laid += rests
        left -= sum(plan.user_bytes[param.name] for b in unit.buffers for param in b.params)
    return max(peak, laid + left)


def _laying(plan: ModelPlan, index: int, buffer: BufferPlan, rank: int) -> tuple[int, int]:
    """Return bytes while one buffer of the unit at this position is built, and afterwards."""
    layout, placement = buffer.layout, plan.param_placements[index]
    master = plan.policy.master_of(plan.precision, buffer, placement)
    own_rank = plan.routes.of(buffer).shard_rank(rank)
    source, shard = (master or buffer.dtype).itemsize, layout.splits[own_rank]
    whole, scalars = layout.numel * source, len(buffer.params) * buffer.dtype.itemsize
    masters = shard * source if master is not None and not plan.policy.state else 0
    if not masters and plan.codec_of_updates(index, buffer) is not None:
        # The shard is beside the whole buffer.
        masters = shard * buffer.dtype.itemsize
    if placement is Placement.REPLICATED:
        converted = layout.numel * buffer.dtype.itemsize
        if master is None or master == buffer.dtype:
            return whole + masters, converted + masters + scalars
        return whole + converted + masters, converted + masters + scalars
    codec = plan.routes.storage_codec_of(buffer)
    kept = shard * buffer.dtype.itemsize if codec is None else codec.wire_bytes(shard)
    # Values that are rounded from masters have no memory of their own.
    is_rounded = masters and not plan.keeps_free_memory
    kept_bytes = 0 if plan.policy.params or is_rounded else kept
    return whole + shard * source, kept_bytes + masters + scalars


@frozen(kw_only=True)
class PlannedSave:
    """Bytes that one rank contributes when all is saved.

    Every element is contributed once, by one rank.
    """

    # All that it writes, or copies to write it later; encoding errors too.
    num_bytes: int
    # The most that is read together, if that takes memory of its own.
    batch_bytes: int


def plan_save(plan: ModelPlan, rank: int) -> PlannedSave:
    """Plan the parts of a rank that `plan_parts` will list, from the second step on. Local."""
    if plan.routes.replica(rank):
        return PlannedSave(num_bytes=0, batch_bytes=0)
    sizes = [
        size
        for unit, placement in zip(plan.units, plan.param_placements, strict=True)
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
    """Return bytes of `loco_state`: errors, and for each buffer the number of its reductions."""
    buffers = [buffer for unit in plan.units for buffer in unit.buffers if buffer.trainable]
    kept = [num_bytes for buffer in buffers if (num_bytes := loco_bytes(plan, buffer, rank))]
    return sum(num_bytes + torch.int64.itemsize for num_bytes in kept)


def _sizes_of(
    plan: ModelPlan, buffer: BufferPlan, placement: Placement, rank: int
) -> Iterator[int]:
    """Yield the bytes of each run of elements that the rank contributes."""
    dtype = plan.policy.main_dtype_of(plan.precision, buffer, placement)
    routes = plan.routes.of(buffer)
    rank, num_ranks = routes.shard_rank(rank), routes.shards
    pieces = {piece.index: piece.in_tensor.numel for piece in buffer.layout.pieces(rank)}
    is_whole = plan.placements.optim is Placement.REPLICATED
    for position, param in enumerate(buffer.params):
        mine = pieces.get(position, 0)
        shape = tuple(param.shape) if is_whole else param.cut.shard_shape(param.shape, mine)
        group = plan.group_of.get(param.name, -1) if buffer.trainable else -1
        entries = plan.state.tensors_of((group, len(shape), dtype), shape)
        # A master is written as the parameter.
        masters = [entry for entry in entries if entry.name == MASTER]
        yield mine * (masters[0].dtype if masters else dtype).itemsize
        owner = _first_with(buffer, position)
        for entry in entries:
            if entry.name == MASTER:
                continue
            numel = math.prod(entry.shape_for(shape))
            if is_whole:
                # Every rank has it, and each gives an equal run.
                given = numel * (rank + 1) // num_ranks - numel * rank // num_ranks
            elif entry.name == "step" or not entry.shape:
                # One value for the whole parameter.
                given = numel if rank == owner else 0
            else:
                given = numel if mine else 0
            yield given * entry.dtype.itemsize


def _first_with(buffer: BufferPlan, position: int) -> int:
    """Return the first rank that has state of a parameter."""
    param, span = buffer.params[position], buffer.layout.spans[position]
    if param.cut == Cut.FLAT or not param.shape.numel():
        return 0
    shards = enumerate(buffer.layout.shards)
    return next(rank for rank, shard in shards if span.overlap(shard) is not None)
