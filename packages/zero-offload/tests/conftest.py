"""Tests of kernels run wherever they are compiled, and must where ZERO_OFFLOAD_NATIVE=require."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
from zero_offload import CPUAdam, native_status

# Under --import-mode=importlib a test's folder is not importable; its neighbours are there.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def compiled() -> None:
    """Skips without compiled kernels, unless they are required."""
    if not native_status().loaded:
        pytest.skip(native_status().reason)


@pytest.fixture(autouse=True, scope="session")
def _plain_torch_will_do() -> None:
    """Without a compiler the rest must still pass; what is said then has a test of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        CPUAdam([torch.zeros(1)])
