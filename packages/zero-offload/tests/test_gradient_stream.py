"""Gradients that leave their device are those that autograd would have left there."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zero_offload import DepartedGradientError, HostArena, host_memory
from zero_offload._departed import DepartedGradient
from zero_offload._gradient_stream import GradientStream, bytes_of


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_backwards", [1, 2, 5])
def test_accumulation_on_the_host_is_that_of_autograd_to_the_bit(
    dtype: torch.dtype, num_backwards: int
) -> None:
    """Where gradients wait must not change the training."""
    plain, streamed = _model(dtype), _model(dtype)
    stream = GradientStream(HostArena("test"))
    stream.add(list(streamed.parameters()))

    for k in range(num_backwards):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(k)).to(dtype)
        for model in (plain, streamed):
            model(x).float().square().sum().backward()
    stream.finish()

    for expected, param in zip(plain.parameters(), streamed.parameters(), strict=True):
        assert isinstance(param.grad, DepartedGradient)
        torch.testing.assert_close(stream.grad_of(param), expected.grad, rtol=0, atol=0)


def test_memory_is_taken_once_at_the_planned_size_and_given_back() -> None:
    """Gradients of one step after another must not add up."""
    model = _model(torch.float32)
    stream = GradientStream(HostArena("test"))
    before = host_memory().get("gradients", 0)

    stream.add(list(model.parameters()))
    held = host_memory()["gradients"] - before

    assert 0 <= held - bytes_of(model.parameters()) < 4096
    stream.close()
    assert host_memory().get("gradients", 0) == before
    model(torch.ones(1, 5)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("drop", ["clear", "zero_grad of the model", "param.grad = None"])
def test_what_is_dropped_is_not_added_to(drop: str) -> None:
    """Else the next step's gradients include the last's: scripts drop them in all these ways."""
    model = _model(torch.float32)
    stream = GradientStream(HostArena("test"))
    stream.add(list(model.parameters()))

    for _ in range(2):
        model(torch.ones(1, 5)).sum().backward()
        stream.finish()
        if drop == "clear":
            stream.clear()
        elif drop == "zero_grad of the model":
            model.zero_grad()
        else:
            for param in model.parameters():
                param.grad = None
        assert all(stream.grad_of(param) is None for param in model.parameters())
    model(torch.ones(1, 5)).sum().backward()
    stream.finish()

    plain = _model(torch.float32)
    plain(torch.ones(1, 5)).sum().backward()
    for expected, param in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(stream.grad_of(param), expected.grad, rtol=0, atol=0)


def test_whoever_reads_a_gradient_that_has_left_is_told() -> None:
    """Torch's clipping would find no gradients, and the training would go on unclipped."""
    model = _model(torch.float32)
    stream = GradientStream(HostArena("test"))
    stream.add(list(model.parameters()))
    model(torch.ones(1, 5)).sum().backward()
    guard = model[0].weight.grad
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))

    assert (guard.shape, guard.dtype, guard.device) == (
        (model[0].weight.shape, model[0].weight.dtype, model[0].weight.device)
    )
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
