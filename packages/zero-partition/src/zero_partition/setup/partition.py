"""partition(): plan, agree, distribute, hook."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Final

import torch
from attrs import asdict, evolve
from torch import Tensor, nn
from zero_comm import (
    AnyRanks,
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
from zero_comm.logs import warn_user

from zero_partition.chained import prepare_wrappers
from zero_partition.dtensors import grid_of, localized, mesh_group_of
from zero_partition.init.context import unguard_module
from zero_partition.init.early_shard import find_early, forget_early
from zero_partition.memory.flat_buffer import FlatBuffer, SecondaryShards
from zero_partition.memory.store import Encoded, InMemory, OffloadedShard, Rounded, Store, WithState
from zero_partition.optimizer.shards import (
    describe_optimizer,
    describe_states,
    join_states,
    shard_optimizer,
)
from zero_partition.plan.config import PartitionConfig
from zero_partition.plan.layout import BufferPlan, Span, UnitPlan, in_batches
from zero_partition.plan.slots import keeps_free_memory
from zero_partition.plan.stages import Placement
from zero_partition.plan.wire import Routes, Wire, pattern_of, ranks_of
from zero_partition.run.gradients import GradientReducer
from zero_partition.run.hooks import (
    count_calls,
    find_sharded,
    install_dtype_hooks,
    install_format_hooks,
    install_module_hooks,
    install_optimizer_hooks,
)
from zero_partition.run.residence import ModelOffload, OffloadBackends
from zero_partition.run.schedule import Schedule
from zero_partition.run.sharded_model import ShardedModel
from zero_partition.run.step import move_state_to_offload
from zero_partition.run.unit import Unit
from zero_partition.values.state_dict import install_state_dict_hooks, install_state_dict_hooks_of

from .checks import check_model
from .groups import (
    check_groups,
    check_same_groups,
    describe_others,
    describe_parameters,
    own_groups,
    with_groups,
)
from .life_cycle import let_step, retire_partition
from .model_plan import effective_config, group_of_names, plan_model_units

# Small parameters are sent together, so many bytes at a time.
_BATCH_BYTES: Final = 2**20
# Elements that are compared at a time.
_CHUNK_NUMEL: Final = 2**22
_NUM_NAMED: Final = 3


def distribute(
    model: nn.Module, plans: Sequence[UnitPlan], config: PartitionConfig, residence: ModelOffload
) -> tuple[Unit, ...]:
    """Move parameters into flat buffers, unit by unit, with the values of rank 0. Collective."""
    routes, wire = residence.routes, config.wire
    params = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    buffers = [buffer for _, buffer in model.named_buffers()]
    dense = [buffer.contiguous() for buffer in buffers]
    together: dict[str, list[Tensor]] = {"": []}
    for (name, _), value in zip(model.named_buffers(), dense, strict=True):
        pattern = pattern_of(name, config.groups)
        together.setdefault(pattern if pattern in routes.of_groups else "", []).append(value)
    for pattern, values in together.items():
        broadcast_coalesced(values, group=routes.whole_of(pattern)).wait()
    for buffer, value in zip(buffers, dense, strict=True):
        if value is not buffer:
            buffer.copy_(value)

    units, indices, replaced = [], count(first_index(plans)), list[str]()
    for unit_index, plan in enumerate(plans):
        placement = plan.param_placement(config.placements.params)
        flat_buffers = tuple(
            _build_flat_buffer(
                buffer_plan,
                tuple(params[param.name] for param in buffer_plan.params),
                next(indices),
                placement,
                wire=wire,
                residence=residence,
                is_small=plan.is_replicated,
                replaced=replaced,
            )
            for buffer_plan in plan.buffers
        )
        # A module with several names is one owner.
        owners = dict.fromkeys(
            (modules[name.rpartition(".")[0]], name.rpartition(".")[2], buffer_index, position)
            for buffer_index, buffer_plan in enumerate(plan.buffers)
            for position, param in enumerate(buffer_plan.params)
            for name in param.names
        )
        is_sharded = placement is Placement.SHARDED
        is_encoded = is_sharded or any(buffer.codec is not None for buffer in flat_buffers)
        codec = wire.params if is_encoded else None
        if codec is None and is_sharded:
            travels = (b.gather_codec for b in flat_buffers if b.plan.travel is not None)
            codec = next(travels, None)
        secondary = None
        if routes.node is not None and is_sharded:
            secondary = SecondaryShards(routes.node, flat_buffers)
        units.append(
            Unit(
                plan,
                unit_index,
                routes.shards,
                placement,
                flat_buffers,
                tuple(owners),
                codec=codec,
                secondary=secondary,
            )
        )
    if replaced:
        _LOG.warning(
            "shard(): on rank %d %d of %d parameters differed from those of the first rank that "
            "trains them, and were replaced by those: %s. Call torch.manual_seed(), or "
            "transformers' set_seed(), alike on all ranks before the model is built, or load "
            "weights. What is meant to differ, such as experts, needs ZeroConfig(groups={pattern: "
            "ranks})",
            *(routes.whole.rank, len(replaced), len(set(map(id, params.values())))),
            _some_of(replaced),
        )
    return tuple(units)


def _warn_of_left_out(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, group: Group
) -> None:
    """Log on rank 0 which parameters no step would change, though they require gradients."""
    if optimizer is None or group.rank:
        return
    given = {id(param) for group in optimizer.param_groups for param in group["params"]}
    trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
    left_out = [name for name, param in trainable.items() if id(param) not in given]
    if left_out:
        _LOG.warning(
            "shard(): %d of %d trainable parameters are in no param group of the %s: %s. They stay "
            "as they are, and clipping does not count them; freeze them, or pass them to it",
            *(len(left_out), len(trainable), type(optimizer).__name__, _some_of(left_out)),
        )


def _some_of(names: Sequence[str]) -> str:
    return ", ".join(names[:_NUM_NAMED]) + (", ..." if len(names) > _NUM_NAMED else "")


def expose_shards(units: Sequence[Unit], routes: Routes) -> Exposure | None:
    """Let peers read this rank's shards from its memory; return None if they cannot. Collective.

    Shards that are sent encoded are not exposed, since all ranks compute with rounded values, and
    shards are exact. Nor are any if some parameters have ranks of their own: an exposure is of one
    group.
    """
    sharded = [unit for unit in units if unit.placement is Placement.SHARDED]
    if routes.of_groups or any(unit.codec is not None for unit in sharded):
        return None
    memories = [buffer.model_shard.memory for unit in sharded for buffer in unit.buffers]
    shards = [memory for memory in memories if memory is not None]
    if not shards or len(shards) < len(memories):
        return None
    exposure = expose(shards, group=routes.shards)
    for unit in sharded:
        unit.read_peers_by(exposure)
    return exposure


def first_index(plans: Sequence[UnitPlan]) -> int:
    """Return the index of the model's first buffer: models on one group should not share tags."""
    buffers = [buffer for unit in plans for buffer in unit.buffers if not buffer.ranks]
    names = [param.name for buffer in buffers for param in buffer.params]
    return 1 + zlib.crc32(" ".join(names).encode()) % 2**12 * 2**14


