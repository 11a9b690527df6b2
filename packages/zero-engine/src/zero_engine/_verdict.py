"""Whether a step was skipped, where the device knows before the host does."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ._loss_scale import LossScaler

# NOTE(verdict): on CUDA a fused optimizer skips its step on the device, and the host goes on as if
# it had not. It learns at the end of the next micro-batch, when the answer has long arrived, and
# only then takes back what it did: the scheduler's step. Losses in between are scaled by a number
# that the device has chosen.


@frozen
class Verdict:
    """Of the last step, on its way to the host."""

    finite: Tensor  # bool scalar: whether the step was applied; in pinned memory of the host
    arrived: torch.Event | None  # None if it is there
    loss_scale: Tensor | None  # float32 scalar on the device: what comes next; None if not scaled
    _undo: Callable[[], None]

    @classmethod
    def of(cls, finite: Tensor, scaler: LossScaler | None, undo: Callable[[], None]) -> Verdict:
        """Send it off; `undo` takes back what an applied step has changed on the host. Local."""
        scale = None if scaler is None else _choose(finite, scaler)
        if finite.device.type == "cpu":
            return cls(finite, None, scale, undo)
        landing = torch.empty((), dtype=torch.bool, pin_memory=True)
        landing.copy_(finite, non_blocking=True)
        arrived = torch.Event(finite.device)
        arrived.record()
        return cls(landing, arrived, scale, undo)

    def settle(self) -> bool:
        """Whether the step was applied; what it was not is undone. Waits until it is known."""
        if self.arrived is not None:
            self.arrived.synchronize()
        is_applied = bool(self.finite)
        if not is_applied:
            self._undo()
        return is_applied


def _choose(finite: Tensor, scaler: LossScaler) -> Tensor:
    clean, overflowed = (
        finite.new_full((), scaler.scale_after(overflowed), dtype=torch.float32)
        for overflowed in (False, True)
    )
    return torch.where(finite, clean, overflowed)


def can_undo(scheduler: Any) -> bool:
    """Whether a scheduler's step can be taken back: it saves and loads its state, or is None."""
    return scheduler is None or (
        callable(getattr(scheduler, "state_dict", None))
        and callable(getattr(scheduler, "load_state_dict", None))
    )


def remember(scheduler: Any, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """What brings a scheduler, and the rates in the optimizer's groups, back to where they are."""
    if scheduler is None:
        return lambda: None
    state = deepcopy(scheduler.state_dict())
    rates = [
        {key: deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]

    def undo() -> None:
        scheduler.load_state_dict(state)
        for group, before in zip(optimizer.param_groups, rates, strict=True):
            group.update(before)

    return undo
