"""The oracle of delayed updates: plain torch, with two copies of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

import parity
import torch
import zero_engine
from attrs import define, field, frozen
from one_dtype import OneDtype
from parity import ZeroConfig
from residences import host_adam, is_same
from torch import Tensor, nn
from zero_comm import Group
from zero_engine import Offload, Precision, Wire
from zero_partition.seams import find_sharded

BF16: Final = torch.bfloat16
NUM_STEPS: Final = 4
NUM_MICRO: Final = 2


def adam(params: Any) -> torch.optim.Optimizer:
    """With a native kernel, the same for us and for the oracle; see `residences.host_adam`."""
    return host_adam(params)


def sgd(params: Any) -> torch.optim.Optimizer:
    """Without one."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@frozen
class Case:
    """What is trained, and where its state rests."""

    offload: Offload
    stage: int = 3
    is_bf16: bool = False
    make: Callable[[Any], torch.optim.Optimizer] = adam
    wire: Wire = field(factory=Wire)

    @property
    def config(self) -> zero_engine.ZeroConfig:
        """For `shard`."""
        precision = Precision(params=BF16) if self.is_bf16 else None
        return ZeroConfig(self.stage, offload=self.offload, precision=precision, wire=self.wire)


@define
class Curve:
    """How a training went, as one rank saw it."""

    losses: list[float] = field(factory=list)
    trained: list[Tensor] = field(factory=list)  # after every update
    used: list[list[Tensor]] = field(factory=list)  # what each step's gradients are of


# ---- The oracle ----


@define(eq=False)
class Late:
    """Two copies of the parameters: `model` computes, and `trained` is what the optimizer steps."""

    model: nn.Module
    trained: list[nn.Parameter]
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, case: Case) -> Late:
        """Before the first step; masters keep the values from before the rounding."""
        given = parity.build(OneDtype)
        trained = [nn.Parameter(p.detach().clone()) for p in trainable(given)]
        return cls(given.to(BF16 if case.is_bf16 else torch.float32), trained, case.make(trained))

    def take_over(self) -> None:
        """The model computes with all updates that were made."""
        with torch.no_grad():
            for param, value in zip(trainable(self.model), self.trained, strict=True):
                param.copy_(value)

    def step(self, grads: list[Tensor | None]) -> None:
        """What the last step has made is used from now on; what this one makes, later."""
        self.take_over()
        for param, grad in zip(self.trained, grads, strict=True):
            param.grad = grad
        self.optimizer.step()


def train_alone(
    case: Case,
    *,
    rank: int,
    world_size: int,
    finishes_after: Collection[int] = (),
    after: Callable[[int, Late], Any] = lambda step, late: None,
    late: Late | None = None,
) -> Curve:
    """One process, every rank's gradients in turn, each mean over the ranks in its dtype."""
    late, curve = late or Late.of(case), Curve()
    scheduler = parity.scheduler_for(late.optimizer)
    for step in range(NUM_STEPS):
        total: list[Tensor | None] = [None] * len(late.trained)
        curve.used.append([p.detach().float().clone() for p in trainable(late.model)])
        for micro in range(NUM_MICRO):
            local = []
            for peer in range(world_size):
                loss = parity.loss_of(late.model, parity.batch(step, micro, peer))
                loss.backward()
                if peer == rank:
                    curve.losses.append(loss.item())
                local.append([copy_of(p.grad) for p in trainable(late.model)])
                late.model.zero_grad()
            reduced = [None if g is None else g.float() for g in parity.mean(local)]
            total = parity.add(total, reduced)
        late.step(total)
        scheduler.step()
        if step in finishes_after:
            late.take_over()
        after(step, late)
    curve.trained = [param.detach() for param in late.trained]
    return curve


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """In the model's order."""
    return [param for param in model.parameters() if param.requires_grad]


def copy_of(grad: Tensor | None) -> Tensor | None:
    """Of a gradient that is going to be dropped."""
    return None if grad is None else grad.detach().clone()


# ---- Ours ----


def build(case: Case, group: Group) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model in every training, sharded."""
    model = parity.build(OneDtype)
    optimizer = case.make(trainable(model))
    return zero_engine.shard(model, optimizer, case.config, group=group)


def train_sharded(
    case: Case,
    group: Group,
    *,
    before_step: Callable[[int], Any] = lambda step: None,
    after: Callable[[int, nn.Module], Any] = lambda step, model: None,
) -> Curve:
    """Ours, with a scheduler that changes the numbers right after each step."""
    model, optimizer = build(case, group)
    curve, scheduler = Curve(), parity.scheduler_for(optimizer)
    for step in range(NUM_STEPS):
        curve.used.append(used(model))
        for micro in range(NUM_MICRO):
            loss = parity.loss_of(model, parity.batch(step, micro, group.rank))
            loss.backward()
            curve.losses.append(loss.item())
        before_step(step)
        optimizer.step()
        scheduler.step()  # while the update goes on with the numbers of before
        optimizer.zero_grad()
        after(step, model)
    curve.trained = read(model)
    zero_engine.unshard(model, optimizer)
    return curve


def used(model: nn.Module) -> list[Tensor]:
    """What forward reads, whole."""
    with zero_engine.GatheredParameters(model):
        return [param.detach().float().clone() for param in trainable(model)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """That it was sharded with."""
    sharded = find_sharded(model)
    assert sharded is not None
    return sharded.optimizer


def read(model: nn.Module) -> list[Tensor]:
    """What is trained, whole."""
    return [zero_engine.full_param(param) for param in trainable(model)]


def assert_same(found: Curve, expected: Curve) -> None:
    """Compare losses, what each step's gradients are of, and what was trained, by `is_same`."""
    assert is_same(found.losses, expected.losses)
    for step, (ours, theirs) in enumerate(zip(found.used, expected.used, strict=True)):
        assert is_same(ours, theirs), f"parameters in step {step}"
    assert is_same(found.trained, expected.trained)


def on_host(**more: Any) -> Offload:
    """Delayed, in several sub-groups."""
    return Offload(optimizer="host", delayed_update=True, subgroup_bytes=1000, **more)


def on_disk(path: Path, **more: Any) -> Offload:
    """The same on disk."""
    more = {"optimizer": "disk", **more}
    return Offload(path=path, delayed_update=True, subgroup_bytes=1000, **more)


def train_one(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int
) -> list[float]:
    """One step of all micro-batches; its losses."""
    losses = []
    for micro in range(NUM_MICRO):
        loss = parity.loss_of(model, parity.batch(step, micro, rank))
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return losses