def _build_flat_buffer(
    plan: BufferPlan,
    params: tuple[nn.Parameter, ...],
    index: int,
    placement: Placement,
    *,
    wire: Wire,
    residence: ModelOffload,
    is_small: bool,
    replaced: list[str],
) -> FlatBuffer:
    """Move parameters into a flat buffer; masters keep the values from before the rounding."""
    allocation, param_offload, offload = (
        residence.allocation,
        residence.param_offload,
        residence.offload,
    )
    routes = residence.routes.of(plan)
    group = routes.shards
    master_dtype = residence.policy.master_of(residence.precision, plan, placement)
    source = plan if master_dtype is None else evolve(plan, dtype=master_dtype)
    values, whole = _flatten(source, params, routes, placement, replaced)
    whole = None if whole is None else whole.to(plan.dtype)
    masters = None
    if master_dtype is not None and offload is None:
        masters = values if whole is None else values.clone()
    num_shards = group.world_size
    codec = wire.codec_of_updates(plan, placement, is_small=is_small, num_shards=num_shards)
    model_shard: Store
    is_rounded = whole is None and not keeps_free_memory(group.device) and param_offload is None
    if masters is not None and (codec is not None or is_rounded):
        model_shard = Rounded(masters, plan.dtype)
    elif codec is not None:
        model_shard = InMemory(values.to(plan.dtype, copy=True))
    elif param_offload is not None and index in allocation.shards:
        model_shard = OffloadedShard(param_offload, index, allocation.shards[index], group.device)
        model_shard.write(values)
    elif wire.stores_encoded(plan, placement):
        assert wire.frozen is not None, "what it says"
        model_shard = Encoded.of(values.to(plan.dtype), wire.frozen)
    elif whole is not None:
        model_shard = InMemory(whole[plan.layout.shard(group.rank).as_slice()])
    else:
        model_shard = InMemory(values.to(plan.dtype))
    offloaded_params, main_shard = allocation.offloaded_params.get(index, ()), model_shard
    if masters is not None:
        main_shard = InMemory(masters)
    elif master_dtype is not None and offload is not None:
        pieces = [
            piece
            for piece in plan.layout.pieces(group.rank)
            if residence.is_stepped(offloaded_params[piece.index])
        ]
        main_shard = WithState(offload, offloaded_params, pieces, model_shard, master_dtype)
        # Otherwise the shard has these values.
        if master_dtype != plan.dtype or residence.backends.is_delayed:
            main_shard.write(values)
    if whole is None:
        codec = model_shard.codec or wire.codec_of_params(plan, num_shards)
    return FlatBuffer(
        plan,
        index,
        group,
        params,
        model_shard,
        whole,
        main_shard,
        offloaded_params,
        wire_dtype=residence.precision.wire_of(plan),
        stepped_device=group.device
        if residence.backends.gradients is None
        else torch.device("cpu"),
        gather_codec=codec,
    )


