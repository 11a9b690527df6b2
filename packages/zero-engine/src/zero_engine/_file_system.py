"""The calls of the operating system that saving rests on, as one value."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from ._errors import FileError


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

    def remove_folder(self, path: Path, *, last: str | None = None) -> None:
        """And the files in it, one of them after the others."""
        for name in sorted(self.listdir(path), key=lambda name: name == last):
            inner = path / name
            if inner.is_dir() and not inner.is_symlink():
                self.remove_folder(inner)
            else:
                self.unlink(inner)
        self.rmdir(path)


FILE_SYSTEM: Final = FileSystem()


def named(error: OSError, path: Path) -> FileError:
    """The same with words: what could not be written, why, and what to do."""
    remedy = {
        errno.ENOSPC: "free some space, or save to another disk",
        errno.EDQUOT: "free some space, or save to another disk",
        errno.EROFS: "save to a folder that this process may write to",
        errno.EACCES: "save to a folder that this process may write to",
        errno.ENOENT: "every rank must see the same folder",
    }.get(error.errno or 0, "the checkpoint before is as it was")
    return FileError(f"{path}: cannot be written: {error.strerror or error}; {remedy}")
