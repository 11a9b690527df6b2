"""Range: a tensor elsewhere, of which any run of elements is read alone."""

from __future__ import annotations

from typing import TypeAlias, final

import torch
from attrs import frozen
from torch import Tensor
from zero_partition.seams import AbstractRangeReader

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