def _flatten(
    plan: BufferPlan,
    params: Sequence[nn.Parameter],
    routes: Routes,
    placement: Placement,
    replaced: list[str],
) -> tuple[Tensor, Tensor | None]:
    """This rank's shard, and the whole buffer if parameters are replicated. Collective.

    If some are early shards, one parameter is whole at a time, or 1 MiB of small ones. Early shards
    are freed as their values arrive. So at its peak memory has the result, one unit's shard and its
    largest parameter. Names of parameters that had other values here are added to `replaced`.
    """
    layout, is_sharded = plan.layout, placement is Placement.SHARDED
    own, kept = layout.shard(routes.shards.rank), Span(0, layout.numel)
    values = (param.detach().reshape(-1) for param in params)
    has_early = any(find_early(param) is not None for param in params)
    if has_early:
        values, kept = _take(params, routes.whole), own if is_sharded else kept
    memory = torch.zeros(kept.numel, dtype=plan.dtype, device=routes.whole.device)
    spans = iter(layout.spans)
    # Not by zip(), which would keep a reference to the value.
    for value in values:
        span = next(spans)
        part = span.overlap(kept)
        if part is not None:
            source = value[part.shifted(-span.start).as_slice()]
            memory[part.shifted(-kept.start).as_slice()].copy_(source)
            del source
        del value
    if not has_early:
        broadcast_flat(memory, src=0, group=routes.whole).wait()
        replaced += _find_replaced(plan, params, memory) if routes.whole.rank else ()
    if not is_sharded:
        return memory[own.as_slice()], memory
    return memory if has_early else memory[own.as_slice()].clone(), None


