"""Where gathers are collective (several hosts, memory that may not be read) the laws are the same.

The ranks of one host read each other's memory, so the tests beside this one never gather together.
Here the bodies of some run once more, over messages.
"""

from __future__ import annotations

import importlib
import os
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
from parity import ZeroConfig
from zero_comm import Group
from zero_partition import find_sharded
from zero_partition._shard_state import ShardState

NESTED = ("blocks.0.up", "blocks.0", "lift", "embed")

# Named by what holds: the test's file, its body, and what it is called with.
LAWS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "trains-as-ddp": ("stages_agree", "_stages_equal_ddp", {"num_micro_batches": 3}),
    "reduces-every-micro-batch": (
        "stages_agree",
        "_stages_equal_the_oracle",
        {"num_micro_batches": 3, "reduces_once": False, "max_norm": 0.5},
    ),
    "window-of-one": ("stages_agree", "_config_equals_ddp", {"window": 1}),
    "window-of-most-units": ("stages_agree", "_config_equals_ddp", {"window": 5}),
    "units-in-units": ("stages_agree", "_config_equals_ddp", {"units": NESTED}),
    "whole-tensors": ("stages_agree", "_tensor_cut_equals_the_oracle", {}),
    "evaluation-between-steps": ("interruptions", "_evaluate", {"when": "between-steps"}),
    "evaluation-before-backward": ("interruptions", "_evaluate", {"when": "before-backward"}),
    "exception-in-forward": ("interruptions", "_fail_in_forward", {"where": "in-block"}),
    "exception-in-backward": (
        "interruptions",
        "_fail_in_backward",
        {"block": 1, "retry": "zero-grad"},
    ),
    "forward-after-an-exception": (
        "interruptions",
        "_fail_in_backward",
        {"block": 2, "retry": "forward"},
    ),
    "two-graphs": (
        "interruptions",
        "_two_graphs",
        {"order": "first-in-first-out", "window": 2},
    ),
    "recomputed-activations": (
        "interruptions",
        "_checkpointed_equals_plain",
        {"use_reentrant": False, "per_segment": 2, "window": 3},
    ),
    "blocks-called-twice": ("interruptions", "_reuse", {"window": 2}),
    "parameters-gathered-by-hand": ("gathered", "_read_all_ways", {"stage": 3}),
    "one-parameter-read": ("full_access", "_read", {"stage": 3}),
    "one-parameter-written": ("full_access", "_write", {"stage": 3, "from_rank": 1}),
    "a-rank-without-a-batch": ("branches", "_one_rank_without_data", {"stage": 2}),
    "bytes-at-rest": ("bytes_at_rest", "_count_the_living", {}),
    "a-model-that-is-deleted": ("bytes_at_rest", "_delete", {}),
}


@pytest.mark.parametrize("law", LAWS)
def test_it_holds_over_messages_too(ranks, law: str) -> None:
    """Gathers that are launched ahead, and that every rank must launch, are another code path."""
    ranks(2).run(_hold_over_messages, law=law)


def _hold_over_messages(group: Group, law: str) -> None:
    file, name, options = LAWS[law]
    body = getattr(importlib.import_module(f"test_{file}"), name)

    body(_by_messages(), **options)


@pytest.mark.parametrize(("window", "is_ahead"), [(1, False), (2, True), (3, True)])
def test_a_window_launches_gathers_ahead_of_use(ranks, window: int, is_ahead: bool) -> None:
    """It is what hides communication: while a unit computes, the next one's values travel."""
    ranks(2).run(_look_ahead, window=window, is_ahead=is_ahead)


def _look_ahead(_: Group, window: int, is_ahead: bool) -> None:
    config = ZeroConfig(3, window=window)
    model, optimizer = parity.build_sharded(_by_messages(), config, make=parity.Chain)
    units = [unit for unit in find_sharded(model).units if unit.name.startswith("layers.")]
    travelled: list[bool] = []

    def look(index: int) -> None:
        travels = units[index].state is ShardState.GATHERING
        travelled.append(travels)
        is_early = travels or units[index].is_resident
        assert is_early or not is_ahead or not is_recorded, f"unit {index} comes too late"

    for index, layer in enumerate(model.layers):
        if index + 1 < len(units):
            layer.register_forward_pre_hook(lambda *_, following=index + 1: look(following))
        layer.register_forward_hook(
            # It runs before ours, which make the unit whole.
            lambda _m, _a, output, own=index: output.register_hook(lambda _: look(own)) and None
        )
    for step in range(3):
        is_recorded = step > 0
        if step == 1:
            travelled.clear()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert any(travelled) == is_ahead, travelled


def _by_messages() -> Group:
    """All ranks of the run, which may not read each other's memory: proven. Collective."""
    with mock.patch.dict(os.environ, {"ZERO_COMM_PEER_MEMORY": "0"}):
        group = Group.from_process_group(dist.new_group())
    assert group.peers is None
    assert group.transport.startswith("messages")
    return group
