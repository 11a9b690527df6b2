"""Settings of the thread that decide what an operator computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from attrs import frozen


@frozen
class Ambient:
    """Autocast, as it was where a function was called first."""

    _autocasts: tuple[dict[str, Any], ...]

    @classmethod
    def take(cls) -> Ambient:
        """As it is now. Local."""
        accelerator = torch.accelerator.current_accelerator()
        types = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
        cache = torch.is_autocast_cache_enabled()
        return cls(
            tuple(
                {
                    "device_type": kind,
                    "enabled": torch.is_autocast_enabled(kind),
                    "dtype": torch.get_autocast_dtype(kind),
                    "cache_enabled": cache,
                }
                for kind in types
            )
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, it is as it was; and gradients are recorded, as only then anything is saved."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for options in self._autocasts:
                stack.enter_context(torch.autocast(**options))
            yield
