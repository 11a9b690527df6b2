"""Laws of flat layouts, over hundreds of random ones."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from zero_partition import Cut, LayoutError
from zero_partition.plan import STAGES, FlatLayout, Placement, Span, Stage
from zero_partition.planning import choose_units, plan_units

KINDS = ["even", "cut", "whole"]


def _random_layout(seed: int, kind: str) -> tuple[list[int], int, int, list[int], FlatLayout]:
    """Numels, world size, alignment, per tensor its grain or owner, and the layout."""
    rng = np.random.default_rng(seed)
    numels = rng.integers(0, 300, size=rng.integers(0, 20)).tolist()
    world_size, align = int(rng.integers(1, 9)), int(2 ** rng.integers(0, 6))
    options = {"world_size": world_size, "align": align}
    if kind == "even":
        return numels, world_size, align, [align], FlatLayout.plan(numels, **options)
    if kind == "cut":
        grains = rng.integers(1, 50, size=len(numels)).tolist()
        layout = FlatLayout.plan_cut(numels, grains, **options)
        return numels, world_size, align, grains, layout
    owners = sorted(rng.integers(0, world_size, size=len(numels)).tolist())
    return numels, world_size, align, owners, FlatLayout.plan_whole(numels, owners, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(100))
def test_shards_cover_every_element_once(seed: int, kind: str) -> None:
    """Else an element is updated twice, or never, and training drifts silently."""
    numels, world_size, _, _, layout = _random_layout(seed, kind)
    seen = [np.zeros(numel, dtype=int) for numel in numels]

    for rank in range(world_size):
        for piece in layout.pieces(rank):
            seen[piece.index][piece.in_tensor.as_slice()] += 1

    assert all((counts == 1).all() for counts in seen)
    assert sum(layout.splits) == layout.numel
    assert sum(layout.payload_splits) == layout.payload_numel == sum(numels)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(100))
def test_a_shard_holds_what_the_buffer_holds_there(seed: int, kind: str) -> None:
    """The two coordinates of a piece must name the same element."""
    numels, world_size, _, _, layout = _random_layout(seed, kind)
    buffer = np.full(layout.numel, -1)
    tensors = [np.arange(numel) + 1000 * i for i, numel in enumerate(numels)]
    for span, tensor in zip(layout.spans, tensors, strict=True):
        buffer[span.as_slice()] = tensor

    for rank in range(world_size):
        shard = buffer[layout.shard(rank).as_slice()]
        for piece in layout.pieces(rank):
            expected = tensors[piece.index][piece.in_tensor.as_slice()]

            np.testing.assert_array_equal(shard[piece.in_shard.as_slice()], expected)


@pytest.mark.parametrize("kind", ["even", "whole"])
@pytest.mark.parametrize("seed", range(100))
def test_tensors_and_shards_are_aligned(seed: int, kind: str) -> None:
    """Vector kernels take another path, with other rounding, on an unaligned start."""
    _, world_size, align, _, layout = _random_layout(seed, kind)

    assert all(span.start % align == 0 for span in layout.spans)
    assert all(shard.start % align == 0 for shard in layout.shards)
    assert len(layout.shards) == world_size
    assert kind == "whole" or len(set(layout.splits)) == 1


@pytest.mark.parametrize("seed", range(100))
def test_a_tensor_lies_whole_with_its_owner(seed: int) -> None:
    """An optimizer that needs whole matrices must never see a part of one."""
    numels, world_size, _, owners, layout = _random_layout(seed, "whole")

    for rank in range(world_size):
        for piece in layout.pieces(rank):
            assert piece.in_tensor.numel == numels[piece.index]
            assert owners[piece.index] == rank


@pytest.mark.parametrize("seed", range(100))
def test_a_tensor_is_cut_on_multiples_of_its_grain(seed: int) -> None:
    """A row or a block that two ranks share has no norm and no scale of its own."""
    numels, world_size, _, grains, layout = _random_layout(seed, "cut")

    for rank in range(world_size):
        for piece in layout.pieces(rank):
            grain, part = grains[piece.index], piece.in_tensor
            assert part.start % grain == 0
            assert part.stop % grain == 0 or part.stop == numels[piece.index]


@pytest.mark.parametrize("seed", range(100))
def test_a_cut_is_the_legal_one_nearest_to_even(seed: int) -> None:
    """Half a grain, or half the padding, is all that a rank may have more than its share."""
    _, world_size, align, grains, layout = _random_layout(seed, "cut")
    coarsest = max(grains, default=1) + align

    for rank, shard in enumerate(layout.shards):
        assert abs(shard.start - layout.numel * rank / world_size) <= coarsest / 2 + align


def test_cuts_even_out_what_ranks_keep_elsewhere() -> None:
    """Balance is a matter of the model, not of one unit."""
    layout = FlatLayout.plan_cut([64, 64], [1, 4], world_size=4, align=1, loads=[64, 0, 0, 0])

    assert layout.splits == (0, 43, 41, 44)  # 128 / 3 = 42.7 would be even


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


def test_whole_tensors_are_never_padded_to_the_largest() -> None:
    """A rank with one small matrix must not send, or hold, as much as one with a large one."""
    numels, align = [1000, 10, 7], 16
    layout = FlatLayout.plan_whole(numels, [0, 1, 3], world_size=4, align=align)

    assert layout.splits == (1008, 16, 0, 16)
    assert layout.numel - sum(numels) < align * len(numels)


@pytest.mark.parametrize(
    ("numels", "world_size", "align"),
    [([-1], 2, 1), ([4], 0, 1), ([4], 2, 0)],
    ids=["numel", "world_size", "align"],
)
def test_nonsense_is_refused(numels: list[int], world_size: int, align: int) -> None:
    """Silently planned, it would surface as a wrong slice far away."""
    with pytest.raises(LayoutError, match="expected world_size >= 1, align >= 1 and numels >= 0"):
        FlatLayout.plan(numels, world_size=world_size, align=align)


@pytest.mark.parametrize("owners", [[1, 0], [0], [0, 2], [-1, 0]])
def test_owners_are_ascending_ranks(owners: list[int]) -> None:
    """Shards are in rank order; an owner out of turn would keep another's tensor."""
    with pytest.raises(LayoutError, match="expected 2 ascending ranks below 2, got"):
        FlatLayout.plan_whole([4, 4], owners, world_size=2)


