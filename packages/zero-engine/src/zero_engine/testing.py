"""Helpers for tests: failing disks, altered checkpoints, and other offload backends.

A failing disk is a `FileSystem` with another call in place of one of its own:

    full = FileSystem(write=raise_no_space)
    with pytest.raises(zero_engine.FileError):
        save(folder, model, optimizer, step=2, system=full)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any, Final
from unittest import mock

import attrs
import torch
from torch import nn
from zero_offload import AbstractStore
from zero_partition.seams import GradOffload, OffloadBackends, ParamOffload

from zero_engine import sharding as _shard
from zero_engine.checkpoint.background import Copying
from zero_engine.checkpoint.file_system import FileSystem
from zero_engine.checkpoint.manifest import MANIFEST, seal, unsealed
from zero_engine.checkpoint.save import save_as
from zero_engine.checkpoint.writer import SaveReport, SaveRequest
from zero_engine.offload import Offload, backends_of
from zero_engine.planning import plan as _plan

__all__ = [
    "MANIFEST",
    "FileSystem",
    "blocked_copies",
    "damage",
    "edit_manifest",
    "host_apart",
    "save",
    "unsealed",
    "using_backends",
    "write_manifest",
]

_BLOCKED_S: Final = 20.0


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    system: FileSystem,
    extra: Any = None,
    tag: str | None = None,
    keep: int | None = None,
) -> SaveReport:
    """Save by `zero_engine.save` on a file system that may fail on this rank only. Collective.

    `zero_engine.Saver` takes `system` itself.
    """
    return save_as(
        SaveRequest(
            model=model,
            optimizer=optimizer,
            folder=folder,
            step=step,
            extra=extra,
            tag=tag,
            keep=keep,
            system=system,
        )
    )


def write_manifest(checkpoint: Path, content: dict[str, Any]) -> None:
    """Write `content` as the manifest of a checkpoint's folder, with its checksum. Local."""
    (checkpoint / MANIFEST).write_bytes(seal(content))


def edit_manifest(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a checkpoint's manifest in place, with the checksum of its new content. Local."""
    content = unsealed(checkpoint / MANIFEST)
    change(content)
    write_manifest(checkpoint, content)


def damage(path: Path, position: int = -1, flip: int = 4) -> None:
    """Flip bits of one byte of a file. Local; a second call undoes it."""
    content = bytearray(path.read_bytes())
    content[position] ^= flip
    path.write_bytes(content)


@contextmanager
def blocked_copies() -> Iterator[Event]:
    """Delay copies on the thread of `Saver(overlap=True)` until the yielded event is set. Local."""
    may_copy, copy = Event(), Copying._copy

    def copy_later(copying: Copying) -> None:
        assert may_copy.wait(_BLOCKED_S), "the event of blocked_copies() was never set"
        copy(copying)

    with mock.patch.object(Copying, "_copy", copy_later):
        yield may_copy


@contextmanager
def host_apart(*, has_gradients: bool = False) -> Iterator[None]:
    """Let `shard` and `plan` treat the host as another memory than a CPU device. Local.

    State that an `Offload` puts on the host is then offloaded. Gradients stay on the device, unless
    `has_gradients`.
    """

    def apart(offload: Offload | None, _: torch.device) -> OffloadBackends:
        found = backends_of(offload, torch.device("meta"))
        return found if has_gradients else attrs.evolve(found, gradients=None)

    with (
        mock.patch.object(_shard, "backends_of", apart),
        mock.patch.object(_plan, "backends_of", apart),
    ):
        yield


@contextmanager
def using_backends(
    *,
    param_offload: Callable[[], ParamOffload],
    store: Callable[[], AbstractStore],
    grad_offload: Callable[[], GradOffload],
) -> Iterator[None]:
    """Let `shard` use these backends for the states that an `Offload` names. Local.

    Args:
        param_offload: Makes the backend of shards of parameters that are offloaded to "disk".
        store: Makes the store of optimizer state that is offloaded to "disk".
        grad_offload: Makes the backend of reduced gradients, where all optimizer state is
            offloaded.
    """

    def instead(offload: Offload | None, device: torch.device) -> OffloadBackends:
        backends = backends_of(offload, device, open_disk=lambda _: store())
        if offload is None:
            return backends
        resources = ExitStack()
        resources.callback(backends.close)
        shards = param_offload() if offload.params == "disk" else None
        if shards is not None:
            resources.callback(shards.end)
        is_all_there = offload.fraction == 1 or shards is not None
        has_gradients = backends.open_state is not None and is_all_there
        return attrs.evolve(
            backends,
            params=shards,
            gradients=grad_offload() if has_gradients else None,
            close=resources.close,
        )

    with mock.patch.object(_shard, "backends_of", instead):
        yield
