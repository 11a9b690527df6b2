"""The norm of gradients is torch's, and the same whoever computes it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from zero_offload import OffloadedOptimizer
from zero_offload.testing import native, native_isas

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUMELS = (0, 1, 7, 17, 1003, 2**18 + 5)


def _norm(*grads: Tensor) -> float:
    params = [torch.zeros_like(grad, requires_grad=True) for grad in grads]
    optimizer = OffloadedOptimizer(params, torch.optim.SGD, lr=0.1)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return optimizer.clip_grad_norm_(1.0).item()


@pytest.mark.parametrize("isa", [None, *native_isas()])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_is_that_of_all_elements(isa: str | None, dtype: torch.dtype) -> None:
    """It decides on clipping: every element, whole vectors and their ends, counts once."""
    generator = torch.Generator().manual_seed(0)
    with native(isa):
        for numel in NUMELS:
            grad = torch.randn(numel + 1, generator=generator).to(dtype)[1:]
            expected = math.sqrt(grad.double().square().sum().item())
            assert _norm(grad) == pytest.approx(expected, rel=1e-7)
            assert _norm(grad, grad) == pytest.approx(math.sqrt(2) * expected, rel=1e-7)


@pytest.mark.parametrize("isa", [None, *native_isas()])
def test_what_is_not_finite_shows_in_the_norm(isa: str | None) -> None:
    """Whoever skips a step goes by it, and inf or nan says how bad it is."""
    with native(isa):
        for position in (0, 5, 999, 1002):
            for bad in (math.inf, -math.inf, math.nan):
                grad = torch.ones(1003)
                grad[position] = bad
                expected = torch.linalg.vector_norm(grad)
                torch.testing.assert_close(torch.tensor(_norm(grad)), expected, equal_nan=True)


@pytest.mark.usefixtures("compiled")
def test_neither_threads_nor_instructions_change_the_norm() -> None:
    """A norm that differed between ranks would clip them differently."""
    grad = torch.randn(3 * 2**18 + 11)
    threads = torch.get_num_threads()
    found = set()
    try:
        for isa in native_isas():
            for num_threads in (1, 2, 5):
                torch.set_num_threads(num_threads)
                with native(isa):
                    found.add(_norm(grad))
    finally:
        torch.set_num_threads(threads)

    assert len(found) == 1
