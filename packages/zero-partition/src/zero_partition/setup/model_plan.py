"""Plan of a partitioned model: its units, and when each is used. Planning only."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from attrs import evolve, frozen
from torch import nn
from zero_comm import AbstractCodec

from zero_partition.dtensors import has_parts, localized, refuse_to_cut
from zero_partition.errors import PartitionError
from zero_partition.init.units import choose_small, choose_units, enclosing, plan_units
from zero_partition.optimizer.needs import Kind, StatePlan, choose_cuts, plan_state
from zero_partition.optimizer.shards import check_optimizer, param_group_of
from zero_partition.plan.config import PartitionConfig
from zero_partition.plan.layout import BufferPlan, UnitPlan
from zero_partition.plan.precision import Precision
from zero_partition.plan.slots import Extent, Limits, Use
from zero_partition.plan.stages import Placement, Placements
from zero_partition.plan.wire import PlannedRoutes, plan_routes
from zero_partition.run.hooks import find_sharded
from zero_partition.run.residence import OffloadPolicy

from .checks import check_shapes
from .groups import plan_groups

# NOTE(canonical order): the order in which units are used is unknown until the model runs. A plan
# takes the order of the modules, each once, and the reverse in backward; a unit that encloses
# others is in use as long as they are. If nothing trains in a unit or before it, backward does not
# come to it.


@frozen
class ModelPlan:
    """A model on so many ranks, before anything of it is allocated."""

    units: tuple[UnitPlan, ...]
    # Uses in one step, in sequence; see NOTE(canonical order).
    uses: tuple[Use, ...]
    routes: PlannedRoutes
    # Placements and precision in effect: on one rank, parameters are replicated.
    placements: Placements
    precision: Precision
    limits: Limits
    policy: OffloadPolicy
    # Name of a parameter that the optimizer steps -> index of its param group.
    group_of: Mapping[str, int]
    state: StatePlan
    # Name -> bytes of each parameter before it is sharded, in the model's order.
    user_bytes: Mapping[str, int]
    keeps_free_memory: bool  # as on the CPU; see NOTE(free memory) in plan.slots

    @property
    def world_size(self) -> int:
        """Number of ranks over which it is sharded."""
        return self.routes.shards

    @cached_property
    def param_placements(self) -> tuple[Placement, ...]:
        """Return the placement of each unit's parameters between uses."""
        return tuple(unit.param_placement(self.placements.params) for unit in self.units)

    def codec_of_updates(self, index: int, buffer: BufferPlan) -> AbstractCodec | None:
        """Return the codec of gathers of a buffer's updated shards; see `Wire.codec_of_updates`."""
        return self.routes.wire.codec_of_updates(
            buffer,
            self.param_placements[index],
            is_small=self.units[index].is_replicated,
            num_shards=self.routes.of(buffer).shards,
        )

    @cached_property
    def extents(self) -> dict[int, Extent]:
        """Return the extents of units that need a slot, by position."""
        return {
            index: unit.extent
            for index, unit in enumerate(self.units)
            if self.param_placements[index] is Placement.SHARDED
        }

    @cached_property
    def trained_bytes_per_rank(self) -> tuple[int, ...]:
        """Return the bytes of trainable parameters in each rank's shards."""
        return trained_bytes_per_rank(self.units, self.world_size)


def plan_model(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: PartitionConfig = PartitionConfig(),  # noqa: B008 - frozen
    *,
    world_size: int,
    policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 - frozen
    ranks_per_node: int | None = None,
    reads_peers: bool = False,
    keeps_free_memory: bool = False,
    **options: Any,
) -> ModelPlan:
    """Plan what `partition` with the same arguments would do. Local; allocates nothing.

    Args:
        model: On any device; on meta no size is too large.
        optimizer: Built from its parameters.
        config: As for `partition`.
        world_size: Number of ranks.
        policy: States that are offloaded.
        ranks_per_node: Neighbours in rank order that share a node, where `config.wire` does not
            say; all do when None.
        reads_peers: Whether ranks read each other's shards: processes of one host, on the CPU.
        keeps_free_memory: Whether memory that is free between steps stays, as it does on the CPU.
        **options: Fields of the configuration, in place of those in `config`.

    Raises:
        PartitionError: The model or the optimizer cannot be partitioned so.
    """
    check_shapes(model)
    with localized(model, [optimizer], lambda: find_sharded(model) is not None):
        return _plan(
            model,
            optimizer,
            evolve(config, **options),
            world_size=world_size,
            policy=policy,
            ranks_per_node=ranks_per_node,
            reads_peers=reads_peers,
            keeps_free_memory=keeps_free_memory,
        )


