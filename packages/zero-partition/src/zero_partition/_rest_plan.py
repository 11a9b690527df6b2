"""What rests elsewhere than on the device, as far as dtypes and places depend on it: arithmetic."""

from __future__ import annotations

import torch
from attrs import frozen

from ._buffer_plan import BufferPlan
from ._placement import Placement
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
