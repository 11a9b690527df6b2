"""Reports of a sharded model on this rank: bytes of each kind, gathers, traffic, LoCo errors."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from attrs import asdict, frozen
from torch import Tensor, nn
from zero_comm import AbstractCodec, LocoErrors, Traffic

from zero_partition.nested import plain_tensors_in
from zero_partition.plan.layout import BufferPlan
from zero_partition.plan.slots import PlannedGather, Use
from zero_partition.run.hooks import require_sharded
from zero_partition.run.sharded_model import ShardedModel
from zero_partition.setup.model_plan import trained_bytes_per_rank


@frozen
class MemoryReport:
    """Bytes on this rank right now, each kind apart, without model buffers and activations.

    All kinds but `parked_bytes`, `host_bytes` and `disk_bytes` are in the device's memory.

    `trained_bytes_per_rank` says how even the shards of all ranks are. Where tensors are not cut,
    shards differ in size, and so do optimizer state and the work of a step.
    """

    # Elements that this rank stores: of parameters, of gradients that wait for the optimizer, and
    # of the optimizer's state, masters of parameters included; what alignment and even cuts add to
    # these.
    params_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    padding_bytes: int
    # Memory into which sharded parameters are gathered.
    slots_bytes: int
    # Further copies, padding included: parts of its node's copy, and of each `ShardedAverage`.
    secondary_bytes: int
    # Memory in which gradients are collected and received.
    reduction_bytes: int
    # Encoded parameters in flight into slots.
    encoded_bytes: int
    # Encoding errors of gradients, kept for the next reduction.
    loco_bytes: int
    # Parameters that are whole by request, or used outside their unit.
    gathered_bytes: int
    # Placeholders of sharded parameters, step counters, and flags between ranks.
    scalars_bytes: int
    # Bytes of these kinds that are parked until reload_states(); not in `total_bytes`.
    parked_bytes: int
    # Slots beyond the window, for units that must be whole besides.
    num_slot_conflicts: int
    # Bytes of trainable parameters in the shards of each rank.
    trained_bytes_per_rank: tuple[int, ...]
    # Host memory of offloaded state and of its transfers, and its files.
    host_bytes: int
    disk_bytes: int

    def __str__(self) -> str:
        """Return a line for each kind that there is, and their sum.

        In MiB (2^20 bytes), or in KiB if there is less than one.
        """
        kinds = {
            name.removesuffix("_bytes"): value
            for name, value in asdict(self).items()
            if name.endswith("_bytes") and value
        }
        kinds["on device"] = self.total_bytes
        size, unit = (2**20, "MiB") if max(kinds.values()) >= 2**20 else (2**10, "KiB")
        lines = (f"{kind:<12}{value / size:>12,.3f} {unit}" for kind, value in kinds.items())
        return "\n".join(lines)

    @property
    def model_state_bytes(self) -> int:
        """Return bytes that the ZeRO paper counts: parameters, gradients and optimizer state."""
        return self.params_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        """Return bytes of all kinds that are in the device's memory."""
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


