"""partition(): plan, agree, distribute, hook."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from attrs import asdict, evolve
from torch import Tensor, nn
from zero_comm import (
    Exposure,
    Group,
    Purpose,
    all_gather_coalesced,
    broadcast_coalesced,
    broadcast_flat,
    check_agreement,
    collective,
    expose,
)

from zero_partition.errors import PartitionError
from zero_partition.init.context import CURRENT, unguard_module
from zero_partition.init.early_shard import find_early, forget_early, in_batches
from zero_partition.memory.flat_buffer import FlatBuffer, SecondaryShards
from zero_partition.memory.store import AtHome, Encoded, InMemory, Rounded, Store, WithState
from zero_partition.optimizer.shards import describe_optimizer, shard_optimizer
from zero_partition.plan.config import PartitionConfig
from zero_partition.plan.layout import BufferPlan, UnitPlan
from zero_partition.plan.stages import Placement, Placements
from zero_partition.plan.trace import Limits
from zero_partition.plan.wire import Routes, Wire
from zero_partition.run.gradients import GradientReducer
from zero_partition.run.hooks import (
    find_sharded,
    install_module_hooks,
    install_norm_hooks,
    install_optimizer_hooks,
)
from zero_partition.run.residence import Homes, Residence
from zero_partition.run.schedule import Schedule
from zero_partition.run.sharded_model import ShardedModel
from zero_partition.run.step import hand_over_state
from zero_partition.run.unit import Unit
from zero_partition.values.state_dict import install_state_dict_hooks, install_state_dict_hooks_of

from .checks import check_content, check_not_wrapped
from .model_plan import as_it_holds, group_of_names, plan_model_units, resting_of

_BATCH_BYTES: Final = 2**20  # small parameters travel together


def check_adoptable(model: nn.Module, group: Group) -> None:
    """Raise PartitionError inside Init, or where it sharded over other ranks."""
    if CURRENT.get() is not None:
        raise PartitionError(
            "shard() was called inside `with Init(...):`, which still watches every parameter; "
            "call it after the block"
        )
    for name, param in model.named_parameters():
        early = find_early(param)
        if early is None:
            continue
        if early.is_blank:
            raise PartitionError(
                f"parameter {name!r} was never initialised (rank {group.rank}); call "
                "zero_engine.materialise() or load its weights first"
            )
        if early.group.process_group is not group.process_group:
            raise PartitionError(
                f"parameter {name!r} was sharded by Init over {early.group.world_size} ranks of "
                f"another group than the one of {group.world_size} ranks given to shard() (rank "
                f"{group.rank}); pass the same group to both"
            )


def describe_early(model: nn.Module) -> dict[str, str]:
    """What ranks must agree on: which parameters arrive sharded."""
    names = [name for name, param in model.named_parameters() if find_early(param) is not None]
    if not names:
        return {"parameters sharded by Init": "none"}
    found = zlib.crc32(" ".join(names).encode())
    return {"parameters sharded by Init": f"{len(names)} from {names[0]!r} on ({found:08x})"}


def adopt(
    plan: BufferPlan, params: Sequence[nn.Parameter], *, routes: Routes, placement: Placement
) -> tuple[Tensor, Tensor | None]:
    """Fill a flat buffer from parameters of which some are early sharded. Collective.

    One parameter is whole at a time, or 1 MiB of small ones, and early shards are given up as their
    values arrive, so that the peak is what rests, one unit's shard and its largest parameter.

    Returns:
        This rank's shard, and the whole buffer where parameters rest replicated.
    """
    layout, is_sharded, rank = plan.layout, placement is Placement.SHARDED, routes.shards.rank
    numel = layout.splits[rank] if is_sharded else layout.numel
    resting = torch.zeros(numel, dtype=plan.dtype, device=routes.whole.device)
    pieces = {piece.index: piece for piece in layout.pieces(rank)}
    index = 0
    named = zip((param.name for param in plan.params), params, strict=True)
    for batch in in_batches(named, max_bytes=_BATCH_BYTES):
        for value in _take([param for _, param in batch], routes.whole):
            if not is_sharded:
                resting[layout.spans[index].as_slice()].copy_(value)
            elif (piece := pieces.get(index)) is not None:
                resting[piece.in_shard.as_slice()].copy_(value[piece.in_tensor.as_slice()])
            index += 1
            del value
    if is_sharded:
        return resting, None
    return resting[layout.shard(rank).as_slice()], resting


def _take(params: Sequence[nn.Parameter], group: Group) -> Iterator[Tensor]:
    """The parameters' values, 1-D, in turn; small ones have travelled as one."""
    shards = [early.shard for param in params if (early := find_early(param)) is not None]
    gathered: Iterator[Tensor] | None = None
    if len(shards) > 1:
        gathered = iter(all_gather_coalesced(shards, group=group).wait())
    del shards
    for param in params:
        early = find_early(param)
        if early is None:
            value = param.detach().view(-1)
            if value.numel():
                broadcast_flat(value.view(torch.uint8), src=0, group=group).wait()
            yield value
            continue
        value = early.whole().view(-1) if gathered is None else next(gathered)[: param.numel()]
        forget_early(param)
        del early
        yield value


