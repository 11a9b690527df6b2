"""Offloaded states of a model, and their memory, allocated before anything is moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from zero_comm import all_gather_json

from zero_partition.chained import SeparateOptimizers, inner_of, members_of
from zero_partition.errors import PartitionError
from zero_partition.memory.seams import GradOffload, OpenState, OptimizerOffload, ParamOffload
from zero_partition.plan.layout import BufferPlan, UnitPlan
from zero_partition.plan.precision import Precision
from zero_partition.plan.stages import Placement, Placements
from zero_partition.plan.wire import Routes


@frozen(kw_only=True)
class OffloadPolicy:
    """Choice of the states that are offloaded, and whether the host is the device itself."""

    # Whether these are offloaded: shards of parameters that are not replicated, optimizer state
    # with its masters, and reduced gradients.
    params: bool = False
    state: bool = False
    grads: bool = False
    # Whether new values reach the shards at the next step only, or at `finish_update()`.
    is_delayed: bool = False
    # Whether the device is the CPU.
    host_is_device: bool = False

    def master_of(
        self, precision: Precision, plan: BufferPlan, placement: Placement
    ) -> torch.dtype | None:
        """Return the dtype of a buffer's masters at this placement, None if it has none.

        Shards in another memory than the one they are stepped in have masters, which are updated in
        their place: else the shards would have to be read before each step. With delayed updates
        all have masters, because the model still computes with the old values.
        """
        if not plan.trainable:
            return None
        chosen = precision.master_of(plan.dtype)
        is_offloaded = self.params and placement is Placement.SHARDED
        is_elsewhere = is_offloaded or (
            self.state and (self.is_delayed or self.params or not self.host_is_device)
        )
        return plan.dtype if chosen is None and is_elsewhere else chosen

    def main_dtype_of(
        self, precision: Precision, plan: BufferPlan, placement: Placement
    ) -> torch.dtype:
        """Return the dtype in which its values are updated and its gradients added up."""
        return self.master_of(precision, plan, placement) or plan.dtype

    def check(
        self,
        optimizer: torch.optim.Optimizer | None,
        placements: Placements,
        precision: Precision,
    ) -> None:
        """Raise PartitionError for states that cannot be offloaded."""
        if self.params and placements.params is Placement.REPLICATED:
            raise PartitionError(
                "parameters were to be offloaded, and are replicated on the device at stages 0 to "
                "2; use stage 3"
            )
        if self.state and placements.optim is Placement.REPLICATED:
            raise PartitionError(
                "optimizer state was to be offloaded, and at stage 0 it is the optimizer's own on "
                "every rank; use stage 1, which gives the same numbers"
            )
        if self.grads and not self.state:
            raise PartitionError(
                "gradients were to be offloaded, and the optimizer steps on the device; offload "
                "all of the optimizer's state, too"
            )
        if not self.state:
            return
        if optimizer is None:
            raise PartitionError(
                "optimizer state was to be offloaded, but there is no optimizer; pass one, or "
                "leave that out"
            )
        if isinstance(optimizer, SeparateOptimizers):
            raise PartitionError(
                "optimizer state of several optimizers that are stepped separately cannot be "
                "offloaded; chain them, ChainedOptimizer(first, second), or leave their state on "
                "the device"
            )
        for member in members_of(optimizer):
            if inner_of(member) is not member:
                raise PartitionError(
                    f"optimizer state of a {type(member).__name__} cannot be offloaded, as it "
                    "wraps another optimizer, whose step is a part of its own; leave its state on "
                    "the device"
                )
        if precision.masters not in (torch.float32, None):
            raise PartitionError(
                f"expected float32 for masters that are offloaded with the optimizer's state, got "
                f"Precision(masters={precision.masters})"
            )


@frozen(eq=False)
class OffloadAllocation:
    """Offloaded shards of parameters, without values, and parameters of offloaded state."""

    # Buffer index -> shape and dtype of its shard, on meta; only shards that are offloaded.
    shards: dict[int, Tensor] = field(factory=dict)
    # Buffer index -> what optimizer offload steps, one for each parameter of the buffer.
    offloaded_params: dict[int, tuple[nn.Parameter, ...]] = field(factory=dict)
    # Offloaded parameter -> index of the param group that has it; others are never stepped.
    positions: dict[nn.Parameter, int] = field(factory=dict)
    # Dtype of offloaded parameters -> dtype of their masters, for those that have masters.
    masters: dict[torch.dtype, torch.dtype] = field(factory=dict)


def plan_allocation(
    plans: Sequence[UnitPlan],
    placements: Sequence[Placement],
    *,
    policy: OffloadPolicy,
    precision: Precision,
    rank_of: Callable[[BufferPlan], int],
    device: torch.device,
    group_of: Mapping[str, int],
    first_index: int = 0,
) -> OffloadAllocation:
    """Plan what this rank offloads of these units.

    Args:
        plans: The units' plans.
        placements: Placement of each unit's parameters.
        policy: States that are offloaded.
        precision: Dtypes, among them those of masters.
        rank_of: Position of this rank among the shards of a buffer.
        device: Device of parameters that are not offloaded; meta if this machine has no such one.
        group_of: Name of a parameter -> index of its param group.
        first_index: Number of the first buffer.
    """
    allocation = OffloadAllocation()
    buffers = [(b, at) for unit, at in zip(plans, placements, strict=True) for b in unit.buffers]
    for index, (buffer, placement) in enumerate(buffers, first_index):
        rank, is_offloaded = rank_of(buffer), policy.params and placement is Placement.SHARDED
        if is_offloaded:
            numel = buffer.layout.splits[rank]
            allocation.shards[index] = torch.empty(numel, dtype=buffer.dtype, device="meta")
        if not (policy.state and buffer.trainable):
            continue
        memory = torch.empty((), dtype=buffer.dtype, device="cpu" if is_offloaded else device)
        numels = {piece.index: piece.in_tensor.numel for piece in buffer.layout.pieces(rank)}
        shapes = [
            param.cut.shard_shape(param.shape, numels.get(position, 0))
            for position, param in enumerate(buffer.params)
        ]
        allocation.offloaded_params[index] = tuple(
            nn.Parameter(memory.expand(shape)) for shape in shapes
        )
        for param, target in zip(buffer.params, allocation.offloaded_params[index], strict=True):
            if param.name in group_of:
                allocation.positions[target] = group_of[param.name]
        master = policy.master_of(precision, buffer, placement)
        if master is not None:
            allocation.masters[buffer.dtype] = master
    return allocation


def _nothing() -> None:
    return


@frozen(kw_only=True)
class OffloadBackends:
    """Backends that store states of one model outside the device; None: not offloaded."""

    # Shards of parameters that are not replicated.
    params: ParamOffload | None = None
    # Opens optimizer state and masters; gives a `DelayedOffload` if `is_delayed`.
    open_state: OpenState | None = None
    is_delayed: bool = False
    # Reduced gradients, for an optimizer that steps outside the device.
    gradients: GradOffload | None = None
    # Where `params` stores shards: the same on all ranks, or nothing is sharded.
    place: str = "here"
    close: Callable[[], None] = _nothing

    def policy_on(self, device: torch.device) -> OffloadPolicy:
        """Return which states are offloaded, for this device. Arithmetic only."""
        return OffloadPolicy(
            params=self.params is not None,
            state=self.open_state is not None,
            grads=self.gradients is not None,
            is_delayed=self.is_delayed,
            host_is_device=device.type == "cpu",
        )


@define(eq=False)
class ModelOffload:
    """Backends of one sharded model's offloaded states, and what this rank has allocated there."""

    routes: Routes
    backends: OffloadBackends
    precision: Precision
    param_offload: ParamOffload | None = field(init=False)
    offload: OptimizerOffload | None = field(default=None, init=False)
    allocation: OffloadAllocation = field(factory=OffloadAllocation, init=False)

    def __attrs_post_init__(self) -> None:
        # An attribute of its own, since each step reads it.
        self.param_offload = self.backends.params

    @property
    def policy(self) -> OffloadPolicy:
        """Return which states are offloaded."""
        return self.backends.policy_on(self.routes.shards.device)

    def is_stepped(self, target: nn.Parameter) -> bool:
        """Return whether a target is in the optimizer's param groups, and so is stepped."""
        return target in self.allocation.positions

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
        """Allocate memory for everything that is offloaded. Collective: if a rank fails, all raise.

        Raises:
            PartitionError: Another rank could not.
            Exception: This rank could not; raised by a backend.
        """
        if self.param_offload is None and self.backends.open_state is None:
            return
        problem: Exception | None = None
        try:
            self.allocation = allocation = plan_allocation(
                plans,
                placements,
                policy=self.policy,
                precision=self.precision,
                rank_of=lambda buffer: self.routes.of(buffer).shards.rank,
                device=self.routes.shards.device,
                group_of=group_of,
                first_index=first_index,
            )
            if self.param_offload is not None:
                self.param_offload.allocate(allocation.shards)
            if self.backends.open_state is not None:
                assert optimizer is not None, "checked"
                self.offload = self.backends.open_state(
                    optimizer, allocation.positions, allocation.masters
                )
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