def memory_report(model: nn.Module) -> MemoryReport:
    """Count this rank's bytes of model state and buffers, each kind apart. Local.

    Raises:
        StateError: Not sharded.
    """
    sharded = require_sharded(model)
    parked = sharded.parked
    gone = frozenset[int]() if parked is None else parked.gone

    def is_gone(tensor: Tensor) -> bool:
        return id(tensor) in gone

    params = padding = gradients = 0
    scalars = sharded.reducer.flags_bytes + (0 if parked is None else parked.stand_in_bytes)
    for buffer in sharded.buffers:
        layout, itemsize = buffer.plan.layout, buffer.plan.dtype.itemsize
        rank = buffer.group.rank
        scalars += len(buffer.params) * itemsize
        storage, memory = buffer.model_shard, buffer.model_shard.memory
        if storage.codec is not None:
            numels = (layout.splits[rank], layout.payload_splits[rank])
            used, unused = encoded_bytes(storage.codec, *numels)
            # Placeholder that `shard_params` view.
            scalars += itemsize
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
        layout, itemsize = g.buffer.plan.layout, g.buffer.main_shard.dtype.itemsize
        rank = g.buffer.group.rank
        payload, shard = layout.payload_splits[rank], layout.splits[rank]
        masters = g.buffer.main_shard.memory if g.buffer.has_masters else None
        if masters is not None and not is_gone(masters):
            state += payload * itemsize
            padding += (shard - payload) * itemsize
        holds = g.has_gradients
        if g.shard is not None and is_gone(g.shard):
            reduction -= 0 if holds else g.shard.nbytes
        elif g.shard is not None and holds and g.grad_offload is None:
            gradients += payload * itemsize
            padding += (shard - payload) * itemsize
        if g.accumulator is not None and is_gone(g.accumulator):
            reduction -= g.accumulator.nbytes
        elif not g.shards_state and g.accumulator is not None:
            with_grad = [p for p in g.buffer.params if p.grad is not None]
            gradients += sum(p.numel() for p in with_grad) * itemsize
            reduction -= sum(p.numel() for p in with_grad) * itemsize
    param_offload, offload = sharded.residence.param_offload, sharded.residence.offload
    caches = {id(unit.unsharded_cache): unit.unsharded_cache for unit in sharded.units}.values()
    keepers = (param_offload, offload.footprint if offload else None, *caches)
    elsewhere = [keeper for keeper in keepers if keeper is not None]
    return MemoryReport(
        params_bytes=params,
        gradients_bytes=gradients,
        optimizer_bytes=state,
        padding_bytes=padding,
        slots_bytes=sharded.schedule.pool.num_bytes,
        secondary_bytes=sum(
            unit.secondary.num_bytes for unit in sharded.units if unit.secondary is not None
        )
        + sum(average.device_bytes for average in sharded.averages),
        reduction_bytes=reduction,
        encoded_bytes=sum(unit.encoded_bytes for unit in sharded.units),
        loco_bytes=sharded.reducer.loco_bytes,
        gathered_bytes=_gathered_bytes(sharded),
        scalars_bytes=scalars + state_scalars,
        parked_bytes=0 if parked is None else parked.num_bytes,
        num_slot_conflicts=sharded.schedule.pool.conflicts,
        trained_bytes_per_rank=trained_bytes_per_rank(
            [unit.plan for unit in sharded.units], sharded.group.world_size
        ),
        host_bytes=sum(
            keeper.host_bytes for keeper in (sharded.reducer, *sharded.averages, *elsewhere)
        ),
        disk_bytes=sum(keeper.disk_bytes for keeper in elsewhere),
    )


def encoded_bytes(codec: AbstractCodec, numel: int, payload: int) -> tuple[int, int]:
    """Return bytes of a shard that is stored encoded: of payload, scales included, and padding."""
    padding = codec.value_bytes(numel) - codec.value_bytes(payload)
    return codec.wire_bytes(numel) - padding, padding


def _optimizer_bytes(sharded: ShardedModel, is_gone: Callable[[Tensor], bool]) -> tuple[int, int]:
    """Return device bytes of optimizer state: values per element or row, and single numbers.

    Masters are left out. Offloaded state counts with the first.
    """
    if sharded.residence.offload is not None:
        return sharded.residence.offload.footprint.device_bytes, 0
    state = scalars = 0
    if sharded.optimizer is None:
        return 0, 0
    for param, values in sharded.optimizer.state.items():
        shape = param.shape if isinstance(param, Tensor) else None
        for value in plain_tensors_in(values):
            if is_gone(value):
                continue
            if value.shape == shape or value.numel() > 1:
                state += value.nbytes
            else:
                scalars += value.nbytes
    return state, scalars


def _gathered_bytes(sharded: ShardedModel) -> int:
    pinned = [
        value.untyped_storage() for buffer in sharded.buffers for value in buffer.pinned.values()
    ]
    memory = {storage.data_ptr(): storage.nbytes() for storage in pinned}
    return sum(memory.values()) + sharded.outside.num_bytes


@frozen
class ScheduleRow:
    """One gather of a unit. Moments are in words."""

    unit: str
    # Bytes of its slot that it takes, padding included.
    num_bytes: int
    # Number of its slot; units with the same number use its memory in turn.
    slot: int
    gathered: str
    used: str
    # When another unit takes its memory.
    released: str


@frozen
class ScheduleReport:
    """The gathers of one training step, in the order of uses, or of one evaluation.

    Units that are replicated on this rank have no rows.
    """

    rows: tuple[ScheduleRow, ...]
    # Elements of parameters that are whole at once, at most, in all slots.
    peak_live_numel: int
    slots_bytes: int


def schedule_report(model: nn.Module) -> ScheduleReport:
    """Report when each unit of a model at stage 3 is gathered, and in which memory. Local.

    The report is of the last training step, or of the last evaluation where nothing was trained
    yet. A rank whose order changes from step to step launches what the step before it would have
    needed.

    Returns:
        No rows where parameters are replicated, and before the second forward.

    Raises:
        StateError: Not sharded.
    """
    sharded = require_sharded(model)
    schedule = sharded.schedule
    order = schedule.training if schedule.training.recorded else schedule.evaluation
    names = [unit.name for unit in sharded.units]
    gathers = schedule.gathers(order)
    rows = []
    for gather in gathers:
        unit = sharded.units[gather.unit]
        assert unit.slot is not None, "what was used has one"
        is_ahead = gather.launched < gather.used
        launched = _in_words(gather.launched, order.recorded, names)
        rows.append(
            ScheduleRow(
                unit=unit.name,
                num_bytes=unit.plan.num_bytes,
                slot=unit.slot.index,
                gathered=f"ahead, {launched}" if is_ahead else "at its use",
                used=_in_words(gather.used, order.recorded, names),
                released="at the end"
                if gather.released is None
                else _in_words(gather.released, order.recorded, names),
            )
        )
    numels = {index: extent.numel for index, extent in schedule.extents.items()}
    live = [
        sum(numels[gather.unit] for gather in gathers if _is_live(gather, position))
        for position in range(len(order.recorded))
    ]
    of_units = (sharded.units[gather.unit].slot for gather in gathers)
    slots_bytes = sum(slot.num_bytes for slot in {slot for slot in of_units if slot is not None})
    return ScheduleReport(tuple(rows), max(live, default=0), slots_bytes)