def distribute(
    model: nn.Module,
    plans: Sequence[UnitPlan],
    routes: Routes,
    placements: Sequence[Placement],
    residence: Residence,
    *,
    wire: Wire,
) -> tuple[Unit, ...]:
    """Move the parameters into flat buffers, unit by unit, with the values of rank 0. Collective.

    Placements are of the parameters of each unit.
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
            unit.secondary = SecondaryShards(routes.node, unit.buffers)
        units.append(unit)
    return tuple(units)


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
    master_dtype = residence.rests.master_of(residence.precision, plan, placement)
    source = plan if master_dtype is None else evolve(plan, dtype=master_dtype)
    group = routes.shards
    values, whole = _flatten(source, params, routes, placement)
    whole = None if whole is None else whole.to(plan.dtype)
    home, offload = residence.home, residence.offload
    masters = None
    if master_dtype is not None and offload is None:
        masters = values if whole is None else values.clone()
    num_shards = group.world_size
    codec = wire.codec_of_updates(plan, placement, is_small=is_small, num_shards=num_shards)
    resting: Store
    if codec is not None and masters is not None:
        resting = Rounded(masters, plan.dtype)
    elif codec is not None:
        resting = InMemory(values.to(plan.dtype, copy=True))
    elif home is not None and index in residence.room.shards:
        resting = AtHome(home, index, residence.room.shards[index], group.device)
        resting.write(values)
    elif wire.rests_encoded(plan, placement):
        assert wire.frozen is not None, "what it says"
        resting = Encoded.of(values.to(plan.dtype), wire.frozen)
    elif whole is not None:
        resting = InMemory(whole[plan.layout.shard(group.rank).as_slice()])
    else:
        resting = InMemory(values.to(plan.dtype))
    targets, training = residence.room.targets.get(index, ()), resting
    if masters is not None:
        training = InMemory(masters)
    elif master_dtype is not None and offload is not None:
        pieces = [
            piece
            for piece in plan.layout.pieces(group.rank)
            if residence.is_stepped(targets[piece.index])
        ]
        training = WithState(offload, targets, pieces, resting, master_dtype)
        if (
            master_dtype != plan.dtype or residence.homes.is_delayed
        ):  # else they are what the shard is
            training.write(values)
    wire_dtype = residence.precision.wire_of(plan.dtype)
    if whole is None:
        codec = resting.codec or wire.codec_of_params(plan.dtype, num_shards)
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
        torch.device("cpu") if residence.homes.gradients is not None else group.device,
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


_SAME_UNITS: Final = (
    "where messages carry the values, every rank must use the same units in the same order: call "
    "set_leaf_modules() on the module that chooses among these, before shard()"
)
_SAME_STEPS: Final = "every rank must run as many backwards and steps: a rank without a batch "
_CALL: Final = "calls backward_without_batch(model) in place of forward and backward"
_RUN: Final = "runs one of any kind with its loss times zero, because gathers need it"


def purposes_of(units: Sequence[Unit], *, control_tag: int, access_tag: int) -> dict[int, Purpose]:
    """By tag, for the group on which these units are gathered and reduced."""
    is_sharded = any(unit.placement is Placement.SHARDED for unit in units)
    gathers_together = is_sharded and all(unit.exposure is None for unit in units)
    same_steps = _SAME_STEPS + (_RUN if gathers_together else _CALL)
    found = {
        control_tag: Purpose("agreeing on gradients or their norm", same_steps),
        access_tag: Purpose(
            "access to whole parameters", "every rank must make the same calls for access"
        ),
    }
    for unit in units:
        gather = Purpose(
            f"{'gathering' if is_sharded else 'publishing'} unit {unit.name!r}",
            _SAME_UNITS if is_sharded else same_steps,
            unit.name,
        )
        reduction = Purpose(f"reducing the gradients of unit {unit.name!r}", same_steps, unit.name)
        for buffer in unit.buffers:
            found |= {buffer.gather_tag: gather, buffer.reduce_tag: reduction}
    return found


_NO_HOMES: Final = Homes()


@collective
def partition(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: PartitionConfig = PartitionConfig(),  # noqa: B008 - frozen
    *,
    group: Group,
    homes: Homes = _NO_HOMES,
    **options: Any,
) -> ShardedModel:
    """Distribute a model's parameters, gradients and optimizer state over a group. Collective.

    The module and the optimizer stay the user's own objects and are changed in place. All ranks
    take the values of rank 0.

    Args:
        model: On the group's device; its parameters dense and contiguous.
        optimizer: Any torch optimizer built from the model's parameters, new or used. One that
            looks at more than single elements says so by `needs_cut`, is one of torch's, or is
            tried on small tensors.
        config: What is chosen; see `PartitionConfig`.
        group: The ranks that train it.
        homes: Who keeps shards of parameters that rest sharded, optimizer state and masters, which
            are then stepped there, and gradients outside the device. They are the model's from now
            on; where this raises, the caller closes them. At stage 0 no state can rest elsewhere.
        **options: Fields of the configuration, in place of those in `config`: `placements`, say.

    Returns:
        What the functions of this package take: `clip_grad_norm_`, `memory_report`, ...

    Raises:
        PartitionError: The model or the optimizer cannot be partitioned as it is.
        zero_comm.AgreementError: Ranks hold different models, optimizers or settings.
        zero_comm.GroupMismatchError: The ranks are no whole number of nodes, and the configured
            wire needs them.
        zero_comm.CommError: A rank did not take part in time.
    """
    check_not_wrapped(model, optimizer)
    config = evolve(config, **options)
    wire, limits, timeout_s = config.wire, config.limits, config.timeout_s
    has_home = homes.params is not None
    wire.check(config.placements, has_home=has_home)
    routes = wire.routes(group, timeout_s=timeout_s)
    group = routes.shards
    config = as_it_holds(config, optimizer, world_size=group.world_size, has_home=has_home)
    placements, precision = config.placements, config.precision
    _check(model, routes.whole)
    residence = Residence(routes, homes, precision)
    plans = plan_model_units(
        model, optimizer, config, world_size=group.world_size, rests=residence.rests
    )
    facts = _describe(plans, placements, limits) | describe_optimizer(optimizer)
    facts |= _describe_buffers(model) | {"state_dict()": config.state_dict}
    facts["precision"] = str(precision)
    facts["shards of parameters are kept"] = homes.place
    when = "deferred" if homes.is_delayed else "right away"
    facts["the optimizer's steps taken elsewhere"] = "no" if homes.open_state is None else when
    facts |= describe_early(model) | wire.facts(routes)
    check_agreement(facts, group=routes.whole, timeout_s=timeout_s)

    resting = resting_of(plans, placements.params)
    residence.prepare(
        plans,
        resting,
        first_index(plans),
        optimizer=optimizer,
        group_of=group_of_names(model, optimizer),
        timeout_s=timeout_s,
    )
    runtime = distribute(model, plans, routes, resting, residence, wire=wire)
    if optimizer is not None and placements.optim is Placement.SHARDED:
        shard_optimizer(optimizer, runtime)
        if residence.offload is not None:
            hand_over_state(optimizer, residence.offload, runtime)
    sharded = ShardedModel(
        model=model,
        routes=routes,
        placements=placements,
        units=runtime,
        schedule=Schedule(runtime, limits=limits, device=group.device, home=homes.params),
        reducer=GradientReducer(runtime, routes, config, homes.gradients),
        residence=residence,
        optimizer=optimizer,
        exposure=expose_shards(runtime, group),
        state_dict=config.state_dict,
        input_dtype=precision.params if precision.cast_inputs else None,
        output_dtype=precision.outputs,
    )
    tags = {"control_tag": sharded.reducer.control_tag, "access_tag": sharded.access_tag}
    for each in routes.groups:
        each.explain(purposes_of(runtime, **tags))
    for module in model.modules():
        unguard_module(module)  # what waited for shard()
    install_module_hooks(model, sharded)
    for norm in precision.kept_norms(model):
        sharded.removers += install_norm_hooks(norm)
    install_state_dict_hooks(sharded)
    if optimizer is not None:
        install_optimizer_hooks(optimizer, sharded)
        if sharded.reducer.shards_state:
            install_state_dict_hooks_of(optimizer, sharded)
    return sharded


def _check(model: nn.Module, group: Group) -> None:
    """Raise PartitionError for what can be seen without other ranks."""
    if any(find_sharded(module) is not None for module in model.modules()):
        raise PartitionError(
            f"this {type(model).__name__}, or a module inside it, is sharded already; shard() a "
            "model once, before wrapping or copying it"
        )
    _check_devices(model, group)
    check_adoptable(model, group)
    check_content(model)


def _check_devices(model: nn.Module, group: Group) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_meta_param = tensor.is_meta and isinstance(tensor, nn.Parameter)  # plan_units says
        if tensor.device != group.device and not is_meta_param:
            raise PartitionError(
                f"{name!r} is on {tensor.device}, but the group communicates on {group.device} "
                f"(rank {group.rank}); move the model with model.to({str(group.device)!r}) before "
                "building the optimizer"
            )


def _describe_buffers(model: nn.Module) -> dict[str, str]:
    return {
        f"buffer {name!r}": f"shape {tuple(buffer.shape)}, {buffer.dtype}"
        for name, buffer in model.named_buffers()
    }


def _describe(plans: Sequence[UnitPlan], placements: Placements, limits: Limits) -> dict[str, str]:
    facts = {
        "placement of parameters": placements.params.value,
        "placement of gradients": placements.grads.value,
        "placement of optimizer state": placements.optim.value,
    } | {name: str(value) for name, value in asdict(limits).items()}
    for unit in plans:
        for buffer in unit.buffers:
            for param in buffer.params:
                facts[f"parameter {param.name!r}"] = (
                    f"shape {tuple(param.shape)}, {param.dtype}, "
                    f"{'trainable' if param.trainable else 'frozen'}, unit {unit.name!r}, "
                    f"cut {param.cut}"
                )
    return facts
