"""Gradients that leave their device are those that autograd would have left there."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zero_offload import HostArena, host_memory
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
    stream = GradientStream(HostArena("test"), lambda param: True)
    stream.add(streamed.parameters())

    for k in range(num_backwards):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(k)).to(dtype)
        for model in (plain, streamed):
            model(x).float().square().sum().backward()
    stream.finish()

    for expected, param in zip(plain.parameters(), streamed.parameters(), strict=True):
        assert param.grad is None
        torch.testing.assert_close(stream.grad_of(param), expected.grad, rtol=0, atol=0)


def test_memory_is_taken_once_at_the_planned_size_and_given_back() -> None:
    """Gradients of one step after another must not add up."""
    model = _model(torch.float32)
    stream = GradientStream(HostArena("test"), lambda param: True)
    before = host_memory().get("gradients", 0)

    stream.add(model.parameters())
    held = host_memory()["gradients"] - before

    assert 0 <= held - bytes_of(model.parameters()) < 4096
    stream.close()
    assert host_memory().get("gradients", 0) == before
    model(torch.ones(1, 5)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_what_is_cleared_is_not_added_to() -> None:
    """Else the next step's gradients include the last's."""
    model = _model(torch.float32)
    stream = GradientStream(HostArena("test"), lambda param: True)
    stream.add(model.parameters())

    for _ in range(2):
        stream.clear()
        model(torch.ones(1, 5)).sum().backward()

    plain = _model(torch.float32)
    plain(torch.ones(1, 5)).sum().backward()
    for expected, param in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(stream.grad_of(param), expected.grad, rtol=0, atol=0)