def _plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: PartitionConfig,
    *,
    world_size: int,
    policy: OffloadPolicy,
    ranks_per_node: int | None,
    reads_peers: bool,
    keeps_free_memory: bool,
) -> ModelPlan:
    config.wire.check(config.placements, offloads_params=policy.params)
    routes = plan_routes(
        config.wire, world_size=world_size, ranks_per_node=ranks_per_node, reads_peers=reads_peers
    )
    config = effective_config(
        config, optimizer, world_size=routes.shards, offloads_params=policy.params
    )
    routes, ranks_of = plan_groups(routes, model, config)
    planned = plan_model_units(
        model,
        optimizer,
        config,
        world_size=routes.shards,
        policy=policy,
        may_be_meta=True,
        ranks_of=ranks_of,
        num_shards={pattern: own.shards for pattern, own in routes.of_groups.items()},
    )
    at_rest = config.placements.params
    sharded = [unit for unit in planned if unit.param_placement(at_rest) is Placement.SHARDED]
    buffers = [buffer for unit in sharded for buffer in unit.buffers]
    if any(buffer.travel or routes.storage_codec_of(buffer) for buffer in buffers):
        routes = evolve(routes, reads_peers=False)
    limits = config.limits.with_window(keeps_free_memory=keeps_free_memory)
    partial_plan = ModelPlan(
        units=planned,
        uses=plan_uses(model, planned),
        routes=routes,
        placements=config.placements,
        precision=config.precision,
        limits=limits.where_shards_are_read()
        if routes.reads_peers and not policy.params
        else limits,
        policy=policy,
        group_of=group_of_names(model, optimizer),
        state=StatePlan(),
        user_bytes={name: param.nbytes for name, param in model.named_parameters()},
        keeps_free_memory=keeps_free_memory,
    )
    if optimizer is None:
        return partial_plan
    return evolve(partial_plan, state=plan_state(optimizer, _kinds_of(partial_plan)))


def _kinds_of(plan: ModelPlan) -> list[Kind]:
    """Return the kinds of all parameters that the optimizer steps, each once."""
    is_whole = plan.placements.optim is Placement.REPLICATED
    kinds: dict[Kind, None] = {}
    for unit, placement in zip(plan.units, plan.param_placements, strict=True):
        for buffer in unit.buffers:
            dtype = plan.policy.main_dtype_of(plan.precision, buffer, placement)
            for param in buffer.params if buffer.trainable else ():
                if param.name in plan.group_of:
                    shape = tuple(param.shape)
                    if not is_whole:
                        shape = param.cut.shard_shape(shape, param.shape.numel())
                    kinds[plan.group_of[param.name], len(shape), dtype] = None
    return list(kinds)


