"""Jobs that run in DeepSpeed's environment: its Adam, and its reads and writes of a file."""

# ruff: noqa: PLC0415

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import timed


def adam(numel: int, dtype: str) -> dict[str, Callable[[], float]]:
    """Its step on the CPU: no master, nothing unscaled."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyrefly: ignore[missing-import]

    pattern = (torch.randn(2**20) * 1e-2).to(getattr(torch, dtype))
    param = torch.nn.Parameter(pattern.repeat(-(-numel // 2**20))[:numel])
    param.grad = param.data.clone()
    return {"step": timed(DeepSpeedCPUAdam([param]).step)}


def aio(
    path: str, nbytes: int, mib: int, depth: int, is_locked: bool
) -> dict[str, Callable[[], float]]:
    """One tensor out and back, from page-locked memory or not."""
    from deepspeed.ops.op_builder import AsyncIOBuilder  # pyrefly: ignore[missing-import]

    handle = AsyncIOBuilder().load().aio_handle(mib * 2**20, depth, False, True, 1)
    if is_locked:
        memory = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
    else:
        memory = torch.empty(nbytes, dtype=torch.uint8)
    memory.random_()
    return {
        "write": timed(lambda: handle.sync_pwrite(memory, path, 0)),
        "read": timed(lambda: handle.sync_pread(memory, path, 0)),
    }