@pytest.mark.parametrize("grains", [[1, 0], [1]])
def test_every_tensor_has_a_grain(grains: list[int]) -> None:
    """A grain of zero elements would cut nowhere and everywhere."""
    with pytest.raises(LayoutError, match="expected 2 grains of at least 1, got"):
        FlatLayout.plan_cut([4, 4], grains, world_size=2)


# ---- Spans ----


def test_neighbours_do_not_overlap() -> None:
    """Else an element on the border would be updated twice."""
    assert Span(0, 4).overlap(Span(4, 8)) is None


def test_overlap_is_what_both_contain() -> None:
    """It decides which part of a tensor a rank keeps."""
    assert Span(2, 9).overlap(Span(5, 20)) == Span(5, 9)


def test_an_empty_span_overlaps_nothing() -> None:
    """A rank that keeps nothing must not be handed an empty piece of everything."""
    assert Span(3, 3).overlap(Span(0, 9)) is None


def test_a_backward_span_is_refused() -> None:
    """It would slice to nothing and hide a mistake in the arithmetic."""
    with pytest.raises(ValueError, match=r"expected stop >= start, got \[5, 3\)"):
        Span(5, 3)


# ---- Cuts ----


@pytest.mark.parametrize("text", ["flat", "row", "tensor", "block(64)"])
def test_a_cut_reads_as_it_is_written(text: str) -> None:
    """Configuration files hold strings, and messages should say them back."""
    assert str(Cut.parse(text)) == text
    assert Cut.parse(Cut.parse(text)) == Cut.parse(text)


@pytest.mark.parametrize("text", ["rows", "block", "block(0)", "row(3)", "block(-1)", "", 64, None])
def test_what_is_no_cut_is_refused(text: object) -> None:
    """A typo that meant `flat` would cut matrices."""
    with pytest.raises(LayoutError, match="expected"):
        Cut.parse(text)


@pytest.mark.parametrize(
    ("cut", "shape", "grain"),
    [
        ("flat", (3, 4), 1),
        ("row", (3, 4, 5), 20),
        ("row", (7,), 1),
        ("row", (), 1),
        ("row", (3, 0), 1),
        ("tensor", (3, 4), 12),
        ("tensor", (), 1),
        ("block(8)", (3, 4), 8),
    ],
)
def test_the_grain_is_what_must_not_be_split(cut: str, shape: tuple[int, ...], grain: int) -> None:
    """A row is a slice along the first dim, of any number of dims."""
    assert Cut.parse(cut).grain(shape) == grain


@pytest.mark.parametrize(
    ("cut", "shape", "numel", "expected"),
    [
        ("flat", (3, 4), 12, (12,)),
        ("row", (3, 4), 8, (2, 4)),
        ("row", (3, 4), 0, (0, 4)),
        ("row", (), 1, ()),
        ("row", (), 0, (0,)),
        ("tensor", (3, 4), 12, (3, 4)),
        ("tensor", (3, 4), 0, (0, 4)),
        ("tensor", (0, 4), 0, (0, 4)),
        ("tensor", (), 1, ()),
        ("block(8)", (3, 4), 8, (8,)),
    ],
)
def test_a_shard_has_the_shape_that_its_cut_promises(
    cut: str, shape: tuple[int, ...], numel: int, expected: tuple[int, ...]
) -> None:
    """An optimizer reads shapes; an empty shard keeps the number of dims that it may check."""
    assert Cut.parse(cut).shard_shape(shape, numel) == expected


