"""What `partition` makes of a model: its units, and when each is used. Planning only."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from attrs import evolve, frozen
from torch import nn
from zero_comm import AbstractCodec

from zero_partition.errors import PartitionError
from zero_partition.init.units import choose_small, choose_units, plan_units
from zero_partition.memory.store import RestPlan
from zero_partition.optimizer.needs import Kind, StatePlan, choose_cuts, plan_state
from zero_partition.optimizer.shards import check_optimizer, param_group_of
from zero_partition.plan.cuts import CutChoice
from zero_partition.plan.layout import BufferPlan, UnitPlan
from zero_partition.plan.stages import AS_IT_IS, Placement, Placements, Precision
from zero_partition.plan.trace import Extent, Limits, Use
from zero_partition.plan.wire import AS_ONE, PlannedRoutes, Wire, plan_routes

# NOTE(canonical order): without running the model nobody knows in which order units are used. A
# plan takes the order of its modules, each once, and in backward the reverse; what encloses others
# is in use as long as they are. Where nothing trains before a unit, and nothing in it, no backward
# comes back to it.


@frozen
class ModelPlan:
    """A model on so many ranks, before anything of it is allocated."""

    units: tuple[UnitPlan, ...]
    uses: tuple[Use, ...]  # of one step, in sequence; see NOTE(canonical order)
    routes: PlannedRoutes
    placements: Placements  # as they hold: on one rank parameters rest whole
    precision: Precision  # likewise
    limits: Limits
    rests: RestPlan
    group_of: Mapping[str, int]  # param group by name of what the optimizer steps
    state: StatePlan
    user_bytes: Mapping[str, int]  # of each parameter before it is sharded, in the model's order

    @property
    def world_size(self) -> int:
        """Number of ranks over which it is sharded."""
        return self.routes.shards

    @cached_property
    def resting(self) -> tuple[Placement, ...]:
        """Of the parameters of each unit."""
        return resting_of(self.units, self.placements.params)

    def codec_of_updates(self, index: int, buffer: BufferPlan) -> AbstractCodec | None:
        """In which updated shards of a buffer of this unit travel; see `Wire.codec_of_updates`."""
        return self.routes.wire.codec_of_updates(
            buffer,
            self.resting[index],
            is_small=self.units[index].rests_whole,
            num_shards=self.routes.shards,
        )

    @cached_property
    def extents(self) -> dict[int, Extent]:
        """Of units that need a slot, by position."""
        return {
            index: unit.extent
            for index, unit in enumerate(self.units)
            if self.resting[index] is Placement.SHARDED
        }

    @cached_property
    def trained_bytes_per_rank(self) -> tuple[int, ...]:
        """Elements of trainable parameters in ranks' shards."""
        plans = [b for unit in self.units for b in unit.buffers if b.trainable]
        splits = [(plan.layout.payload_splits, plan.dtype.itemsize) for plan in plans]
        return tuple(
            sum(numels[rank] * itemsize for numels, itemsize in splits)
            for rank in range(self.world_size)
        )


def plan_model(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    world_size: int,
    placements: Placements,
    units: Sequence[str] | None = None,
    max_unit_bytes: int = 512 * 2**20,
    min_unit_bytes: int = 2**16,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    small_param_numel: int = 0,
    max_small_numel: int | None = None,
    precision: Precision = AS_IT_IS,
    cut: CutChoice = None,
    rests: RestPlan = RestPlan(),  # noqa: B008 - frozen
    wire: Wire = AS_ONE,
    ranks_per_node: int | None = None,
    reads_peers: bool = False,
) -> ModelPlan:
    """Plan what `partition` with the same arguments would do. Local; allocates nothing.

    Args:
        model: On any device; on meta no size is too large.
        optimizer: Built from its parameters.
        world_size: Number of ranks.
        placements: As for `partition`, as are all that follow up to `cut`.
        units: Likewise.
        max_unit_bytes: Likewise.
        min_unit_bytes: Likewise.
        limits: Likewise.
        small_param_numel: Likewise.
        max_small_numel: Likewise.
        precision: Likewise.
        cut: Likewise.
        rests: What rests outside the device.
        wire: As for `partition`.
        ranks_per_node: Neighbours in rank order that share a node, where `wire` does not say; all
            do when None.
        reads_peers: Whether ranks read each other's shards: processes of one host, on the CPU.

    Raises:
        PartitionError: The model or the optimizer cannot be partitioned so.
    """
    wire.check(placements, has_home=rests.params)
    routes = plan_routes(
        wire, world_size=world_size, ranks_per_node=ranks_per_node, reads_peers=reads_peers
    )
    placements, precision = as_they_hold(
        placements,
        precision,
        world_size=routes.shards,
        has_home=rests.params,
        has_optimizer=optimizer is not None,
    )
    check_masters(model, placements, precision)
    rests.check(optimizer, placements, precision)
    if optimizer is not None:
        check_optimizer(optimizer, model, shards_state=placements.optim is Placement.SHARDED)
    planned = plan_model_units(
        model,
        optimizer,
        world_size=routes.shards,
        placements=placements,
        units=units,
        max_unit_bytes=max_unit_bytes,
        min_unit_bytes=min_unit_bytes,
        small_param_numel=small_param_numel,
        max_small_numel=max_small_numel,
        cut=cut,
        precision=precision,
        may_be_meta=True,
    )
    sharded = [u for u in planned if placements.params is Placement.SHARDED and not u.rests_whole]
    if any(routes.resting_codec_of(buffer) for unit in sharded for buffer in unit.buffers):
        routes = evolve(routes, reads_peers=False)
    group_of_id = param_group_of(optimizer)
    named = dict(model.named_parameters())
    group_of = {n: group_of_id[id(p)] for n, p in named.items() if id(p) in group_of_id}
    partial_plan = ModelPlan(
        units=planned,
        uses=plan_uses(model, planned),
        routes=routes,
        placements=placements,
        precision=precision,
        limits=limits.where_shards_are_read()
        if routes.reads_peers and not rests.params
        else limits,
        rests=rests,
        group_of=group_of,
        state=StatePlan({}),
        user_bytes={name: param.numel() * param.element_size() for name, param in named.items()},
    )
    if optimizer is None:
        return partial_plan
    return evolve(partial_plan, state=plan_state(optimizer, _kinds_of(partial_plan)))


