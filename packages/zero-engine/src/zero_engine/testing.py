"""For tests of what is saved: disks that fail, and checkpoints that are not as they were saved.

A disk that fails is a `FileSystem` with another call in place of one of its own:

    full = FileSystem(write=raise_no_space)
    with pytest.raises(zero_engine.FileError):
        save(folder, model, optimizer, step=2, system=full)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any, Final
from unittest import mock

import torch
from torch import nn

from ._copies import Copying
from ._file_system import FileSystem
from ._manifest import MANIFEST, read_manifest, seal
from ._save import SaveReport, save_with

__all__ = [
    "MANIFEST",
    "FileSystem",
    "damage",
    "edit_manifest",
    "held_copies",
    "read_manifest",
    "save",
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
    asked: dict[str, Any] = {"folder": folder, "tag": tag, "step": step, "keep": keep}
    asked |= {"extra": extra, "scheduler": None, "has_frozen": True, "is_latest": True}
    return save_with(model, optimizer, system=system, **asked)


def write_manifest(checkpoint: Path, content: dict[str, Any]) -> None:
    """Make a manifest of a checkpoint's own folder, with the checksum of what it says. Local."""
    (checkpoint / MANIFEST).write_bytes(seal(content))


def edit_manifest(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a checkpoint says of itself in place, as if it had been saved so. Local."""
    content = read_manifest(checkpoint / MANIFEST)
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