def test_which_cut_is_right_for_which_need() -> None:
    """A finer one is wrong; a coarser one costs balance only."""
    right = {
        need: {cut for cut in _CUTS if Cut.parse(cut).keeps(Cut.parse(need), (6, 8))}
        for need in _CUTS
    }

    assert right == {
        "flat": set(_CUTS),
        "row": {"row", "tensor"},
        "tensor": {"tensor"},
        "block(4)": {"row", "tensor", "block(4)", "block(8)"},  # a row is two blocks of 4
        "block(8)": {"row", "tensor", "block(8)"},
    }


_CUTS = ("flat", "row", "tensor", "block(4)", "block(8)")


# ---- Balance ----


class _Flat(nn.Module):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.empty(size) for size in sizes)

    def forward(self) -> None:
        raise NotImplementedError


def test_nobody_has_more_than_another_plus_one_tensor() -> None:
    """The bound of largest-first; all on one rank would be legal too, and useless."""
    for seed in range(50):
        rng = random.Random(seed)
        sizes = [rng.randrange(1, 1000) for _ in range(rng.randrange(1, 60))]
        world_size = rng.randrange(1, 9)
        model = _Flat(sizes)
        cuts = {id(param): Cut.TENSOR for param in model.parameters()}

        (unit,) = plan_units(model, [""], world_size=world_size, cuts=cuts)

        splits = [buffer.layout.payload_splits for buffer in unit.buffers]
        held = [sum(of_rank) for of_rank in zip(*splits, strict=True)]
        assert sum(held) == sum(sizes)
        assert max(held) - min(held) <= max(sizes), seed


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 16)
        self.gate = nn.Linear(16, 16, bias=False)
        self.blocks = nn.ModuleList(_Block() for _ in range(4))


def _plan(world_size: int, cut_of) -> list:
    model = _Net()
    cuts = {id(param): cut_of(name, param) for name, param in model.named_parameters()}
    units = choose_units(model, max_unit_bytes=2**30)
    return [
        buffer
        for unit in plan_units(model, units, world_size=world_size, cuts=cuts)
        for buffer in unit.buffers
    ]


def _by_dims(name: str, param: nn.Parameter) -> Cut:
    return Cut.TENSOR if param.dim() > 1 and name != "embed.weight" else Cut.FLAT


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_small_vectors_travel_with_the_matrices_of_their_unit(world_size: int) -> None:
    """A collective of its own for a few biases costs more than it evens out."""
    root, *blocks = _plan(world_size, _by_dims), []
    blocks = root[2:]

    assert len(blocks) == 4
    assert all(len(buffer.params) == 6 for buffer in blocks)
    for buffer in blocks:
        for rank in range(world_size):
            for piece in buffer.layout.pieces(rank):
                assert piece.in_tensor.numel == buffer.params[piece.index].shape.numel()


def test_a_large_parameter_that_may_be_cut_is_cut_evenly() -> None:
    """An embedding that AdamW trains must not go to one rank because Muon's matrix is beside it."""
    buffers = _plan(4, _by_dims)[:2]

    assert [[param.name for param in buffer.params] for buffer in buffers] == [
        ["gate.weight"],
        ["embed.weight"],
    ]
    assert len(set(buffers[1].layout.splits)) == 1


def test_rows_and_blocks_even_out_what_whole_tensors_left_uneven() -> None:
    """One rank keeps the only matrix; the others get the rows."""
    buffers = _plan(2, lambda name, _: Cut.TENSOR if name == "gate.weight" else Cut.ROW)
    held = [sum(buffer.layout.payload_splits[rank] for buffer in buffers) for rank in range(2)]

    assert abs(held[0] - held[1]) <= 2 * 64  # a row of the widest matrix


def test_ranks_far_more_than_tensors_leave_some_empty() -> None:
    """Legal, and every rank still plans the same."""
    buffers = _plan(64, lambda name, _: Cut.TENSOR)

    assert sum(sum(buffer.layout.payload_splits) for buffer in buffers) == sum(
        param.numel() for param in _Net().parameters()
    )


# ---- Stages ----


def test_each_stage_shards_one_kind_more() -> None:
    """Section 5 of arXiv 1910.02054: optimizer state, then gradients, then parameters."""
    counts = [
        sum(
            kind is Placement.SHARDED
            for kind in (STAGES[stage].optim, STAGES[stage].grads, STAGES[stage].params)
        )
        for stage in Stage
    ]

    assert counts == [0, 1, 2, 3]
    assert STAGES[Stage.ONE].optim is Placement.SHARDED
    assert STAGES[Stage.TWO].grads is Placement.SHARDED
