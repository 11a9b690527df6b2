"""Moving averages of sharded models: the numbers of torch's AveragedModel over the plain one."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from residences import Blocks, config_of, host_adam, is_same
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from zero_comm import Group, all_gather_json
from zero_comm.testing import equal, on_cpu
from zero_engine import Precision, Saver, ShardedAverage, Wire
from zero_partition import LoadError, PartitionError, StateError, memory_report

pytestmark = pytest.mark.xdist_group("ranks")

DECAY = 0.9
_KINDS = {
    "replicated": {"stage": 0},
    "state sharded": {"stage": 1},
    "by rows": {"stage": 2, "cut": "row"},
    "parameters too": {"stage": 3},
    "on disk": {"stage": 3, "offload": ("disk", "disk")},
    "state on the host": {"stage": 2, "offload": ("host", "device")},
}


def _build(group: Group, config: ZeroConfig, make: Any = parity.tiny_float32) -> tuple[Any, Any]:
    return parity.build_sharded(group, config, "sgd", make)


def _plain() -> tuple[nn.Module, torch.optim.Optimizer, AveragedModel]:
    model, optimizer = parity.build_with_optimizer("sgd", parity.tiny_float32)
    return model, optimizer, AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The same data on every rank, so that their mean is what one process computes."""
    parity.finish_step(parity.loss_of(model, parity.batch(step, 0, 0)), optimizer)


def _loss(model: nn.Module) -> float:
    with torch.no_grad():
        return parity.loss_of(model, parity.batch(9, 0, 0)).item()


def _weights(average: AveragedModel) -> dict[str, Tensor]:
    return dict(average.module.state_dict())


@pytest.mark.parametrize("kind", _KINDS)
def test_the_average_is_torchs(group: Group, tmp_path: Path, kind: str) -> None:
    """Bit for bit, in a file and in an evaluation, after which training goes on as if nothing."""
    plain, its, expected = _plain()
    model, optimizer = _build(group, config_of(tmp_path, **_KINDS[kind]))
    average = ShardedAverage(model, decay=DECAY)
    for step in range(4):
        _step(plain, its, step)
        _step(model, optimizer, step)
        if step:
            expected.update_parameters(plain)
            average.update()
        found = average.full_state_dict()
        if group.rank == 0:
            parity.assert_same_weights(found, _weights(expected), what=f"{kind}, step {step}")
        else:
            assert found == {}
        with average.swap() as swapped:
            assert swapped is model
            assert _loss(model) == _loss(expected), step
            inside = zero_engine.full_state_dict(model)
        if group.rank == 0:
            parity.assert_same_weights(inside, found, what="inside")
        assert _loss(model) == _loss(plain), step
    assert average.num_updates == 3
    zero_engine.unshard(model, optimizer)
    parity.assert_same_weights(model.state_dict(), plain.state_dict(), what="trained on")
    with pytest.raises(StateError, match=r"update\(\): the model was unsharded"):
        average.update()


_BF16 = Precision(params=torch.bfloat16)
_MASTERS: dict[str, dict[str, Any]] = {
    "sent in 8 bits": {"stage": 1, "wire": Wire(params="int8"), "precision": _BF16},
    "parameters too": {"stage": 3, "precision": _BF16},
    "on disk": {"stage": 3, "offload": ("disk", "disk"), "precision": _BF16},
    "the optimizer's own": {"stage": 2},
    "the optimizer's own, on disk": {"stage": 2, "offload": ("disk", "device")},
}


_OWN = pytest.mark.cpu_only("CPUAdam is what keeps masters in its state")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[_OWN] if "own" in kind else []) for kind in _MASTERS]
)
def test_masters_are_averaged_where_there_are_some(group: Group, tmp_path: Path, kind: str) -> None:
    """An average of rounded weights would stand still: each step moves it by less than a bit."""
    config = config_of(tmp_path, **_MASTERS[kind])
    runs = []
    for swaps in (False, True):
        if config.precision is None:
            model = parity.build(Blocks).bfloat16()
            optimizer: Any = host_adam(model.parameters(), lr=1e-4)
            zero_engine.shard(model, optimizer, config, group=group)
        else:
            model, optimizer = _build(group, config, Blocks)
        average = ShardedAverage(model, decay=DECAY)
        by_hand: dict[str, Any] = {}
        for step in range(3):
            _step(model, optimizer, step)
            average.update()
            for name, param in model.named_parameters():
                if config.precision is None and param.requires_grad:
                    value = zero_engine.full_optimizer_state(param, "master")
                else:
                    value = zero_engine.full_param(param)
                by_hand[name] = by_hand.get(name, value).lerp(value, 1 - DECAY)
            with average.swap() if swaps else nullcontext():
                _loss(model)
                for name, param in model.named_parameters() if swaps and config.precision else ():
                    assert equal(zero_engine.full_param(param), by_hand[name]), name
        found = average.full_state_dict()
        for name, value in found.items():
            assert equal(value, by_hand[name]) and value.dtype == by_hand[name].dtype, name
        assert group.rank or found["head.weight"].dtype == torch.float32
        runs.append([zero_engine.full_param(param) for param in model.parameters()])
        zero_engine.unshard(model, optimizer)
    assert is_same(*runs)


