"""Range: a tensor in files or in memory, of which any run of elements is read alone."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from attrs import frozen
from torch import Tensor
from zero_partition.seams import AbstractRangeReader

from zero_engine.errors import FileError

from .tensor_file import TensorFile


@final
@frozen(eq=False)
class FileRun:
    """A 1-D tensor of a safetensors file, or all elements of one that has another shape."""

    file: TensorFile
    key: str
    dtype: torch.dtype
    numel: int

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop), in memory of their own."""
        return self.file.read(self.key, self.dtype, start, stop)


@final
@frozen(eq=False)
class MemoryRun:
    """Elements of a tensor in memory, or in a file that is mapped."""

    tensor: Tensor
    first: int
    numel: int

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of these, as a view where they lie in order."""
        start, stop = self.first + start, self.first + stop
        if self.tensor.is_contiguous():
            return self.tensor.view(-1)[start:stop]
        return self.tensor[torch.unravel_index(torch.arange(start, stop), self.tensor.shape)]


Run: TypeAlias = FileRun | MemoryRun


@final
@frozen(eq=False)
class Range(AbstractRangeReader):
    """Runs end to end, in one shape."""

    shape: torch.Size
    dtype: torch.dtype
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Range:
        """All of a tensor."""
        return cls(tensor.shape, tensor.dtype, (MemoryRun(tensor.detach(), 0, tensor.numel()),))

    @property
    def num_bytes(self) -> int:
        """Of all its elements."""
        return self.shape.numel() * self.dtype.itemsize

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop), as a view where they lie in one tensor: copy what is to stay.

        Raises:
            FileError: A file is missing, or is not what it was said to be.
        """
        parts, begin = [], 0
        for run in self.runs:
            first, last = max(start - begin, 0), min(stop - begin, run.numel)
            if first < last:
                parts.append(run.read(first, last))
            begin += run.numel
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype)

    def whole(self) -> Tensor:
        """All of it, in its shape."""
        return self.read(0, self.shape.numel()).view(self.shape)


def open_safetensors(path: Path) -> dict[str, Range]:
    """The tensors of a file, by name. Local; reads its header only."""
    file = TensorFile(path)
    return {
        key: Range(shape, dtype, (FileRun(file, key, dtype, shape.numel()),))
        for key, (dtype, shape, _) in file.tensors().items()
    }


# NOTE(weights_only): torch's unpickler for `weights_only=True` runs no code: it knows the functions
# that make tensors, and refuses the file when it meets any other name. A stand-in is a class of
# ours that it may make in the place of one other name, and of which it sets attributes.


def open_torch_file(path: Path) -> dict[str, Range]:
    """The tensors of a state dict that torch.save wrote, by name. Local; reads no values."""
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
            raise FileError(
                f"{path}: expected a state dict, from names to dense tensors; {name!r} is a {got}. "
                "If the state dict is a part of what was saved, save that part by itself"
            )
    return {name: Range.of(value) for name, value in content.items()}


def read_torch_file(path: Path, *, stand_ins: Mapping[str, type] | None = None) -> Any:
    """What torch.save wrote; tensors are mapped, so that only what is read of them is. Local.

    `stand_ins` are by full name of a class what to make in its place. See NOTE(weights_only).
    """
    if not path.is_file():
        raise FileError(f"{path}: no such file")
    if not zipfile.is_zipfile(path):
        raise FileError(
            f"{path}: expected a whole file as torch.save writes it since version 1.6; if it is "
            "older, write it again with torch.save, else it was cut short"
        )
    allowed: list[Any] = [(kind, name) for name, kind in (stand_ins or {}).items()]
    with torch.serialization.safe_globals(allowed):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise FileError(
                f"{path}: expected tensors and plain values only, and nothing of it was run: it "
                f"asks for {_unknown_names(path) or error}. Save it again without these objects; "
                "a DeepSpeed checkpoint can be converted by its own zero_to_fp32.py with "
                "--safe_serialization, and the weights loaded with load_pretrained()"
            ) from error
        except Exception as error:  # what a damaged file makes torch say has many types
            raise FileError(
                f"{path}: expected a whole file of torch.save ({error}); it is damaged"
            ) from error


def _unknown_names(path: Path) -> str:
    """What a file asks for beyond what is allowed, found without running it."""
    try:
        return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)))
    except Exception:  # it is damaged as well: the first error says enough
        return ""
