"""What rests elsewhere than on the device, as far as dtypes and places depend on it: arithmetic."""

from __future__ import annotations

import torch
from attrs import frozen

from ._buffer_plan import BufferPlan
from ._chained import ChainedOptimizer
from ._errors import PartitionError
from ._placement import Placement, Placements
from ._precision import Precision


@frozen(kw_only=True)
class RestPlan:
    """Which kinds rest outside the device, and whether that is another memory."""

    params: bool = False  # shards of parameters that rest sharded
    state: bool = False  # optimizer state and masters
    grads: bool = False  # reduced gradients
    is_delayed: bool = False  # updates hold their values back
    host_is_device: bool = False  # the device is the CPU

    def master_of(
        self, precision: Precision, plan: BufferPlan, placement: Placement
    ) -> torch.dtype | None:
        """Dtype of the masters of a buffer whose parameters rest so, None if it has none.

        What rests elsewhere than where it is stepped is not stepped itself: a copy that is needed
        anyway to step it would have to be read first. Nor is what the model still computes with.
        """
        if not plan.trainable:
            return None
        chosen = precision.master_of(plan.dtype)
        is_at_home = self.params and placement is Placement.SHARDED
        is_elsewhere = is_at_home or (
            self.state and (self.is_delayed or self.params or not self.host_is_device)
        )
        return plan.dtype if chosen is None and is_elsewhere else chosen

    def training_of(
        self, precision: Precision, plan: BufferPlan, placement: Placement
    ) -> torch.dtype:
        """In which its values are updated, and its gradients added up."""
        return self.master_of(precision, plan, placement) or plan.dtype

    def check(
        self,
        optimizer: torch.optim.Optimizer | None,
        placements: Placements,
        precision: Precision,
    ) -> None:
        """Raise PartitionError for what cannot rest elsewhere."""
        if self.params and placements.params is Placement.REPLICATED:
            raise PartitionError(
                "parameters were to rest outside the device, and rest whole on it at stages 0 to "
                "2; use stage 3"
            )
        if self.state and placements.optim is Placement.REPLICATED:
            raise PartitionError(
                "optimizer state was to rest outside the device, and at stage 0 it is the "
                "optimizer's own on every rank; use stage 1, which gives the same numbers"
            )
        if self.grads and not self.state:
            raise PartitionError(
                "gradients were to wait outside the device for an optimizer that steps on it; they "
                "go where an updater keeps all of its state"
            )
        if not self.state:
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
        if precision.masters not in (torch.float32, None):
            raise PartitionError(
                f"masters that rest with the optimizer's state outside the device are float32, got "
                f"Precision(masters={precision.masters})"
            )