def traffic_report(model: nn.Module) -> Traffic:
    """Report what this rank sent for a model in its last step. Local.

    A step goes from one `optimizer.step()` to the next. A gather that was launched ahead counts in
    the step that it was launched for.

    Returns:
        Traffic per operation, and by subject per unit; what was sent so far where no step is
        complete.

    Raises:
        StateError: Not sharded.
    """
    return require_sharded(model).routes.log[0]


def _is_live(gather: PlannedGather, position: int) -> bool:
    return gather.launched <= position and (gather.released is None or position < gather.released)


def _in_words(position: int, uses: Sequence[Use], names: Sequence[str]) -> str:
    if position < 0:
        return "before the forward"
    return f"{uses[position].phase} of {names[uses[position].unit]}"


# Key of one tensor for all buffers: the number of reductions of each, in their order.
_NUM_REDUCTIONS: Final = "num_reductions"


def loco_facts(sharded: ShardedModel) -> dict[str, str]:
    """Return the facts that must be the same where saved LoCo errors are restored. Local.

    Empty where none are kept. Equal on every rank.
    """
    kept = _kept(sharded)
    if not kept:
        return {}
    hops = sharded.routes.hops
    coded = next(g for g in sharded.reducer.gradients if g.loco_errors is not None)
    facts = {
        "number of ranks": str(sharded.whole.world_size),
        "ranks of a node": str(
            sharded.whole.world_size if hops is None else hops.inside.world_size
        ),
        "codec of gradients": str(coded.codec),
        "Loco": str(next(iter(kept.values())).loco),
    }
    layouts = {_name(g.buffer.plan): _layout_of(g.buffer.plan) for g in sharded.reducer.gradients}
    return facts | {f"layout of {name!r} and what lies beside it": layouts[name] for name in kept}


def loco_state(sharded: ShardedModel) -> dict[str, Tensor]:
    """Return this rank's LoCo errors: 1-D tensors by names of their own; not copied. Local.

    One more tensor has the number of reductions of each buffer.
    """
    counts, tensors = [], {}
    for name, errors in _kept(sharded).items():
        state = errors.state_dict()
        counts.append(state.pop(_NUM_REDUCTIONS))
        tensors |= {f"{name}.{level}": tensor for level, tensor in state.items()}
    if not tensors:
        return {}
    return {_NUM_REDUCTIONS: torch.tensor(counts, dtype=torch.int64, device="cpu"), **tensors}


def restore_loco(sharded: ShardedModel, saved: Mapping[str, Tensor]) -> None:
    """Restore what `loco_state` returned where `loco_facts` are the same. Local.

    Errors are reset if `saved` is empty. Where none are kept, nothing happens.

    Args:
        sharded: The model, between steps.
        saved: On any device.
    """
    kept, device = _kept(sharded), sharded.group.device
    if not kept:
        return
    counts = saved[_NUM_REDUCTIONS].tolist() if saved else [0] * len(kept)
    for (name, errors), count in zip(kept.items(), counts, strict=True):
        prefix = f"{name}."
        of_levels = {
            level: saved[prefix + level].to(device)
            for level in ("inside", "across")
            if prefix + level in saved
        }
        errors.load_state_dict({_NUM_REDUCTIONS: count, **of_levels})


def _kept(sharded: ShardedModel) -> dict[str, LocoErrors]:
    """Return the LoCo errors of each buffer that has some, by the name of its first parameter."""
    return {
        _name(g.buffer.plan): g.loco_errors
        for g in sharded.reducer.gradients
        if g.loco_errors is not None
    }


def _name(plan: BufferPlan) -> str:
    return plan.params[0].name


def _layout_of(plan: BufferPlan) -> str:
    """Return a checksum of which elements each rank has, which is too long to say in full."""
    spans = [(span.start, span.stop) for span in plan.layout.spans]
    said = ([param.name for param in plan.params], spans, plan.layout.splits)
    return f"{zlib.crc32(repr(said).encode()):08x}"
