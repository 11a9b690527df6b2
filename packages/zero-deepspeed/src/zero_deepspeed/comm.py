"""deepspeed.comm: torch.distributed's functions, and answers where this process is alone."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import zero_comm
from zero_engine import ConfigError


def init_distributed(  # noqa: PLR0917 - the order is DeepSpeed's
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta = timedelta(minutes=30),
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the job that the launcher describes, unless it was joined already. Collective.

    A process that no launcher has started stays alone. MPI is not asked.

    Args:
        dist_backend: "nccl" or "gloo"; chosen by the hardware when None.
        auto_mpi_discovery: Only for DeepSpeed's signature, as are `verbose` and `config`.
        distributed_port: MASTER_PORT, where the launcher has set none.
        verbose: See above.
        timeout: Longest wait of a collective.
        init_method: "env://", or None; for others, call `torch.distributed.init_process_group`
            before.
        dist_init_required: False: do nothing.
        config: See above.
        rank: RANK, where it is not -1.
        world_size: WORLD_SIZE, where it is not -1.

    Raises:
        ConfigError: Another `init_method`.
        zero_comm.CommError: The environment describes a job in part only.
    """
    if dist_init_required is False or dist.is_initialized():
        return
    if init_method not in (None, "env://"):
        raise ConfigError(
            f"init_distributed(): expected init_method 'env://' or None, got {init_method!r}; call "
            f"torch.distributed.init_process_group(init_method={init_method!r}, ...) before it"
        )
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        if value != -1:
            os.environ[name] = str(value)
    if "WORLD_SIZE" in os.environ:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    zero_comm.init(backend=dist_backend, timeout_s=timeout.total_seconds())


def is_initialized() -> bool:
    """Return whether this process has joined a job."""
    return dist.is_initialized()


def get_rank(group: Any = None) -> int:
    """Return this process's rank in the group; 0 where it is alone."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks of the group; 1 where this process is alone."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_local_rank() -> int:
    """Return the launcher's LOCAL_RANK, the rank on this host; 0 where it is not set."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def barrier(group: Any = None) -> None:
    """Wait for all ranks of the group. Collective."""
    if dist.is_initialized():
        dist.barrier(group)


def __getattr__(name: str) -> Any:
    # DeepSpeed has names of torch here, such as `all_reduce`, `ReduceOp` and `new_group`.
    return getattr(dist, name)
