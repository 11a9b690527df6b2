"""Every test begins with late streams, default options, and nothing counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(autouse=True)
def fresh_device() -> Iterator[None]:
    import simulated_device  # not above: pytest imports this file where there is no extension
    import torch

    torch.accelerator.synchronize()
    simulated_device.set_mode("late")
    simulated_device.set_options()
    simulated_device.set_memory_limit(0)
    simulated_device.set_sync_debug_mode("default")
    simulated_device.take_unordered_uses()
    simulated_device.take_host_waits()
    torch.manual_seed(0)
    yield
    simulated_device.set_sync_debug_mode("default")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two processes that run programs together."""
    pool = Ranks(2)
    yield pool
    pool.close()
