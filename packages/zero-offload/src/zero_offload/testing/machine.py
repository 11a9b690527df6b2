"""Machines as a test describes them: how much memory they have, and which of it is a device's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

from torch import Tensor

from zero_offload.memory.budget import AvailableMemory, HostBudget, available_memory
from zero_offload.memory.numa import interleave, nodes_of_process, spread
from zero_offload.state import block, offloaded_state, staging

__all__ = ["budget", "budget_of", "elsewhere", "interleave", "nodes_of_process", "spread"]


def budget(
    limit_bytes: int | None = None,
    *,
    available_bytes: int = 1 << 50,
    source: str = "a large machine",
) -> HostBudget:
    """Return a budget for `HostArena(budget=)`: the machine has so much, as `source` says."""
    return HostBudget(limit_bytes, available=lambda: AvailableMemory(available_bytes, source))


def budget_of(root: Path) -> HostBudget:
    """Return the budget of a machine whose /proc and /sys are under `root`."""
    return HostBudget(available=lambda: available_memory(root))


@contextmanager
def elsewhere(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Count these tensors on the CPU as a device's, inside. Local."""
    spans = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]

    def is_on_host(tensor: Tensor) -> bool:
        return not any(start <= tensor.data_ptr() < stop for start, stop in spans)

    with ExitStack() as stack:
        for module in (offloaded_state, block, staging):
            stack.enter_context(mock.patch.object(module, "is_on_host", is_on_host))
        yield
