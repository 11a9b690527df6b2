"""A tensor that lies in several others."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from torch import Tensor
from zero_partition import AbstractRangeReader


@final
@frozen(eq=False)
class JoinedRange(AbstractRangeReader):
    """Readers end to end, in one shape."""

    joined_shape: torch.Size
    joined_dtype: torch.dtype
    parts: tuple[tuple[Tensor, int, int], ...]  # 1-D tensors, and which elements of them
    _starts: tuple[int, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        starts, cursor = [], 0
        for _, first, last in self.parts:
            starts.append(cursor)
            cursor += last - first
        object.__setattr__(self, "_starts", tuple(starts))

    @property
    def shape(self) -> torch.Size:
        """Of the whole."""
        return self.joined_shape

    @property
    def dtype(self) -> torch.dtype:
        """Of all parts."""
        return self.joined_dtype

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop), as a view where they lie in one part: copy what is to stay."""
        found = []
        for begin, (tensor, first, last) in zip(self._starts, self.parts, strict=True):
            low, high = max(start - begin, 0), min(stop - begin, last - first)
            if low < high:
                found.append(tensor[first + low : first + high])
        if len(found) == 1:
            return found[0]
        return torch.cat(found) if found else torch.empty(0, dtype=self.dtype)
