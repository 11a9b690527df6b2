"""What only a GPU can show. Skipped without one; docs/gpu.md says what has run, and where."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import zero_comm
import zero_engine
from parity import ZeroConfig
from torch import nn
from torch.nn import functional as F
from zero_partition import memory_report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _train(stage: int | None, steps: int = 4) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(33), nn.Linear(33, 33)) for _ in range(4)]
    model: nn.Module = nn.Sequential(*blocks).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if stage is not None:
        model, optimizer = zero_engine.shard(model, optimizer, ZeroConfig(stage))
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 33, generator=generator).cuda()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if stage is None:
        return losses, {key: value.cpu() for key, value in model.state_dict().items()}
    assert memory_report(model).params_bytes > 0
    return losses, zero_engine.full_state_dict(model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_gpu_trains_as_plain_torch_does(stage: int) -> None:
    """Streams and pinned addresses must change no bit where nothing travels."""
    expected_losses, expected = _train(None)

    losses, weights = _train(stage)

    assert losses == expected_losses
    assert all(torch.equal(weights[key], value) for key, value in expected.items())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nccl_trains_as_plain_torch_does(stage: int, tmp_path) -> None:
    """The same through NCCL's collectives, which one rank runs as well."""
    expected_losses, _ = _train(None)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        assert zero_comm.init().backend.name == "nccl"
        losses, _ = _train(stage)
    finally:
        torch.distributed.destroy_process_group()

    assert losses == expected_losses


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_steady_step_with_masters_and_clipping_never_waits_for_the_device(stage: int) -> None:
    """A host that waits launches nothing meanwhile: every step would pay for it."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    config = ZeroConfig(stage, precision=zero_engine.Precision(params=torch.bfloat16))
    zero_engine.shard(model, optimizer, config)
    x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        model(x).float().square().mean().backward()
        report = zero_engine.unscale_and_clip_(model, scale=2.0, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        return report.finite

    for _ in range(3):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        finite = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert finite.item()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_steady_step_in_fp16_decides_on_overflow_without_the_host(stage: int) -> None:
    """The scale, the skipped step and the scheduler must not cost a wait in every step."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    engine, *_ = zero_engine.initialize(
        model=model.cuda(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
        lr_scheduler=torch.optim.lr_scheduler.ConstantLR,
        config={
            "train_micro_batch_size_per_gpu": 8,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage},
            "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2},
        },
    )
    x = torch.randn(8, 64, device="cuda", dtype=torch.float16)

    def step(factor: float = 1.0) -> None:
        engine.backward(engine(x).float().square().mean() * factor)
        engine.step()

    for _ in range(3):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (engine.was_step_applied(), engine.skipped_steps) == (True, 0)
    scale = engine.cur_scale
    step(float("inf"))
    step()
    assert (engine.was_step_applied(), engine.skipped_steps) == (True, 1)
    assert engine.cur_scale <= scale


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_gpus_train_through_nccl(stage: int, tmp_path: Path) -> None:
    """Gathers and reductions on NCCL's stream must reach the same loss at every stage."""
    losses = []
    for chosen in (0, stage):
        out = tmp_path / str(chosen)
        options = ["--ranks", "2", "--size", "tiny", "--steps", "20", "--out", str(out)]
        example = Path(__file__).parent.parent / "examples" / "train_gpt.py"
        command = [sys.executable, str(example), *options, "--stage", str(chosen)]
        subprocess.run(command, check=True, timeout=300)
        with (out / "metrics.csv").open() as file:
            losses.append(float(list(csv.DictReader(file))[-1]["loss"]))

    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