def trained_bytes_per_rank(units: Sequence[UnitPlan], world_size: int) -> tuple[int, ...]:
    """Bytes of trainable parameters in ranks' shards; of a group's, an even part on each rank."""
    plans = [buffer for unit in units for buffer in unit.buffers if buffer.trainable]
    splits = [
        (
            [plan.layout.payload_numel // len(plan.layout.splits)] * world_size
            if plan.ranks
            else plan.layout.payload_splits,
            plan.dtype.itemsize,
        )
        for plan in plans
    ]
    return tuple(
        sum(numels[rank] * itemsize for numels, itemsize in splits) for rank in range(world_size)
    )


def group_of_names(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Param group by name of the parameter, for each of its names."""
    group_of = param_group_of(optimizer)
    named = model.named_parameters(remove_duplicate=False)
    return {name: group_of[id(param)] for name, param in named if id(param) in group_of}


def effective_config(
    config: PartitionConfig,
    optimizer: torch.optim.Optimizer | None,
    *,
    world_size: int,
    offloads_params: bool,
) -> PartitionConfig:
    """Return the configuration without settings that have no effect.

    On one rank a shard is the whole parameter, so parameters are replicated unless they are
    offloaded. Without an optimizer there are no masters.
    """
    if world_size == 1 and not offloads_params:
        placements = evolve(config.placements, params=Placement.REPLICATED)
        config = evolve(config, placements=placements)
    if optimizer is None:
        config = evolve(config, precision=evolve(config.precision, masters=None))
    return config


def plan_model_units(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: PartitionConfig,
    *,
    world_size: int,
    policy: OffloadPolicy,
    may_be_meta: bool = False,
    ranks_of: Mapping[int, str] | None = None,
    num_shards: Mapping[str, int] | None = None,
) -> tuple[UnitPlan, ...]:
    """The units of a model, if it and its optimizer can be partitioned so. Local.

    Args:
        model: Only its shapes, dtypes and names matter.
        optimizer: Parameters of one of its param groups lie side by side; its needs say where to
            cut.
        config: As `effective_config` returns it.
        world_size: Number of shards.
        policy: States that are offloaded.
        may_be_meta: See `plan_units`.
        ranks_of: See `plan_units`.
        num_shards: The number of shards by pattern in these.

    Raises:
        PartitionError: The model or the optimizer cannot be partitioned so.
    """
    placements, precision = config.placements, config.precision
    shards_state = placements.optim is Placement.SHARDED
    if not shards_state:
        _check_masters(model, precision)
    # What it steps are parts of tensors: shards, or at stage 0 this rank's parts of DTensors.
    steps_parts = shards_state or has_parts(model)
    if optimizer is not None:
        check_optimizer(optimizer, model, shards_state=steps_parts)
    policy.check(optimizer, placements, precision)
    cuts = choose_cuts(model, optimizer, config.cut) if steps_parts else {}
    refuse_to_cut(model, cuts)
    cuts = cuts if shards_state else {}
    units = config.units
    if units is None:
        units = choose_units(
            model, max_unit_bytes=config.max_unit_bytes, min_unit_bytes=config.min_unit_bytes
        )
    small: Collection[int] = ()
    if placements.params is Placement.SHARDED:
        small = choose_small(
            model,
            small_param_numel=config.small_param_numel,
            max_small_numel=config.max_small_numel,
        )
    return plan_units(
        model,
        units,
        world_size=world_size,
        cuts=cuts,
        group_of=param_group_of(optimizer),
        small=small,
        precision=precision,
        may_be_meta=may_be_meta,
        ranks_of=ranks_of,
        num_shards=num_shards,
    )


def _check_masters(model: nn.Module, precision: Precision) -> None:
    """Raise PartitionError if there would be masters, which no optimizer updates at stage 0."""
    dtypes = precision.dtypes_of(model)
    for name, param in model.named_parameters():
        if param.requires_grad and precision.master_of(dtypes[id(param)]) is not None:
            raise PartitionError(
                f"parameter {name!r} would have a {precision.masters} master, and at stage 0 "
                "the optimizer updates the parameters themselves; use stage 1, which gives the "
                "same numbers with less memory, or Precision(masters=None)"
            )


def plan_uses(model: nn.Module, units: Sequence[UnitPlan]) -> tuple[Use, ...]:
    """The uses of units in one step, in the order of the model's modules; NOTE(canonical order)."""
    indices = {unit.name: index for index, unit in enumerate(units) if not unit.is_replicated}
    names, reached, trains = [], set(), False
    for name, module in model.named_modules():
        if name in indices:
            names.append(name)
            if trains or any(param.requires_grad for param in module.parameters()):
                reached.add(name)
        trains |= any(param.requires_grad for param in module.parameters(recurse=False))

    def use(name: str, phase: str) -> Use:
        return Use(
            indices[name],
            phase,
            frozenset(indices[n] for n in (name, *enclosing(name)) if n in indices),
        )

    forward = [use(name, "forward") for name in names]
    backward = [use(name, "backward") for name in _backward(names) if name in reached]
    return (*forward, *backward)


def _backward(names: Sequence[str]) -> Iterator[str]:
    """Each unit before those inside it, and those that follow each other in reverse."""
    inside: dict[str, list[str]] = {}
    top: list[str] = []
    for name in names:
        outer = next((n for n in enclosing(name) if n in names), None)
        (top if outer is None else inside.setdefault(outer, [])).append(name)

    def visit(some: Sequence[str]) -> Iterator[str]:
        for name in reversed(some):
            yield name
            yield from visit(inside.get(name, ()))

    return visit(top)
