"""A folder of checkpoints, changed so that a crash at any moment leaves the last one whole."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from attrs import define, field, frozen

from zero_engine.errors import ConfigError, FileError

from .manifest import MANIFEST, read_manifest, seal
from .pieces import LATEST, REPLACED, find_complete, holds_parts


@frozen
class FileSystem:
    """A test puts a failing call in place of one of these; nobody else needs another value."""

    mkdir: Callable[[Path], None] = os.mkdir
    open: Callable[[Path, int, int], int] = os.open
    write: Callable[[int, Any], int] = os.write
    fsync: Callable[[int], None] = os.fsync
    close: Callable[[int], None] = os.close
    rename: Callable[[Path, Path], None] = os.rename
    link: Callable[[Path, Path], None] = os.link
    unlink: Callable[[Path], None] = os.unlink
    rmdir: Callable[[Path], None] = os.rmdir
    listdir: Callable[[Path], list[str]] = os.listdir

    def make_folders(self, path: Path) -> None:
        """Of a path, those that are not there."""
        if path.is_dir():
            return
        self.make_folders(path.parent)
        try:
            self.mkdir(path)
        except FileExistsError:
            if not path.is_dir():
                raise

    def sync_folder(self, path: Path) -> None:
        """Have names in it on disk."""
        folder = self.open(path, os.O_RDONLY | os.O_DIRECTORY, 0)
        try:
            self.fsync(folder)
        finally:
            self.close(folder)

    def write_file(self, path: Path, content: bytes) -> None:
        """A new file, on disk when this returns."""
        file = self.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            view = memoryview(content)
            while view:
                view = view[self.write(file, view) :]
            self.fsync(file)
        finally:
            self.close(file)

    def remove(self, path: Path, *, last: str | None = None) -> None:
        """A file, or a folder with all in it, one name after the others."""
        if not path.is_dir() or path.is_symlink():
            self.unlink(path)
            return
        for name in sorted(self.listdir(path), key=lambda name: name == last):
            self.remove(path / name)
        self.rmdir(path)

    @contextmanager
    def published(self, path: Path, aside: str) -> Iterator[Path]:
        """What is written to the path that this gives is `path` at the end of the context.

        Until then, and after an error, there is what was there before.
        """
        temporary = path.with_name(aside)
        try:
            yield temporary
            self.rename(temporary, path)
            self.sync_folder(path.parent)
        except BaseException:
            with suppress(OSError):
                self.remove(temporary)
            raise


FILE_SYSTEM: Final = FileSystem()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the file system inside say what could not be written, why, and what to do."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        remedy = {
            errno.ENOSPC: "free some space, or save to another disk",
            errno.EDQUOT: "free some space, or save to another disk",
            errno.EROFS: "save to a folder that this process may write to",
            errno.EACCES: "save to a folder that this process may write to",
            errno.ENOENT: "every rank must see the same folder",
        }.get(error.errno or 0, "the checkpoint before is as it was")
        why = error.strerror or error
        raise FileError(f"{path}: cannot be written: {why}; {remedy}") from error


_PARTIAL: Final = ".partial-"
_PRUNED: Final = ".pruned-"
_LOCK: Final = "lock"
_NO_LOCK_S: Final = 60.0  # a folder without a lock is younger only where its job has just made it

# NOTE(order): everything is written to `.TAG.partial-XXXX` and on disk before that is renamed to
# TAG; whatever has a name without a dot is complete. What is to go is renamed first, and deleted
# then. Rank 0's process holds a lock in the partial folder: where nobody does, it is left over. The
# lock's file is the first in a folder and the last that goes, so that a kill leaves none without.


def check_tag(tag: Any) -> str:
    """A tag is the name of a folder.

    Raises:
        ConfigError: It cannot be.
    """
    is_name = isinstance(tag, str) and tag and Path(tag).name == tag and tag != LATEST
    if not is_name or tag.startswith(".") or any(c in tag for c in "\0\n"):
        raise ConfigError(
            f"tag: expected the name of a folder that does not begin with a dot, got {tag!r}"
        )
    return tag


@define(eq=False)
class PartialFolder:
    """A checkpoint that is being written: rank 0's side of it.

    Attributes:
        folder: Of all checkpoints.
        tag: Of this one.
        serial: Larger than that of any other in the folder.
    """

    folder: Path
    tag: str
    system: FileSystem
    path: Path = field(init=False)
    serial: int = field(init=False)
    _lock: int | None = field(default=None, init=False)

    @classmethod
    def begin(cls, folder: Path, tag: str, system: FileSystem) -> PartialFolder:
        """Make the folder, after what dead jobs have left is removed.

        Raises:
            FileError: It cannot be made, or something else has the name of the tag.
        """
        self = cls(folder, tag, system)
        self.path = folder / f".{tag}{_PARTIAL}{secrets.token_hex(4)}"
        final = folder / tag
        try:
            with naming(folder):
                system.make_folders(folder)
                _remove_leftovers(folder, system)
                is_empty = final.is_dir() and not any(final.iterdir())
                if final.exists() and not _is_replaceable(final) and not is_empty:
                    raise FileError(
                        f"{final}: expected nothing, or a checkpoint to replace, and this is none; "
                        "choose another tag, or remove it"
                    )
                serials = [_serial_of(path) for path in find_complete(folder).values()]
                self.serial = 1 + max(serials, default=0)
                system.mkdir(self.path)
                self._lock = system.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
                with suppress(OSError):  # the file system may have no locks: see _is_left_over
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileError:
            self.abandon()
            raise
        return self

    def publish(self, manifest: Mapping[str, Any], *, is_latest: bool, keep: int | None) -> None:
        """Make it complete, and remove what it replaces and what is not kept.

        Raises:
            FileError: Something could not be written. The checkpoint is complete all the same if
                there is a folder of its tag, or else not there.
        """
        with naming(self.folder / self.tag):
            self.system.write_file(self.path / MANIFEST, seal(manifest))
            self.system.sync_folder(self.path)
            self._rename()
            self.system.sync_folder(self.folder)
            with suppress(OSError):  # it does no harm there
                self.system.unlink(self.folder / self.tag / _LOCK)
            self._release()
            if is_latest:
                aside = f".{LATEST}{_PARTIAL}{secrets.token_hex(4)}"
                with self.system.published(self.folder / LATEST, aside) as path:
                    self.system.write_file(path, self.tag.encode())
            _remove_leftovers(self.folder, self.system)
            if keep is not None:
                _prune(self.folder, self.tag, keep, self.system)

    def abandon(self) -> None:
        """Remove it, as far as that can be. Again, or after `publish`: nothing happens."""
        if self.path.exists():
            _remove(self.path, self.system)
        self._release()

    def _rename(self) -> None:
        final = self.folder / self.tag
        aside = self.folder / f".{self.tag}{REPLACED}{secrets.token_hex(4)}"
        is_replaced = _is_replaceable(final)
        if is_replaced:
            self.system.rename(final, aside)
        try:
            self.system.rename(self.path, final)  # also over an empty folder
        except OSError:
            if is_replaced:
                self.system.rename(aside, final)
            raise

    def _release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            with suppress(OSError):
                self.system.close(lock)


def _serial_of(path: Path) -> int:
    try:
        return int(read_manifest(path / MANIFEST).get("serial") or 0)
    except FileError:  # it is damaged, and nobody will load it for the newest
        return 0


def _is_replaceable(path: Path) -> bool:
    """Whether it is a checkpoint, or what is left of one whose manifest is gone."""
    return (path / MANIFEST).exists() or holds_parts(path)


def _remove_leftovers(folder: Path, system: FileSystem) -> None:
    """What dead jobs have left. One that replaced a checkpoint is finished, or undone."""
    complete = find_complete(folder)
    for path in [folder / name for name in system.listdir(folder) if name.startswith(".")]:
        tag, was_replaced, _ = path.name[1:].rpartition(REPLACED)
        if was_replaced and (path / MANIFEST).exists() and complete.get(tag) == path:
            system.rename(path, folder / tag)
        elif (
            was_replaced or _PRUNED in path.name or (_PARTIAL in path.name and _is_left_over(path))
        ):
            _remove(path, system)
        elif path.name.startswith(f".{LATEST}{_PARTIAL}"):
            system.unlink(path)


def _is_left_over(path: Path) -> bool:
    """Whether the job that has made a partial folder is dead; where that cannot be told, no."""
    if not path.is_dir():
        return False
    try:
        lock = os.open(path / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        try:
            return time.time() - path.stat().st_mtime > _NO_LOCK_S
        except OSError:
            return False
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(lock)


def _remove(path: Path, system: FileSystem) -> None:
    """A folder that is no complete checkpoint by its name. What cannot go now goes another time."""
    with suppress(OSError):
        system.remove(path, last=_LOCK)


def _prune(folder: Path, tag: str, keep: int, system: FileSystem) -> None:
    """Keep the newest; the one that was saved just now is one of them."""
    found = find_complete(folder)
    others = {name: _serial_of(path) for name, path in found.items() if name != tag}
    ranked = sorted((name for name in others if others[name]), key=lambda name: others[name])
    for name in ranked[: max(0, len(ranked) - (keep - 1))]:
        aside = folder / f".{name}{_PRUNED}{secrets.token_hex(4)}"
        system.rename(found[name], aside)
        system.sync_folder(folder)
        _remove(aside, system)
