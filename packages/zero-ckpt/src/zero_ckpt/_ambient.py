"""Settings of the thread that decide what an operator computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from attrs import frozen


class _Autocast(NamedTuple):
    """Of one type of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool


@frozen
class Ambient:
    """Autocast, as it was where a function was called first."""

    _autocasts: tuple[_Autocast, ...]

    @classmethod
    def take(cls) -> Ambient:
        """As it is now. Local."""
        accelerator = torch.accelerator.current_accelerator()
        types = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
        cache = torch.is_autocast_cache_enabled()
        return cls(
            tuple(
                _Autocast(
                    kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cache
                )
                for kind in types
            )
        )

    def again(self) -> AbstractContextManager[Any]:
        """Inside, it is as it was; and gradients are recorded, as only then anything is saved."""
        # To leave an autocast empties its cache, which takes as long as a small operator.
        if not any(each.enabled for each in self._autocasts) and Ambient.take() == self:
            return torch.enable_grad()
        return self._entered()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for autocast in self._autocasts:
                stack.enter_context(torch.autocast(**autocast._asdict()))
            yield
