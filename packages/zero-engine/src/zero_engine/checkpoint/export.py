"""export(): a checkpoint's weights as Hugging Face's files, in memory that does not grow."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor
from zero_partition.seams import AbstractRangeReader

from zero_engine.errors import ConfigError, FileError

from .deepspeed import DeepSpeedFolder, is_deepspeed
from .folder import FILE_SYSTEM
from .manifest import MANIFEST
from .pieces import Checkpoint, PiecesRange
from .pretrained import INDEX, ExportedFile, ExportedTensor, index_of, plan_files

_CHUNK_BYTES: Final = 2 * 2**20  # on their way from one file to the other


@frozen
class ExportReport:
    """What was written."""

    files: tuple[Path, ...]  # of weights
    num_tensors: int
    num_bytes: int  # of these files


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    progress: Callable[[int], object] | None = None,
) -> ExportReport:
    """Write a checkpoint's weights as a folder that `from_pretrained` of transformers loads. Local.

    Parameters are what was trained: the masters' values where there were masters. Tied ones are
    written once, under the first of their names. Persistent buffers are those of rank 0. One
    process does it, without a GPU, and needs 32 MiB whatever the size of the model.

    The folder is complete or absent. It has the weights only: `config.json` and the tokenizer's
    files come from where the model came from.

    Args:
        checkpoint: A folder of checkpoints, or one of them; also one that DeepSpeed's ZeRO saved,
            which is read as `load_deepspeed` does, and mapped.
        out: The folder to make; it may exist if it is empty.
        tag: Which checkpoint of the folder; the newest complete one when None.
        dtype: Floating-point tensors are rounded to it, to nearest even; as they are when None.
        max_shard_bytes: Of tensors in one file; with several files there is an index beside them.
        progress: Called with a number of bytes whenever so many more have been written.

    Raises:
        ConfigError: `dtype` or `max_shard_bytes` makes no sense.
        FileError: There is no complete checkpoint, a file of it is damaged, a tensor has a dtype
            that safetensors has no word for, or the folder cannot be written or is not empty.
    """
    _check_choices(dtype, max_shard_bytes)
    found, readers = open_weights_of(Path(checkpoint), tag)
    files = plan_files(readers, dtype=dtype, max_shard_bytes=max_shard_bytes)
    out = Path(out)
    _check_absent(out)
    verify_weights(found, readers)
    with _appearing(out) as folder:
        for file in files:
            _write(folder / file.name, _content_of(file, progress))
        if len(files) > 1:
            _write(folder / INDEX, iter([index_of(files)]))
    return ExportReport(
        files=tuple(out / file.name for file in files),
        num_tensors=sum(len(file.tensors) for file in files),
        num_bytes=sum(file.num_bytes for file in files),
    )


def open_weights_of(
    path: Path, tag: str | None, *, has_frozen: bool = True
) -> tuple[Checkpoint | DeepSpeedFolder, dict[str, AbstractRangeReader]]:
    """A checkpoint, ours or DeepSpeed's, and readers of its weights and buffers by name. Local.

    Raises:
        FileError: As for `export`.
    """
    found = _open(path, tag)
    if isinstance(found, Checkpoint):
        frozen = found.frozen
        if has_frozen and found.excludes_frozen:
            raise FileError(
                f"{found.path}: was saved with exclude_frozen=True, so that it has a part of the "
                "model only; load it into the model, save that whole, and export what was saved"
            )
    else:
        frozen = found.params.keys() - found.states.keys()
    params = {n: r for n, r in found.params.items() if has_frozen or n not in frozen}
    return found, {**params, **found.buffers}


def verify_weights(
    found: Checkpoint | DeepSpeedFolder, readers: Mapping[str, AbstractRangeReader]
) -> None:
    """Raise FileError unless files with anything of these are as they were saved. Local."""
    if isinstance(found, Checkpoint):
        found.verify(_files_of(readers.values()))


def _check_choices(dtype: Any, max_shard_bytes: Any) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(
            f"export(): expected dtype to be a floating-point torch.dtype or None, got {dtype!r}"
        )
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise ConfigError(
            f"export(): expected max_shard_bytes to be a positive int, got {max_shard_bytes!r}"
        )


def _open(path: Path, tag: str | None) -> Checkpoint | DeepSpeedFolder:
    if is_deepspeed(path, tag):
        return DeepSpeedFolder.open(path, tag)
    if tag is None and (path / MANIFEST).is_file():
        path = path.absolute()
        path, tag = path.parent, path.name
    found = Checkpoint.open(path, tag)
    if found is None:
        raise FileError(
            f"{path}: expected a folder with a complete checkpoint, which has a {MANIFEST}; found "
            "none"
        )
    return found


def _files_of(readers: Any) -> list[str]:
    """Names of the files that hold anything of these."""
    pieces = (piece for r in readers if isinstance(r, PiecesRange) for piece in r.stored.pieces)
    return list(dict.fromkeys(piece.file for piece in pieces))


def _check_absent(out: Path) -> None:
    if out.is_dir():
        if any(out.iterdir()):
            raise FileError(f"{out}: expected no folder or an empty one; it has files in it")
    elif os.path.lexists(out):
        raise FileError(f"{out}: expected no folder or an empty one; it is a file")


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A folder to write to, named `out` at the end of the context and removed after an error."""
    out = out.absolute()
    # Not "partial": a save to the same folder meanwhile would take it for its own leftovers.
    folder = out.parent / f".{out.name}.exporting-{secrets.token_hex(4)}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        try:
            yield folder
            FILE_SYSTEM.sync_folder(folder)
            folder.rename(out)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        FILE_SYSTEM.sync_folder(out.parent)
    except FileError:
        raise
    except OSError as error:
        raise FileError(
            f"{out}: cannot be written ({error.strerror}); there is nothing there now"
        ) from error


def _write(path: Path, content: Iterator[Any]) -> None:
    with path.open("xb", buffering=0) as file:
        for chunk in content:
            view = memoryview(chunk)
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def _content_of(file: ExportedFile, progress: Callable[[int], object] | None) -> Iterator[Any]:
    yield file.header
    for tensor in file.tensors:
        for values in _chunks_of(tensor):
            yield values.contiguous().view(torch.uint8).numpy()
            if progress is not None:
                progress(values.nbytes)


def _chunks_of(tensor: ExportedTensor) -> Iterator[Tensor]:
    numel = tensor.reader.shape.numel()
    step = _CHUNK_BYTES // max(tensor.dtype.itemsize, tensor.reader.dtype.itemsize)
    for start in range(0, numel, step):
        yield tensor.reader.read(start, min(start + step, numel)).to(tensor.dtype)
