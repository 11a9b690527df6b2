"""Gradients that leave their device are those that autograd would have left there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

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


DROPS: Final[dict[str, Callable[[nn.Module, OffloadedOptimizer], object]]] = {
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "zero_grad of the model": lambda model, optimizer: model.zero_grad(),
    "param.grad = None": lambda model, optimizer: [
        setattr(param, "grad", None) for param in model.parameters()
    ],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("drop", DROPS)
def test_gradients_on_the_host_are_those_of_autograd_to_the_bit(
    dtype: torch.dtype, drop: str
) -> None:
    """However many add up, and in whatever way they are dropped: in the room of one."""
    plain, streamed = _model(dtype), _model(dtype)
    before = host_memory().get("gradients", 0)
    with _leaving(streamed) as optimizer:
        other = OffloadedOptimizer(plain.parameters(), torch.optim.SGD, lr=0.1, grads="device")
        optimizer.param_groups[0]["lr"] = 0.1
        for num_backwards in (1, 2, 0, 5):
            for k in range(num_backwards):
                x = torch.randn(4, 5, generator=torch.Generator().manual_seed(k)).to(dtype)
                for model in (plain, streamed):
                    model(x).float().square().sum().backward()
            for model, stepped in ((plain, other), (streamed, optimizer)):
                stepped.step()
                DROPS[drop](model, stepped)
                stepped.step()  # of nothing
            torch.testing.assert_close(_params(streamed), _params(plain), rtol=0, atol=0)
            held = host_memory()["gradients"] - before
            assert 0 <= held - optimizer.footprint.gradient_bytes < 4096
            assert held >= sum(param.nbytes for param in streamed.parameters())

    assert host_memory().get("gradients", 0) == before
    streamed(torch.ones(1, 5, dtype=dtype)).sum().backward()
    assert all(isinstance(param.grad + 1, Tensor) for param in streamed.parameters())


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
