"""export(): write a checkpoint's weights as Hugging Face's files, in constant memory."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor
from zero_partition.seams import AbstractRangeReader, SplitReader

from zero_engine.errors import ConfigError, FileError
from zero_engine.readers import find_reader

from .file_system import FILE_SYSTEM, NewFile, naming
from .folder import Checkpoint, find_complete
from .manifest import MANIFEST
from .pretrained import INDEX, SINGLE
from .ranges import ALL_CODES, FileRun, Range, file_bytes, in_files

# Bytes that are read and converted at a time.
_CHUNK_BYTES: Final = 2**20


@frozen
class _Tensor:
    """Tensor to write, with the dtype that it is converted to."""

    name: str
    reader: AbstractRangeReader
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.reader.shape.numel() * self.dtype.itemsize


@frozen
class ExportReport:
    """Files that `export` wrote, and what they contain."""

    # Files of weights.
    files: tuple[Path, ...]
    num_tensors: int
    # Bytes of these files.
    num_bytes: int


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
        max_shard_bytes: Most bytes of tensors in one file, unless it has a single larger one.
            Several files have an index beside them.
        progress: Called with a number of bytes whenever so many more have been written.

    Raises:
        ConfigError: `dtype` or `max_shard_bytes` makes no sense.
        FileError: There is no complete checkpoint, a file of it is damaged, a tensor has a dtype
            that safetensors has no word for, or the folder cannot be written or is not empty.
    """
    _check_choices(dtype, max_shard_bytes)
    out = Path(out)
    _check_absent(out)
    try:
        readers = open_weights_of(Path(checkpoint), tag)[1]
    except FileError as error:
        exported = [name for name in (SINGLE, INDEX) if (Path(checkpoint) / name).is_file()]
        if not exported:
            raise
        raise FileError(
            f"{checkpoint}: expected a checkpoint, got a folder that has {exported[0]}, as one "
            "that was exported already: from_pretrained() of transformers and "
            "zero_engine.load_pretrained() read it as it is; for another dtype or size of files, "
            "export the checkpoint that it came from"
        ) from error
    tensors = [_chosen(name, reader, dtype) for name, reader in readers.items()]
    parts = list(in_files(tensors, max_shard_bytes)) or [[]]
    names = [f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
    files = dict(zip(names if len(parts) > 1 else [SINGLE], parts, strict=True))
    final, num_bytes = out.absolute(), 0
    # Not "partial": a save to the same folder meanwhile would remove it as a leftover.
    aside = f".{final.name}.exporting-{secrets.token_hex(4)}"
    try:
        FILE_SYSTEM.make_folders(final.parent)
        with FILE_SYSTEM.published(final, aside) as folder:
            FILE_SYSTEM.mkdir(folder)
            for name, part in files.items():
                num_bytes += _write(folder / name, part, progress)
            if len(files) > 1:
                FILE_SYSTEM.write_file(folder / INDEX, _index_of(files))
            FILE_SYSTEM.sync_folder(folder)
    except FileError:
        raise
    except OSError as error:
        raise FileError(
            f"{out}: cannot be written ({error.strerror}); there is nothing there now"
        ) from error
    return ExportReport(
        files=tuple(out / name for name in files), num_tensors=len(tensors), num_bytes=num_bytes
    )


def open_weights_of(
    path: Path, tag: str | None, *, has_frozen: bool = True
) -> tuple[Any, dict[str, AbstractRangeReader]]:
    """Open a checkpoint, ours or DeepSpeed's; return it and readers by name. Local.

    Readers are those of weights and buffers. Files of ours with any of these are verified first.
    """
    found = _open(path, tag)
    if isinstance(found, Checkpoint) and found.manifest.excludes_frozen and has_frozen:
        # Of a Trainer's checkpoint, which has ours within it.
        above = (each / "adapter_model.safetensors" for each in [*found.path.parents][:2])
        adapters = next((file for file in above if file.exists()), None)
        raise FileError(
            f"{found.path}: was saved with exclude_frozen=True, so that it has a part of the "
            "model only; load it into the model, save that whole, and export what was saved"
            + (f". The adapters are in {adapters}" if adapters else "")
        )
    names = found.source.params if isinstance(found, Checkpoint) else ()
    numbered = [name for name in names if "@" in name and name.rpartition("@")[2].isdigit()]
    if numbered:
        raise FileError(
            f"{found.path}: parameter {numbered[0]!r} is one of several of this name, of experts "
            "that were spread over ranks (ZeroConfig.groups), and files of weights have one of "
            "each name; give each expert a name of its own, such as its number among all"
        )
    left_out = frozenset() if has_frozen else found.frozen
    weights: dict[str, Any] = {**found.source.params, **found.source.buffers}
    readers = {name: reader for name, reader in weights.items() if name not in left_out}
    if isinstance(found, Checkpoint):
        stored = (r.parts if isinstance(r, SplitReader) else r for r in readers.values())
        runs = [run for reader in stored if isinstance(reader, Range) for run in reader.runs]
        found.verify({run.file.path.name: None for run in runs if isinstance(run, FileRun)})
    return found, readers


def _check_choices(dtype: Any, max_shard_bytes: Any) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(
            f"export(): expected dtype to be a floating-point torch.dtype or None, got {dtype!r}"
        )
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise ConfigError(
            f"export(): expected max_shard_bytes to be a positive int, got {max_shard_bytes!r}"
        )


def _open(path: Path, tag: str | None) -> Any:
    if (reader := find_reader()) is not None and reader.is_checkpoint(path, tag):
        return reader.open_checkpoint(path, tag)
    if tag is None and (path / MANIFEST).is_file():
        path = path.absolute()
        path, tag = path.parent, path.name
    found = Checkpoint.open(path, tag)
    if found is None:
        got = "it is a file" if path.exists() else "there is no such folder"
        if path.is_dir():
            inside = [each for each in sorted(path.iterdir()) if find_complete(each)]
            got = f"found none; did you mean {inside[0]}?" if inside else "found none"
        raise FileError(
            f"{path}: expected a folder with a complete checkpoint, which has a {MANIFEST}; {got}"
        )
    return found


def _check_absent(out: Path) -> None:
    if out.is_dir():
        if any(out.iterdir()):
            raise FileError(f"{out}: expected no folder or an empty one; it has files in it")
    elif os.path.lexists(out):
        raise FileError(f"{out}: expected no folder or an empty one; it is a file")


def _chosen(name: str, reader: AbstractRangeReader, dtype: torch.dtype | None) -> _Tensor:
    chosen = reader.dtype
    if dtype is not None and reader.dtype.is_floating_point:
        chosen = dtype
    if chosen not in ALL_CODES:
        raise FileError(
            f"{name!r}: expected one of the dtypes of safetensors, got {chosen}; leave it out of "
            "the model's state dict, or export it with a dtype that the format has"
        )
    return _Tensor(name, reader, chosen)


def _index_of(files: Mapping[str, Sequence[_Tensor]]) -> bytes:
    """Return the index of several files, which has the file of each tensor, as JSON."""
    places = {tensor.name: name for name, part in files.items() for tensor in part}
    num_bytes = sum(tensor.num_bytes for part in files.values() for tensor in part)
    content = {
        "metadata": {"total_size": num_bytes},
        "weight_map": {name: places[name] for name in sorted(places)},
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def _write(path: Path, part: list[_Tensor], progress: Callable[[int], object] | None) -> int:
    """Write tensors to a safetensors file; return its size in bytes.

    Tensors are in the order of the safetensors library: the widest dtypes first, so that all are
    aligned, then by name.
    """
    part = sorted(part, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    said = ((t.name, ALL_CODES[t.dtype], t.reader.shape, t.num_bytes) for t in part)
    metadata = {"format": "pt"}  # required by transformers
    with NewFile(path, FILE_SYSTEM) as file:
        for view in file_bytes(said, _values(part, progress), align=8, metadata=metadata):
            file.put(view)
    return file.num_bytes


def _values(part: list[_Tensor], progress: Callable[[int], object] | None) -> Iterator[Tensor]:
    for tensor in part:
        numel = tensor.reader.shape.numel()
        step = _CHUNK_BYTES // max(tensor.dtype.itemsize, tensor.reader.dtype.itemsize)
        for start in range(0, numel, step):
            values = tensor.reader.read(start, min(start + step, numel)).to(tensor.dtype)
            yield values
            if progress is not None:
                progress(values.nbytes)


def write_weights(state: Mapping[str, Any], path: Path) -> None:
    """Write a state dict to one file: of safetensors or of torch, as its name ends. Local.

    A file that was there before is unchanged if the new one cannot be written.
    """
    with naming(path):
        FILE_SYSTEM.make_folders(path.parent)
        with FILE_SYSTEM.published(path, f".{path.name}.partial") as aside:
            # A process that was killed may have left it.
            aside.unlink(missing_ok=True)
            if path.suffix == ".safetensors":
                first: dict[int, str] = {}
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        first.setdefault(id(value), name)
                tensors = [_chosen(name, Range.of(state[name]), None) for name in first.values()]
                _write(aside, tensors, None)
                return
            with aside.open("xb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
