"""The safetensors format: a header in JSON, and then the bytes of 1-D tensors, end to end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import torch
from attrs import define, field, frozen
from torch import Tensor

from zero_engine.errors import FileError

# Of each dtype that the format knows; all others are written as their bytes, "U8".
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
_ALIGN_BYTES: Final = 64  # mapped tensors then begin where any dtype, and vector units, may
_LENGTH_BYTES: Final = 8
_LARGEST_HEADER_BYTES: Final = 10**8  # what the safetensors library accepts


@frozen
class PlannedTensor:
    """A 1-D tensor of a file that is going to be written."""

    key: str
    dtype: torch.dtype
    numel: int

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return self.numel * self.dtype.itemsize


@frozen
class TensorFilePlan:
    """What a file is going to be: everything but the values. Equal tensors give equal bytes."""

    tensors: tuple[PlannedTensor, ...]
    header: bytes
    paddings: tuple[int, ...]  # bytes of zeros before each tensor
    num_bytes: int  # of the whole file

    @classmethod
    def of(cls, tensors: Iterable[PlannedTensor]) -> TensorFilePlan:
        """Lay tensors end to end. The format has no holes: paddings are tensors as well."""
        tensors = tuple(tensors)
        said: dict[str, object] = {}
        paddings, cursor = [], 0
        for tensor in tensors:
            padding = -cursor % _ALIGN_BYTES
            if padding:
                span = [cursor, cursor + padding]
                said[f"padding.{len(paddings)}"] = _said("U8", padding, span)
            paddings.append(padding)
            cursor += padding
            code = CODES.get(tensor.dtype)
            numel = tensor.numel if code is not None else tensor.num_bytes
            span = [cursor, cursor + tensor.num_bytes]
            said[tensor.key] = _said(code or "U8", numel, span)
            cursor += tensor.num_bytes
        text = json.dumps(said, separators=(",", ":")).encode()
        text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGN_BYTES)
        header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        return cls(tensors, header, tuple(paddings), len(header) + cursor)


def _said(code: str, numel: int, span: list[int]) -> dict[str, object]:
    return {"dtype": code, "shape": [numel], "data_offsets": span}


@define(eq=False)
class TensorFile:
    """A file to read from; its header is read when it is needed, and the file is not kept open."""

    path: Path
    _places: Mapping[str, tuple[int, int]] | None = field(default=None, init=False)

    def read(self, key: str, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a tensor, in memory of their own.

        Raises:
            FileError: There is no such file or tensor, or the tensor has fewer elements.
        """
        out = torch.empty(stop - start, dtype=dtype)
        if not out.numel():
            return out
        begin, end = self._place(key)
        first, size = begin + start * dtype.itemsize, out.nbytes
        if first + size > end:
            raise FileError(
                f"{self.path}: expected {key!r} to have at least {stop} elements of {dtype}, got "
                f"{end - begin} bytes"
            )
        view = out.view(torch.uint8).numpy().data
        try:
            with self.path.open("rb", buffering=0) as file:
                while size:
                    count = os.preadv(file.fileno(), [view[-size:]], first)
                    if not count:
                        raise FileError(f"{self.path}: expected {size} more bytes at {first}")
                    first, size = first + count, size - count
        except FileError:
            raise
        except OSError as error:
            raise FileError(f"{self.path}: cannot be read: {error.strerror}") from error
        return out

    def _place(self, key: str) -> tuple[int, int]:
        if self._places is None:
            self._places = _read_header(self.path)
        if key not in self._places:
            raise FileError(f"{self.path}: expected a tensor {key!r}; there is none")
        return self._places[key]


def _read_header(path: Path) -> dict[str, tuple[int, int]]:
    """Where the bytes of each tensor begin and end in the file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > _LARGEST_HEADER_BYTES:
                raise FileError(f"{path}: expected a safetensors file, got a header of {length} B")
            text = file.read(length)
        data = _LENGTH_BYTES + length
        return {
            key: (data + said["data_offsets"][0], data + said["data_offsets"][1])
            for key, said in json.loads(text).items()
            if key != "__metadata__"
        }
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise FileError(f"{path}: expected a safetensors file ({error!r})") from error
