"""Laws of flat layouts, over hundreds of random ones."""

import numpy as np
import pytest
from zero_partition import Cut, FlatLayout, LayoutError


def _random_layout(seed: int, cut: Cut) -> tuple[list[int], int, int, FlatLayout]:
    rng = np.random.default_rng(seed)
    numels = rng.integers(0, 300, size=rng.integers(0, 20)).tolist()
    world_size, align = int(rng.integers(1, 9)), int(2 ** rng.integers(0, 6))
    layout = FlatLayout.plan(numels, world_size=world_size, align=align, cut=cut)
    return numels, world_size, align, layout


@pytest.mark.parametrize("cut", Cut, ids=lambda cut: cut.value)
@pytest.mark.parametrize("seed", range(100))
def test_shards_cover_every_element_once(seed: int, cut: Cut) -> None:
    """Else an element is updated twice, or never, and training drifts silently."""
    numels, world_size, _, layout = _random_layout(seed, cut)
    seen = [np.zeros(numel, dtype=int) for numel in numels]

    for rank in range(world_size):
        for piece in layout.pieces(rank):
            seen[piece.index][piece.in_tensor.as_slice()] += 1

    assert all((counts == 1).all() for counts in seen)
    assert sum(layout.splits) == layout.numel
    assert sum(layout.payload_splits) == layout.payload_numel == sum(numels)


@pytest.mark.parametrize("cut", Cut, ids=lambda cut: cut.value)
@pytest.mark.parametrize("seed", range(100))
def test_a_shard_holds_what_the_buffer_holds_there(seed: int, cut: Cut) -> None:
    """The two coordinates of a piece must name the same element."""
    numels, world_size, _, layout = _random_layout(seed, cut)
    buffer = np.full(layout.numel, -1)
    tensors = [np.arange(numel) + 1000 * i for i, numel in enumerate(numels)]
    for span, tensor in zip(layout.spans, tensors, strict=True):
        buffer[span.as_slice()] = tensor

    for rank in range(world_size):
        shard = buffer[layout.shard(rank).as_slice()]
        for piece in layout.pieces(rank):
            expected = tensors[piece.index][piece.in_tensor.as_slice()]

            np.testing.assert_array_equal(shard[piece.in_shard.as_slice()], expected)


@pytest.mark.parametrize("seed", range(100))
def test_tensors_and_flat_cuts_are_aligned(seed: int) -> None:
    """Vector kernels take another path, with other rounding, on an unaligned start."""
    _, world_size, align, layout = _random_layout(seed, Cut.FLAT)

    assert all(span.start % align == 0 for span in layout.spans)
    assert all(shard.start % align == 0 for shard in layout.shards)
    assert len(set(layout.splits)) == 1
    assert len(layout.shards) == world_size


@pytest.mark.parametrize("seed", range(100))
def test_tensor_cuts_leave_every_tensor_whole(seed: int) -> None:
    """An optimizer that needs whole matrices must never see a part of one."""
    numels, world_size, _, layout = _random_layout(seed, Cut.TENSOR)

    for rank in range(world_size):
        for piece in layout.pieces(rank):
            assert piece.in_tensor.numel == numels[piece.index]


def test_a_tensor_smaller_than_the_world_leaves_ranks_empty() -> None:
    """They still take part in every collective, with nothing of their own."""
    layout = FlatLayout.plan([3], world_size=4, align=16)

    assert layout.splits == (16, 16, 16, 16)
    assert layout.payload_splits == (3, 0, 0, 0)


def test_a_flat_cut_wastes_less_than_one_alignment_per_tensor_and_rank() -> None:
    """Padding is memory and traffic that the paper's formula does not have."""
    numels, align, world_size = [7, 100, 33, 1], 16, 3
    layout = FlatLayout.plan(numels, world_size=world_size, align=align)

    assert layout.numel - sum(numels) < align * (len(numels) + world_size)


@pytest.mark.parametrize(
    ("numels", "world_size", "align"),
    [([-1], 2, 1), ([4], 0, 1), ([4], 2, 0)],
    ids=["numel", "world_size", "align"],
)
def test_nonsense_is_refused(numels: list[int], world_size: int, align: int) -> None:
    """Silently planned, it would surface as a wrong slice far away."""
    with pytest.raises(LayoutError, match="expected world_size >= 1, align >= 1 and numels >= 0"):
        FlatLayout.plan(numels, world_size=world_size, align=align)
