"""Residence on a CUDA device: host memory that is another one. docs/gpu.md says what has run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import nn
from zero_engine import Offload
from zero_partition import memory_report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH = 128
BF16 = zero_engine.Precision(params=torch.bfloat16)


def _model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(6)]
    return nn.Sequential(*blocks).cuda()


def _train(
    config: ZeroConfig, *, steps: int = 5
) -> tuple[list[float], dict[str, torch.Tensor], nn.Module]:
    """With two micro-batches a step, and clipping that bites."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    zero_engine.shard(model, optimizer, config)
    dtype = torch.bfloat16 if config.precision is not None else torch.float32
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        for _ in range(2):
            x = torch.randn(16, WIDTH, generator=generator).to("cuda", dtype)
            loss = (model(x) - x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        zero_engine.clip_grad_norm_(model, 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return losses, zero_engine.full_state_dict(model), model


@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("fraction", [0.3, 1.0])
@pytest.mark.parametrize("optimizer", ["host", "disk"])
@pytest.mark.parametrize(
    "where", [(1, "device"), (2, "device"), (3, "device"), (3, "host"), (3, "disk")]
)
def test_residence_changes_no_more_than_another_kernel_does(
    where: tuple[int, str], optimizer: str, fraction: float, precision, tmp_path: Path
) -> None:
    """Copies on streams of their own must be there when they are read, both ways."""
    stage, params = where
    offload = Offload(
        optimizer=optimizer,
        params=params,
        fraction=fraction,
        path=tmp_path if "disk" in (optimizer, params) else None,
        subgroup_bytes=100_000,
    )
    plain_losses, plain, _ = _train(ZeroConfig(stage, precision=precision))

    losses, weights, model = _train(ZeroConfig(stage, precision=precision, offload=offload))

    # Native steps round in another order than torch's; a bf16 value may then be its neighbour.
    tolerance = 1e-5 if precision is None else 2**-6
    torch.testing.assert_close(losses, plain_losses, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(weights, plain, rtol=tolerance, atol=tolerance)
    report = memory_report(model)
    assert report.host_bytes > 0
    assert (report.params_bytes == 0) == (params != "device")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizer_state_on_the_host_leaves_nothing_of_it_on_the_device(stage: int) -> None:
    """Gradients, masters and moments: 16 bytes a parameter that the device need not have."""
    config = ZeroConfig(
        stage, offload=Offload(optimizer="host", params="host" if stage == 3 else "device")
    )
    before = torch.cuda.memory_allocated()
    _, _, model = _train(config)
    zero_engine.release_buffers(model)

    report = memory_report(model)

    resting = 0 if stage == 3 else sum(p.numel() for p in model.parameters()) * 4
    assert report.optimizer_bytes == report.gradients_bytes == 0
    assert torch.cuda.memory_allocated() - before <= resting + 2**20


def test_gradients_wait_on_the_host_from_the_end_of_backward_on() -> None:
    """Whoever reads `grad` of a shard then must find what a plain run has there."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    zero_engine.shard(model, optimizer, ZeroConfig(2, offload=Offload(optimizer="host")))
    plain = _model()
    x = torch.randn(16, WIDTH, device="cuda")
    for _ in range(2):  # the second is added to the first
        model(x).square().mean().backward()
        plain(x).square().mean().backward()

    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(zero_engine.full_grad(param), expected.grad)
    shards = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(shard.grad.is_cpu for shard in shards)
    norm = zero_engine.clip_grad_norm_(model, 1.0)
    expected_norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.testing.assert_close(norm.cpu(), expected_norm.cpu())
