"""What only a GPU can show. Skipped without one; docs/gpu.md says what has run, and where."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import parity
import pytest
import torch
import zero_comm
import zero_engine
import zero_partition
from parity import ZeroConfig
from torch import nn
from torch.nn import functional as F
from zero_engine import Offload, Precision, Saver
from zero_engine.planning import Plan
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


# ---- Residence ----


WIDTH = 128
BF16 = zero_engine.Precision(params=torch.bfloat16)


def _model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(6)]
    return nn.Sequential(*blocks).cuda()


def _train_resting(
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
    plain_losses, plain, _ = _train_resting(ZeroConfig(stage, precision=precision))

    losses, weights, model = _train_resting(ZeroConfig(stage, precision=precision, offload=offload))

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
    _, _, model = _train_resting(config)
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


# ---- Parking ----


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("place", ["host", "pageable", "non-blocking", "disk"])
def test_a_gpu_gets_the_memory_and_training_its_bits(stage: int, place: str, tmp_path) -> None:
    """What generation needs between training phases, by CUDA's own count."""
    options: dict[str, dict[str, Any]] = {
        "host": {},
        "pageable": {"pin": False},
        "non-blocking": {"non_blocking": True},
        "disk": {"to": "disk", "path": tmp_path},
    }
    expected = _train_parked(stage, None)

    assert _train_parked(stage, options[place]) == expected


def _train_parked(stage: int, options: dict[str, Any] | None) -> list[float]:
    model = parity.build(lambda: parity.Chain(4, 1024)).cuda()
    optimizer = parity.adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(stage))
    losses = []
    for _ in range(3):
        loss = model(torch.linspace(-1, 1, 2048, device="cuda").view(2, 1024)).square().mean()
        loss.backward()
        losses.append(loss.item())
        del loss
        if options is not None:
            zero_engine.release_buffers(model)
            before = torch.cuda.memory_allocated()
            zero_engine.offload_states(model, **options)
            parked = zero_partition.memory_report(model).parked_bytes
            fall = before - torch.cuda.memory_allocated()
            assert parked >= 2 * 4 * 2**20 * 4
            assert parked - 2**16 < fall <= parked
            poison = torch.full((parked // 4,), float("nan"), device="cuda")
            del poison
            zero_engine.reload_states(model, non_blocking=options.get("non_blocking", False))
        optimizer.step()
        optimizer.zero_grad()
    return losses


# ---- Saving ----


def _make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.Linear(64, 64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return zero_engine.shard(model, optimizer, ZeroConfig(3))


def _run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(3):
        loss = model(torch.ones(4, 64, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("how", ["save", "in background", "overlapped"])
def test_a_run_on_a_device_goes_on_with_its_dropout(tmp_path: Path, how: str) -> None:
    """Its generator is the device's, and its step counts lie there."""
    model, optimizer = _make(0)
    _run(model, optimizer)
    if how == "save":
        zero_engine.save(tmp_path, model, optimizer, step=3)
        expected = _run(model, optimizer)
    else:
        with Saver(tmp_path, model, optimizer, overlap=how == "overlapped") as saver:
            saver.save(step=3)
            expected = _run(model, optimizer)
    again, its = _make(1)

    zero_engine.load(tmp_path, again, its)

    assert _run(again, its) == expected


# ---- Plans ----


PLACES = [
    (stage, optimizer, params)
    for stage in (0, 1, 2, 3)
    for optimizer in ("device", "host", "disk")
    for params in ("device", "host", "disk")
    if (stage or optimizer == "device") and (stage == 3 or params == "device")
]


def _model_planned() -> nn.Module:
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

    plan, report = _train_planned(config)

    passing = report.host_bytes - plan.at_rest.host_bytes if params == "disk" else 0
    assert 0 <= passing <= plan.passing_bytes
    assert attrs.evolve(report, host_bytes=report.host_bytes - passing) == plan.at_rest
    del report
    assert torch.cuda.memory_allocated() - before < 2**20  # what was trained is gone


def _train_planned(config: ZeroConfig) -> tuple[Plan, object]:
    model = _model_planned().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = zero_engine.plan(
        _model_planned(), config, world_size=1, optimizer="adamw", device="cuda"
    )
    zero_engine.shard(model, optimizer, config)
    dtype = torch.float32 if config.precision is None else torch.bfloat16
    for _ in range(3):
        model(torch.ones(4, 128, device="cuda", dtype=dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return plan, memory_report(model)


def test_a_timeline_is_of_the_stream_of_the_device() -> None:
    """Kernels run long after they were launched; what is timed must be them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).cuda()
    model, optimizer = zero_engine.shard(
        model, torch.optim.AdamW(model.parameters(), fused=True), ZeroConfig(2)
    )
    x = torch.randn(4096, 2048, device="cuda")

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with zero_engine.timeline(model) as recorded:
        begin.record()
        step()
        end.record()

    (events,) = recorded.ranks
    expected_s = begin.elapsed_time(end) / 1e3
    assert sum(event.seconds for event in events) == pytest.approx(expected_s, rel=0.05)
    assert {"compute", "step"} < {event.kind for event in events}

    with zero_engine.metrics(model) as end_step:
        end_step()
        begin.record()
        step()
        end.record()
        row = end_step()
    assert row["time/step_s"] == pytest.approx(begin.elapsed_time(end) / 1e3, rel=0.05)
    parts = ("compute", "optimizer", "swap", "exposed")
    assert sum(row[f"time/{part}_s"] for part in parts) == pytest.approx(row["time/step_s"])


def test_random_numbers_of_a_device_are_those_of_both_runs() -> None:
    """Else dropout alone makes a verification differ."""
    found = zero_engine.verify(
        lambda: nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64)).cuda(),
        lambda model: torch.optim.AdamW(model.parameters()),
        [torch.randn(8, 64, device="cuda") for _ in range(3)],
        ZeroConfig(3),
        loss=lambda model, batch: model(batch).square().mean(),
        group=zero_comm.Group.solo(torch.device("cuda", 0)),
    )

    assert found.is_equal, str(found)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_sanitizer_changes_no_bit_on_a_device(stage: int, monkeypatch) -> None:
    """Poison and copies are written on the stream that computes."""
    expected, _ = _train(stage)
    monkeypatch.setenv("ZERO_SANITIZE", "1")

    losses, _ = _train(stage)

    assert losses == expected
