"""Optimizers and schedulers made by name, on sharded models."""

from __future__ import annotations

import warnings
from typing import Any

import parity
import pytest
import torch
import zero_engine
from torch import nn
from training import assert_weights_of
from zero_comm import Group
from zero_deepspeed.engine_config import NamedOptimizer, NamedScheduler
from zero_engine.engine import EngineConfig

OPTIMIZERS = {
    "Adam": {"lr": 1e-2},
    "Lion": {"lr": 1e-3},
    "Muon": {"muon_lr": 1e-2, "adam_lr": 1e-3},
}
PARAMS = {
    "WarmupLR": {"warmup_num_steps": 3},
    "OneCycle": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 2},
}


def _build(
    optimizer: str, scheduler: str, stage: int, group: Group
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """As a file asks for them: the scheduler is there before the model is sharded."""
    model = parity.build(parity.tiny_float32)
    config = EngineConfig(
        zero=parity.ZeroConfig(stage),
        optimizer=NamedOptimizer(optimizer, OPTIMIZERS[optimizer]),
        scheduler=NamedScheduler(scheduler, PARAMS[scheduler]),
        train_batch_size=group.world_size,
        micro_batch_size=1,
    )
    groups = parity.param_groups(model)
    _, made, _, early = zero_engine.initialize(
        model=model, model_parameters=groups, config=config, group=group
    )
    return model, made, early


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    for step in range(5):
        # Every rank has the same batch, so that the mean is what one process has.
        parity.finish_step(parity.loss_of(model, parity.batch(step, 0, 0)), optimizer)
        scheduler.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_by_name_train_as_in_one_process(ranks, optimizer: str) -> None:
    """Lion and the halves of Muon must see through their shards what they would see whole."""
    ranks(2).run(_compare, optimizer=optimizer, scheduler="WarmupLR", stages=parity.STAGES)


def test_schedulers_by_name_reach_the_shards_whenever_they_are_built(ranks) -> None:
    """shard() swaps the parameters of a param group; its learning rate and momentum must stay."""
    for scheduler in PARAMS:
        # Param groups are those of the user at stage 0, and have other parameters at all others.
        ranks(2).run(_compare, optimizer="Adam", scheduler=scheduler, stages=(0, 0, 3, 3))


def _compare(group: Group, optimizer: str, scheduler: str, stages: tuple[int, ...]) -> None:
    """At each of the stages: built before shard() and after it by turns."""
    warnings.simplefilter("error")
    alone, its_optimizer, its_scheduler = _build(optimizer, scheduler, 0, Group.solo(group.device))
    zero_engine.unshard(alone, its_optimizer)
    _train(alone, its_optimizer, its_scheduler)
    for turn, stage in enumerate(stages):
        model, ours, made = _build(optimizer, scheduler, stage, group)
        if turn % 2 == 0:  # once more, after shard()
            for each in ours.param_groups:
                each["lr"] = each.pop("initial_lr")
            made = NamedScheduler(scheduler, PARAMS[scheduler])(ours)
        _train(model, ours, made)
        what = f"{optimizer}, {scheduler}, stage {stage}, before shard: {turn % 2 == 1}"
        assert_weights_of(model, alone, group=group, what=what)
