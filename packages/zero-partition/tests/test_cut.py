"""Where parameters may be cut, who keeps what is not, and which form a unit."""

import random
from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import nn
from zero_partition import Cut, LayoutError, PartitionError
from zero_partition.planning import choose_units, plan_units


def test_a_cut_reads_as_it_is_written() -> None:
    """Configuration files hold strings, messages say them back, and a typo is no `flat`."""
    for text in ("flat", "row", "tensor", "block(64)"):
        assert str(Cut.parse(text)) == text
        assert Cut.parse(Cut.parse(text)) == Cut.parse(text)
    for given in ("rows", "block", "block(0)", "row(3)", "block(-1)", "", 64, None):
        with pytest.raises(LayoutError, match="expected"):
            Cut.parse(given)


@pytest.mark.parametrize(
    ("cut", "shape", "grain", "shards"),
    [  # shapes of shards by their numels
        ("flat", (3, 4), 1, {12: (12,)}),
        ("row", (3, 4), 4, {8: (2, 4), 0: (0, 4)}),
        ("row", (3, 4, 5), 20, {20: (1, 4, 5)}),
        ("row", (7,), 1, {3: (3,)}),
        ("row", (), 1, {1: (), 0: (0,)}),
        ("row", (3, 0), 1, {}),
        ("tensor", (3, 4), 12, {12: (3, 4), 0: (0, 4)}),
        ("tensor", (0, 4), 1, {0: (0, 4)}),
        ("tensor", (), 1, {1: ()}),
        ("block(8)", (3, 4), 8, {8: (8,)}),
    ],
)
def test_a_shard_is_some_grains_in_the_shape_that_its_cut_promises(
    cut: str, shape: tuple[int, ...], grain: int, shards: dict[int, tuple[int, ...]]
) -> None:
    """An optimizer reads shapes; an empty shard keeps the number of dims that it may check."""
    assert Cut.parse(cut).grain(shape) == grain
    assert {numel: Cut.parse(cut).shard_shape(shape, numel) for numel in shards} == shards


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


def test_nobody_has_more_than_another_plus_one_tensor() -> None:
    """The bound of largest-first; all on one rank would be legal too, and useless."""
    for seed in range(50):
        rng = random.Random(seed)
        sizes = [rng.randrange(1, 1000) for _ in range(rng.randrange(1, 60))]
        model = nn.ParameterList(torch.empty(size) for size in sizes)
        cuts = {id(param): Cut.TENSOR for param in model.parameters()}
        (unit,) = plan_units(model, [], world_size=rng.randrange(1, 9), cuts=cuts)

        splits = [buffer.layout.payload_splits for buffer in unit.buffers]
        held = [sum(of_rank) for of_rank in zip(*splits, strict=True)]
        assert sum(held) == sum(sizes)
        assert max(held) - min(held) <= max(sizes), seed


class _Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16))


class _Net(nn.Module):
    def __init__(self, *, vocabulary: int = 500) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 16)
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


@pytest.mark.parametrize("world_size", [1, 3])
def test_small_vectors_travel_with_the_matrices_of_their_unit(world_size: int) -> None:
    """A collective of its own for a few biases costs more than it evens out."""
    blocks = _plan(world_size, _by_dims)[2:]

    assert [len(buffer.params) for buffer in blocks] == [6] * 4
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


# ---- Which parameters form a unit ----


def test_repeated_blocks_become_units() -> None:
    """Users should not have to name the layers of a transformer."""
    blocks = tuple(f"blocks.{i}" for i in range(4))
    assert choose_units(_Net(), max_unit_bytes=2**30) == ("embed", *blocks)  # larger than a block
    small = _Net(vocabulary=8)
    assert choose_units(small, max_unit_bytes=2**30) == blocks


def _layers(num: int) -> list[nn.Module]:
    return [_Block() for _ in range(num)]


