"""Parameters on a CUDA device, state on the host or on disk: the same training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from offloaded_training import HOMES, make_model
from torch import Tensor
from torch.optim import Optimizer
from zero_offload import DepartedGradientError, OffloadedOptimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_residence_of_state_and_gradients_changes_no_bit(
    optimizer: type[Optimizer], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Memory is what is chosen, not the result; the same holds for a device as for the host."""
    results = [
        _train(dtype, optimizer, **HOMES[home](tmp_path), grads=grads)
        for home in ("host", "disk", "lazy store")
        for grads in ("host", "device")
    ]

    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


@pytest.mark.parametrize("overflows", [None, False, True], ids=["left", "fine", "overflows"])
def test_a_grad_scaler_works_with_gradients_on_the_device_alone(overflows: bool | None) -> None:
    """Where they have left it would find none, take that for no overflow, and fail later."""
    model = make_model().cuda()
    grads = "host" if overflows is None else "device"
    offloaded = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, grads=grads)
    before = [param.detach().clone() for param in model.parameters()]
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0)
    scaler.scale(_loss(model, 0)).backward()
    if overflows is None:
        with pytest.raises(DepartedGradientError, match="grads='device'"):
            scaler.step(offloaded)
        return
    if overflows:
        model[0].weight.grad[0, 0] = float("inf")

    scaler.step(offloaded)
    scaler.update()

    stayed = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert all(stayed) if overflows else not any(stayed)
    assert scaler.get_scale() == (32.0 if overflows else 64.0)


def _loss(model: Any, step: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    with torch.device("cuda"):
        x, y = torch.ones(8, 33, dtype=dtype) * (step + 1) / 9, torch.ones(8, 7, dtype=dtype)
    return (model(x) - y).float().square().mean()


def _train(dtype: torch.dtype, optimizer: type[Optimizer], **arguments: Any) -> list[Tensor]:
    model = make_model(dtype).cuda()
    offloaded = OffloadedOptimizer(model.parameters(), optimizer, lr=1e-2, **arguments)
    for step in range(4):
        for k in range(2):
            _loss(model, 2 * step + k).backward()
        offloaded.step()
        offloaded.zero_grad()
    offloaded.close()
    return [param.detach() for param in model.parameters()]