def _kinds_of(plan: ModelPlan) -> list[Kind]:
    """Of all that the optimizer steps."""
    is_whole = plan.placements.optim is Placement.REPLICATED
    kinds: dict[Kind, None] = {}
    for unit, placement in zip(plan.units, plan.resting, strict=True):
        for buffer in unit.buffers:
            dtype = plan.rests.training_of(plan.precision, buffer, placement)
            for param in buffer.params if buffer.trainable else ():
                if param.name in plan.group_of:
                    shape = param.shape if is_whole else param.cut.shard_shape(param.shape, 0)
                    kinds[plan.group_of[param.name], len(shape), dtype] = None
    return list(kinds)


def resting_of(units: Sequence[UnitPlan], placement: Placement) -> tuple[Placement, ...]:
    """How the parameters of each unit rest: small ones may rest whole."""
    return tuple(Placement.REPLICATED if unit.rests_whole else placement for unit in units)


def as_they_hold(
    placements: Placements,
    precision: Precision,
    *,
    world_size: int,
    has_home: bool,
    has_optimizer: bool,
) -> tuple[Placements, Precision]:
    """Placements and precision where some of it makes no difference.

    One rank's shard is the whole, so there is nothing to make whole; and nobody updates masters
    without an optimizer.
    """
    if world_size == 1 and not has_home:
        placements = evolve(placements, params=Placement.REPLICATED)
    if not has_optimizer:
        precision = evolve(precision, masters=None)
    return placements, precision


def check_masters(model: nn.Module, placements: Placements, precision: Precision) -> None:
    """Raise PartitionError where there would be masters that nobody updates."""
    if placements.optim is Placement.REPLICATED:
        dtypes = precision.dtypes_of(model)
        for name, param in model.named_parameters():
            if param.requires_grad and precision.master_of(dtypes[id(param)]) is not None:
                raise PartitionError(
                    f"parameter {name!r} would have a {precision.masters} master, and at stage 0 "
                    "the optimizer updates the parameters themselves; use stage 1, which gives the "
                    "same numbers with less memory, or Precision(masters=None)"
                )


def plan_model_units(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    world_size: int,
    placements: Placements,
    units: Sequence[str] | None,
    max_unit_bytes: int,
    min_unit_bytes: int,
    small_param_numel: int,
    max_small_numel: int | None,
    cut: CutChoice,
    precision: Precision,
    may_be_meta: bool = False,
) -> tuple[UnitPlan, ...]:
    """The units of a model, as `partition` documents its arguments of these names. Local.

    Args:
        model: Of which only shapes, dtypes and names matter.
        optimizer: Whose param groups lie side by side, and whose needs say where to cut.
        world_size: Number of shards.
        placements: As they hold.
        units: See `partition`, as for all that follow.
        max_unit_bytes: Likewise.
        min_unit_bytes: Likewise.
        small_param_numel: Likewise.
        max_small_numel: Likewise.
        cut: Likewise.
        precision: Likewise.
        may_be_meta: Whether parameters without memory are taken as they are.

    Raises:
        PartitionError: As for `plan_units` and `partition`.
    """
    cuts = choose_cuts(model, optimizer, cut) if placements.optim is Placement.SHARDED else {}
    if units is None:
        units = choose_units(model, max_unit_bytes=max_unit_bytes, min_unit_bytes=min_unit_bytes)
    small: Collection[int] = ()
    if placements.params is Placement.SHARDED:
        small = choose_small(
            model, small_param_numel=small_param_numel, max_small_numel=max_small_numel
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
    )


def plan_uses(model: nn.Module, units: Sequence[UnitPlan]) -> tuple[Use, ...]:
    """The uses of units in one step, in the order of the model's modules; NOTE(canonical order)."""
    indices = {unit.name: index for index, unit in enumerate(units) if not unit.rests_whole}
    names, reached, trains = [], set(), False
    for name, module in model.named_modules():
        if name in indices:
            names.append(name)
            if trains or any(param.requires_grad for param in module.parameters()):
                reached.add(name)
        trains |= any(param.requires_grad for param in module.parameters(recurse=False))

    def use(name: str, phase: str) -> Use:
        return Use(
            indices[name], phase, frozenset(indices[n] for n in (name, *_around(name, indices)))
        )

    forward = [use(name, "forward") for name in names]
    backward = [use(name, "backward") for name in _backward(names) if name in reached]
    return (*forward, *backward)


def _around(name: str, units: Collection[str]) -> Iterator[str]:
    """Units that enclose it."""
    while name:
        name = name.rpartition(".")[0]
        if name in units:
            yield name


def _backward(names: Sequence[str]) -> Iterator[str]:
    """Each unit before those inside it, and those that follow each other in reverse."""
    inside: dict[str, list[str]] = {}
    top: list[str] = []
    for name in names:
        outer = next(_around(name, names), None)
        (top if outer is None else inside.setdefault(outer, [])).append(name)

    def visit(some: Sequence[str]) -> Iterator[str]:
        for name in reversed(some):
            yield name
            yield from visit(inside.get(name, ()))

    return visit(top)
