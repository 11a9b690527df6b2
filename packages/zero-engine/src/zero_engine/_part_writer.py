"""A rank's pieces on their way to files: batch by batch, checksummed as they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from attrs import define, field, frozen
from torch import Tensor

from ._checkpoint import Checkpoint
from ._errors import FileError
from ._file_system import FileSystem, named
from ._manifest import FileFacts
from ._new_file import NewFile
from ._plain_values import name_of
from ._tensor_file import PlannedTensor, TensorFilePlan

FILE_BYTES: Final = 2**30
_CHUNK_BYTES: Final = 4 * 2**20  # leave a device at a time

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

    def planned(self) -> PlannedTensor:
        """As a tensor of a file."""
        return PlannedTensor(self.key, self.dtype, self.stop - self.start)


@frozen(eq=False)
class GivenBatch:
    """Runs that are read together."""

    runs: tuple[Given, ...]
    read: Callable[[], Sequence[Tensor]]  # 1-D each
    is_resident: bool = False  # see `zero_partition.PartBatch`

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return sum(run.planned().num_bytes for run in self.runs)


@frozen
class Written:
    """What a rank has written; travels as JSON."""

    pieces: list[dict[str, Any]] = field(factory=list)
    files: dict[str, dict[str, int]] = field(factory=dict)


class _Sink(Protocol):
    def put(self, view: memoryview) -> None: ...


class _DiffersError(Exception):
    """A file is not what would be written."""


@define(eq=False)
class _Comparison:
    """Reads a file where it would be written."""

    _file: Any

    def put(self, view: memoryview) -> None:
        if self._file.read(len(view)) != view:
            raise _DiffersError


def write_parts(
    folder: Path,
    prefix: str,
    batches: Iterable[GivenBatch],
    *,
    system: FileSystem,
    before: Checkpoint | None = None,
) -> Written:
    """Write batches to new files of a folder, each on disk when this returns. Local.

    Args:
        folder: Where to.
        prefix: Of the names of the files.
        batches: What; read one at a time, or again where they are compared.
        system: See `FileSystem`.
        before: Whose files are linked where they are the same; see NOTE(linked).

    Raises:
        FileError: A file could not be written.
    """
    written = Written()
    for index, chosen in enumerate(_in_files(batches)):
        name = f"{prefix}-{index:02}.safetensors"
        plan = TensorFilePlan.of(run.planned() for batch in chosen for run in batch.runs)
        path = folder / name
        try:
            facts = _link(path, plan, chosen, system, before)
            if facts is None:
                with NewFile(path, system) as file:
                    _put(file, plan, chosen)
                facts = FileFacts(file.num_bytes, file.crc32)
        except FileError:
            raise
        except OSError as error:
            raise named(error, path) from error
        written.files[name] = {"bytes": facts.num_bytes, "crc32": facts.crc32}
        written.pieces.extend(_said(run, name) for batch in chosen for run in batch.runs)
    return written


def _said(run: Given, file: str) -> dict[str, Any]:
    return {
        "path": run.path,
        "dtype": name_of(run.dtype),
        "shape": list(run.shape),
        "piece": {"file": file, "key": run.key, "start": run.start, "stop": run.stop},
    }


def _in_files(batches: Iterable[GivenBatch]) -> Iterator[list[GivenBatch]]:
    chosen: list[GivenBatch] = []
    num_bytes = 0
    for batch in batches:
        if chosen and num_bytes + batch.num_bytes > FILE_BYTES:
            yield chosen
            chosen, num_bytes = [], 0
        chosen.append(batch)
        num_bytes += batch.num_bytes
    if chosen:
        yield chosen


def _put(sink: _Sink, plan: TensorFilePlan, batches: Iterable[GivenBatch]) -> None:
    sink.put(memoryview(plan.header))
    paddings = iter(plan.paddings)
    for batch in batches:
        for run, value in zip(batch.runs, batch.read(), strict=True):
            sink.put(memoryview(bytes(next(paddings))))
            if value.dtype != run.dtype or value.numel() != run.stop - run.start:
                raise FileError(
                    f"{run.key}: expected {run.stop - run.start} elements of {run.dtype}, got "
                    f"{value.numel()} of {value.dtype}: it has changed while it was saved"
                )
            flat = value.detach().contiguous().view(torch.uint8)
            for start in range(0, flat.numel(), _CHUNK_BYTES):
                sink.put(flat[start : start + _CHUNK_BYTES].cpu().numpy().data)


def _link(
    path: Path,
    plan: TensorFilePlan,
    batches: Sequence[GivenBatch],
    system: FileSystem,
    before: Checkpoint | None,
) -> FileFacts | None:
    """Give the file of the checkpoint before a second name, if it is what would be written."""
    facts = None if before is None else before.files.get(path.name)
    if before is None or facts is None or facts.num_bytes != plan.num_bytes:
        return None
    with suppress(_DiffersError, OSError):
        with (before.path / path.name).open("rb", buffering=0) as file:
            _put(_Comparison(file), plan, batches)
        system.link(before.path / path.name, path)
        return facts
    return None
