"""Which parameters form a unit."""

import pytest
import torch
from torch import nn
from zero_partition import PartitionError
from zero_partition.planning import choose_units, plan_units


class _Block(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.second = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class _Net(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(_Block() for _ in range(num_blocks))
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_repeated_blocks_become_units() -> None:
    """Users should not have to name the layers of a transformer."""
    assert choose_units(_Net(), max_unit_bytes=2**30) == ("blocks.0", "blocks.1", "blocks.2")


def test_what_is_too_large_becomes_a_unit_of_its_own() -> None:
    """A large embedding beside small blocks would otherwise be whole all the time."""
    chosen = choose_units(_Net(), max_unit_bytes=10 * 8 * 4 - 1)

    assert {"embed", "head"} <= set(chosen)


def test_every_parameter_is_in_exactly_one_unit() -> None:
    """Else it is gathered twice, or never."""
    model = _Net()
    plans = plan_units(model, choose_units(model, max_unit_bytes=2**30), world_size=2)

    names = [param.name for unit in plans for buffer in unit.buffers for param in buffer.params]

    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert [unit.is_outer for unit in plans] == [True, False, False, False]


def test_tied_parameters_go_to_what_encloses_both() -> None:
    """Each block alone would free the other's weight."""
    model = _Net()
    model.blocks[0].first.weight = model.blocks[2].first.weight
    plans = plan_units(model, choose_units(model, max_unit_bytes=2**30), world_size=2)

    root = {param.names for buffer in plans[0].buffers for param in buffer.params}

    assert ("blocks.0.first.weight", "blocks.2.first.weight") in root


def test_dtypes_and_frozen_parameters_lie_apart() -> None:
    """A flat buffer has one dtype, and frozen parameters must cost no gradient memory."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4))
    model[2].requires_grad_(False)
    (plan,) = plan_units(model, (), world_size=2)

    kinds = {(buffer.dtype, buffer.trainable) for buffer in plan.buffers}

    assert kinds == {(torch.float32, True), (torch.bfloat16, True), (torch.float32, False)}
    assert all(offset % 64 == 0 for offset in plan.offsets)


@pytest.mark.parametrize(
    ("name", "message"),
    [("nothing", "no module of this name"), ("blocks", "has no forward of its own")],
    ids=["unknown", "container"],
)
def test_a_unit_must_be_a_module_that_runs(name: str, message: str) -> None:
    """Its hooks would never fire."""
    with pytest.raises(PartitionError, match=message):
        plan_units(_Net(), (name,), world_size=2)


def test_two_parameters_over_one_storage_are_refused() -> None:
    """Flattening would silently untie them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)

    with pytest.raises(PartitionError, match=r"'0.weight' and '1.weight' are different Parameter"):
        plan_units(model, (), world_size=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("world_size", [1, 3])
def test_parameters_and_shards_start_on_64_bytes(dtype: torch.dtype, world_size: int) -> None:
    """Vector units and compiled kernels assume it, and copy what does not lie so."""
    model = nn.Module()
    for index, numel in enumerate((1, 13, 64, 7)):
        values = torch.zeros(numel, dtype=dtype)
        model.register_parameter(f"p{index}", nn.Parameter(values, requires_grad=False))

    (unit,) = plan_units(model, [], world_size=world_size)

    (buffer,) = unit.buffers
    starts = [span.start for span in (*buffer.layout.spans, *buffer.layout.shards)]
    assert all(start * dtype.itemsize % 64 == 0 for start in starts)
    assert all(offset % 64 == 0 for offset in unit.offsets)
