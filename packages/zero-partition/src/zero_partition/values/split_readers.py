"""Readers of tensors that are split over ranks: of the whole from its parts, and of a part."""

from __future__ import annotations

from typing import Any, final

import torch
from attrs import frozen
from torch import Tensor

from zero_partition.dtensors import part_index, split_of
from zero_partition.memory.seams import AbstractRangeReader
from zero_partition.plan.layout import Span
from zero_partition.plan.split import Split, blocks_of


@final
@frozen(eq=False)
class SplitReader(AbstractRangeReader):
    """A whole tensor, from its elements in the order of the parts."""

    parts: AbstractRangeReader
    split: Split

    @property
    def shape(self) -> torch.Size:
        """Return that of the whole."""
        return self.split.shape

    @property
    def dtype(self) -> torch.dtype:
        """Return that of the parts."""
        return self.parts.dtype

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the flattened whole."""
        split, found = self.split, [torch.empty(0, dtype=self.dtype, device="cpu")]
        for block in blocks_of(Span(start, stop), split.width):
            rows = []
            for index in range(len(split.sizes)):
                columns = split.columns(index)
                if some := columns.overlap(Span(block.start, block.stop)):
                    first = split.span_of(index).start + block.row * columns.numel - columns.start
                    last = first + (block.num_rows - 1) * columns.numel
                    values = self.parts.read(first + some.start, last + some.stop)
                    rows.append(values.view(block.num_rows, some.numel))
            found.append(torch.cat(rows, dim=1).view(-1))
        return torch.cat(found)


@final
@frozen(eq=False)
class PartReader(AbstractRangeReader):
    """A part of a tensor, from the whole."""

    whole: AbstractRangeReader
    split: Split
    # Position of the part in `split`.
    index: int

    @property
    def shape(self) -> torch.Size:
        """Return that of the part."""
        return self.split.shape_of(self.index)

    @property
    def dtype(self) -> torch.dtype:
        """Return that of the whole."""
        return self.whole.dtype

    def span_in_whole(self, span: Span) -> Span:
        """Return the run of elements of the flattened whole that has these of the part."""
        columns, width = self.split.columns(self.index), self.split.width
        if not span.numel:
            return Span(0, 0)
        ends = [divmod(element, columns.numel) for element in (span.start, span.stop - 1)]
        first, last = (row * width + columns.start + column for row, column in ends)
        return Span(first, last + 1)

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the flattened part."""
        split, columns = self.split, self.split.columns(self.index)
        if isinstance(self.whole, SplitReader) and self.whole.split == split:
            first = split.span_of(self.index).start
            return self.whole.parts.read(first + start, first + stop)
        found = [torch.empty(0, dtype=self.dtype, device="cpu")]
        for block in blocks_of(Span(start, stop), columns.numel):
            first = block.row * columns.numel
            last = first + (block.num_rows - 1) * columns.numel
            run = self.span_in_whole(Span(first + block.start, last + block.stop))
            values = self.whole.read(run.start, run.stop)
            rows = values.as_strided((block.num_rows, block.stop - block.start), (split.width, 1))
            found.append(rows.reshape(-1))
        return torch.cat(found)


def in_source(reader: AbstractRangeReader, span: Span) -> tuple[AbstractRangeReader, Span]:
    """Return what is read, and the run of it, where these elements are. Local."""
    if isinstance(reader, PartReader):
        return reader.whole, reader.span_in_whole(span)
    return reader, span


def reader_of_part(param: Tensor, reader: Any) -> Any:
    """Return a reader of this rank's part of what has the shape of a DTensor; else the same. Local.

    Args:
        param: The DTensor, the part of one, or a plain parameter.
        reader: Of a whole tensor; or what is no reader.
    """
    split = split_of(param)
    if split is None or not isinstance(reader, AbstractRangeReader) or reader.shape != split.shape:
        return reader
    return PartReader(reader, split, part_index(param))
