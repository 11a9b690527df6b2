"""A store on disk: one file per key, in a folder that is removed when the job ends."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from attrs import define, field
from torch import Tensor

from zero_offload.errors import StoreError

from .file import REMEDIES, Checksummer, SwapFile, choose_checksummer, with_remedy
from .folder import SYSTEM, JobFolder, System
from .settings import DiskSettings, DiskStatus
from .store import AbstractStore, check_form, flat_bytes, form_of
from .transport import (
    AbstractTransport,
    Direct,
    align_up,
    choose_transport,
    probe_direct,
)

_LOG: Final = logging.getLogger(__name__)
# A future, and the operation whose result it gets.
_Job: TypeAlias = tuple[Future[Any], Callable[[], Any]]


@final
@define(eq=False)
class DiskStore(AbstractStore):
    """Values in files of a private folder below `parent`, which is removed by `close`.

    The folder is also removed at exit; that of a killed job is removed by the next store in the
    same `parent`. Values do not survive the job. Tensors are on the CPU. Memory of a `HostArena` is
    read and written in place; any other goes through blocks of aligned memory, which costs a copy
    and up to `block_bytes * queue_depth * num_workers` bytes of memory. `status` tells which
    features are in use, and why the others are not.

    Args:
        parent: An existing folder on the disk to use.
        settings: How bytes are moved; see `tune`.
        system: For tests; see `System`.

    Raises:
        StoreError: There is no such folder, or it cannot be written to.
    """

    parent: Path = field(converter=Path)
    settings: DiskSettings = field(factory=DiskSettings)
    system: System = field(default=SYSTEM, kw_only=True, repr=False)
    _folder: JobFolder = field(init=False, repr=False)
    _direct: Direct = field(init=False, repr=False)
    _transport: AbstractTransport = field(init=False, repr=False)
    _uring_reason: str = field(default="", init=False, repr=False)
    _checksummer: Checksummer | None = field(default=None, init=False, repr=False)
    _workers: ThreadPoolExecutor = field(init=False, repr=False)
    _owner: int = field(factory=os.getpid, init=False, repr=False)
    _files: dict[str, SwapFile] = field(factory=dict, init=False, repr=False)
    # Number of files made so far. It is part of a file's name, so that none is used twice.
    _num_files: int = field(default=0, init=False, repr=False)
    # Key -> operations that have not begun; a key is removed when its last operation has ended.
    _waiting: dict[str, deque[_Job]] = field(factory=dict, init=False, repr=False)
    _is_closed: bool = field(default=False, init=False, repr=False)
    _state: threading.Condition = field(factory=threading.Condition, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self._folder = JobFolder(self.parent, self.system)
        try:
            self._direct = (
                probe_direct(self._folder.path, self.system)
                if self.settings.is_direct
                else Direct(1, "is_direct is False")
            )
        except OSError as error:
            self._folder.close()
            raise StoreError(
                f"cannot write to {self._folder.path}: {with_remedy(error)}",
                path=str(self._folder.path),
                errno=error.errno,
            ) from error
        self._transport, self._uring_reason = choose_transport(
            self.settings, self._direct.align_bytes, self.system
        )
        if self.settings.has_checksums:
            self._checksummer = choose_checksummer()
        self._workers = ThreadPoolExecutor(
            self.settings.num_workers, thread_name_prefix="zero-offload-disk"
        )
        _LOG.debug("files in %s: %s", self._folder.path, self.status)

    @property
    def status(self) -> DiskStatus:
        """Features in use, and the reason for each that is not."""
        return DiskStatus(
            transport="threads" if self._uring_reason else "io_uring",
            uring_reason=self._uring_reason,
            direct_bytes=self._direct.align_bytes,
            direct_reason=self._direct.reason,
            lock_reason=self._folder.lock_reason,
            checksum=self._checksummer.algorithm if self._checksummer else "",
        )

    @property
    def folder(self) -> Path:
        """Path of the folder with the files."""
        return self._folder.path

    def allocate(self, sizes: Mapping[str, int]) -> None:
        """Make files of these sizes; see `AbstractStore.allocate`.

        Blocks while an operation on one of the keys is in progress.
        """
        needed = sum(align_up(nbytes, self._direct.align_bytes) for nbytes in sizes.values())
        asked = f"{len(sizes)} values need {needed} bytes in {self.folder}"
        with self._state:
            # The future of a failed write is done before its key is removed from `_waiting`.
            self._state.wait_for(lambda: self._waiting.keys().isdisjoint(sizes))
            self._check_open()
            for key in sizes:
                if key in self._files:
                    raise StoreError(f"{key!r} is allocated already", key=key)
            found = self.system.statvfs(str(self.folder))
            free = found.f_bavail * found.f_frsize
            if needed > free:
                raise StoreError(
                    f"{asked}, and {free} bytes are free there; {REMEDIES[errno.ENOSPC]}",
                    path=str(self.folder),
                    nbytes=needed,
                    errno=errno.ENOSPC,
                )
            made: list[SwapFile] = []
            try:
                for key, nbytes in sizes.items():
                    made.append(self._make(key, nbytes))
            except StoreError as error:
                for file in made:
                    self.system.unlink(file.path)
                raise StoreError(
                    f"{asked}: {error}",
                    key=error.key,
                    path=error.path,
                    nbytes=needed,
                    errno=error.errno,
                ) from error
            self._files |= {file.key: file for file in made}

    def write(self, key: str, source: Tensor) -> Future[None]:
        """Begin to write `source`, on the CPU, to the file of `key`; see `AbstractStore.write`."""
        return self._submit(key, lambda: self._write(key, source))

    def read(self, key: str, into: Tensor) -> Future[Tensor]:
        """Begin to read the file of `key` into `into`, on the CPU; see `AbstractStore.read`."""
        return self._submit(key, lambda: self._read(key, into))

    def delete(self, key: str) -> None:
        """Delete the file of `key` after earlier operations on it. Blocks."""
        self._submit(key, lambda: self._delete(key)).result()

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each key's value, allocated or written."""
        with self._state:
            return {key: file.nbytes for key, file in self._files.items()}

    def close(self) -> None:
        """Wait for operations in progress, and remove the folder. Again: nothing happens.

        In a process that was forked from the one that made the store, nothing happens either.
        """
        if os.getpid() != self._owner:
            # The files and the threads belong to the process that forked this one.
            return
        with self._state:
            self._is_closed = True
            self._state.wait_for(lambda: not self._waiting)
        self._workers.shutdown()
        self._transport.close()
        self._folder.close()

    def _submit(self, key: str, run: Callable[[], Any]) -> Future[Any]:
        """Run an operation on a worker, after earlier operations on the same key."""
        future: Future[Any] = Future()
        # From now on `cancel` has no effect.
        future.set_running_or_notify_cancel()
        try:
            with self._state:
                self._check_open()
                if key not in self._waiting:
                    self._workers.submit(self._serve, key)
                self._waiting.setdefault(key, deque()).append((future, run))
        except Exception as error:
            future.set_exception(error)
        return future

    def _serve(self, key: str) -> None:
        """Run the operations on one key, in order, until none is waiting."""
        while True:
            with self._state:
                queue = self._waiting[key]
                if not queue:
                    del self._waiting[key]
                    self._state.notify_all()
                    return
                future, run = queue.popleft()
            try:
                result = run()
            except BaseException as error:
                # The operation refers to its tensor. Drop it before the future is done: from then
                # on only the caller refers to the tensor.
                del run
                future.set_exception(error)
            else:
                del run
                future.set_result(result)
                del result
            del future

    def _write(self, key: str, source: Tensor) -> None:
        flat = self._flat(key, source)
        file = self._files.get(key)
        if file is None or file.nbytes != flat.nbytes:
            if file is not None:
                self._delete(key)
            file = self._make(key, flat.nbytes)
            with self._state:
                self._files[key] = file
        file.begin_write()
        with file.opened("write", self._direct.flag) as fd:
            try:
                moved = self._transport.move(fd, flat, writes=True)
            finally:
                # A failed write may have changed the file as well.
                file.stamp(fd)
            assert moved == flat.nbytes, f"{file.path}: {moved} of {flat.nbytes} bytes written"
        checksum = self._checksummer.of(flat) if self._checksummer else None
        file.end_write(form_of(source), checksum)

    def _read(self, key: str, into: Tensor) -> Tensor:
        flat = self._flat(key, into)
        file = self._known(key)
        if file.form is None:
            raise StoreError(f"{key!r} cannot be read: {file.fault}", key=key, path=file.path)
        check_form(key, file.form, into, file.path)
        with file.opened("read", self._direct.flag) as fd:
            moved = self._transport.move(fd, flat, writes=False)
        if moved < flat.nbytes:
            raise file.changed(f"it ends after {moved} of {flat.nbytes} bytes")
        if self._checksummer and self._checksummer.of(flat) != file.checksum:
            raise file.changed(f"its {self._checksummer.algorithm} is not that of what we wrote")
        return into

    def _delete(self, key: str) -> None:
        file = self._known(key)
        with self._state:
            del self._files[key]
        file.delete()

    def _known(self, key: str) -> SwapFile:
        file = self._files.get(key)
        if file is None:
            raise StoreError(f"{key!r} was never written to {self.folder}", key=key)
        return file

    def _flat(self, key: str, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            raise StoreError(
                f"{key!r}: a DiskStore moves tensors of the CPU, got one on {tensor.device}; copy "
                "it to memory of a HostArena first",
                key=key,
            )
        return flat_bytes(key, tensor)

    def _make(self, key: str, nbytes: int) -> SwapFile:
        with self._state:
            self._num_files += 1
            path = str(self.folder / f"{self._num_files:06}-{_spelled(key)}")
        file = SwapFile(key, path, nbytes, self.system)
        file.create(align_up(nbytes, self._direct.align_bytes))
        return file

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError(f"this DiskStore is closed: {self.folder}", path=str(self.folder))
        if os.getpid() != self._owner:
            raise StoreError(
                f"this DiskStore belongs to process {self._owner}, and was used in process "
                f"{os.getpid()}, which was forked from it; make one there",
                path=str(self.folder),
            )


def _spelled(key: str) -> str:
    """Return a form of the key that may be part of a file's name."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in key)[:60]
