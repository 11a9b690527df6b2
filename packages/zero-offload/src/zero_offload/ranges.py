"""Ranges of profilers and timelines: marks on methods, which zero-comm reads if it is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def ranged(kind: str, subject: str) -> Callable[[Method], Method]:
    """Mark a method as `zero_comm.ranges.ranged` does, which this package does not import."""

    def mark(method: Method) -> Method:
        method.zero_range = kind, subject  # type: ignore[attr-defined]
        return method

    return mark
