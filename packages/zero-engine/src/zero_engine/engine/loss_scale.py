"""Loss scales, static and dynamic, by which fp16 gradients stay in range."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy, deepcopy
from typing import Any, Final, final

import torch
from attrs import field, frozen
from torch import Tensor

from zero_engine.checks import at_least, check_number, is_kind
from zero_engine.errors import ConfigError, LossScaleError

# Limits of fp32, in which the loss is scaled and gradients are unscaled.
SMALLEST_SCALE: Final = 2.0**-126
LARGEST_SCALE: Final = 2.0**127


@frozen
class StaticLossScale:
    """Scale that is the same in every step. Steps whose gradients overflow are still skipped.

    Args:
        scale: Factor by which the loss is multiplied, in the range of fp32.

    Raises:
        ConfigError: Names the field, what was expected and what came.
    """

    scale: float = field(validator=at_least(SMALLEST_SCALE, (int, float), below=2 * LARGEST_SCALE))


@frozen(kw_only=True)
class DynamicLossScale:
    """Scale that halves when gradients overflow, and doubles after many steps without overflow.

    Args:
        initial_power: The first scale is two to this power.
        window: After this many steps in a row without overflow, the scale doubles in the next one
            if that has none either; then again in every window-th step until the next overflow.
        hysteresis: Number of the overflow at which the scale halves; those before it only skip
            their step. Every further overflow halves it at once, until the count starts again: when
            the scale doubles or, with `consecutive_hysteresis`, after any step without overflow.
        consecutive_hysteresis: Whether only overflows in a row count.
        minimum: The scale never gets smaller. It stays a power of two, so that unscaling rounds
            nothing: a minimum between two of them stops at the larger one.
        raises_at_minimum: Whether an overflow that would have to halve it below is an error.

    Raises:
        ConfigError: Names the field, what was expected and what came.
    """

    initial_power: int = field(default=16, validator=at_least(0, int, below=128))
    window: int = field(default=1000, validator=at_least(1, int))
    hysteresis: int = field(default=2, validator=at_least(1, int))
    consecutive_hysteresis: bool = field(default=False, validator=is_kind(bool))
    minimum: float = field(
        default=1.0, validator=at_least(0, (int, float), below=2 * LARGEST_SCALE)
    )
    raises_at_minimum: bool = field(default=False, validator=is_kind(bool))

    def __attrs_post_init__(self) -> None:
        if self.minimum > 2.0**self.initial_power:
            raise ConfigError(
                f"DynamicLossScale.minimum: expected at most the first scale, "
                f"2**{self.initial_power} = {2.0**self.initial_power:g}, got {self.minimum:g}"
            )


@final
class LossScaler:
    """Loss scale of the current step. Local: equal on ranks that report equal overflows.

    The rule is DeepSpeed's (deepspeed.ai/docs/config-json, "FP16 training options").

    Args:
        value: The kind of scale, and how it changes.

    Raises:
        ConfigError: `value` is neither of the two kinds.
    """

    def __init__(self, value: StaticLossScale | DynamicLossScale) -> None:
        if not isinstance(value, StaticLossScale | DynamicLossScale):
            raise ConfigError(
                f"LossScaler: expected a StaticLossScale or a DynamicLossScale, got {value!r}"
            )
        self._value = value
        # Steps since the last overflow.
        self._clean_steps = 0
        # Overflows until the scale is halved.
        self._hysteresis = 1
        if isinstance(value, StaticLossScale):
            self._scale = float(value.scale)
        else:
            self._scale = 2.0**value.initial_power
            self._hysteresis = value.hysteresis

    @property
    def scale(self) -> float:
        """Factor by which to multiply the next loss, and to divide its gradients."""
        return self._scale

    def update(self, overflowed: bool) -> None:
        """Adjust the scale; to call once per step, when gradients are known to be finite or not.

        Args:
            overflowed: Whether any gradient on any rank was inf or nan.

        Raises:
            LossScaleError: The scale would have to get smaller than its minimum, and the
                configuration asks for an error; nothing was changed.
        """
        value = self._value
        if isinstance(value, StaticLossScale):
            return
        if overflowed:
            self._back_off(value)
            self._clean_steps = 0
            return
        is_window_over = self._clean_steps > 0 and self._clean_steps % value.window == 0
        self._clean_steps += 1
        if is_window_over or value.consecutive_hysteresis:
            self._hysteresis = value.hysteresis
        if is_window_over:
            self._scale = min(2 * self._scale, LARGEST_SCALE)

    def scale_after(self, overflowed: bool) -> float:
        """Return the scale after `update(overflowed)`; the current one if that would raise."""
        other = copy(self)
        with suppress(LossScaleError):
            other.update(overflowed)
        return other.scale

    def _back_off(self, value: DynamicLossScale) -> None:
        if self._hysteresis > 1:
            self._hysteresis -= 1
        elif self._scale / 2 >= max(value.minimum, SMALLEST_SCALE):
            self._scale /= 2
        elif value.raises_at_minimum:
            raise LossScaleError(
                f"gradients overflow at loss scale {self._scale:g}, and it may not get smaller "
                f"(minimum {value.minimum:g}): training has diverged, or the inputs contain inf "
                "or nan. Lower the learning rate, look for the first loss that is not finite, or "
                "train in bf16, which needs no scale."
            )

    def state_dict(self) -> dict[str, float | int]:
        """Return the scale and, if it is dynamic, its counters, as plain numbers."""
        state: dict[str, float | int] = {"scale": self._scale}
        if isinstance(self._value, DynamicLossScale):
            state |= {"clean_steps": self._clean_steps, "hysteresis": self._hysteresis}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore scale and counters from `state_dict`. A static scale is left as configured.

        If the saved count of overflows left is above the configured hysteresis, that is taken.

        Raises:
            ConfigError: A key is missing, unknown or not of its type; nothing was changed.
        """
        value = self._value
        if isinstance(value, StaticLossScale):
            return
        where, keys = "LossScaler.load_state_dict()", {"scale", "clean_steps", "hysteresis"}
        if set(state_dict) != keys:
            raise ConfigError(
                f"{where}: expected the keys {sorted(keys)}, got {sorted(map(str, state_dict))}; "
                "after training with a static scale, a dynamic one starts anew: load nothing"
            )
        scale, clean_steps, hysteresis = (
            check_number(f"{where}: {name}", state_dict[name], minimum, kind, below=below)
            for name, minimum, kind, below in (
                ("scale", SMALLEST_SCALE, (int, float), 2 * LARGEST_SCALE),
                ("clean_steps", 0, int, None),
                ("hysteresis", 1, int, None),
            )
        )
        self._scale, self._clean_steps = float(scale), clean_steps
        self._hysteresis = min(hysteresis, value.hysteresis)


