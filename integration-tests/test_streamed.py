"""Generation with parameters outside the device: each rank reads whole copies, unit by unit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zero_comm
import zero_engine
from torch import Tensor, nn
from zero_comm import Group
from zero_engine import Offload, ZeroConfig
from zero_partition import StateError, memory_report

pytestmark = pytest.mark.xdist_group("ranks")

WIDTH, DEPTH = 32, 6


def _sharded(group: Group, folder: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offload = Offload(params="disk", path=folder)
    config = ZeroConfig(3, min_unit_bytes=0, window=2, offload=offload)
    zero_engine.shard(model, optimizer, config, group=group)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    loss = model(torch.ones(4, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def test_each_rank_runs_the_model_as_often_as_it_likes(ranks, tmp_path: Path) -> None:
    """Prompts end at different lengths: a rank that waits for another would wait for ever."""
    ranks(2).run(_generate, folder=str(tmp_path))


@torch.no_grad()
def _forward(model: nn.Module) -> Tensor:
    return model(torch.ones(4, WIDTH))


def _generate(group: Group, folder: str) -> None:
    model, optimizer = _sharded(group, folder)
    for _ in range(2):
        _step(model, optimizer)
    expected = _forward(model)
    weights = [zero_engine.full_param(param) for param in model.parameters()]

    with zero_engine.unsharded(model):
        with zero_comm.record_traffic(group) as traffic:
            for _ in range(1 + 4 * group.rank):
                assert torch.equal(_forward(model), expected)
            for param, weight in zip(model.parameters(), weights, strict=True):
                assert torch.equal(param.detach() + 0, weight)  # outside a forward, too
        assert not traffic.operations

    assert torch.isfinite(_step(model, optimizer))  # all is as it was, and ranks agree


def test_the_device_holds_no_more_than_in_training(ranks, tmp_path: Path) -> None:
    """Who offloads parameters has no room for all of them: only the disk may have whole copies."""
    ranks(2).run(_count_bytes, folder=str(tmp_path))


def _count_bytes(group: Group, folder: str) -> None:
    model, optimizer = _sharded(group, folder)
    for _ in range(2):
        _step(model, optimizer)
    before = memory_report(model)
    shards = sum(p.numel() for p in model.parameters()) * 4 // 2
    assert before.disk_bytes == shards

    with zero_engine.unsharded(model):
        for _ in range(2):
            _forward(model)
        inside = memory_report(model)

    assert inside.total_bytes == before.total_bytes
    assert inside.disk_bytes == shards + 2 * shards
    assert memory_report(model).disk_bytes == shards


def test_the_context_ends_whatever_happens_inside(ranks, tmp_path: Path) -> None:
    """An exception of one rank must leave no file, and nothing that reads a copy out of date."""
    ranks(2).run(_fail_inside, folder=str(tmp_path))


def _fail_inside(group: Group, folder: str) -> None:
    model, optimizer = _sharded(group, folder)
    losses = [_step(model, optimizer)]
    with pytest.raises(ZeroDivisionError), zero_engine.unsharded(model):
        _forward(model)
        _ = 1 // 0
    refusal = pytest.raises(StateError, match=r"optimizer\.step\(\) inside unsharded")
    with refusal, zero_engine.unsharded(model):
        optimizer.step()
    losses += [_step(model, optimizer) for _ in range(2)]

    fresh, other = _sharded(group, folder)
    assert [_step(fresh, other) for _ in range(3)] == losses
