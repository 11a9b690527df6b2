"""Numbers that an optimizer's constructor refuses."""

from __future__ import annotations

from typing import Any


def check_at_least(low: float, **numbers: Any) -> None:
    """Raise ValueError for a number below `low`, naming it."""
    for name, number in numbers.items():
        if not float(number) >= low:
            raise ValueError(f"{name}={number}: expected at least {low}")


def check_betas(betas: Any) -> None:
    """Raise ValueError unless there are two, each in [0, 1)."""
    if len(betas) != 2 or not all(0 <= float(beta) < 1 for beta in betas):
        raise ValueError(f"betas={betas}: expected two numbers, each at least 0 and below 1")
