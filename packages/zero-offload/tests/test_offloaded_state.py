"""State dicts are torch's in both directions, and state can be looked at wherever it rests."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from offloaded_training import HOMES, assert_equal, make_model, offloaded, train
from torch.optim import Optimizer
from zero_offload import CPUAdam, OffloadedOptimizer

CLASSES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "SGD, momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "CPUAdam": (CPUAdam, {"lr": 1e-2}),
}


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("name", CLASSES)
def test_a_training_goes_on_in_the_plain_optimizer_and_back(
    name: str, home: str, tmp_path: Path
) -> None:
    """A checkpoint outlives the choice of where state rests: both ways, to 1e-6."""
    optimizer, arguments = CLASSES[name]
    plain_model = make_model()
    plain = optimizer(plain_model.parameters(), **arguments)
    expected = train(plain_model, plain, steps=range(9))

    model, saved = make_model(), {}
    for steps, is_offloaded in ((range(3), True), (range(3, 6), False), (range(6, 9), True)):
        stepped: Optimizer = (
            OffloadedOptimizer(model.parameters(), optimizer, **HOMES[home](tmp_path), **arguments)
            if is_offloaded
            else optimizer(model.parameters(), **arguments)
        )
        if steps.start:
            stepped.load_state_dict(saved)
        actual = train(model, stepped, steps=steps)
        saved = copy.deepcopy(stepped.state_dict())

    torch.testing.assert_close(actual.params, expected.params, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(saved["state"], plain.state_dict()["state"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_resumed_is_as_never_stopped_to_the_bit(
    optimizer: type[Optimizer], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Masters included: a resumed run is compared with the first one's curve."""
    whole, never_stopped = offloaded(tmp_path, optimizer, dtype=dtype)
    train(whole, never_stopped, steps=range(3))
    expected = train(whole, never_stopped, steps=range(3, 6))

    first, before = offloaded(tmp_path, optimizer, dtype=dtype, home="shared")
    train(first, before, steps=range(3))
    second, after = offloaded(tmp_path, optimizer, dtype=dtype, home="host")
    second.load_state_dict(first.state_dict())
    after.load_state_dict(before.state_dict())
    assert_equal(train(second, after, steps=range(3, 6)), expected)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adamax])
def test_a_16_bit_checkpoint_of_torch_gets_masters_from_its_parameters(
    optimizer: type[Optimizer], tmp_path: Path
) -> None:
    """Torch keeps none; the values to go on from are those of the model."""
    model, stepped = offloaded(tmp_path, optimizer, dtype=torch.bfloat16)
    plain = optimizer(model.parameters(), lr=1e-2)
    train(model, plain, steps=range(2))

    stepped.load_state_dict(plain.state_dict())
    before = [param.detach().float() for param in model.parameters()]
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    stepped.param_groups[0]["lr"] = 0.0
    stepped.step()

    masters = [stepped.state[param]["master"] for param in model.parameters()]
    torch.testing.assert_close(masters, before, rtol=0, atol=0)


def test_one_parameters_state_is_read_and_written_where_it_rests(tmp_path: Path) -> None:
    """Surgery on a state, resetting one layer's say, needs no checkpoint."""
    model, stepped = offloaded(tmp_path)
    train(model, stepped, steps=range(2))
    weight, other = model[2].weight, model[0].weight
    unchanged = stepped.state[other]
    value = torch.arange(weight.numel(), dtype=torch.float64).view(weight.shape)

    stepped.write_state({weight: stepped.state[weight] | {"exp_avg": value}})

    torch.testing.assert_close(stepped.state[weight]["exp_avg"], value.float())
    torch.testing.assert_close(stepped.state[other], unchanged, rtol=0, atol=0)
    assert len(stepped.state) == 6
    stepped.write_state({weight: {}})
    assert weight not in stepped.state
    with pytest.raises(TypeError):
        stepped.state[weight] = {}  # a copy would be written to, and nothing changed


def test_masters_follow_parameters_that_were_loaded_when_told(tmp_path: Path) -> None:
    """Else the next step quietly puts the old weights back."""
    model, stepped = offloaded(tmp_path, dtype=torch.bfloat16, lr=0.0)
    train(model, stepped, steps=range(1))
    other = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(other)

    stepped.refresh_masters()
    train(model, stepped, steps=range(1))

    torch.testing.assert_close(dict(model.state_dict()), other, rtol=0, atol=0)


def test_a_state_dict_of_other_groups_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    """As torch does: half a load is worse than none."""
    model, stepped = offloaded(tmp_path)
    train(model, stepped, steps=range(2))
    before = copy.deepcopy(stepped.state_dict())
    other = torch.optim.AdamW(list(model.parameters())[:2]).state_dict()

    with pytest.raises(ValueError, match="doesn't match the size"):
        stepped.load_state_dict(other)

    torch.testing.assert_close(stepped.state_dict(), before, rtol=0, atol=0)
