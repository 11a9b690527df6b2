"""Calls that change files, errors of these that say what to do, and NewFile, which writes one."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Final

from attrs import define, field, frozen

from zero_engine.errors import FileError


@frozen
class FileSystem:
    """Calls that change files. Only tests replace one of them, by a call that fails."""

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
        """Make a folder, and those above it that do not exist."""
        if path.is_dir():
            return
        self.make_folders(path.parent)
        try:
            self.mkdir(path)
        except FileExistsError:
            if not path.is_dir():
                raise

    def sync_folder(self, path: Path) -> None:
        """Sync a folder, so that the names in it are on disk."""
        folder = self.open(path, os.O_RDONLY | os.O_DIRECTORY, 0)
        try:
            self.fsync(folder)
        finally:
            self.close(folder)

    def write_file(self, path: Path, content: bytes) -> None:
        """Write a new file, which is on disk when this returns."""
        file = self.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            view = memoryview(content)
            while view:
                view = view[self.write(file, view) :]
            self.fsync(file)
        finally:
            self.close(file)

    def remove(self, path: Path, *, last: str | None = None) -> None:
        """Remove a file, or a folder with all in it; what is called `last` in it goes last."""
        if not path.is_dir() or path.is_symlink():
            self.unlink(path)
            return
        for name in sorted(self.listdir(path), key=lambda name: name == last):
            self.remove(path / name)
        self.rmdir(path)

    @contextmanager
    def published(self, path: Path, aside: str) -> Iterator[Path]:
        """Yield a temporary path to write to, which is renamed to `path` at the end.

        Until then, and after an error, `path` is as it was before.
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


_KINDS: Final = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


class OpenFolder:
    """Folder to read from, also after it was renamed; while it is open, no process removes it.

    Where the file system has no locks, it may be removed all the same. See `removing`.

    Raises:
        OSError: It cannot be opened, or is being removed.
    """

    file: int = -1  # -1 when closed

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _lock(self.file, fcntl.LOCK_SH)

    def close(self) -> None:
        """Close the folder, so that it may be removed. A second call does nothing."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    def __del__(self) -> None:
        self.close()


@contextmanager
def removing(path: Path) -> Iterator[None]:
    """Raise BlockingIOError if a process has opened a folder, else keep it from being opened."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _lock(folder: int, kind: int) -> None:
    try:
        fcntl.flock(folder, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        # The file system has no locks, or none for folders.
        pass


def open_regular(path: Path, folder: OpenFolder | None = None) -> FileIO:
    """Open a file to read, unbuffered; by its name in `folder`, if that is given. Local.

    Other kinds of files are refused: reading a pipe waits for a process that writes to it, and a
    device may have no end.

    Raises:
        FileError: It is no regular file.
        OSError: It cannot be opened.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(path, flags) if folder is None else os.open(path.name, flags, dir_fd=folder.file)
    kind = stat.S_IFMT(os.fstat(file).st_mode)
    if kind != stat.S_IFREG:
        os.close(file)
        what = _KINDS.get(kind, "something else")
        raise FileError(f"{path}: expected a regular file, got {what}; remove it")
    return FileIO(file, "rb")


def read_regular(path: Path, folder: OpenFolder | None = None) -> bytes:
    """Read all of a file that `open_regular` opens, with the same arguments and errors."""
    with open_regular(path, folder) as file:
        return file.read()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an OSError inside into a FileError with what could not be written, why, what to do."""
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
            errno.ENOENT: "every rank must see the same folder, and no other job write to it",
            errno.ENAMETOOLONG: "choose a shorter tag",
            errno.EEXIST: "expected a folder, got a file",
            errno.ENOTDIR: "expected a folder, got a file",
        }.get(error.errno or 0, "the checkpoint before is as it was")
        why = error.strerror or error
        raise FileError(f"{path}: cannot be written: {why}; {remedy}") from error


# Bytes that are written at a time, and the number of such blocks in memory. One block is filled
# while the others are written: the speed of a disk varies.
_BLOCK_BYTES: Final = 4 * 2**20
_NUM_BLOCKS: Final = 4
_ALIGN_BYTES: Final = 4096  # required by O_DIRECT
_DIRECT: Final = getattr(os, "O_DIRECT", 0)

