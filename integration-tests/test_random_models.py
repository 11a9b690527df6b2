"""Laws that hold for any model, held to models, loops and configurations that are drawn."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from parity import OPTIMIZERS
from random_models import RandomModel, random_config, train
from test_plan import assert_planned
from torch import nn
from training import assert_trains_as_plain
from zero_comm import Group


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Not torch's fused kernel, which rounds what is behind the last whole vector otherwise."""
    return OPTIMIZERS["adamw"](model.parameters())


@pytest.mark.drawn(3)
@pytest.mark.parametrize("first", [0, 10, 20])
@pytest.mark.ranks(timeout_s=120)
def test_a_random_model_trains_as_plain(group: Group, first: int) -> None:
    """Bit for bit, whatever it is made of and whatever its loop does."""
    for seed in range(first, first + 10):
        make, run = partial(RandomModel, seed), partial(train, seed=seed)
        assert_trains_as_plain(group, make, run, random_config(seed), make_optimizer=_adamw)


@pytest.mark.ranks(2, 3, timeout_s=120)
def test_a_random_model_takes_and_sends_what_is_planned(group: Group) -> None:
    """Every byte."""
    for seed in range(100, 115):
        assert_planned(group, random_config(seed), make=partial(RandomModel, seed, is_plain=True))
