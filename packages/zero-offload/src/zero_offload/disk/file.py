"""One file of a store on disk: allocated at full size, checked for changes when it is opened."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Final

from attrs import define, field, frozen
from torch import Tensor

from zero_offload._native import kernels
from zero_offload.errors import StoreError

from .folder import System

# Bytes of one call, since zlib takes no more than 4 GiB.
_BLOCK_BYTES: Final = 2**30


@frozen
class Checksummer:
    """One way of computing checksums; releases the GIL."""

    algorithm: str
    # Maps the checksum so far, an address and a number of bytes to the new checksum.
    update: Callable[[int, int, int], int]

    def of(self, tensor: Tensor) -> int:
        """Return the checksum of the bytes of a contiguous CPU tensor."""
        value, address = 0, tensor.data_ptr()
        for start in range(0, tensor.nbytes, _BLOCK_BYTES):
            size = min(_BLOCK_BYTES, tensor.nbytes - start)
            value = self.update(value, address + start, size)
        return value


def choose_checksummer() -> Checksummer:
    """CRC-32C by the processor where the native library has it, else zlib's CRC-32."""
    found = kernels()
    if found is not None and found.library.zero_has_crc32c():
        return Checksummer("crc32c", found.library.zero_crc32c)
    return Checksummer("crc32", _crc32)


def _crc32(value: int, address: int, nbytes: int) -> int:
    return zlib.crc32((ctypes.c_char * nbytes).from_address(address), value)


REMEDIES: Final = {
    errno.ENOSPC: "free some of the disk, or name another one",
    errno.EDQUOT: "the quota is used up: raise it, or name another disk",
    errno.EFBIG: "a limit on the size of files (`ulimit -f`) or the file system forbids it",
    errno.EACCES: "something changed the permissions of the job's folder",
    errno.EROFS: "the file system has become read-only: look at the kernel's log",
    errno.EIO: "the device fails: look at the kernel's log",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`)",
}
_NO_FALLOCATE: Final = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


@define(eq=False)
class SwapFile:
    """The file of one key, with the form and the checksum of its value."""

    key: str
    path: str
    nbytes: int
    system: System = field(repr=False)
    # Numel and dtype of the value as text; None while there is nothing to read.
    form: str | None = field(default=None, init=False)
    checksum: int | None = field(default=None, init=False)
    # Why there is nothing to read, while `form` is None.
    fault: str = field(default="it was never written", init=False)
    # Status of the file after our last operation on it.
    _known: os.stat_result = field(init=False)

    def create(self, capacity: int) -> None:
        """Create the file with `capacity` bytes allocated, or not at all.

        Raises:
            StoreError: The system refuses.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with self._reported("make"):
            fd = self.system.open(self.path, flags, 0o600)
            try:
                try:
                    if capacity:
                        self.system.fallocate(fd, 0, capacity)
                except OSError as error:
                    if error.errno not in _NO_FALLOCATE:
                        raise
                    # Without fallocate, a full disk is only noticed when the file is written.
                    self.system.truncate(fd, capacity)
                self.stamp(fd)
            except BaseException:
                self.system.unlink(self.path)
                raise
            finally:
                self.system.close(fd)

    def begin_write(self) -> None:
        """Forget the value, until `end_write`: a write that fails leaves nothing to read."""
        self.form, self.fault = None, "its last write failed"

    def end_write(self, form: str, checksum: int | None) -> None:
        """Note the form and the checksum of the value that was written."""
        self.form, self.checksum = form, checksum

    @contextlib.contextmanager
    def opened(self, verb: str, flag: int) -> Iterator[int]:
        """Open the file, check that it is as we left it, and yield its descriptor.

        O_NOFOLLOW: a link that was put in its place is not followed.

        Args:
            verb: The operation that it is opened for, in messages.
            flag: Further flags of open.

        Raises:
            StoreError: The file was changed, or the system refuses to open it or an operation
                within the context.
        """
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flag
        with self._reported(verb):
            try:
                fd = self.system.open(self.path, flags, 0)
            except FileNotFoundError:
                raise self.changed("it has been removed") from None
            try:
                known, now = self._known, self.system.fstat(fd)
                if (now.st_dev, now.st_ino) != (known.st_dev, known.st_ino):
                    raise self.changed("another file has been put in its place")
                if now.st_size != known.st_size:
                    raise self.changed(f"it had {known.st_size} bytes and now has {now.st_size}")
                if now.st_mtime_ns != known.st_mtime_ns:
                    raise self.changed("something else has written to it")
                yield fd
            finally:
                self.system.close(fd)

    def stamp(self, fd: int) -> None:
        """Record the status of the file, which `opened` compares with the one it finds."""
        self._known = self.system.fstat(fd)

    def delete(self) -> None:
        """Delete the file; it may be gone already.

        Raises:
            StoreError: The system refuses.
        """
        with self._reported("delete"), contextlib.suppress(FileNotFoundError):
            self.system.unlink(self.path)

    def changed(self, how: str) -> StoreError:
        """Return the error to raise if another program has changed the file."""
        return StoreError(
            f"{self.path}, which contains {self.key!r} ({self.nbytes} bytes), was changed by "
            f"another program: {how}. Its value is lost; resume from a checkpoint, and keep other "
            "programs out of that folder",
            key=self.key,
            path=self.path,
            nbytes=self.nbytes,
        )

    @contextlib.contextmanager
    def _reported(self, verb: str) -> Iterator[None]:
        """Raise a StoreError, with the key, the path and the bytes, for an OSError."""
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(
                f"cannot {verb} {self.key!r} ({self.nbytes} bytes) at {self.path}: "
                f"{with_remedy(error)}",
                key=self.key,
                path=self.path,
                nbytes=self.nbytes,
                errno=error.errno,
            ) from error


def with_remedy(error: OSError) -> str:
    """Return the message of a system error, with its remedy where one is known."""
    remedy = REMEDIES.get(error.errno or 0, "")
    text = error.strerror or str(error)
    return f"{text}; {remedy}" if remedy else text