# NOTE(verdict): on CUDA a fused optimizer skips its step on the device, and the host goes on as if
# it had not. The host learns of it at the end of the next micro-batch, when the outcome has been
# copied, and then undoes the scheduler's step. Losses in between are scaled on the device.


@frozen
class PendingOverflow:
    """Outcome of the last step, which is being copied to the host."""

    # Whether the step was applied: a bool scalar in page-locked host memory.
    finite: Tensor
    # Event after the copy of `finite`; None if that has its value already.
    arrived: torch.Event | None
    # The next loss scale: a float32 scalar on the device; None if losses are not scaled.
    loss_scale: Tensor | None
    _undo: Callable[[], None]

    @classmethod
    def of(
        cls, finite: Tensor, scaler: LossScaler | None, undo: Callable[[], None]
    ) -> PendingOverflow:
        """Start the copy to the host; `undo` reverts an applied step's host changes. Local."""
        scale = None
        if scaler is not None:
            clean, overflowed = (
                finite.new_full((), scaler.scale_after(overflowed), dtype=torch.float32)
                for overflowed in (False, True)
            )
            scale = torch.where(finite, clean, overflowed)
        if finite.device.type == "cpu":
            return cls(finite, None, scale, undo)
        landing = torch.empty((), dtype=torch.bool, pin_memory=True, device="cpu")
        landing.copy_(finite, non_blocking=True)
        arrived = torch.Event(finite.device)
        arrived.record()
        return cls(landing, arrived, scale, undo)

    def resolve(self) -> bool:
        """Wait for the outcome, undo the host's changes if skipped; return whether applied."""
        if self.arrived is not None:
            self.arrived.synchronize()
        is_applied = bool(self.finite)
        if not is_applied:
            self._undo()
        return is_applied


def has_state(scheduler: Any) -> bool:
    """Return whether a scheduler saves and loads its state, so that a step can be undone."""
    return hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")


def remember(scheduler: Any, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that restores a scheduler and param groups' options as they are now."""
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
