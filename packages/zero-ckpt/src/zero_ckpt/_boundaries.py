"""The edges of a checkpoint, at which a device may be waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch

from ._frame import AbstractCompanion


@final
class Synchronized(AbstractCompanion):
    """Waits for the current accelerator before and after both runs; for nothing on the CPU."""

    def forward(self) -> AbstractContextManager[Any]:
        """Around the first run."""
        return _synchronized()

    def recompute(self) -> AbstractContextManager[Any]:
        """Around the second."""
        return _synchronized()


@contextmanager
def _synchronized() -> Iterator[None]:
    _wait()
    try:
        yield
    finally:
        _wait()


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
