"""Gradients that leave their device are those that autograd would have left there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zero_offload import DepartedGradientError, OffloadedOptimizer, host_memory
from zero_offload.testing import elsewhere


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)


@contextmanager
def _leaving(model: nn.Module) -> Iterator[OffloadedOptimizer]:
    """An optimizer whose step subtracts the gradients, which wait on the host for it."""
    with elsewhere(model.parameters()):
        optimizer = OffloadedOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
        yield optimizer
        optimizer.close()


def _params(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_backwards", [1, 2, 5])
def test_accumulation_on_the_host_is_that_of_autograd_to_the_bit(
    dtype: torch.dtype, num_backwards: int
) -> None:
    """Where gradients wait must not change the training."""
    plain, streamed = _model(dtype), _model(dtype)
    with _leaving(streamed) as optimizer:
        other = OffloadedOptimizer(plain.parameters(), torch.optim.SGD, lr=1.0, grads="device")
        for k in range(num_backwards):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(k)).to(dtype)
            for model in (plain, streamed):
                model(x).float().square().sum().backward()
        with pytest.raises(DepartedGradientError):
            _ = next(streamed.parameters()).grad + 1
        other.step()
        optimizer.step()

    torch.testing.assert_close(_params(streamed), _params(plain), rtol=0, atol=0)


def test_memory_is_taken_once_at_the_planned_size_and_given_back() -> None:
    """Gradients of one step after another must not add up."""
    model = _model()
    before = host_memory().get("gradients", 0)
    with _leaving(model) as optimizer:
        for _ in range(3):
            held = sum(n for name, n in host_memory().items() if name == "gradients") - before
            assert 0 <= held - optimizer.footprint.gradient_bytes < 4096
            assert held >= sum(param.nbytes for param in model.parameters())
            model(torch.ones(1, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert host_memory().get("gradients", 0) == before
    model(torch.ones(1, 5)).sum().backward()
    assert all(isinstance(param.grad + 1, Tensor) for param in model.parameters())


@pytest.mark.parametrize("drop", ["zero_grad", "zero_grad of the model", "param.grad = None"])
def test_what_is_dropped_is_not_added_to(drop: str) -> None:
    """Else the next step's gradients include the last's: scripts drop them in all these ways."""
    model, plain = _model(), _model()
    with _leaving(model) as optimizer:
        for _ in range(2):
            model(torch.ones(1, 5)).sum().backward()
            if drop == "zero_grad":
                optimizer.zero_grad()
            elif drop == "zero_grad of the model":
                model.zero_grad()
            else:
                for param in model.parameters():
                    param.grad = None
            optimizer.step()
            torch.testing.assert_close(_params(model), _params(plain), rtol=0, atol=0)
        model(torch.ones(1, 5)).sum().backward()
        optimizer.step()

    plain(torch.ones(1, 5)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    torch.testing.assert_close(_params(model), _params(plain), rtol=0, atol=0)


def test_whoever_reads_a_gradient_that_has_left_is_told() -> None:
    """Torch's clipping would find no gradients, and the training would go on unclipped."""
    model = _model()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    with _leaving(model):
        model(torch.ones(1, 5)).sum().backward()
        param = model[0].weight
        guard: Any = param.grad

        assert (guard.shape, guard.dtype, guard.device) == (param.shape, param.dtype, param.device)
        for use in (
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
            lambda: torch.optim.SGD(model.parameters()).step(),
            lambda: scaler.unscale_(torch.optim.SGD(model.parameters())),
            lambda: guard + 1,
            lambda: guard.data,
            guard.item,
        ):
            with pytest.raises(DepartedGradientError, match="has left its device"):
                use()
