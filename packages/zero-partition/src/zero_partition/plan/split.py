"""Split: how a tensor is cut along one dimension, and its elements in the order of the parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from attrs import frozen

from .layout import Span

# NOTE(rows): a flattened tensor has a row for each index of the dimensions before the one that is
# cut, and each part has the same columns of every row. In the order of the parts, all rows of the
# first part come first, then all of the next. So a rank's elements of its part are contiguous
# there, and they are not in the order of the whole.


class Block(NamedTuple):
    """Rows of the same columns: some whole ones, or a part of one."""

    # The first row and the number of rows; the first column and the one after the last.
    row: int
    num_rows: int
    start: int
    stop: int


def blocks_of(span: Span, width: int) -> Iterator[Block]:
    """Divide a run of elements into a part of a row, whole rows of `width`, a part of a row."""
    start = span.start
    while start < span.stop:
        row, column = divmod(start, width)
        num_rows = 1 if column else max(1, (span.stop - start) // width)
        last = min(width, column + span.stop - start)
        yield Block(row, num_rows, column, last)
        start += num_rows * (last - column)


@frozen
class Split:
    """A tensor that is cut along one dimension, as the ranks of a mesh have one."""

    # Shape of the whole.
    shape: torch.Size
    dim: int
    # Sizes of the parts along `dim`.
    sizes: tuple[int, ...]

    @property
    def width(self) -> int:
        """Return the number of elements of a row of the whole."""
        return self.shape[self.dim :].numel()

    def columns(self, index: int) -> Span:
        """Return the elements of a row of the whole that a part has."""
        inner = self.shape[self.dim + 1 :].numel()
        start = sum(self.sizes[:index])
        return Span(start * inner, (start + self.sizes[index]) * inner)

    def span_of(self, index: int) -> Span:
        """Return the elements of a part, in the order of the parts."""
        columns, num_rows = self.columns(index), self.shape[: self.dim].numel()
        return Span(columns.start * num_rows, columns.stop * num_rows)

    def shape_of(self, index: int) -> torch.Size:
        """Return the shape of a part."""
        return torch.Size((*self.shape[: self.dim], self.sizes[index], *self.shape[self.dim + 1 :]))
