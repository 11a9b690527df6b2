"""Readers of tensors in safetensors files, torch's files or memory, by any range of elements."""

from __future__ import annotations

import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import torch
from attrs import frozen
from torch import Tensor
from zero_partition.seams import AbstractRangeReader

from zero_engine.errors import FileError

from .file_system import OpenFolder, open_regular
from .limits import LARGEST_HEADER_BYTES

# ---- The safetensors format: a header in JSON, then the bytes of tensors, end to end ----

# Code of each dtype that checkpoints are written in; others are written as bytes, "U8".
CODES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALL_CODES: Final = CODES | {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.complex64: "C64",
}
_DTYPES: Final = {code: dtype for dtype, code in ALL_CODES.items()} | {
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
# Bytes that are copied from a device at a time.
_CHUNK_BYTES: Final = 4 * 2**20
_LENGTH_BYTES: Final = 8
_WHEN_READ: Final = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)


def file_bytes(
    tensors: Iterable[tuple[str, str, Sequence[int], int]],
    values: Iterable[Tensor],
    *,
    align: int,
    metadata: Mapping[str, str] | None = None,
) -> Iterator[memoryview]:
    """Yield the bytes of a safetensors file in order; use each view before the next. Local.

    Args:
        tensors: Key, code of the dtype, shape and bytes of each tensor.
        values: Values of these, end to end, in parts of any size, which are taken one by one.
        align: The first tensor begins at a multiple of this, in bytes.
        metadata: Metadata of the file.
    """
    said: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    cursor = 0
    for key, code, shape, num_bytes in tensors:
        span = [cursor, cursor + num_bytes]
        said[key] = {"dtype": code, "shape": list(shape), "data_offsets": span}
        cursor += num_bytes
    text = json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % align)
    yield memoryview(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
    for value in values:
        flat = value.detach().contiguous().view(-1).view(torch.uint8)
        for start in range(0, flat.numel(), _CHUNK_BYTES):
            yield flat[start : start + _CHUNK_BYTES].cpu().numpy().data


def in_files(items: Iterable[Any], max_bytes: int) -> Iterator[list[Any]]:
    """Yield the items of each file, in order; only a single item may exceed `max_bytes`."""
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


@frozen(eq=False)
class TensorFile:
    """Safetensors file; its header is read when it is needed, and the file is not kept open."""

    path: Path
    # Folder that the file is read from, even after that was renamed.
    folder: OpenFolder | None = None

    @cached_property
    def tensors(self) -> Mapping[str, tuple[torch.dtype, torch.Size, int]]:
        """Dtype, shape and first byte of tensors, by key. FileError unless the file is whole."""
        try:
            with open_regular(self.path, self.folder) as file:
                return _read_header(file)
        except FileNotFoundError as error:
            raise FileError(f"{self.path}: no such file") from error
        except (ArithmeticError, *_WHEN_READ) as error:
            # Numbers that are too large raise an ArithmeticError.
            raise FileError(
                f"{self.path}: expected a whole safetensors file ({error!r}); save or download "
                "it again"
            ) from error


def _read_header(file: FileIO) -> dict[str, tuple[torch.dtype, torch.Size, int]]:
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > LARGEST_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    said = json.loads(file.read(length))
    num_bytes = os.fstat(file.fileno()).st_size
    said.pop("__metadata__", None)
    tensors, cursor = {}, _LENGTH_BYTES + length
    for key, of in sorted(said.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = _DTYPES[of["dtype"]], torch.Size(of["shape"])
        tensors[key] = dtype, shape, cursor
        size = shape.numel() * dtype.itemsize
        begin = cursor - _LENGTH_BYTES - length
        if of["data_offsets"] != [begin, begin + size]:
            raise ValueError(f"{key!r} of {size} bytes from {begin} at {of['data_offsets']}")
        cursor += size
    if cursor != num_bytes:
        raise ValueError(f"{num_bytes} bytes, where the header tells of {cursor}")
    return tensors


# ---- Ranges ----


@final
@frozen(eq=False)
class FileRun:
    """A 1-D tensor of a safetensors file, or all elements of one that has another shape."""

    file: TensorFile
    key: str
    dtype: torch.dtype
    numel: int

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) in new memory."""
        out = torch.empty(max(0, stop - start), dtype=self.dtype, device="cpu")
        self.read_into(out, start)
        return out

    def read_into(self, out: Tensor, start: int) -> None:
        """Fill contiguous memory of this dtype on the CPU with the elements from `start` on."""
        path, key, dtype, stop = self.file.path, self.key, self.dtype, start + out.numel()
        if stop <= start:
            return
        if key not in self.file.tensors:
            raise FileError(f"{path}: expected a tensor {key!r}; there is none")
        stored, shape, begin = self.file.tensors[key]
        num_bytes = shape.numel() * stored.itemsize
        if stop * dtype.itemsize > num_bytes:
            raise FileError(
                f"{path}: expected {key!r} to have at least {stop} elements of {dtype}, got "
                f"{num_bytes} bytes"
            )
        first, view = begin + start * dtype.itemsize, out.view(torch.uint8).numpy().data
        try:
            with open_regular(path, self.file.folder) as file:
                while view and (count := os.preadv(file.fileno(), [view], first)):
                    first, view = first + count, view[count:]
        except OSError as error:
            raise FileError(f"{path}: cannot be read: {error.strerror}") from error
        if view:
            raise FileError(f"{path}: expected {len(view)} more bytes at {first}")


@final
@frozen(eq=False)
class MemoryRun:
    """Elements of a tensor in memory, or in a file that is mapped."""

    tensor: Tensor
    first: int
    numel: int

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the run, as a view if the tensor is contiguous."""
        start, stop = self.first + start, self.first + stop
        if self.tensor.is_contiguous():
            return self.tensor.view(-1)[start:stop]
        return self.tensor[
            torch.unravel_index(torch.arange(start, stop, device="cpu"), self.tensor.shape)
        ]


Run: TypeAlias = FileRun | MemoryRun


@final
@frozen(eq=False)
class Range(AbstractRangeReader):
    """Reader of a tensor; its elements are those of `runs`, one run after the other."""

    shape: torch.Size
    dtype: torch.dtype
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Range:
        """Return a reader of all elements of a tensor in memory."""
        return cls(tensor.shape, tensor.dtype, (MemoryRun(tensor.detach(), 0, tensor.numel()),))

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop), maybe as a view of a tensor: copy values to keep.

        Raises:
            FileError: A file is missing, or is not what it was said to be.
        """
        parts = [run.read(first, last) for run, first, last in self._runs_in(start, stop)]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype, device="cpu")

    def read_into(self, memory: Tensor, start: int) -> None:
        """Fill 1-D memory with the elements from `start` on; from files without a copy, if it can.

        Raises:
            FileError: A file is missing, or is not what it was said to be.
        """
        is_plain = type(memory) is Tensor and memory.device.type == "cpu"
        is_as_in_files = is_plain and memory.dtype == self.dtype and memory.stride(0) == 1
        for run, first, last in self._runs_in(start, start + memory.numel()):
            part, memory = memory[: last - first], memory[last - first :]
            if isinstance(run, FileRun) and is_as_in_files:
                run.read_into(part.detach(), first)
                # `read_into` writes without torch. This lets autograd notice the write.
                part[:0].zero_()
            else:
                part.copy_(run.read(first, last))

    def _runs_in(self, start: int, stop: int) -> Iterator[tuple[Run, int, int]]:
        """Yield runs that have some of these elements, with [first, last) within the run."""
        begin = 0
        for run in self.runs:
            first, last = max(start - begin, 0), min(stop - begin, run.numel)
            if first < last:
                yield run, first, last
            begin += run.numel

    def whole(self) -> Tensor:
        """Return the full tensor, in its shape."""
        return self.read(0, self.shape.numel()).view(self.shape)


def open_safetensors(path: Path) -> dict[str, Range]:
    """Open the tensors of a safetensors file, by name. Local; reads its header only."""
    file = TensorFile(path)
    return {
        key: Range(shape, dtype, (FileRun(file, key, dtype, shape.numel()),))
        for key, (dtype, shape, _) in file.tensors.items()
    }


# NOTE(weights_only): torch's unpickler for `weights_only=True` runs no code: it knows the functions
# that make tensors, and refuses the file when it meets any other name. A stand-in is a class of
# ours that it may make in the place of one other name, and of which it sets attributes.


def open_torch_file(path: Path) -> dict[str, Range]:
    """Open the tensors of a state dict that torch.save wrote, by name. Local; reads no values."""
    content = read_torch_file(path)
    if not isinstance(content, Mapping):
        raise FileError(
            f"{path}: expected a state dict, from names to tensors, got a {type(content).__name__}"
        )
    for name, value in content.items():
        is_tensor = isinstance(value, Tensor)
        is_dense = is_tensor and value.layout is torch.strided and not value.is_quantized
        if not isinstance(name, str) or not is_dense or value.is_meta:
            got = f"{value.layout} {value.dtype} tensor" if is_tensor else type(value).__name__
            # Of several, such as of a model and its optimizer, the one that is named so.
            nested = (key for key, part in content.items() if isinstance(part, Mapping))
            key = min(nested, key=lambda each: each not in ("model", "state_dict"), default="key")
            raise FileError(
                f"{path}: expected a state dict, from names to dense tensors; {name!r} is a {got}. "
                "If the state dict is a part of what was saved, save that part by itself: "
                f"torch.save(torch.load(path)[{key!r}], other_path)"
            )
    return {name: Range.of(value) for name, value in content.items()}


def read_torch_file(path: Path, *, stand_ins: Mapping[str, type] | None = None) -> Any:
    """Read what torch.save wrote; tensors are mapped, and only read when they are used. Local.

    `stand_ins` has classes to make in the place of others, by full name of these. See
    NOTE(weights_only).
    """
    if not path.is_file():
        raise FileError(f"{path}: no such file")
    if not zipfile.is_zipfile(path):
        raise FileError(
            f"{path}: expected a whole file as torch.save writes it since version 1.6; if it is "
            "older, write it again with torch.save, else it was cut short"
        )
    _check_archive(path)
    allowed: list[Any] = [(kind, name) for name, kind in (stand_ins or {}).items()]
    # Depending on its version, torch warns that it validates sparse tensors, or that it does not.
    # Where warnings are errors, an intact file would be called damaged.
    quiet = warnings.catch_warnings(action="ignore")
    with torch.serialization.safe_globals(allowed), quiet:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise FileError(
                f"{path}: expected tensors and plain values only, and nothing of it was run: it "
                f"asks for {_unknown_names(path) or error}. Save it again without these objects; "
                "a DeepSpeed checkpoint can be converted by its own zero_to_fp32.py with "
                "--safe_serialization, and the weights loaded with load_pretrained()"
            ) from error
        except Exception as error:
            # torch raises errors of many types for a damaged file.
            raise FileError(
                f"{path}: expected a whole file of torch.save ({error}); it is damaged"
            ) from error


def _check_archive(path: Path) -> None:
    """Raise FileError if an archive is compressed, or would give more bytes than it has."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise FileError(f"{path}: expected a whole file of torch.save ({error})") from error
    packed = [entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
    has, gives = path.stat().st_size, sum(entry.file_size for entry in entries)
    if packed or gives > has:
        what = f"{packed[0].filename!r} is compressed" if packed else "entries share their bytes"
        raise FileError(
            f"{path}: expected an archive as torch.save writes it, got one of {has} bytes that "
            f"would be {gives}: {what}. Save it again with torch.save"
        )


def _unknown_names(path: Path) -> str:
    """Return the names that a file needs beyond those allowed, found without running it."""
    try:
        return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)))
    except Exception:
        # The file is damaged as well, as the first error says.
        return ""
