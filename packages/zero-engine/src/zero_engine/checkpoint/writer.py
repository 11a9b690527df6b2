"""A rank's pieces on their way to files: batch by batch, checksummed as they are written."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
from attrs import define, field, frozen
from torch import Tensor

from zero_engine.errors import FileError

from .folder import FileSystem, naming
from .manifest import FileFacts, name_of
from .pieces import Checkpoint
from .tensor_file import CODES, header_of

_BLOCK_BYTES: Final = 4 * 2**20  # written at a time
_NUM_BLOCKS: Final = 4  # in memory: one fills; a disk is not steady, and others may wait for it
_ALIGN_BYTES: Final = 4096  # what O_DIRECT asks for, of any disk
_DIRECT: Final = getattr(os, "O_DIRECT", 0)

# NOTE(direct): through the page cache a checkpoint is copied once more, pushes out what others have
# there, and is written when `fsync` asks. So bytes are gathered in aligned blocks, and each goes
# past the cache while the next fills. What does not fill a page at the end, and all of it where the
# file system has no O_DIRECT, goes the usual way.
#
# The blocks lie in huge pages where the kernel grants those: what goes to a disk at once is one
# piece of memory then and not a thousand, and writing took half as long again without.


@define(eq=False)
class NewFile:
    """A context in which a file is made; it is on disk at its end."""

    path: Path
    system: FileSystem
    num_bytes: int = field(default=0, init=False)
    crc32: int = field(default=0, init=False)
    _file: int = field(init=False)
    _is_direct: bool = field(default=bool(_DIRECT), init=False)
    _blocks: deque[memoryview] = field(init=False)  # the first fills; the last were given away last
    _filled: int = field(default=0, init=False)  # bytes of the first block
    _writer: ThreadPoolExecutor = field(init=False)
    _under_way: deque[Future[None]] = field(factory=deque, init=False)  # of the last blocks

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
        """Write these bytes after those before; they may change when it returns."""
        view = view.cast("B")
        self.num_bytes += len(view)
        while view:
            room = _BLOCK_BYTES - self._filled
            part, view = view[:room], view[room:]
            self._blocks[0][self._filled : self._filled + len(part)] = part
            self.crc32 = zlib.crc32(part, self.crc32)  # while it is in the processor's cache
            self._filled += len(part)
            if self._filled == _BLOCK_BYTES:
                self._under_way.append(self._writer.submit(self._write, self._blocks[0]))
                self._wait_for(_NUM_BLOCKS - 1)
                self._blocks.rotate(-1)
                self._filled = 0

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        if self._is_direct:
            try:
                return self.system.open(self.path, flags | _DIRECT, 0o666)
            except OSError as error:
                if error.errno != errno.EINVAL:  # that: the file system has none
                    raise
                self._is_direct = False
                flags &= ~os.O_EXCL  # it may have been made all the same
        return self.system.open(self.path, flags, 0o666)

    def _wait_for(self, num_left: int) -> None:
        """Until so many blocks, at most, are still to be written."""
        while len(self._under_way) > num_left:
            self._under_way.popleft().result()

    def _write(self, view: memoryview) -> None:
        while view:
            try:
                written = self.system.write(self._file, view)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._be_usual()  # blocks of this disk are larger than a page
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
    """Anonymous memory, none of which is there before it is touched."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel without them, or another system
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


FILE_BYTES: Final = 2**30
_CHUNK_BYTES: Final = 4 * 2**20  # leave a device at a time
_TENSOR_ALIGN_BYTES: Final = 64  # mapped tensors then begin where any dtype, and vector units, may

# NOTE(linked): frozen parameters are compared with their file in the checkpoint before, byte by
# byte, and if they are the same there is one file with two names. To read costs less than to write,
# and a file that has been damaged since is not carried on.


@frozen
class Given:
    """A run of elements of a flattened tensor, which this rank writes."""

    path: tuple[str, ...]  # in the manifest
    dtype: torch.dtype
    shape: torch.Size  # of the whole tensor
    start: int
    stop: int

    @property
    def key(self) -> str:
        """In its file."""
        return f"{'/'.join(self.path)}:{self.start}"

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return (self.stop - self.start) * self.dtype.itemsize


@frozen(eq=False)
class GivenBatch:
    """Runs that are read together."""

    runs: tuple[Given, ...]
    read: Callable[[], Sequence[Tensor]]  # 1-D each
    is_resident: bool = False  # see `zero_partition.seams.PartBatch`
    is_frozen: bool = False  # of parameters that do not train

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return sum(run.num_bytes for run in self.runs)


