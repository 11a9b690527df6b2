"""Engines of the oracle's model, and their loop, for the tests of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import parity
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import assert_close
from zero_engine import Engine
from zero_engine.engine import EngineConfig


def engine_config(
    group: Group, stage: int, *, accumulation_steps: int = 1, **options: Any
) -> EngineConfig:
    """For the oracle's batches, two samples each."""
    return EngineConfig(
        zero=ZeroConfig(stage),
        train_batch_size=2 * accumulation_steps * group.world_size,
        micro_batch_size=2,
        accumulation_steps=accumulation_steps,
        checks_overflow=True,
        **options,
    )


def build_engine(
    group: Group,
    config: EngineConfig,
    make: Callable[[], nn.Module] = parity.tiny_float32,
    *,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    lr_scheduler: Any = parity.scheduler_for,
) -> Engine:
    """Of the oracle's model, optimizer and scheduler, or of others."""
    model, optimizer = parity.build_with_optimizer(make=make)
    if optimizer_of is not None:
        optimizer = optimizer_of(model)
    engine, same, _, scheduler = zero_engine.initialize(
        model=model, optimizer=optimizer, lr_scheduler=lr_scheduler, config=config, group=group
    )
    assert same is optimizer and engine.lr_scheduler is scheduler
    return engine


def run_micro_batch(engine: Engine, step: int, micro: int = 0, factor: float = 1.0) -> float:
    """Forward, backward of the loss times `factor`, step. Returns the loss."""
    loss = parity.loss_of(engine, parity.batch(step, micro, engine.group.rank))
    engine.backward(loss * factor)
    engine.step()
    return loss.item()


def weights_of(engine: Engine) -> dict[str, Tensor]:
    """Whole, on rank 0. Collective."""
    return zero_engine.full_state_dict(engine.module)


def assert_weights(engine: Engine, expected: dict[str, Tensor]) -> None:
    """On rank 0, which alone has them. Collective."""
    weights = weights_of(engine)
    if engine.group.rank == 0:
        parity.assert_same_weights(weights, expected, what="engine")


def train_ddp(group: Group, counts: Sequence[int], *, divisor: int | None = None) -> nn.Module:
    """What DDP makes of the oracle's model in a step for each count of micro-batches.

    Losses are divided by the count, or by `divisor`.
    """
    plain, optimizer = parity.build_with_optimizer(make=parity.tiny_float32)
    scheduler, ddp = parity.scheduler_for(optimizer), parity.as_ddp(plain, group)
    for step, count in enumerate(counts):
        for micro in range(count):
            with ddp.no_sync() if micro + 1 < count else nullcontext():
                loss = parity.loss_of(ddp, parity.batch(step, micro, group.rank))
                (loss / (divisor or count)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return plain


def assert_near(engine: Engine, plain: nn.Module) -> None:
    """On rank 0: the weights of a plain model, which has added its gradients up in another order.

    Collective.
    """
    weights = weights_of(engine)
    if engine.group.rank == 0:
        assert_close(weights, plain.state_dict(), rtol=1e-5, atol=1e-6)