# NOTE(direct): through the page cache, a checkpoint is copied once more, displaces data of other
# programs, and is written only when `fsync` is called. So bytes are collected in aligned blocks,
# and each is written past the cache while the next is filled. An end that does not fill a page, and
# everything where the file system has no O_DIRECT, goes through the cache.
#
# The blocks are in huge pages where the kernel has them: a write is then one piece of memory
# instead of a thousand. Without huge pages, writing took 1.5 times as long.


@define(eq=False)
class NewFile:
    """Context in which a new file is written; the file is on disk at its end."""

    path: Path
    system: FileSystem
    num_bytes: int = field(default=0, init=False)
    crc32: int = field(default=0, init=False)
    _file: int = field(init=False)
    _is_direct: bool = field(default=False, init=False)
    # The first block is being filled. The others are in the order of their last writes.
    _blocks: deque[memoryview] = field(init=False)
    # Bytes in the first block.
    _filled: int = field(default=0, init=False)
    _writer: ThreadPoolExecutor = field(init=False)
    # Writes of blocks in progress, the oldest first.
    _under_way: deque[Future[None]] = field(factory=deque, init=False)

    def __enter__(self) -> NewFile:
        self._file = self._open()
        memory = memoryview(_huge_pages(_NUM_BLOCKS * _BLOCK_BYTES))
        starts = range(0, len(memory), _BLOCK_BYTES)
        self._blocks = deque(memory[start : start + _BLOCK_BYTES] for start in starts)
        self._writer = ThreadPoolExecutor(1, "zero-checkpoint")
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self._wait_for(0)
                whole = self._filled - self._filled % _ALIGN_BYTES
                self._write(self._blocks[0][:whole])
                self._be_usual()
                self._write(self._blocks[0][whole : self._filled])
                self.system.fsync(self._file)
        finally:
            self._writer.shutdown(cancel_futures=True)
            self._blocks.clear()
            self.system.close(self._file)

    def put(self, view: memoryview) -> None:
        """Append bytes to the file; their memory may be reused when this returns."""
        view = view.cast("B")
        self.num_bytes += len(view)
        while view:
            room = _BLOCK_BYTES - self._filled
            part, view = view[:room], view[room:]
            self._blocks[0][self._filled : self._filled + len(part)] = part
            # Computed while the bytes are in the processor's cache.
            self.crc32 = zlib.crc32(part, self.crc32)
            self._filled += len(part)
            if self._filled == _BLOCK_BYTES:
                self._under_way.append(self._writer.submit(self._write, self._blocks[0]))
                self._wait_for(_NUM_BLOCKS - 1)
                self._blocks.rotate(-1)
                self._filled = 0

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        if _DIRECT:
            try:
                file = self.system.open(self.path, flags | _DIRECT, 0o666)
            except OSError as error:
                # EINVAL means that the file system has no O_DIRECT.
                if error.errno != errno.EINVAL:
                    raise
                # The failed call may have created the file.
                flags &= ~os.O_EXCL
            else:
                self._is_direct = True
                return file
        return self.system.open(self.path, flags, 0o666)

    def _wait_for(self, num_left: int) -> None:
        """Wait until at most `num_left` blocks are still to be written."""
        while len(self._under_way) > num_left:
            self._under_way.popleft().result()

    def _write(self, view: memoryview) -> None:
        while view:
            try:
                written = self.system.write(self._file, view)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                # This disk needs a larger alignment than a page.
                self._be_usual()
                continue
            view = view[written:]
            if written % _ALIGN_BYTES:
                self._be_usual()

    def _be_usual(self) -> None:
        if self._is_direct:
            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~_DIRECT)
            self._is_direct = False


def _huge_pages(num_bytes: int) -> mmap.mmap:
    """Map anonymous memory, in huge pages if the kernel has them; it is allocated when used."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Some kernels have no huge pages, and other systems no `madvise`.
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
