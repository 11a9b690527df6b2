"""Makes the oracle importable; the `ranks` fixture comes with zero-comm."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo  # optimizers load it at their first step: so it is loaded once for all ranks

# Under --import-mode=importlib a test's folder is not importable. Workers add it by themselves.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """An oracle in this process computes as ranks do: sums depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
