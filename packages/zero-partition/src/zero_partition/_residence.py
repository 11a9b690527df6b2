"""What rests outside the device, and the room for it, taken before anything is moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import define, field
from torch import nn
from zero_comm import Group, all_gather_json

from ._buffer_plan import BufferPlan
from ._chained import ChainedOptimizer
from ._errors import PartitionError
from ._gradient_home import AbstractGradientHome
from ._grouping import UnitPlan
from ._placement import Placement, Placements
from ._precision import Precision
from ._shard_home import AbstractShardHome, ShardSize
from ._updater import AbstractUpdater
from ._wire import Routes

Targets = tuple[nn.Parameter, ...]


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
        """Dtype of its masters, None if it has none.

        What rests elsewhere than where it is stepped is not stepped itself: a copy that is needed
        anyway to step it would have to be read first. Nor is what the model still computes with.
        """
        if not plan.trainable:
            return None
        chosen = self.precision.master_of(plan.dtype)
        is_elsewhere = self.home_of(placement) is not None or (
            self.updater is not None
            and (
                self.updater.is_delayed or self.home is not None or self.group.device.type != "cpu"
            )
        )
        return plan.dtype if chosen is None and is_elsewhere else chosen

    @property
    def stepped_device(self) -> torch.device:
        """Where shards of parameters, as the optimizer has them, and their gradients are."""
        return torch.device("cpu") if self.gradients is not None else self.group.device

    def is_updated(self, target: nn.Parameter) -> bool:
        """Whether the optimizer, and so the updater, knows it."""
        return target in self._updated

    def check(self, optimizer: torch.optim.Optimizer | None, placements: Placements) -> None:
        """Raise PartitionError for what cannot rest elsewhere."""
        if self.home is not None and placements.params is Placement.REPLICATED:
            raise PartitionError(
                "parameters were to rest outside the device, and rest whole on it at stages 0 to "
                "2; use stage 3"
            )
        if self.updater is not None and placements.optim is Placement.REPLICATED:
            raise PartitionError(
                "optimizer state was to rest outside the device, and at stage 0 it is the "
                "optimizer's own on every rank; use stage 1, which gives the same numbers"
            )
        if self.gradients is not None and self.updater is None:
            raise PartitionError(
                "gradients were to wait outside the device for an optimizer that steps on it; they "
                "go where an updater keeps all of its state"
            )
        if self.updater is None:
            return
        if optimizer is None:
            raise PartitionError(
                "optimizer state was to rest outside the device, but there is no optimizer; pass "
                "one, or leave that out"
            )
        if isinstance(optimizer, ChainedOptimizer):
            raise PartitionError(
                "optimizer state of a ChainedOptimizer cannot rest outside the device; use one "
                "optimizer, or leave its state on the device"
            )
        if self.precision.masters not in (torch.float32, None):
            raise PartitionError(
                f"masters that rest with the optimizer's state outside the device are float32, got "
                f"Precision(masters={self.precision.masters})"
            )

    def prepare(
        self,
        plans: Sequence[UnitPlan],
        placements: Mapping[int, Placement],
        first_index: int,
        *,
        optimizer: torch.optim.Optimizer | None,
        group_of: Mapping[str, int],
        timeout_s: float,
    ) -> None:
        """Take the room for all of it. Collective: where one rank fails, all raise.

        Args:
            plans: Of the units.
            placements: Of parameters, by position of their unit.
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
        placements: Mapping[int, Placement],
        first_index: int,
        optimizer: torch.optim.Optimizer | None,
        group_of: Mapping[str, int],
    ) -> None:
        sizes: dict[int, ShardSize] = {}
        positions: dict[nn.Parameter, int] = {}
        masters: dict[torch.dtype, torch.dtype] = {}
        index = first_index
        for position, unit in enumerate(plans):
            for buffer in unit.buffers:
                at_home = self.home_of(placements[position]) is not None
                if at_home:
                    numel = buffer.layout.splits[self.group.rank]
                    sizes[index] = ShardSize(numel, buffer.dtype)
                if self.updater is not None and buffer.trainable:
                    self.targets[index] = self._targets(buffer, at_home=at_home)
                    for param, target in zip(buffer.params, self.targets[index], strict=True):
                        if param.name in group_of:
                            positions[target] = group_of[param.name]
                    master = self.master_of(buffer, placements[position])
                    if master is not None:
                        masters[buffer.dtype] = master
                index += 1
        if self.home is not None:
            self.home.allocate(sizes)
        if self.updater is not None:
            assert optimizer is not None, "checked"
            self.updater.plan(positions, optimizer, masters=masters)
            self._updated = set(positions)

    def _targets(self, plan: BufferPlan, *, at_home: bool) -> Targets:
        numels = {
            piece.index: piece.in_tensor.numel for piece in plan.layout.pieces(self.group.rank)
        }
        device = torch.device("cpu") if at_home else self.group.device
        return tuple(
            nn.Parameter(
                torch.empty((), dtype=plan.dtype, device=device).expand(
                    param.cut.shard_shape(param.shape, numels.get(position, 0))
                )
            )
            for position, param in enumerate(plan.params)
        )