CONTAINERS: Final[dict[str, tuple[Callable[[], nn.Module], list[str]]]] = {
    "embedding, blocks, head": (
        lambda: nn.Sequential(nn.Embedding(500, 16), *_layers(3), nn.Linear(16, 500)),
        ["0", "1", "2", "3", "4"],
    ),
    "blocks in between": (
        lambda: nn.Sequential(nn.Embedding(500, 16), nn.Sequential(*_layers(2)), nn.Linear(16, 50)),
        ["0", "1.0", "1.1", "2"],
    ),
    "two classes in turn": (
        lambda: nn.ModuleList([_Block(), nn.Linear(16, 16), _Block(), nn.Linear(16, 16)]),
        ["0", "1", "2", "3"],
    ),
    "none twice": (
        lambda: nn.ModuleDict({"a": nn.Linear(16, 16), "b": _Block(), "c": nn.Embedding(500, 16)}),
        ["a", "b.1", "b.2", "c"],
    ),
    "a small one": (
        lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Embedding(500, 16)),
        ["0", "2"],
    ),
    "one child": (lambda: nn.Sequential(nn.Linear(16, 16)), []),
    "towers": (
        lambda: nn.ModuleDict({"text": _Net(), "head": nn.Linear(16, 16)}),
        ["text.embed", *(f"text.blocks.{i}" for i in range(4)), "head"],
    ),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_children_of_a_container_become_units(container: str) -> None:
    """Else the container is one unit, and stage 3 keeps the model whole."""
    make, expected = CONTAINERS[container]
    model = make()
    assert list(choose_units(model, max_unit_bytes=2**30, min_unit_bytes=512)) == expected
    assert not choose_units(model, max_unit_bytes=2**30, min_unit_bytes=2**20)


def test_what_is_too_large_becomes_a_unit_of_its_own() -> None:
    """A large embedding beside small blocks would otherwise be whole all the time."""
    assert "embed" in choose_units(_Net(), max_unit_bytes=500 * 16 * 4 - 1)


def test_every_parameter_is_in_one_unit_and_tied_ones_in_what_encloses_both() -> None:
    """Else it is gathered twice, or never; and each block would free the other's weight."""
    model = _Net()
    model.blocks[0][1].weight = model.blocks[2][1].weight
    plans = plan_units(model, choose_units(model, max_unit_bytes=2**30), world_size=2)

    params = [[param for buffer in unit.buffers for param in buffer.params] for unit in plans]
    names = sorted(param.name for of_unit in params for param in of_unit)
    assert names == sorted(name for name, _ in model.named_parameters())
    assert [unit.is_outer for unit in plans] == [True, *[False] * 5]
    assert ("blocks.0.1.weight", "blocks.2.1.weight") in {param.names for param in params[0]}


def test_dtypes_and_frozen_parameters_lie_apart() -> None:
    """A flat buffer has one dtype, and frozen parameters must cost no gradient memory."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4))
    model[2].requires_grad_(False)
    (plan,) = plan_units(model, (), world_size=2)

    kinds = {(buffer.dtype, buffer.trainable) for buffer in plan.buffers}

    assert kinds == {(torch.float32, True), (torch.bfloat16, True), (torch.float32, False)}
    assert all(offset % 64 == 0 for offset in plan.offsets)


def test_what_cannot_be_a_unit_is_refused() -> None:
    """Its hooks would never fire; flattening would silently untie parameters of one storage."""
    aliased = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    aliased[1].weight = nn.Parameter(aliased[0].weight.data)
    for model, units, message in (
        (_Net(), ("nothing",), "no module of this name"),
        (_Net(), ("blocks",), "has no forward of its own"),
        (aliased, (), r"'0.weight' and '1.weight' are different Parameter"),
    ):
        with pytest.raises(PartitionError, match=message):
            plan_units(model, units, world_size=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_parameters_and_shards_start_on_64_bytes(dtype: torch.dtype) -> None:
    """Vector units and compiled kernels assume it, and copy what does not lie so."""
    values = (torch.zeros(numel, dtype=dtype) for numel in (1, 13, 64, 7))
    model = nn.ParameterList(nn.Parameter(value, requires_grad=False) for value in values)
    (unit,) = plan_units(model, [], world_size=3)
    (buffer,) = unit.buffers

    starts = [span.start for span in (*buffer.layout.spans, *buffer.layout.shards)]
    assert all(start * dtype.itemsize % 64 == 0 for start in starts)
    assert all(offset % 64 == 0 for offset in unit.offsets)