class _DiffersError(Exception):
    """A file is not what would be written."""


def write_files(
    folder: Path,
    rank: int,
    batches: Sequence[GivenBatch],
    *,
    system: FileSystem,
    before: Checkpoint | None,
) -> dict[str, Any]:
    """Write batches to new files of a folder, each on disk when this returns. Local.

    Args:
        folder: Where to.
        rank: In the names of the files.
        batches: What; read one at a time, or again where they are compared.
        system: See `FileSystem`.
        before: Whose files are linked where they are the same; see NOTE(linked).

    Returns:
        For the manifest: its pieces, and facts of files by name.

    Raises:
        FileError: A file could not be written.
    """
    pieces: list[dict[str, Any]] = []
    files: dict[str, dict[str, int]] = {}
    for prefix, is_frozen in (("frozen", True), ("rank", False)):
        of_prefix = (batch for batch in batches if batch.is_frozen is is_frozen)
        for index, chosen in enumerate(in_files(of_prefix, FILE_BYTES)):
            name = f"{prefix}-{rank:05}-{index:02}.safetensors"
            path = folder / name
            with naming(path):
                facts = _link(path, chosen, system, before) if is_frozen else None
                if facts is None:
                    with NewFile(path, system) as file:
                        _put(file.put, chosen)
                    facts = FileFacts(file.num_bytes, file.crc32)
            files[name] = {"bytes": facts.num_bytes, "crc32": facts.crc32}
            for run in (run for batch in chosen for run in batch.runs):
                where = {"file": name, "key": run.key, "start": run.start, "stop": run.stop}
                said = {"path": run.path, "dtype": name_of(run.dtype), "shape": list(run.shape)}
                pieces.append(said | {"piece": where})
    return {"pieces": pieces, "files": files}


def in_files(items: Iterable[Any], max_bytes: int) -> Iterator[list[Any]]:
    """In their order; no file is larger than it may be, but one with a single item."""
    chosen: list[Any] = []
    num_bytes = 0
    for item in items:
        if chosen and num_bytes + item.num_bytes > max_bytes:
            yield chosen
            chosen, num_bytes = [], 0
        chosen.append(item)
        num_bytes += item.num_bytes
    if chosen:
        yield chosen


def _put(put: Callable[[memoryview], object], batches: Sequence[GivenBatch]) -> None:
    """All bytes of a file. The format has no holes: paddings are tensors as well."""
    tensors: list[tuple[str, str, list[int], int]] = []
    cursor = 0
    for index, run in enumerate(run for batch in batches for run in batch.runs):
        if padding := -cursor % _TENSOR_ALIGN_BYTES:
            tensors.append((f"padding.{index}", "U8", [padding], padding))
        cursor += padding + run.num_bytes
        code = CODES.get(run.dtype)
        numel = run.num_bytes if code is None else run.stop - run.start
        tensors.append((run.key, code or "U8", [numel], run.num_bytes))
    put(memoryview(header_of(tensors, align=_TENSOR_ALIGN_BYTES)))
    cursor = 0
    for batch in batches:
        for run, value in zip(batch.runs, batch.read(), strict=True):
            put(memoryview(bytes(-cursor % _TENSOR_ALIGN_BYTES)))
            cursor += -cursor % _TENSOR_ALIGN_BYTES + run.num_bytes
            if value.dtype != run.dtype or value.numel() != run.stop - run.start:
                raise FileError(
                    f"{run.key}: expected {run.stop - run.start} elements of {run.dtype}, got "
                    f"{value.numel()} of {value.dtype}: it has changed while it was saved"
                )
            flat = value.detach().contiguous().view(torch.uint8)
            for start in range(0, flat.numel(), _CHUNK_BYTES):
                put(flat[start : start + _CHUNK_BYTES].cpu().numpy().data)


def _link(
    path: Path, batches: Sequence[GivenBatch], system: FileSystem, before: Checkpoint | None
) -> FileFacts | None:
    """Give the file of the checkpoint before a second name, if it is what would be written."""
    facts = None if before is None else before.files.get(path.name)
    if before is None or facts is None:
        return None
    with suppress(_DiffersError, OSError):
        with (before.path / path.name).open("rb", buffering=0) as file:

            def compare(view: memoryview) -> None:
                if file.read(len(view)) != view:
                    raise _DiffersError

            _put(compare, batches)
            if file.read(1):
                return None
        system.link(before.path / path.name, path)
        return facts
    return None
