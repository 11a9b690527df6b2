"""What one step does to one element: a formula and its numbers, for kernels and reference alike."""

from __future__ import annotations

from enum import Enum

from attrs import frozen


class Formula(Enum):
    """Which kernel; the value is part of its name in the library."""

    ADAM = "adam"
    ADAGRAD = "adagrad"
    LION = "lion"


@frozen(kw_only=True)
class Rule:
    """The numbers of one step, computed in double as torch does and rounded to fp32 where used.

    Attributes:
        factor: What gradients are multiplied by first: unscaling and clipping.
        weight_decay: Added to the gradient times the parameter, unless decoupled.
        shrink: What the parameter is multiplied by, if decoupled.
        unbias: Adam's 1 / sqrt(1 - beta2^t), what the root of the second moment is multiplied by.
        rate: Minus the step size, Adam's bias correction in it.
        seed: Of stochastic rounding, another for each step; None rounds to nearest.
    """

    formula: Formula
    rate: float
    factor: float = 1.0
    maximize: bool = False
    decoupled: bool = False
    weight_decay: float = 0.0
    shrink: float = 1.0
    beta1: float = 0.0
    beta2: float = 0.0
    unbias: float = 1.0
    eps: float = 0.0
    seed: int | None = None


def seed_of_step(seed: int, step: int) -> int:
    """32 bits that look unrelated for neighbouring steps (SplitMix64's finalizer)."""
    mask = 2**64 - 1
    mixed = (seed * 0xD1342543DE82EF95 + step * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return (mixed ^ (mixed >> 31)) & 0xFFFFFFFF