@pytest.mark.parametrize("kind", _KINDS)
def test_an_average_is_counted_where_it_rests(group: Group, tmp_path: Path, kind: str) -> None:
    """It takes as much as the masters, and whoever looks for memory must find it."""
    model, _ = _build(group, config_of(tmp_path, **_KINDS[kind]))
    ShardedAverage(model)  # shards on disk pass through memory that stays
    before = memory_report(model)
    average = ShardedAverage(model)
    after = memory_report(model)
    of_device = after.total_bytes - before.total_bytes
    of_host = after.host_bytes - before.host_bytes
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(all_gather_json(of_device + of_host, group=group))
    assert 4 * numel <= total < 7 * numel, (total, numel)  # padding included
    assert bool(of_host) != bool(of_device) == ("offload" not in _KINDS[kind])
    del average
    assert memory_report(model) == before


@pytest.mark.parametrize(
    "kinds", [("on disk", "state sharded"), ("by rows", "parameters too")], ids=" to ".join
)
def test_an_average_is_resumed_at_any_world_size(
    ranks, tmp_path: Path, kinds: tuple[str, str]
) -> None:
    """It takes thousands of steps to make another."""
    for step, kind, world_size in ((0, kinds[0], 2), (1, kinds[1], 1), (2, kinds[0], 2)):
        ranks(world_size).run(_resume, folder=tmp_path, kind=kind, step=step)
    found = torch.load(tmp_path / "average.pt")
    (expected,) = ranks(1).run(_average_of_plain, num_steps=3)
    parity.assert_same_weights(found, expected, what=str(kinds))


def _average_of_plain(group: Group, num_steps: int) -> dict[str, Tensor]:
    plain, its, expected = _plain()
    for step in range(num_steps):
        _step(plain, its, step)
        expected.update_parameters(plain)
    return on_cpu(_weights(expected))


def _resume(group: Group, folder: Path, kind: str, step: int) -> None:
    model, optimizer = _build(group, config_of(folder, **_KINDS[kind]))
    average = ShardedAverage(model, decay=DECAY)
    if step:
        _step(model, optimizer, 7)
        average.update()  # which is forgotten
        zero_engine.load(folder / "run", model, optimizer, average=average)
        assert average.num_updates == step
    _step(model, optimizer, step)
    average.update()
    with Saver(folder / "run", model, optimizer, overlap=True) as saver:
        saver.save(step=step, average=average)
        found = average.full_state_dict()
        average.update()
    if group.rank == 0:
        torch.save(found, folder / "average.pt")
    zero_engine.unshard(model, optimizer)


@pytest.mark.parametrize("stage", [0, 3])
def test_misuse_of_averages_is_refused_by_name(group: Group, tmp_path: Path, stage: int) -> None:
    """Nobody trains averages, saves them as weights, or averages a copy of stand-ins."""
    model, optimizer = _build(group, ZeroConfig(stage))
    with pytest.raises(StateError, match=r"AveragedModel.*zero_engine\.ShardedAverage\(model"):
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    with pytest.raises(StateError, match=r"a Linear that was not.*zero_engine\.shard\(\)"):
        ShardedAverage(nn.Linear(2, 2))
    for decay in (1.5, "0.9", True):
        with pytest.raises(PartitionError, match="a number from 0 to 1"):
            ShardedAverage(model, decay=decay)
    average = ShardedAverage(model)
    with average.swap():
        for use in (
            average.update,
            average.full_state_dict,
            lambda: average.swap().__enter__(),
            optimizer.step,
            lambda: zero_engine.save(tmp_path, model, optimizer, step=0),
            lambda: zero_engine.unshard(model, optimizer),
        ):
            with pytest.raises(StateError, match=r"inside ShardedAverage\.swap\(\).*leave the con"):
                use()
    zero_engine.save(tmp_path, model, optimizer, step=1)
    with pytest.raises(LoadError, match="was saved without an average"):
        zero_engine.load(tmp_path, model, optimizer, average=average)
    zero_engine.load(tmp_path, model, optimizer, average=average, is_strict=False)
