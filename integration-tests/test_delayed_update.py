"""An update that goes on during the next forward and backward, against plain torch."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import parity
import pytest
import torch
import zero_engine
import zero_offload
from attrs import define, field, frozen
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group
from zero_engine import Offload, Precision
from zero_offload import CPUAdam, DiskStore, StoreError, TornStepError
from zero_partition import STAGES, find_sharded, memory_report

pytestmark = pytest.mark.xdist_group("ranks")

BF16: Final = torch.bfloat16
NUM_STEPS: Final = 4
NUM_MICRO: Final = 2
MAX_NORM: Final = 0.5


class _Net(nn.Module):
    """Blocks, a tie, a frozen parameter and an unused one; all of it computes in one dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(parity.VOCABULARY, parity.WIDTH)
        self.blocks = nn.ModuleList(parity.Block() for _ in range(3))
        self.frozen = nn.Parameter(torch.randn(parity.WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5))
        self.head = nn.Linear(parity.WIDTH, parity.VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.frozen
        for block in self.blocks:
            x = block(x)
        return self.head(x).float()


def _adam(params: Any) -> torch.optim.Optimizer:
    return CPUAdam(params, lr=1e-2)


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@frozen
class _Case:
    offload: Offload
    stage: int = 3
    is_bf16: bool = False
    make: Callable[[Any], torch.optim.Optimizer] = _adam
    max_norm: float | None = None

    @property
    def config(self) -> zero_engine.ZeroConfig:
        precision = Precision(params=BF16) if self.is_bf16 else None
        return ZeroConfig(self.stage, offload=self.offload, precision=precision)


@define
class _Curve:
    losses: list[float] = field(factory=list)
    trained: list[Tensor] = field(factory=list)  # after every update
    used: list[list[Tensor]] = field(factory=list)  # what each step's gradients are of


# ---- The oracle ----


@define(eq=False)
class _Late:
    """Two copies of the parameters: `model` computes, and `trained` is what the optimizer steps."""

    model: nn.Module
    trained: list[nn.Parameter]
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, case: _Case) -> _Late:
        given = parity.build(_Net)
        trained = [nn.Parameter(p.detach().clone()) for p in _trainable(given)]
        return cls(given.to(BF16 if case.is_bf16 else torch.float32), trained, case.make(trained))

    def take_over(self) -> None:
        """The model computes with all updates that were made."""
        with torch.no_grad():
            for param, value in zip(_trainable(self.model), self.trained, strict=True):
                param.copy_(value)

    def step(self, grads: list[Tensor | None]) -> None:
        """What the last step has made is used from now on; what this one makes, later."""
        self.take_over()
        for param, grad in zip(self.trained, grads, strict=True):
            param.grad = grad
        self.optimizer.step()


def _alone(
    case: _Case, *, rank: int, world_size: int, finishes_after: tuple[int, ...] = ()
) -> _Curve:
    """One process, every rank's gradients in turn, each mean over the ranks in its dtype."""
    late, curve = _Late.of(case), _Curve()
    scheduler = parity.scheduler_for(late.optimizer)
    for step in range(NUM_STEPS):
        total: list[Tensor | None] = [None] * len(late.trained)
        curve.used.append([p.detach().float().clone() for p in _trainable(late.model)])
        for micro in range(NUM_MICRO):
            local = []
            for peer in range(world_size):
                loss = parity.loss_of(late.model, parity.batch(step, micro, peer))
                loss.backward()
                if peer == rank:
                    curve.losses.append(loss.item())
                local.append([_copy(p.grad) for p in _trainable(late.model)])
                late.model.zero_grad()
            reduced = [None if g is None else g.float() for g in parity.mean(local)]
            total = parity.add(total, reduced)
        late.step(total)
        scheduler.step()
        if step in finishes_after:
            late.take_over()
    curve.trained = [param.detach() for param in late.trained]
    return curve


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def _copy(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.detach().clone()


# ---- Ours ----


def _build(case: _Case, group: Group) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = parity.build(_Net)
    optimizer = case.make(_trainable(model))
    return zero_engine.shard(model, optimizer, case.config, group=group)


def _sharded(
    case: _Case, group: Group, *, after: Callable[[int, nn.Module], Any] = lambda step, model: None
) -> _Curve:
    model, optimizer = _build(case, group)
    curve, scheduler = _Curve(), parity.scheduler_for(optimizer)
    for step in range(NUM_STEPS):
        curve.used.append(_used(model))
        for micro in range(NUM_MICRO):
            loss = parity.loss_of(model, parity.batch(step, micro, group.rank))
            loss.backward()
            curve.losses.append(loss.item())
        optimizer.step()
        scheduler.step()  # while the update goes on with the numbers of before
        optimizer.zero_grad()
        after(step, model)
    curve.trained = [zero_engine.full_param(param) for param in _trainable(model)]
    zero_engine.unshard(model, optimizer)
    return curve


def _used(model: nn.Module) -> list[Tensor]:
    """What forward reads, whole."""
    with zero_engine.GatheredParameters(model):
        return [param.detach().float().clone() for param in _trainable(model)]


def _compare(group: Group, case: _Case) -> None:
    expected = _alone(case, rank=group.rank, world_size=group.world_size)

    found = _sharded(case, group)

    _assert_same(found, expected)


def _assert_same(found: _Curve, expected: _Curve) -> None:
    assert found.losses == expected.losses
    for step, (ours, theirs) in enumerate(zip(found.used, expected.used, strict=True)):
        assert all(map(torch.equal, ours, theirs)), f"parameters in step {step}"
    assert all(map(torch.equal, found.trained, expected.trained))


def _host(**more: Any) -> Offload:
    return Offload(optimizer="host", delayed_update=True, subgroup_bytes=1000, **more)


def _disk(path: Path, **more: Any) -> Offload:
    more = {"optimizer": "disk", **more}
    return Offload(path=path, delayed_update=True, subgroup_bytes=1000, **more)


@pytest.mark.parametrize("is_bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_of_parameters_that_lack_the_last_update_alone(
    ranks, tmp_path: Path, stage: int, is_bf16: bool
) -> None:
    """One step late and not two, nor by chance: every bit is that of two copies in plain torch."""
    for offload in (
        _host(),
        _host(fraction=0.4),
        _disk(tmp_path),
        *([_disk(tmp_path, optimizer="host", params="disk")] if stage == 3 else ()),
        *([_disk(tmp_path, params="disk")] if stage == 3 else ()),
    ):
        ranks(2).run(_compare, case=_Case(offload, stage, is_bf16))
