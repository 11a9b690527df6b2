"""Laws of spans, of flat layouts, over hundreds of random ones, and the ZeRO table."""

from collections.abc import Iterator

import numpy as np
import pytest
from zero_partition import LayoutError
from zero_partition.plan import STAGES, FlatLayout, Placement, Span, Stage

KINDS = ["even", "cut", "whole"]


def _random_layouts(kind: str) -> Iterator[tuple[list[int], int, int, list[int], FlatLayout]]:
    """Numels, world size, alignment, per tensor its grain or owner, and the layout."""
    for seed in range(100):
        rng = np.random.default_rng(seed)
        numels = rng.integers(0, 300, size=rng.integers(0, 20)).tolist()
        world_size, align = int(rng.integers(1, 9)), int(2 ** rng.integers(0, 6))
        options = {"world_size": world_size, "align": align}
        per_tensor = [align]
        if kind == "even":
            layout = FlatLayout.plan(numels, **options)
        elif kind == "cut":
            per_tensor = rng.integers(1, 50, size=len(numels)).tolist()
            layout = FlatLayout.plan_cut(numels, per_tensor, **options)
        else:
            per_tensor = sorted(rng.integers(0, world_size, size=len(numels)).tolist())
            layout = FlatLayout.plan_whole(numels, per_tensor, **options)
        yield numels, world_size, align, per_tensor, layout


@pytest.mark.parametrize("kind", KINDS)
def test_shards_cover_every_element_once(kind: str) -> None:
    """Else an element is updated twice, or never; a piece names it in tensor and shard."""
    for numels, world_size, align, _, layout in _random_layouts(kind):
        buffer = np.full(layout.numel, -1)
        tensors = [np.arange(numel) + 1000 * i for i, numel in enumerate(numels)]
        seen = [np.zeros(numel, dtype=int) for numel in numels]
        for span, tensor in zip(layout.spans, tensors, strict=True):
            buffer[span.as_slice()] = tensor

        for rank in range(world_size):
            shard = buffer[layout.shard(rank).as_slice()]
            for piece in layout.pieces(rank):
                seen[piece.index][piece.in_tensor.as_slice()] += 1
                expected = tensors[piece.index][piece.in_tensor.as_slice()]
                np.testing.assert_array_equal(shard[piece.in_shard.as_slice()], expected)

        assert all((counts == 1).all() for counts in seen)
        assert sum(layout.splits) == layout.numel
        # Padding is memory and traffic that the paper's formula does not have.
        assert layout.numel - sum(numels) <= align * (len(numels) + world_size * (kind == "even"))
        assert sum(layout.payload_splits) == layout.payload_numel == sum(numels)


@pytest.mark.parametrize("kind", ["even", "whole"])
def test_tensors_and_shards_are_aligned(kind: str) -> None:
    """Vector kernels take another path, with other rounding, on an unaligned start."""
    for _, world_size, align, _, layout in _random_layouts(kind):
        assert all(each.start % align == 0 for each in (*layout.spans, *layout.shards))
        assert len(layout.shards) == world_size
        assert kind == "whole" or len(set(layout.splits)) == 1


def test_a_tensor_lies_whole_with_its_owner() -> None:
    """An optimizer that needs whole matrices must never see a part of one."""
    for numels, world_size, _, owners, layout in _random_layouts("whole"):
        for rank in range(world_size):
            for piece in layout.pieces(rank):
                assert piece.in_tensor.numel == numels[piece.index]
                assert owners[piece.index] == rank


def test_a_tensor_is_cut_on_the_multiple_of_its_grain_nearest_to_even() -> None:
    """A row or a block that two ranks share has no norm and no scale of its own."""
    for numels, world_size, align, grains, layout in _random_layouts("cut"):
        for rank in range(world_size):
            for piece in layout.pieces(rank):
                grain, part = grains[piece.index], piece.in_tensor
                assert part.start % grain == 0
                assert part.stop % grain == 0 or part.stop == numels[piece.index]
        # Half a grain, or half the padding, is all that a rank may have more than its share.
        coarsest = max(grains, default=1) + align
        for rank, shard in enumerate(layout.shards):
            assert abs(shard.start - layout.numel * rank / world_size) <= coarsest / 2 + align


def test_cuts_even_out_what_ranks_keep_elsewhere() -> None:
    """Balance is a matter of the model, not of one unit."""
    layout = FlatLayout.plan_cut([64, 64], [1, 4], world_size=4, align=1, loads=[64, 0, 0, 0])

    assert layout.splits == (0, 43, 41, 44)  # 128 / 3 = 42.7 would be even


def test_nonsense_is_refused() -> None:
    """Silently planned, it would surface as a wrong slice far away."""
    for numels, world_size, align in (([-1], 2, 1), ([4], 0, 1), ([4], 2, 0)):
        with pytest.raises(LayoutError, match="expected world_size >= 1, align >= 1 and numels >="):
            FlatLayout.plan(numels, world_size=world_size, align=align)
    for owners in ([1, 0], [0], [0, 2], [-1, 0]):
        with pytest.raises(LayoutError, match="expected 2 ascending ranks below 2, got"):
            FlatLayout.plan_whole([4, 4], owners, world_size=2)
    for grains in ([1, 0], [1]):
        with pytest.raises(LayoutError, match="expected 2 grains of at least 1, got"):
            FlatLayout.plan_cut([4, 4], grains, world_size=2)


def test_spans_are_half_open() -> None:
    """Neighbours neither overlap nor leave a gap, and an empty one is a piece of nothing."""
    assert Span(0, 4).overlap(Span(4, 8)) is None
    assert Span(2, 9).overlap(Span(5, 20)) == Span(5, 9)
    assert Span(3, 3).overlap(Span(0, 9)) is None
    with pytest.raises(ValueError, match=r"expected stop >= start, got \[5, 3\)"):
        Span(5, 3)


def test_each_stage_shards_one_kind_more() -> None:
    """Section 5 of arXiv 1910.02054: optimizer state, then gradients, then parameters."""
    for stage in Stage:
        kinds = (STAGES[stage].optim, STAGES[stage].grads, STAGES[stage].params)
        assert [kind is Placement.SHARDED for kind in kinds] == [n < stage for n in range(3)]
