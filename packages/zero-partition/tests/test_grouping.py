"""Which parameters form a unit."""

import pytest
import torch
from torch import nn
from zero_partition import PartitionError
from zero_partition.planning import choose_units, plan_units


class _Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Linear(8, 8))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def test_repeated_blocks_become_units() -> None:
    """Users should not have to name the layers of a transformer."""
    assert choose_units(_Net(), max_unit_bytes=2**30) == ("blocks.0", "blocks.1", "blocks.2")


def test_what_is_too_large_becomes_a_unit_of_its_own() -> None:
    """A large embedding beside small blocks would otherwise be whole all the time."""
    chosen = choose_units(_Net(), max_unit_bytes=10 * 8 * 4 - 1)

    assert {"embed", "head"} <= set(chosen)


def test_every_parameter_is_in_one_unit_and_tied_ones_in_what_encloses_both() -> None:
    """Else it is gathered twice, or never; and each block would free the other's weight."""
    model = _Net()
    model.blocks[0][0].weight = model.blocks[2][0].weight
    plans = plan_units(model, choose_units(model, max_unit_bytes=2**30), world_size=2)

    params = [[param for buffer in unit.buffers for param in buffer.params] for unit in plans]
    names = sorted(param.name for of_unit in params for param in of_unit)
    assert names == sorted(name for name, _ in model.named_parameters())
    assert [unit.is_outer for unit in plans] == [True, False, False, False]
    assert ("blocks.0.0.weight", "blocks.2.0.weight") in {param.names for param in params[0]}


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
