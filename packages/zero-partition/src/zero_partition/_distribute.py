"""Parameters move from the user's memory into flat buffers."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from attrs import evolve
from torch import Tensor, nn
from zero_comm import Exposure, Group, broadcast_coalesced, broadcast_flat, expose

from ._adopt import adopt
from ._buffer_plan import BufferPlan, UnitPlan
from ._early_shard import find_early
from ._flat_buffer import FlatBuffer
from ._model_plan import resting_of
from ._placement import Placement
from ._residence import Residence
from ._rest import AbstractRest, AtHome, Encoded, InMemory, Rounded, WithState
from ._secondary import SecondaryShards
from ._shard_home import ShardSize
from ._unit import Unit
from ._wire import Routes, Wire


def distribute(
    model: nn.Module,
    plans: Sequence[UnitPlan],
    routes: Routes,
    placements: Mapping[int, Placement],
    residence: Residence,
    *,
    wire: Wire,
) -> tuple[Unit, ...]:
    """Move the parameters into flat buffers, unit by unit, with the values of rank 0.

    Args:
        model: Whose parameters.
        plans: Of its units.
        routes: The ranks.
        placements: Of parameters, by position of their unit.
        residence: Where shards and masters rest, if not on the device.
        wire: How shards are gathered.
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules())
    buffers = [buffer for _, buffer in model.named_buffers()]
    dense = [buffer.contiguous() for buffer in buffers]
    broadcast_coalesced(dense, group=routes.whole).wait()
    for buffer, value in zip(buffers, dense, strict=True):
        if value is not buffer:
            buffer.copy_(value)

    units, next_index = [], first_index(plans)
    for unit_index, plan in enumerate(plans):
        flat_buffers, placement = [], placements[unit_index]
        for buffer_plan in plan.buffers:
            owned = tuple(params[param.name] for param in buffer_plan.params)
            flat_buffers.append(
                _lay_down(
                    buffer_plan,
                    owned,
                    next_index,
                    routes,
                    placement=placement,
                    residence=residence,
                    wire=wire,
                    is_small=plan.rests_whole,
                )
            )
            next_index += 1
        owners = tuple(
            (modules[name.rpartition(".")[0]], name.rpartition(".")[2], buffer_index, position)
            for buffer_index, buffer_plan in enumerate(plan.buffers)
            for position, param in enumerate(buffer_plan.params)
            for name in param.names
        )
        is_whole = placement is Placement.REPLICATED
        is_exact = is_whole and all(buffer.codec is None for buffer in flat_buffers)
        codec = None if is_exact else wire.params
        unit = Unit(plan, unit_index, routes.shards, placement, tuple(flat_buffers), owners, codec)
        if routes.node is not None and placement is Placement.SHARDED:
            unit.secondary = SecondaryShards(routes.node, plan.buffers)
        units.append(unit)
    return tuple(units)


def placements_of(plans: Sequence[UnitPlan], placement: Placement) -> dict[int, Placement]:
    """Of parameters, by position of their unit: small ones may rest whole."""
    return dict(enumerate(resting_of(plans, placement)))


def expose_shards(units: Sequence[Unit], group: Group) -> Exposure | None:
    """Let peers read this rank's shards of what is gathered, where they can.

    Not where they travel encoded: then all ranks compute with other values than rest there.
    """
    sharded = [unit for unit in units if unit.placement is Placement.SHARDED]
    if any(unit.codec is not None for unit in sharded):
        return None
    memories = [buffer.resting.memory for unit in sharded for buffer in unit.buffers]
    shards = [memory for memory in memories if memory is not None]
    if not shards or len(shards) < len(memories):
        return None
    exposure = expose(shards, group=group)
    for unit in sharded:
        unit.exposure = exposure
    return exposure


def first_index(plans: Sequence[UnitPlan]) -> int:
    """Where this model's buffers begin to count: models on one group should not share tags."""
    names = [param.name for unit in plans for buffer in unit.buffers for param in buffer.params]
    return 1 + zlib.crc32(" ".join(names).encode()) % 2**12 * 2**14


def _lay_down(
    plan: BufferPlan,
    params: tuple[nn.Parameter, ...],
    index: int,
    routes: Routes,
    *,
    placement: Placement,
    residence: Residence,
    wire: Wire,
    is_small: bool,
) -> FlatBuffer:
    """Move parameters into a flat buffer; masters keep the values from before the rounding."""
    master_dtype = residence.master_of(plan, placement)
    source = plan if master_dtype is None else evolve(plan, dtype=master_dtype)
    group = routes.shards
    values, whole = _flatten(source, params, routes, placement)
    whole = None if whole is None else whole.to(plan.dtype)
    home, updater = residence.home_of(placement), residence.updater
    masters = None
    if master_dtype is not None and updater is None:
        masters = values if whole is None else values.clone()
    num_shards = group.world_size
    codec = wire.codec_of_updates(plan, placement, is_small=is_small, num_shards=num_shards)
    resting: AbstractRest
    if codec is not None and masters is not None:
        resting = Rounded(masters, plan.dtype)
    elif codec is not None:
        resting = InMemory(values.to(plan.dtype, copy=True))
    elif home is not None:
        size = ShardSize(plan.layout.splits[group.rank], plan.dtype)
        resting = AtHome(home, index, size, group.device)
        resting.write(values)
    elif wire.rests_encoded(plan, placement):
        assert wire.frozen is not None, "what it says"
        resting = Encoded.of(values.to(plan.dtype), wire.frozen)
    elif whole is not None:
        resting = InMemory(whole[plan.layout.shard(group.rank).as_slice()])
    else:
        resting = InMemory(values.to(plan.dtype))
    targets, training = residence.targets.get(index, ()), resting
    if masters is not None:
        training = InMemory(masters)
    elif master_dtype is not None and updater is not None:
        pieces = [
            piece
            for piece in plan.layout.pieces(group.rank)
            if residence.is_updated(targets[piece.index])
        ]
        training = WithState(updater, targets, pieces, resting, master_dtype)
        if master_dtype != plan.dtype or updater.is_delayed:  # else they are what the shard is
            training.write(values)
    wire_dtype = residence.precision.wire_of(plan.dtype)
    return FlatBuffer(
        plan,
        index,
        group,
        params,
        resting,
        whole,
        training,
        targets,
        wire_dtype,
        residence.stepped_device,
        codec,
    )


def _flatten(
    plan: BufferPlan, params: tuple[nn.Parameter, ...], routes: Routes, placement: Placement
) -> tuple[Tensor, Tensor | None]:
    """This rank's shard, and the whole buffer where parameters rest replicated."""
    if any(find_early(param) is not None for param in params):
        return adopt(plan, params, routes=routes, placement=placement)
    whole = torch.zeros(plan.layout.numel, dtype=plan.dtype, device=routes.whole.device)
    with torch.no_grad():
        for span, param in zip(plan.layout.spans, params, strict=True):
            whole[span.as_slice()].copy_(param.detach().reshape(-1))
    broadcast_flat(whole, src=0, group=routes.whole).wait()
    shard = whole[plan.layout.shard(routes.shards.rank).as_slice()]
    if placement is Placement.SHARDED:
        return shard.clone(), None
    return shard, whole
