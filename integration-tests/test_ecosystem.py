"""What people use around a plain loop of torch, beside a sharded model: the same, or named.

docs/guides/pytorch.md lists it; what other files state is not repeated here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import parity
import pytest
import torch
import torch.distributed as dist
import torchmetrics
import zero_engine
from parity import ZeroConfig
from scripts import on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.nn.utils import parametrizations, prune
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from training import assert_weights_of
from zero_comm import Group
from zero_comm.testing import assert_close, equal, on_cpu
from zero_engine import Precision
from zero_partition import StateError

pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata's
]

PAGE: Final = Path(__file__).parents[1] / "docs" / "guides" / "pytorch.md"
WIDTH: Final = 8
NUM_CLASSES: Final = 4
SHARDED: Final = (1, 2, 3)  # stages


class _Net(nn.Module):
    """With statistics, which a loop updates on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.up(x))))


class _Measured(_Net):
    """Keeps a metric among its modules, as a LightningModule does."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = _accuracy()


def _batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(6, WIDTH, generator=generator)
    return x, torch.randint(NUM_CLASSES, (6,), generator=generator)


def _loss(model: nn.Module, step: int, rank: int) -> Tensor:
    x, targets = _batch(step, rank)
    return nn.functional.cross_entropy(model(x), targets)


def _build(make: type[nn.Module] = _Net) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = parity.build(make)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _shard(group: Group, stage: int, make: type[nn.Module] = _Net, **options: Any) -> Any:
    return zero_engine.shard(*_build(make), ZeroConfig(stage, **options), group=group)


# ---- GradScaler ----


def _overflowing(model: nn.Module, loss: Tensor, *, is_now: bool) -> Tensor:
    """In the gradient of one element, which is in the shard of one rank."""
    bias = getattr(model, "module", model).head.bias
    return loss + bias[-1] * (float("inf") if is_now else 0.0)


def test_a_grad_scaler_trains_as_under_ddp(group: Group) -> None:
    """DDP's gradients are equal, and so is what overflowed; shards are one rank's each."""
    plain, its = _build()
    expected = _train_scaled(parity.as_ddp(plain, group), its, group.rank)
    assert [scale for _, scale in expected] == [256.0, 128.0, 128.0, 256.0, 256.0]
    for stage in SHARDED:
        model, optimizer = _shard(group, stage)
        assert _train_scaled(model, optimizer, group.rank) == expected, f"stage {stage}"
        assert_weights_of(model, plain, group=group, what=f"stage {stage}")


def _train_scaled(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int
) -> list[tuple[float, float]]:
    """Losses under fp16 autocast, and scales; rank 1's second loss overflows, in one element."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    seen = []
    for step in range(5):
        with torch.autocast(torch.get_default_device().type, torch.float16):
            loss = _loss(model, step, rank)
        is_now = (step, rank) == (1, 1)
        scaler.scale(_overflowing(model, loss, is_now=is_now)).backward()
        if step != 3:  # step() does it otherwise
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((loss.item(), scaler.get_scale()))
    return seen


def test_a_grad_scaler_skips_masters_of_fp16_parameters_everywhere(group: Group) -> None:
    """Torch refuses to unscale fp16 gradients; those of fp32 masters are what it finds here."""
    for stage in SHARDED:
        model, optimizer = _shard(group, stage, precision=Precision(params=torch.float16))
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(3):
            before = zero_engine.full_state_dict(model)
            scale = scaler.get_scale()
            loss = _loss(model, step, group.rank)
            is_now = (step, group.rank) == (1, 0)
            scaler.scale(_overflowing(model, loss, is_now=is_now)).backward()
            scaler.unscale_(optimizer)
            zero_engine.clip_grad_norm_(model, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after = zero_engine.full_state_dict(model)
            assert scaler.get_scale() == (scale / 2 if step == 1 else scale)
            for name in before:
                if name.endswith("weight"):
                    assert equal(before[name], after[name]) == (step == 1), (stage, name)


# ---- Schedulers and averages ----


SCHEDULERS: Final[dict[str, Callable[[torch.optim.Optimizer], Any]]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.CosineAnnealingLR(o, 3)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, 2),  # and momentum
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=6),  # and momentum
    "SWALR": lambda o: SWALR(o, 1e-3, 2),
}


def test_every_scheduler_of_torch_sets_the_rates_of_shards(group: Group) -> None:
    """shard() gives param groups other parameters; whoever holds a group must be heard."""
    assert {*lr_scheduler.__all__} - {"LRScheduler"} <= SCHEDULERS.keys(), "torch has another"
    for name, make in SCHEDULERS.items():
        expected = _train_scheduled(name, make, lambda *_: None, is_early=False)
        for stage, is_early in ((1, False), (3, True)):
            found = _train_scheduled(
                name,
                make,
                partial(zero_engine.shard, config=ZeroConfig(stage), group=group),
                is_early=is_early,
            )
            assert found == expected, f"{name}, stage {stage}"


