"""Plans on a CUDA device, where the host's memory is another one. docs/gpu.md says what has run."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import nn
from zero_engine import Offload, Precision
from zero_engine.planning import Plan
from zero_partition import memory_report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PLACES = [
    (stage, optimizer, params)
    for stage in (0, 1, 2, 3)
    for optimizer in ("device", "host", "disk")
    for params in ("device", "host", "disk")
    if (stage or optimizer == "device") and (stage == 3 or params == "device")
]


def _model() -> nn.Module:
    blocks = [nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 128)) for _ in range(6)]
    return nn.Sequential(*blocks)


@pytest.mark.parametrize(
    "precision", [None, Precision(params=torch.bfloat16)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("where", PLACES, ids=str)
def test_a_plan_is_what_the_device_then_holds(
    where: tuple[int, str, str], precision: Precision | None, tmp_path: Path
) -> None:
    """The device's memory is what is short, and there it is counted by the device's allocator."""
    stage, optimizer, params = where
    if stage == 0 and precision is not None:
        pytest.skip("stage 0 has no masters")
    offload = None
    if (optimizer, params) != ("device", "device"):
        path = tmp_path if "disk" in (optimizer, params) else None
        offload = Offload(optimizer=optimizer, params=params, path=path, subgroup_bytes=2**16)
    config = ZeroConfig(stage, precision=precision, offload=offload)
    before = torch.cuda.memory_allocated()

    plan, report = _train(config)

    passing = report.host_bytes - plan.at_rest.host_bytes if params == "disk" else 0
    assert 0 <= passing <= plan.passing_bytes
    assert attrs.evolve(report, host_bytes=report.host_bytes - passing) == plan.at_rest
    del report
    assert torch.cuda.memory_allocated() - before < 2**20  # what was trained is gone


def _train(config: ZeroConfig) -> tuple[Plan, object]:
    model = _model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = zero_engine.plan(_model(), config, world_size=1, optimizer="adamw", device="cuda")
    zero_engine.shard(model, optimizer, config)
    dtype = torch.float32 if config.precision is None else torch.bfloat16
    for _ in range(3):
        model(torch.ones(4, 128, device="cuda", dtype=dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return plan, memory_report(model)
