"""Tests of kernels run wherever they are compiled, and must where ZERO_OFFLOAD_NATIVE=require."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
from zero_offload import _cpu_optimizer, _native

# Under --import-mode=importlib a test's folder is not importable; its neighbours are there.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def kernels() -> _native.Kernels:
    """The compiled kernels; skips without, unless they are required."""
    found = _native.kernels()
    if found is None:
        pytest.skip(_native.native_status().reason)
    return found


@pytest.fixture(autouse=True, scope="session")
def _plain_torch_will_do() -> None:
    """Without a compiler the rest must still pass; what is said then has a test of its own."""
    status = _native.native_status()
    if not status.loaded:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _cpu_optimizer._warn_once(status.reason)
