"""Readers of parts and of wholes, against torch's own slices."""

from __future__ import annotations

from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from zero_partition.memory.seams import AbstractRangeReader
from zero_partition.plan import Split
from zero_partition.values.custom_loading import MemoryReader
from zero_partition.values.split_readers import PartReader, SplitReader


@st.composite
def _tensors(draw: st.DrawFn) -> tuple[Tensor, Split, Split]:
    """A tensor, and two ways to cut it along one dimension, some parts of which are empty."""
    dim = draw(st.integers(0, 2))
    before = draw(st.lists(st.integers(1, 4), min_size=dim, max_size=dim))
    after = draw(st.lists(st.integers(1, 4), max_size=2))
    side = draw(st.integers(1, 7))
    splits = []
    for _ in range(2):
        ends = sorted(draw(st.lists(st.integers(0, side), max_size=3)))
        pairs = zip([0, *ends], [*ends, side], strict=True)
        sizes = tuple(stop - start for start, stop in pairs)
        splits.append(Split(torch.Size((*before, side, *after)), dim, sizes))
    whole = torch.arange(splits[0].shape.numel()).view(splits[0].shape)
    return whole, splits[0], splits[1]


@given(_tensors(), st.data())
def test_any_run_of_the_whole_is_read_from_parts(
    drawn: tuple[Tensor, Split, Split], data: st.DataObject
) -> None:
    """Which lie one after the other, each row by row."""
    whole, split, _ = drawn
    parts = torch.cat([part.reshape(-1) for part in whole.split(split.sizes, split.dim)])
    reader = SplitReader(MemoryReader(parts), split)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, whole.numel())] * 2)))
    assert reader.shape == whole.shape
    assert torch.equal(reader.read(start, stop), whole.view(-1)[start:stop])


@given(_tensors(), st.data())
def test_any_run_of_a_part_is_read_from_other_parts(
    drawn: tuple[Tensor, Split, Split], data: st.DataObject
) -> None:
    """From a whole, from parts of other sizes, and from the same parts."""
    whole, split, other = drawn
    index = data.draw(st.integers(0, len(split.sizes) - 1))
    expected = whole.split(split.sizes, split.dim)[index].reshape(-1)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, expected.numel())] * 2)))
    sources: list[AbstractRangeReader] = [MemoryReader(whole)]
    for each in (split, other):
        parts = torch.cat([part.reshape(-1) for part in whole.split(each.sizes, each.dim)])
        sources.append(SplitReader(MemoryReader(parts), each))
    for source in sources:
        reader = PartReader(source, split, index)
        assert torch.equal(reader.read(start, stop), expected[start:stop])
    run = reader.span_in_whole(split.span_of(index).shifted(-split.span_of(index).start))
    assert {*expected.tolist()} <= {*whole.view(-1)[run.as_slice()].tolist()}


def test_a_part_is_read_by_few_calls() -> None:
    """Rows of the same columns are one run, however many there are."""
    whole = torch.arange(64 * 8).view(64, 8)
    reader = PartReader(MemoryReader(whole), Split(whole.shape, 1, (4, 4)), 1)
    with mock.patch.object(
        MemoryReader, "read", autospec=True, side_effect=MemoryReader.read
    ) as read:
        assert torch.equal(reader.read(2, 250), whole[:, 4:].reshape(-1)[2:250])
    assert read.call_count == 3