def _find_replaced(
    plan: BufferPlan, params: Sequence[nn.Parameter], memory: Tensor
) -> Iterator[str]:
    """Yield names of parameters that have other values than they have in a flat buffer. Local."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[min(8, memory.itemsize)]
    for plan_of, param, span in zip(plan.params, params, plan.layout.spans, strict=True):
        before = param.detach().reshape(-1).to(plan.dtype).contiguous()
        now = memory[span.as_slice()]
        chunks = zip(before.split(_CHUNK_NUMEL), now.split(_CHUNK_NUMEL), strict=True)
        if not all(torch.equal(a.view(bits), b.view(bits)) for a, b in chunks):  # NaN equals NaN
            yield plan_of.name


def _take(params: Sequence[nn.Parameter], group: Group) -> Iterator[Tensor]:
    """Values of parameters of which some are early shards, 1-D, in turn. Collective."""
    for batch in in_batches(params, lambda param: param.nbytes, max_bytes=_BATCH_BYTES):
        shards = [early.shard for param in batch if (early := find_early(param)) is not None]
        gathered: Iterator[Tensor] | None = None
        # Several shards travel as one.
        if len(shards) > 1:
            gathered = iter(all_gather_coalesced(shards, group=group).wait())
        del shards
        for param in batch:
            early = find_early(param)
            if early is None:
                value = param.detach().reshape(-1)
                if value.numel():
                    broadcast_flat(value.view(torch.uint8), src=0, group=group).wait()
            else:
                value = early.whole().view(-1) if gathered is None else next(gathered)
                value = value[: param.numel()]
                forget_early(param)
                del early
            yield value
            del value


_SAME_UNITS: Final = (
    "every rank must run the same number of backwards and steps, and where messages carry the "
    "values, use the same units in the same order: call set_leaf_modules() on the module that "
    "chooses among these, before shard()"
)
_SAME_STEPS: Final = (
    "every rank must run the same number of backwards and steps, none inside `if rank == 0:`; a "
    "rank without a batch "
)
_CALL: Final = "calls backward_without_batch(model) in place of forward and backward"
_RUN: Final = "runs one of any kind with its loss times zero, because gathers need it"


def purposes_of(sharded: ShardedModel) -> dict[int, Purpose]:
    """Return the purpose of each tag, for the groups on which units are gathered and reduced."""
    is_sharded = any(unit.placement is Placement.SHARDED for unit in sharded.units)
    gathers_together = is_sharded and sharded.exposure is None
    same_steps = _SAME_STEPS + (_RUN if gathers_together else _CALL)
    found = {
        sharded.reducer.control_tag: Purpose("agreeing on gradients or their norm", same_steps),
        sharded.access_tag: Purpose(
            "access to whole parameters", "every rank must make the same calls for access"
        ),
    }
    for unit in sharded.units:
        gather = Purpose(
            f"{'gathering' if is_sharded else 'publishing'} unit {unit.name!r}",
            _SAME_UNITS if is_sharded else same_steps,
            unit.name,
        )
        reduction = Purpose(f"reducing the gradients of unit {unit.name!r}", same_steps, unit.name)
        for buffer in unit.buffers:
            found |= {buffer.gather_tag: gather, buffer.reduce_tag: reduction}
    return found


_NO_BACKENDS: Final = OffloadBackends()
_LOG: Final = logging.getLogger("zero_partition")


@collective
def partition(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: PartitionConfig = PartitionConfig(),  # noqa: B008 - frozen
    *,
    group: AnyRanks,
    backends: OffloadBackends | Callable[[], OffloadBackends] = _NO_BACKENDS,
    **options: Any,
) -> ShardedModel:
    """Distribute a model's parameters, gradients and optimizer state over a group. Collective.

    The module and the optimizer stay the user's own objects and are changed in place. All ranks
    take the values of rank 0, those of a group in `config.groups` the values of its first rank.

    Args:
        model: On the group's device; its parameters dense, of any strides, which they have again
            when the partition ends.
        optimizer: Any torch optimizer built from the model's parameters, new or used. A model that
            is partitioned already is handed over to it, see `retire_partition`. One that looks at
            more than single elements says so by `needs_cut`, is one of torch's, or is tried on
            small tensors.
        config: What is chosen; see `PartitionConfig`.
        group: The ranks that train it: a Group, a ProcessGroup, or a DeviceMesh of one dimension,
            or of two, replicas outside and shards inside.
        backends: Offloaded shards of parameters, optimizer state and masters, which
            are then stepped there, and gradients outside the device. They are the model's from now
            on; where this raises, the caller closes them. A function that makes them is called
            again when the model is laid out anew, as parameters are unfrozen or added to the
            optimizer, which is refused otherwise. At stage 0 no state can be offloaded.
        **options: Fields of the configuration, in place of those in `config`: `placements`, say.

    Returns:
        What the functions of this package take: `clip_grad_norm_`, `memory_report`, ...

    Raises:
        PartitionError: The model or the optimizer cannot be partitioned as it is.
        zero_comm.AgreementError: Ranks have different models, optimizers or settings.
        zero_comm.GroupMismatchError: The ranks are no whole number of nodes, and the configured
            wire needs them.
        zero_comm.CommError: A rank did not take part in time.
    """
    # This may raise, before anything is undone.
    config = evolve(config, **options)
    group, wire = ranks_of(group, config.wire, config.placements)
    config = evolve(config, wire=wire)
    before, groups = find_sharded(model), own_groups(config)
    check_same_groups(before, groups)
    known = [optimizer, None if before is None else before.optimizer]
    with localized(model, known, lambda: find_sharded(model) is not None):
        optimizer, averages = retire_partition(model, optimizer)
        is_made = isinstance(backends, OffloadBackends)
        again = None
        if not is_made or backends is _NO_BACKENDS:
            again = partial(_partition_again, config=config, group=group, backends=backends)
        made = backends if isinstance(backends, OffloadBackends) else backends()
        try:
            sharded = _partition(
                model, optimizer, config, group=group, groups=groups, backends=made, again=again
            )
        except BaseException:
            if not is_made:
                made.close()
            raise
    for average, values in averages.items():
        average.follow(sharded, values)
    return sharded


def _partition_again(sharded: ShardedModel, **how: Any) -> None:
    model = sharded.model
    _LOG.info(
        "a %s is laid out anew, since parameters were unfrozen or added to its optimizer: all of "
        "it is gathered once, a unit at a time",
        type(model).__name__,
    )
    partition(model, sharded.optimizer, **how)


def _partition(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: PartitionConfig,
    *,
    group: Group,
    groups: Mapping[str, Group],
    backends: OffloadBackends,
    again: Callable[[ShardedModel], None] | None,
) -> ShardedModel:
    check_model(model, optimizer, group, groups)
    let_step(optimizer)
    prepare_wrappers(optimizer)
    offloads_params = backends.params is not None
    config.wire.check(config.placements, offloads_params=offloads_params)
    routes, given = config.wire.routes(group, timeout_s=config.timeout_s), group
    parts = mesh_group_of(model.parameters())
    routes = evolve(routes, parts=parts, grid=grid_of(routes.whole, parts))
    routes, ranks_of = with_groups(routes, groups, model, optimizer, config)
    group = routes.shards
    config = effective_config(
        config, optimizer, world_size=group.world_size, offloads_params=offloads_params
    )
    placements, precision = config.placements, config.precision
    residence = ModelOffload(routes, backends, precision)
    plans = plan_model_units(
        model,
        optimizer,
        config,
        world_size=group.world_size,
        policy=residence.policy,
        ranks_of=ranks_of,
        num_shards={ranks: own.shards.world_size for ranks, own in routes.of_groups.items()},
    )
    facts = _describe(model, plans, config, residence) | describe_optimizer(optimizer)
    facts |= describe_states(optimizer, among=lambda key: key not in ranks_of)
    check_agreement(facts, group=routes.whole, timeout_s=config.timeout_s)
    check_groups(model, optimizer, plans, routes, ranks_of=ranks_of, timeout_s=config.timeout_s)
    _warn_of_large_unit(plans, config)
    _warn_of_left_out(model, optimizer, routes.whole)

    residence.prepare(
        plans,
        [plan.param_placement(placements.params) for plan in plans],
        first_index(plans),
        optimizer=optimizer,
        group_of=group_of_names(model, optimizer),
        timeout_s=config.timeout_s,
    )
    units = distribute(model, plans, config, residence)
    shards_state = optimizer is not None and placements.optim is Placement.SHARDED
    if optimizer is not None and shards_state:
        shard_optimizer(optimizer, units)
    # State is still split at stage 0, and of parameters that are in no group.
    join_states(optimizer)
    if optimizer is not None and shards_state and residence.offload is not None:
        move_state_to_offload(optimizer, residence.offload, units)
    sharded = ShardedModel(
        model=model,
        routes=routes,
        placements=placements,
        units=units,
        schedule=Schedule(
            units, limits=config.limits, device=group.device, param_offload=backends.params
        ),
        reducer=GradientReducer(units, routes, config, backends.gradients),
        residence=residence,
        optimizer=optimizer,
        exposure=expose_shards(units, routes),
        state_dict=config.state_dict,
        count_calls=count_calls,
        again=again,
        input_dtype=precision.params if precision.cast_inputs else None,
        output_dtype=precision.outputs,
    )
    purposes = purposes_of(sharded)
    for each in routes.groups:
        each.explain(purposes)
    for module in model.modules():
        # These modules were guarded until now.
        unguard_module(module)
    install_module_hooks(model, sharded)
    install_format_hooks(model, sharded)
    for module, policy in precision.kept_modules(model).values():
        if policy.has_hooks:
            sharded.removers.extend(install_dtype_hooks(module, policy, precision.params))
    install_state_dict_hooks(sharded)
    if optimizer is not None:
        install_optimizer_hooks(optimizer, sharded)
        if sharded.shards_state or routes.parts is not None:
            install_state_dict_hooks_of(optimizer, sharded)
    if config.sanitize:
        from zero_partition.sanitize import sanitize  # noqa: PLC0415 (only this needs it)

        sanitize(sharded, given)
    for plan in plans if _LOG.isEnabledFor(logging.DEBUG) else ():
        params = [param for buffer in plan.buffers for param in buffer.params]
        cuts = ", ".join(sorted({str(param.cut) for param in params}))
        how = plan.param_placement(placements.params).value
        message = "unit %r: %d parameters, %d elements, %s, cut %s"
        _LOG.debug(message, plan.name or "(model)", len(params), plan.extent.numel, how, cuts)
    return sharded


_LARGE_BYTES: Final = 64 * 2**20


def _warn_of_large_unit(plans: Sequence[UnitPlan], config: PartitionConfig) -> None:
    """Warn where sharding parameters saves little, since one unit has most of them."""
    if config.units is not None or config.placements.params is not Placement.SHARDED:
        return
    largest = max(plans, key=lambda plan: plan.num_bytes, default=None)
    num_bytes = sum(plan.num_bytes for plan in plans)
    if largest is None or largest.num_bytes <= max(_LARGE_BYTES, num_bytes // 2):
        return
    params = [param for buffer in largest.buffers for param in buffer.params]
    params.sort(key=lambda param: -param.shape.numel())
    names = ", ".join(param.name for param in params[:3])
    warn_user(
        f"unit {largest.name or '(model)'!r} has {largest.num_bytes / 2**20:,.0f} MiB of the "
        f"model's {num_bytes / 2**20:,.0f} MiB, and is whole while it runs, which leaves little to "
        f"save (its largest parameters are {names}). Name modules inside it in "
        "ZeroConfig(units=[...]), as in model.named_modules(); units=[] says that it is meant so",
    )


def _describe(
    model: nn.Module, plans: Sequence[UnitPlan], config: PartitionConfig, residence: ModelOffload
) -> dict[str, str]:
    """Return facts that ranks must agree on, by name; those of the optimizer are not among them."""
    backends = residence.backends
    of_groups = residence.routes.of_groups
    when = "deferred" if backends.is_delayed else "right away"
    early = [
        name
        for name, param in model.named_parameters()
        if find_early(param) is not None and pattern_of(name, config.groups) not in of_groups
    ]
    found = zlib.crc32(" ".join(early).encode())
    return {
        "the stage": str(config.placements),
        **{name: str(value) for name, value in asdict(config.limits).items()},
        **describe_parameters(plans, ""),
        **describe_others(plans, of_groups),
        **{
            f"buffer {name!r}": f"shape {tuple(buffer.shape)}, {buffer.dtype}"
            for name, buffer in model.named_buffers()
            if pattern_of(name, config.groups) not in of_groups
        },
        "sanitize": str(config.sanitize),
        "state_dict()": config.state_dict,
        "precision": str(config.precision),
        "shards of parameters are kept": backends.place,
        "steps of offloaded optimizer state": "no" if backends.open_state is None else when,
        "parameters sharded by Init": f"{len(early)} from {early[0]!r} on ({found:08x})"
        if early
        else "none",
        **config.wire.facts(residence.routes),
    }
