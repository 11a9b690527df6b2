"""Engines of the oracle's model, and their loop, for the tests of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parity
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group
from zero_engine import Engine
from zero_engine.deepspeed import EngineConfig


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
    group: Group, config: EngineConfig, make: Callable[[], nn.Module] = parity.tiny_float32
) -> Engine:
    """Of the oracle's model, optimizer and scheduler."""
    model, optimizer = parity.build_with_optimizer(make=make)
    engine, same, _, scheduler = zero_engine.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=parity.scheduler_for,
        config=config,
        group=group,
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
