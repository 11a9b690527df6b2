"""What a loss is multiplied by so that fp16 gradients stay in range."""

from __future__ import annotations

from attrs import frozen


@frozen
class StaticLossScale:
    """The same scale in every step."""

    scale: float


@frozen(kw_only=True)
class DynamicLossScale:
    """A scale that halves where gradients overflow and doubles after many steps without."""

    initial_power: int = 16
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0
    raises_at_minimum: bool = False
