"""Optimizers that need rows, blocks or whole tensors train as they do under plain DDP."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import parity
import pytest
import structured
import torch
import zero_engine
import zero_partition
from torch import Tensor, nn
from zero_comm import Group
from zero_engine import ZeroConfig
from zero_partition import Cut

HOW = {
    "plain": {},
    "accumulated": {"num_micro_batches": 2, "reduces_once": True, "scheduler": "after"},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", structured.OPTIMIZERS)
def test_two_ranks_train_as_ddp_does_bit_for_bit(ranks, name: str, how: str) -> None:
    """The promise does not end where an optimizer looks at more than single elements."""
    ranks(2).run(_stages_equal_ddp, name=name, **HOW[how])


def _stages_equal_ddp(group: Group, name: str, **recipe: Any) -> None:
    chosen = parity.Recipe(optimizer=structured.OPTIMIZERS[name], **recipe)
    expected = parity.train_ddp(group, chosen)

    for stage in parity.STAGES:
        config = ZeroConfig(stage, cut=structured.CHOICES.get(name))
        curve = parity.train_sharded(group, chosen, config)
        parity.assert_same(curve, expected, rank=group.rank, what=f"{name}, stage {stage}")
