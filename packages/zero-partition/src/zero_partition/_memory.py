"""Where this rank's bytes are, computed from layouts."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen
from torch import Tensor
from zero_comm import AbstractCodec

from ._rest import Encoded
from ._sharded_model import ShardedModel


@frozen
class MemoryReport:
    """Bytes on this rank right now, each kind apart, without model buffers and activations.

    All but the last two kinds are in the device's memory.

    `trained_bytes_per_rank` says how even the shards of all ranks are: where tensors stay whole
    they differ, and optimizer state and the work of a step with them.
    """

    params_bytes: int  # elements of parameters that rest here
    gradients_bytes: int  # elements of gradients that wait for the optimizer
    optimizer_bytes: int  # elements of the optimizer's state, masters of parameters included
    padding_bytes: int  # what alignment and even cuts add to the three
    slots_bytes: int  # where sharded parameters are whole while in use
    secondary_bytes: int  # this rank's parts of its node's copy of them, padding included
    reduction_bytes: int  # where gradients are collected and received
    encoded_bytes: int  # parameters on their way into slots, as a codec has written them
    loco_bytes: int  # what encoding gradients lost, kept for the next reduction
    gathered_bytes: int  # parameters that are whole by request, or used outside their unit
    scalars_bytes: int  # stand-ins of sharded parameters, step counters, flags between ranks
    parked_bytes: int  # of the above kinds, elsewhere until reload_states(); not in `total_bytes`
    num_slot_conflicts: int  # slots beyond the window, for units that must be whole besides
    trained_bytes_per_rank: tuple[int, ...]  # elements of trainable parameters in ranks' shards
    host_bytes: int  # of host memory where any of it rests, or passes through, off the device
    disk_bytes: int  # of files where they rest

    @property
    def model_state_bytes(self) -> int:
        """What the ZeRO paper counts: parameters, gradients and optimizer state."""
        return self.params_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        """All of it that is in the device's memory."""
        return (
            self.model_state_bytes
            + self.padding_bytes
            + self.slots_bytes
            + self.secondary_bytes
            + self.reduction_bytes
            + self.encoded_bytes
            + self.loco_bytes
            + self.gathered_bytes
            + self.scalars_bytes
        )


def memory_report(sharded: ShardedModel) -> MemoryReport:
    """Count this rank's bytes. Local."""
    rank, parked = sharded.group.rank, sharded.parked
    gone = frozenset[int]() if parked is None else parked.gone

    def is_gone(tensor: Tensor) -> bool:
        return id(tensor) in gone

    params = padding = gradients = 0
    scalars = sharded.reducer.flags_bytes + (0 if parked is None else parked.stand_in_bytes)
    for unit in sharded.units:
        for buffer in unit.buffers:
            layout, itemsize = buffer.plan.layout, buffer.plan.dtype.itemsize
            scalars += len(buffer.params) * itemsize
            rest, memory = buffer.resting, buffer.resting.memory
            if isinstance(rest, Encoded):
                numels = (layout.splits[rank], layout.payload_splits[rank])
                used, unused = encoded_bytes(rest.codec, *numels)
                scalars += itemsize  # what stands in for the values in `shard_params`
                params += used
                padding += unused
                continue
            if memory is not None and not is_gone(memory) and not buffer.is_view:
                params += layout.payload_splits[rank] * itemsize
                padding += (layout.splits[rank] - layout.payload_splits[rank]) * itemsize
            if buffer.whole is not None and not is_gone(buffer.whole):
                params += layout.payload_numel * itemsize
                padding += (layout.numel - layout.payload_numel) * itemsize
    reduction = sharded.reducer.reduction_bytes
    state, state_scalars = _optimizer_bytes(sharded, is_gone)
    for g in sharded.reducer.gradients:
        layout, itemsize = g.buffer.plan.layout, g.buffer.training.dtype.itemsize
        payload, resting = layout.payload_splits[rank], layout.splits[rank]
        masters = g.buffer.training.memory if g.buffer.has_masters else None
        if masters is not None and not is_gone(masters):
            state += payload * itemsize
            padding += (resting - payload) * itemsize
        holds = g.holds_gradients
        if g.shard is not None and is_gone(g.shard):
            reduction -= 0 if holds else g.shard.nbytes
        elif g.shard is not None and holds and g.result.home is None:
            gradients += payload * itemsize
            padding += (resting - payload) * itemsize
        if g.accumulator is not None and is_gone(g.accumulator):
            reduction -= g.accumulator.nbytes
        elif not g.shards_state and g.accumulator is not None:
            held = [p for p in g.buffer.params if p.grad is not None]
            gradients += sum(p.numel() for p in held) * itemsize
            reduction -= sum(p.numel() for p in held) * itemsize
    home, updater = sharded.residence.home, sharded.residence.updater
    copies = {id(unit.copies): unit.copies for unit in sharded.units}.values()
    keepers = (home, updater.report if updater else None, *copies)
    elsewhere = [keeper for keeper in keepers if keeper is not None]
    return MemoryReport(
        params_bytes=params,
        gradients_bytes=gradients,
        optimizer_bytes=state,
        padding_bytes=padding,
        slots_bytes=sharded.schedule.pool.num_bytes,
        secondary_bytes=sum(
            unit.secondary.num_bytes for unit in sharded.units if unit.secondary is not None
        ),
        reduction_bytes=reduction,
        encoded_bytes=sum(unit.encoded_bytes for unit in sharded.units),
        loco_bytes=sharded.reducer.loco_bytes,
        gathered_bytes=_gathered_bytes(sharded),
        scalars_bytes=scalars + state_scalars,
        parked_bytes=0 if parked is None else parked.num_bytes,
        num_slot_conflicts=sharded.schedule.pool.conflicts,
        trained_bytes_per_rank=_trained_bytes_per_rank(sharded),
        host_bytes=sum(keeper.host_bytes for keeper in (sharded.reducer, *elsewhere)),
        disk_bytes=sum(keeper.disk_bytes for keeper in elsewhere),
    )


def encoded_bytes(codec: AbstractCodec, numel: int, payload: int) -> tuple[int, int]:
    """Of a shard that rests encoded: of its payload, scales included, and of padding."""
    padding = codec.value_bytes(numel) - codec.value_bytes(payload)
    return codec.wire_bytes(numel) - padding, padding


def _optimizer_bytes(sharded: ShardedModel, is_gone: Callable[[Tensor], bool]) -> tuple[int, int]:
    """Of its state but for masters: one value per element or row, and single numbers."""
    if sharded.residence.updater is not None:
        return sharded.residence.updater.report.device_bytes, 0
    state = scalars = 0
    if sharded.optimizer is None:
        return 0, 0
    for param, values in sharded.optimizer.state.items():
        for value in values.values():
            if not isinstance(value, Tensor) or is_gone(value):
                continue
            if value.shape == param.shape or value.numel() > 1:
                state += value.nbytes
            else:
                scalars += value.nbytes
    return state, scalars


def _trained_bytes_per_rank(sharded: ShardedModel) -> tuple[int, ...]:
    plans = [buffer.plan for unit in sharded.units for buffer in unit.buffers]
    return tuple(
        sum(p.layout.payload_splits[rank] * p.dtype.itemsize for p in plans if p.trainable)
        for rank in range(sharded.group.world_size)
    )


def _gathered_bytes(sharded: ShardedModel) -> int:
    held = [
        value.untyped_storage()
        for unit in sharded.units
        for buffer in unit.buffers
        for value in buffer.held.values()
    ]
    memory = {storage.data_ptr(): storage.nbytes() for storage in held}
    return sum(memory.values()) + sharded.outside.num_bytes
