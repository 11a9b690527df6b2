"""For tests: disks that fail, checkpoints that are not as they were saved, and other residences.

A disk that fails is a `FileSystem` with another call in place of one of its own:

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
from zero_partition.seams import GradientHome, Homes, TensorHome

from zero_engine import sharding as _shard
from zero_engine.checkpoint.background import Copying
from zero_engine.checkpoint.file_system import FileSystem
from zero_engine.checkpoint.manifest import MANIFEST, seal, unsealed
from zero_engine.checkpoint.save import save_as
from zero_engine.checkpoint.writer import SaveReport, SaveRequest
from zero_engine.offload import Offload, homes_of
from zero_engine.planning import plan as _plan

__all__ = [
    "MANIFEST",
    "FileSystem",
    "damage",
    "edit_manifest",
    "held_copies",
    "host_apart",
    "resting",
    "save",
    "unsealed",
    "write_manifest",
]

_HELD_S: Final = 20.0


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
    """`zero_engine.save` on another file system, which may fail on this rank only. Collective.

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
    """Make a manifest of a checkpoint's own folder, with the checksum of what it says. Local."""
    (checkpoint / MANIFEST).write_bytes(seal(content))


def edit_manifest(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a checkpoint says of itself in place, as if it had been saved so. Local."""
    content = unsealed(checkpoint / MANIFEST)
    change(content)
    write_manifest(checkpoint, content)


def damage(path: Path, position: int = -1, flip: int = 4) -> None:
    """Flip bits of one byte of a file. Local; the same again undoes it."""
    content = bytearray(path.read_bytes())
    content[position] ^= flip
    path.write_bytes(content)


@contextmanager
def held_copies() -> Iterator[Event]:
    """`Saver(overlap=True)` copies nothing on its thread before this event is set. Local."""
    may_copy, copy = Event(), Copying._copy

    def copy_later(copying: Copying) -> None:
        assert may_copy.wait(_HELD_S), "the event of held_copies() was never set"
        copy(copying)

    with mock.patch.object(Copying, "_copy", copy_later):
        yield may_copy


@contextmanager
def host_apart() -> Iterator[None]:
    """On CPUs, `shard` and `plan` see a host whose memory is not the device's. Local.

    What an `Offload` puts on the host then rests apart from the device, but for gradients, which
    stay there.
    """

    def apart(offload: Offload | None, _: torch.device) -> Homes:
        return attrs.evolve(homes_of(offload, torch.device("meta")), gradients=None)

    with (
        mock.patch.object(_shard, "homes_of", apart),
        mock.patch.object(_plan, "homes_of", apart),
    ):
        yield


@contextmanager
def resting(
    *,
    home: Callable[[], TensorHome],
    store: Callable[[], AbstractStore],
    gradient_home: Callable[[], GradientHome],
) -> Iterator[None]:
    """`shard` keeps what an `Offload` names at these instead. Local.

    Args:
        home: Makes what has parameters that rest on "disk".
        store: Makes what has optimizer state that rests on "disk".
        gradient_home: Makes where gradients wait of state that rests elsewhere, all of it.
    """

    def instead(offload: Offload | None, device: torch.device) -> Homes:
        homes = homes_of(offload, device, open_disk=lambda _: store())
        if offload is None:
            return homes
        resources = ExitStack()
        resources.callback(homes.close)
        shards = home() if offload.params == "disk" else None
        if shards is not None:
            resources.callback(shards.end)
        is_all_there = offload.fraction == 1 or shards is not None
        has_gradients = homes.open_state is not None and is_all_there
        return attrs.evolve(
            homes,
            params=shards,
            gradients=gradient_home() if has_gradients else None,
            close=resources.close,
        )

    with mock.patch.object(_shard, "homes_of", instead):
        yield
