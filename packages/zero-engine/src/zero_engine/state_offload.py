"""offload_states() and reload_states(): move training state off the device between phases."""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn
from zero_comm import collective
from zero_offload import DiskStore, HostArena
from zero_offload.residence import DiskBackup, HostBackup
from zero_partition import StateKind, seams
from zero_partition.seams import Backup, find_sharded

from .checks import check_flag, check_names
from .errors import ConfigError
from .offload import our_word

Kind = Literal["params", "masters", "grads", "optim", "buffers"]

_OF_DEEPSPEED: Final = {
    "lp_params": StateKind.PARAMS,
    "hp_params": StateKind.MASTERS,
    "lp_grads": StateKind.GRADS,
    "optim_states": StateKind.OPTIM,
    "contiguous_grad_buffer": StateKind.BUFFERS,
}


@collective
def offload_states(
    model: nn.Module,
    include: Collection[Kind] | None = None,
    *,
    to: Literal["host", "disk"] = "host",
    path: Path | str | None = None,
    pin: bool = True,
    non_blocking: bool = False,
) -> None:
    """Offload training state between phases, and free its memory. Collective.

    For generation between training phases, or several models that take turns. Call it between steps
    or micro-batches, with or without pending gradients, with the same `include` on every rank.
    Until `reload_states(model)`, calls that need offloaded state raise StateError; others go on
    working: forwards do if only "optim", "masters" and "grads" are offloaded. `memory_report` says
    in `parked_bytes` how much was freed; memory that a graph or a kept `.data` views is not freed,
    with a warning. If one rank lacks memory for its copies, nothing is offloaded on any rank.

    With `to="host"`, memory of a device is freed. A model on the CPU is copied within the same
    memory, which frees only the slots and reduction buffers; `to="disk"` frees its state, too.

    Args:
        model: The very module that `shard` returned.
        include: Of "params" (shards at stage 3, full parameters at other stages), "masters",
            "grads", "optim" (the optimizer's tensors) and "buffers" (slots and reduction buffers,
            which are just released); all when None.
        to: Where to copy the state.
        path: An existing folder on the disk to use, for files of this job's own.
        pin: Page-lock host memory, where there is an accelerator. It counts to the host budget.
        non_blocking: Return before a device's copies are done. Freed memory then stays in torch's
            cache, for work that follows on the current stream; else it is returned to the device.

    Raises:
        ConfigError: An unknown kind or destination, or a wrong argument for that destination.
        zero_partition.StateError: Not sharded, parked already, during a forward or backward, inside
            a context that gathers, or after a backward that an exception ended; or another rank
            lacked memory or disk space.
        zero_offload.OffloadError: Host memory or disk space is insufficient.
        zero_comm.CommError: A rank did not take part in time.
    """
    where = "offload_states()"
    kinds = _kinds_of(where, include, {kind.value: kind for kind in StateKind})
    backup = _backup_for(where, to, path, pin, non_blocking)
    _offload(model, kinds, backup, non_blocking=non_blocking)


@collective
def reload_states(model: nn.Module, *, non_blocking: bool = False) -> None:
    """Restore the state that `offload_states` has offloaded. Every rank calls it.

    Collective for parameters at stage 3 where ranks read each other's memory, else local.

    Parameters, gradients and optimizer state have their values again, in the same tensor objects
    that the model and the optimizer had before. Does nothing where nothing is offloaded.

    Args:
        model: The very module that `shard` returned.
        non_blocking: Return before a device's copies from pinned memory are done; what follows on
            the current stream waits for them.

    Raises:
        zero_partition.StateError: Not sharded.
        zero_offload.StoreError: The disk fails; what was not read yet can be tried again.
        zero_comm.CommError: A rank did not take part in time.
    """
    seams.reload_states(model, non_blocking=non_blocking)


def offload_as_deepspeed(
    model: nn.Module, include: Any, device: Any, *, pin_memory: Any, non_blocking: Any
) -> None:
    """Offload states by DeepSpeed's names; see `Engine.offload_states`. Collective."""
    where = "Engine.offload_states()"
    device = getattr(device, "value", device)
    if device != "cpu":
        raise ConfigError(
            f"{where}: expected device 'cpu', got {device!r}; "
            "zero_engine.offload_states(engine.module, to='disk', path=...) goes to a disk"
        )
    pin, non_blocking = check_flag(where, pin_memory), check_flag(where, non_blocking)
    kinds = _kinds_of(where, include, _OF_DEEPSPEED)
    _offload(model, kinds, _on_host(pin), non_blocking=non_blocking)


def _offload(
    model: nn.Module, kinds: Collection[StateKind], backup: Backup, *, non_blocking: bool
) -> None:
    """Offload states and, if blocking, return memory that torch or malloc caches to the machine."""
    # Raises if it is no module, before anything is done.
    sharded = find_sharded(model)
    seams.offload_states(model, backup, kinds, non_blocking=non_blocking)
    if non_blocking:
        return
    if sharded is not None and sharded.group.device.type != "cpu":
        torch.accelerator.empty_cache()
    elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        # Only glibc has it, and keeps freed small allocations until it is called.
        trim(0)


def _kinds_of(where: str, include: Any, known: dict[str, StateKind]) -> frozenset[StateKind]:
    if include is None:
        return frozenset(StateKind)
    if isinstance(include, str) or not isinstance(include, Collection):
        raise ConfigError(
            f"{where}: expected include to be a collection of {', '.join(known)}, or None for all "
            f"of them, got {include!r}"
        )
    names = [getattr(kind, "value", kind) for kind in include]
    check_names(f"{where}: include", names, known)
    return frozenset(known[name] for name in names)


def _backup_for(
    where: str, to: Any, path: Path | str | None, pin: Any, non_blocking: Any
) -> Backup:
    pin, non_blocking = check_flag(where, pin), check_flag(where, non_blocking)
    if to not in ("host", "disk"):
        raise ConfigError(f"{where}: expected to='host' or to='disk', got {to!r}" + our_word(to))
    if (to == "disk") != (path is not None):
        raise ConfigError(
            f"{where}: expected path, an existing folder, with to='disk' and only there, got "
            f"to={to!r} and path={path!r}"
        )
    if path is None:
        return _on_host(pin)
    if non_blocking:
        raise ConfigError(
            f"{where}: expected non_blocking=False with to='disk', got True: memory is given back "
            "when its bytes are in the file"
        )
    return DiskBackup(DiskStore(Path(path)))


def _on_host(pin: bool) -> HostBackup:
    return HostBackup(HostArena("parked training state", is_pinned=pin))