def _train_scheduled(
    name: str, make: Callable[..., Any], shard: Callable[..., Any], *, is_early: bool
) -> list[tuple[float, ...]]:
    """The same data on every rank, so that their mean is what one process computes."""
    model, optimizer = _build()
    scheduler = make(optimizer) if is_early else None
    shard(model, optimizer)
    scheduler = scheduler or make(optimizer)
    seen = []
    for step in range(5):
        loss = _loss(model, step, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(*[loss.item()] if name == "ReduceLROnPlateau" else [])
        param_group = optimizer.param_groups[0]
        seen.append((loss.item(), param_group["lr"], param_group["momentum"]))
    return seen


def test_statistics_are_computed_again_for_an_average_of_the_weights(group: Group) -> None:
    """update_bn() is the last call of torch's recipe for SWA; each rank's batches are its own."""
    for stage in SHARDED:
        plain, its = _build()
        model, optimizer = _shard(group, stage)
        expected = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        average = zero_engine.ShardedAverage(model, decay=0.5)
        for step in range(3):
            for trained, by in ((plain, its), (model, optimizer)):
                parity.finish_step(_loss(trained, step, 0), by)
            expected.update_parameters(plain)
            average.update()
        batches = [_batch(step, group.rank) for step in range(2 + group.rank)]
        update_bn(batches, expected)
        with average.swap():
            update_bn(batches, model)
            assert model.training
            model.eval(), expected.eval()
            with torch.no_grad():
                assert equal(model(batches[0][0]), expected(batches[0][0])), stage


# ---- Metrics ----


def _accuracy() -> torchmetrics.Metric:
    return torchmetrics.Accuracy("multiclass", num_classes=NUM_CLASSES)


def test_metrics_reduce_over_all_ranks_beside_the_model_and_in_it(group: Group) -> None:
    """They communicate in the same group, between a backward and its step."""
    for stage in SHARDED:
        model, optimizer = _shard(group, stage, _Measured)
        mean = torchmetrics.MeanMetric()
        seen = []
        for step in range(3):
            x, targets = _batch(step, group.rank)
            outputs = model(x)
            loss = nn.functional.cross_entropy(outputs, targets)
            loss.backward()
            mean.update(loss.detach())
            model.accuracy.update(outputs, targets)
            found = model.accuracy.compute(), mean.compute()
            optimizer.step()
            optimizer.zero_grad()
            everyone: list[Any] = [None] * group.world_size
            mine = on_cpu((outputs.detach(), targets, loss.item()))
            dist.all_gather_object(everyone, mine)
            seen += everyone
            whole = _accuracy()
            whole.sync_on_compute = False
            whole.update(*(torch.cat([each[index] for each in seen]) for index in range(2)))
            assert equal(found[0], whole.compute()), f"stage {stage}, step {step}"
            assert_close(found[1].item(), sum(s[2] for s in seen) / len(seen))


# ---- What reads or writes the model ----


def test_weights_from_rank_0_are_set_by_torchs_checkpoint_functions(
    group: Group, tmp_path: Path
) -> None:
    """So that one rank reads the file; both at once, and files of shards, are ours to do."""
    full = StateDictOptions(full_state_dict=True)
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    plain, its = _build()
    parity.finish_step(_loss(plain, 0, 0), its)
    weights, state = get_state_dict(plain, its, options=full)
    zeros = {name: torch.zeros_like(value) for name, value in weights.items()}
    for stage in SHARDED:
        model, optimizer = _shard(group, stage)
        set_model_state_dict(model, {} if group.rank else weights, options=from_rank_0)
        assert_weights_of(model, plain, group=group, what=f"stage {stage}")
        with pytest.raises(StateError, match=r"load_full_optimizer_state_dict\(model, state_dict"):
            set_state_dict(
                model, optimizer, model_state_dict=zeros, optim_state_dict=state, options=full
            )
        assert_weights_of(model, plain, group=group, what=f"stage {stage}, nothing loaded")
        with pytest.raises(StateError, match="full_optimizer_state_dict"):
            dist.checkpoint.save({"optimizer": optimizer}, checkpoint_id=tmp_path)


def _prune(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", 0.3)


LATE: Final = {"pruned": _prune, "parametrized": parametrizations.spectral_norm}


def test_what_makes_other_parameters_comes_before_shard(group: Group) -> None:
    """Each rank would train its own. Before shard() they train: test_module_kinds.py."""
    for stage in SHARDED:
        for what, change in LATE.items():
            model, _ = _shard(group, stage)
            with pytest.raises(StateError, match=r"'head\.weight'.*before shard\(\)"):
                change(model.head)
                _loss(model, 0, group.rank)
                pytest.fail(f"{what} at stage {stage}")


# ---- The page ----


def test_the_script_of_the_page_goes_on_in_the_middle_of_an_epoch(ranks, tmp_path: Path) -> None:
    """With the batches, the losses and the accuracy of the run that was not interrupted."""
    source = PAGE.read_text().partition("```python\n")[2].partition("```\n")[0]
    script = tmp_path / "train.py"
    script.write_text(source)
    run = on_ranks(ranks)
    whole = run(str(script), [str(tmp_path / "whole")]).splitlines()
    num_steps = sum(line.startswith("step ") for line in whole)
    stop = num_steps * 2 // 3
    begun = run(str(script), [str(tmp_path / "parts"), str(stop)]).splitlines()
    resumed = run(str(script), [str(tmp_path / "parts")]).splitlines()

    assert begun[:stop] == whole[:stop]
    first = int(re.findall(r"\d+", resumed[0])[0])
    assert 0 < first < stop, "it goes on from what was saved"
    assert first * 2 != num_steps, "in the middle of an epoch"
    assert resumed == whole[first:]
    assert float(whole[-1].split()[-1]) > 0.9, whole[-1]
