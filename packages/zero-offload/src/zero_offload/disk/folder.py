"""A private folder of one job, locked while the job lives; those of killed jobs are removed."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, final

from attrs import define, field, frozen

from zero_offload.errors import StoreError


@frozen
class System:
    """System calls of this package, of which a test replaces one by a call that fails."""

    open: Callable[[str, int, int], int] = os.open
    close: Callable[[int], None] = os.close
    fstat: Callable[[int], os.stat_result] = os.fstat
    statvfs: Callable[[str], os.statvfs_result] = os.statvfs
    fallocate: Callable[[int, int, int], None] = os.posix_fallocate
    truncate: Callable[[int, int], None] = os.ftruncate
    preadv: Callable[[int, Sequence[Any], int], int] = os.preadv
    pwritev: Callable[[int, Sequence[Any], int], int] = os.pwritev
    unlink: Callable[[str], None] = os.unlink
    flock: Callable[[int, int], None] = fcntl.flock


SYSTEM: Final = System()


_PREFIX: Final = "zero-offload-"
_NO_LOCKS: Final = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}

# NOTE(locks): beside each folder is a file `<folder>.lock`. The folder's job holds a flock on it,
# which the kernel releases however the job ends. A process that gets this lock may delete the
# folder: its job is dead, or has not made the folder yet. A job therefore takes the lock first, and
# makes the folder only once it sees that the file it locked is still the one at that path.


@final
@define(eq=False)
class JobFolder:
    """`<parent>/zero-offload-<random>`, 0700; removed by `close`, at exit, or by the next job here.

    Args:
        parent: An existing folder on the disk to use; several jobs may share it.
        system: See `System`.

    Raises:
        StoreError: The parent is missing or cannot be written.
    """

    parent: Path
    system: System = SYSTEM
    path: Path = field(init=False)
    lock_reason: str = field(default="", init=False)
    """Why the file system's locks cannot be used; such a folder is removed by its own job only."""
    _finalizer: weakref.finalize = field(init=False)

    def __attrs_post_init__(self) -> None:
        if not self.parent.is_dir():
            raise StoreError(
                f"{self.parent} is no folder: name an existing one on the disk to use, as in "
                "Offload(path=...) (is it mounted?)",
                path=str(self.parent),
            )
        remove_leftovers(self.parent, self.system)
        try:
            self.path, lock = self._claim()
        except OSError as error:
            raise StoreError(
                f"cannot make a folder in {self.parent}: {error.strerror}. Name one that this "
                "process may write to",
                path=str(self.parent),
                errno=error.errno,
            ) from error
        self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def close(self) -> None:
        """Remove the folder and all in it. Again: nothing happens."""
        self._finalizer()

    def _claim(self) -> tuple[Path, int]:
        while True:
            path = self.parent / f"{_PREFIX}{secrets.token_hex(6)}"
            lock_path = _lock_path(path)
            lock = self.system.open(
                str(lock_path), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
            )
            try:
                self.system.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # Another job has found the file unlocked, and removes it; see NOTE(locks).
                os.close(lock)
                continue
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    os.close(lock)
                    lock_path.unlink(missing_ok=True)
                    raise
                self.lock_reason = f"flock: {error.strerror}"
            if os.fstat(lock).st_nlink == 0:
                os.close(lock)
                continue
            try:
                path.mkdir(mode=0o700)
            except BaseException:
                lock_path.unlink()
                os.close(lock)
                raise
            return path, lock


def remove_leftovers(parent: Path, system: System) -> None:
    """Remove folders in `parent` whose jobs are dead, of this user only.

    A folder is not touched if its job is alive, or if that is unknown.
    """
    for lock_path in sorted(parent.glob(f"{_PREFIX}*.lock")):
        try:
            lock = system.open(str(lock_path), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0)
        except OSError:
            # The file is another user's, or has been removed meanwhile.
            continue
        try:
            found = os.fstat(lock)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                continue
            system.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink == 0:
                continue
            folder = lock_path.with_suffix("")
            if folder.exists():
                # `rmtree` does not follow links.
                shutil.rmtree(folder)
            lock_path.unlink()
        except OSError:
            # The job is alive, or the file system has no locks, or removing failed.
            continue
        finally:
            os.close(lock)


def _lock_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _remove(path: Path, lock: int, owner: int) -> None:
    # A forked process inherits this finalizer, but the folder is not its own.
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)
        _lock_path(path).unlink(missing_ok=True)
    os.close(lock)
