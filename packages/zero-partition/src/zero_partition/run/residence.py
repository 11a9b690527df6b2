"""What rests outside the device, and the room for it, taken before anything is moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import define, field, frozen
from torch import nn
from zero_comm import Group, all_gather_json

from zero_partition.errors import PartitionError
from zero_partition.memory.seams import (
    AbstractGradientHome,
    AbstractShardHome,
    AbstractUpdater,
    ShardSize,
)
from zero_partition.memory.store import RestPlan
from zero_partition.plan.layout import BufferPlan, UnitPlan
from zero_partition.plan.stages import Placement, Precision
from zero_partition.plan.wire import Routes

Targets = tuple[nn.Parameter, ...]


@frozen(eq=False)
class RoomPlan:
    """Sizes of what a home keeps, and what an updater steps."""

    sizes: dict[int, ShardSize] = field(factory=dict)  # of shards at home, by number of the buffer
    targets: dict[int, Targets] = field(factory=dict)  # likewise
    positions: dict[nn.Parameter, int] = field(factory=dict)  # of targets: their param groups
    masters: dict[torch.dtype, torch.dtype] = field(factory=dict)  # by dtype of targets


def plan_room(
    plans: Sequence[UnitPlan],
    placements: Sequence[Placement],
    *,
    rests: RestPlan,
    precision: Precision,
    rank: int,
    device: torch.device,
    group_of: Mapping[str, int],
    first_index: int = 0,
) -> RoomPlan:
    """Say what rests elsewhere of these units on this rank.

    Args:
        plans: Of the units.
        placements: Of the parameters of each.
        rests: What rests elsewhere.
        precision: Says which have masters.
        rank: Whose.
        device: Of what rests on the device; meta for one that is not here.
        group_of: Param group by name of the parameter.
        first_index: Number of the first buffer.
    """
    room, index = RoomPlan(), first_index
    for unit, placement in zip(plans, placements, strict=True):
        for buffer in unit.buffers:
            at_home = rests.params and placement is Placement.SHARDED
            if at_home:
                room.sizes[index] = ShardSize(buffer.layout.splits[rank], buffer.dtype)
            if rests.state and buffer.trainable:
                at = torch.device("cpu") if at_home else device
                room.targets[index] = targets_of(buffer, rank, at)
                for param, target in zip(buffer.params, room.targets[index], strict=True):
                    if param.name in group_of:
                        room.positions[target] = group_of[param.name]
                master = rests.master_of(precision, buffer, placement)
                if master is not None:
                    room.masters[buffer.dtype] = master
            index += 1
    return room


def targets_of(plan: BufferPlan, rank: int, device: torch.device) -> Targets:
    """What stands for each parameter's shard: of its shape, without memory."""
    numels = {piece.index: piece.in_tensor.numel for piece in plan.layout.pieces(rank)}
    return tuple(
        nn.Parameter(
            torch.empty((), dtype=plan.dtype, device=device).expand(
                param.cut.shard_shape(param.shape, numels.get(position, 0))
            )
        )
        for position, param in enumerate(plan.params)
    )


# ---- What rests outside the device, and the room for it, taken before anything is moved ----


@define(eq=False)
class Residence:
    """Who keeps what of one model outside the device."""

    routes: Routes
    home: AbstractShardHome | None  # of shards of parameters that rest sharded
    updater: AbstractUpdater | None  # of optimizer state and masters
    gradients: AbstractGradientHome | None  # of reduced gradients, for the updater
    precision: Precision
    targets: dict[int, Targets] = field(factory=dict, init=False)  # by number of the buffer
    _updated: set[nn.Parameter] = field(factory=set, init=False)  # those in a param group

    @property
    def group(self) -> Group:
        """The ranks over which the model is sharded."""
        return self.routes.shards

    def home_of(self, placement: Placement) -> AbstractShardHome | None:
        """Where the shard of a buffer whose parameters rest so is kept; None: on the device."""
        return self.home if placement is Placement.SHARDED else None

    def master_of(self, plan: BufferPlan, placement: Placement) -> torch.dtype | None:
        """Dtype of its masters, None if it has none; see `RestPlan.master_of`."""
        return self.rests.master_of(self.precision, plan, placement)

    @property
    def rests(self) -> RestPlan:
        """Which kinds rest elsewhere."""
        return RestPlan(
            params=self.home is not None,
            state=self.updater is not None,
            grads=self.gradients is not None,
            is_delayed=self.updater is not None and self.updater.is_delayed,
            host_is_device=self.group.device.type == "cpu",
        )

    @property
    def stepped_device(self) -> torch.device:
        """Where shards of parameters, as the optimizer has them, and their gradients are."""
        return torch.device("cpu") if self.gradients is not None else self.group.device

    def is_updated(self, target: nn.Parameter) -> bool:
        """Whether the optimizer, and so the updater, knows it."""
        return target in self._updated

    def prepare(
        self,
        plans: Sequence[UnitPlan],
        placements: Sequence[Placement],
        first_index: int,
        *,
        optimizer: torch.optim.Optimizer | None,
        group_of: Mapping[str, int],
        timeout_s: float,
    ) -> None:
        """Take the room for all of it. Collective: where one rank fails, all raise.

        Args:
            plans: Of the units.
            placements: Of the parameters of each.
            first_index: Number of the first buffer.
            optimizer: What the updater steps for.
            group_of: Param group by name of the parameter.
            timeout_s: How long to wait for ranks that do not call this.

        Raises:
            PartitionError: Another rank could not.
            Exception: This one could not; what home or updater raise.
        """
        if self.home is None and self.updater is None:
            return
        problem: Exception | None = None
        try:
            self._take_room(plans, placements, first_index, optimizer, group_of)
        except Exception as error:
            problem = error
        mine = "" if problem is None else f"{type(problem).__name__}: {problem}"
        said = all_gather_json(mine, group=self.routes.whole, timeout_s=timeout_s)
        if problem is not None:
            raise problem
        for rank, theirs in enumerate(said):
            if theirs:
                raise PartitionError(
                    f"nothing was sharded: rank {rank} cannot keep its part outside the device "
                    f"(seen on rank {self.routes.whole.rank}): {theirs}"
                )

    def end(self) -> None:
        """Release all of it."""
        if self.home is not None:
            self.home.end()
        if self.updater is not None:
            self.updater.end()

    def _take_room(
        self,
        plans: Sequence[UnitPlan],
        placements: Sequence[Placement],
        first_index: int,
        optimizer: torch.optim.Optimizer | None,
        group_of: Mapping[str, int],
    ) -> None:
        room = plan_room(
            plans,
            placements,
            rests=self.rests,
            precision=self.precision,
            rank=self.group.rank,
            device=self.group.device,
            group_of=group_of,
            first_index=first_index,
        )
        self.targets = room.targets
        if self.home is not None:
            self.home.allocate(room.sizes)
        if self.updater is not None:
            assert optimizer is not None, "checked"
            self.updater.plan(room.positions, optimizer, masters=room.masters)
            self._updated = set(room.positions)
