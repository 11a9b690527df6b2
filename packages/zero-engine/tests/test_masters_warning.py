"""shard() warns of 16-bit parameters without masters, unless somebody has said what they want."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import zero_engine
import zero_offload
from torch import nn
from zero_engine import Precision, ZeroConfig
from zero_partition import ChainedOptimizer

Made = Callable[[nn.Module], torch.optim.Optimizer]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5)


def _chained(model: nn.Module) -> torch.optim.Optimizer:
    own = zero_offload.CPUAdam(model[0].parameters(), lr=1e-5)
    return ChainedOptimizer(own, torch.optim.SGD(model[1].parameters(), lr=1e-5))


def _as_fused_adam(model: nn.Module) -> torch.optim.Optimizer:
    """Says of masters what `zero_offload.FusedAdam` does, which needs CUDA."""
    return torch.optim.SGD([{"params": [*model.parameters()], "masters": True}], lr=1e-5)


def _warnings(make: Made | None, precision: Precision | None, dtype: torch.dtype) -> list[str]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(dtype)
    optimizer = None if make is None else make(model)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        zero_engine.shard(model, optimizer, ZeroConfig(3, precision=precision))
        zero_engine.shard(model)  # again, as it is
    assert all(each.filename == __file__ for each in found)
    return [str(each.message) for each in found]


@pytest.mark.parametrize(
    ("make", "name"), [(_adamw, "AdamW"), (_chained, "SGD")], ids=["alone", "chained"]
)
def test_parameters_without_masters_are_warned_of_once(make: Made, name: str) -> None:
    """Training goes on for days before its loss says so."""
    (said,) = _warnings(make, None, torch.bfloat16)

    assert said.startswith(f"shard(): {name} updates parameters of torch.bfloat16 without fp32")
    assert "ZeroConfig(precision=Precision())" in said  # the remedy
    assert "Precision(masters=None)" in said  # how to say that it is meant so


def test_the_most_of_the_elements_says_what_a_model_is() -> None:
    """A 16-bit model may keep its norms in fp32; an fp32 model may have some 16-bit weights."""
    for large, warned in ((torch.bfloat16, True), (torch.float32, False)):
        small = torch.float32 if warned else torch.bfloat16
        model = nn.Sequential(nn.Linear(8, 8, dtype=large), nn.LayerNorm(8, dtype=small))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            zero_engine.shard(model, _adamw(model), ZeroConfig(2))
        assert len(found) == warned


@pytest.mark.parametrize(
    ("make", "precision", "dtype"),
    [
        (_adamw, None, torch.float32),
        (_adamw, Precision(), torch.bfloat16),
        (_adamw, Precision(params=torch.bfloat16), torch.float32),
        (_adamw, Precision(masters=None), torch.float16),
        (lambda model: zero_offload.CPUAdam(model.parameters()), None, torch.bfloat16),
        (
            lambda model: zero_offload.CPUAdam(model.parameters(), masters=False),
            None,
            torch.bfloat16,
        ),
        (_as_fused_adam, None, torch.bfloat16),
        (None, None, torch.bfloat16),
    ],
)
def test_nobody_is_warned_who_has_masters_or_wants_none(
    make: Made | None, precision: Precision | None, dtype: torch.dtype
) -> None:
    """A warning that comes without reason is not read the next time."""
    assert not _warnings(make, precision, dtype)


def test_small_updates_need_masters() -> None:
    """The remedy that is named is one: with it, no update is lost."""
    moved = []
    for precision in (Precision(masters=None), Precision()):
        torch.manual_seed(0)
        model = nn.Linear(64, 64, dtype=torch.bfloat16)
        before = model.weight.detach().float()
        optimizer = _adamw(model)
        zero_engine.shard(model, optimizer, ZeroConfig(3, precision=precision))
        for _ in range(10):
            x = torch.randn(8, 64, dtype=torch.bfloat16)
            (model(x) - x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        after = zero_engine.full_param(model.weight).float()
        moved.append((after != before).float().mean())

    without, with_masters = moved
    assert without < 0.2
    assert with_masters > 0.99
