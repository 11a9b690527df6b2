"""Where gathers are collective (several hosts, memory that may not be read) the laws are the same.

The ranks of one host read each other's memory, so the tests beside this one never gather together.
Here the bodies of some run once more, over messages.
"""

from __future__ import annotations

import importlib
from typing import Any

import parity
import pytest
import torch
import zero_engine
from parity import Recipe, ZeroConfig
from torch import Tensor, nn
from zero_comm import Group
from zero_partition.seams import find_sharded

pytestmark = pytest.mark.cpu_only("the same over gloo's messages, where ranks do not read memory")

SHARDED = (2, 3)  # gathers are after the step, or at each use
NESTED = ("blocks.0.up", "blocks.0", "lift", "embed")

# Named by what holds: the test's file, its body, and what it is called with.
LAWS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "trains-as-ddp": ("stages_agree", "_stages_equal_ddp", {"num_micro_batches": 3}),
    "units-in-units": ("stages_agree", "_config_equals_ddp", {"units": NESTED, "stages": SHARDED}),
    "whole-tensors": ("stages_agree", "test_shards_of_whole_tensors_train_the_same", {}),
    "evaluation-before-backward": (
        "interruptions",
        "test_evaluation_in_the_middle_of_training_changes_nothing",
        {"when": "before-backward", "stages": (3,)},
    ),
    "exception-in-forward": (
        "interruptions",
        "test_an_exception_in_forward_leaves_nothing_behind",
        {"where": "in-block", "stages": (3,)},
    ),
    "exception-in-backward": (
        "interruptions",
        "test_an_exception_in_backward_leaves_nothing_behind",
        {"block": 1, "retry": "zero-grad", "stages": (3,)},
    ),
    "forward-after-an-exception": (
        "interruptions",
        "test_an_exception_in_backward_leaves_nothing_behind",
        {"block": 2, "retry": "forward", "stages": (3,)},
    ),
    "two-graphs": (
        "interruptions",
        "test_two_forwards_then_two_backwards",
        {"order": "first-in-first-out", "window": 2, "stages": (3,)},
    ),
    "recomputed-activations": (
        "interruptions",
        "test_recomputing_activations_gives_the_same_numbers",
        {"use_reentrant": False, "per_segment": 2, "window": 3, "stages": (3,)},
    ),
    "blocks-called-twice": (
        "interruptions",
        "test_a_block_may_be_called_twice",
        {"window": 2, "stages": (3,)},
    ),
    "parameters-gathered-by-hand": (
        "gathered",
        "test_inside_every_parameter_is_whole_in_its_own_object",
        {"stage": 3},
    ),
    "one-parameter-read": (
        "full_access",
        "test_what_is_read_is_what_plain_torch_has",
        {"stage": 3},
    ),
    "one-parameter-written": (
        "full_access",
        "test_what_is_written_is_trained_with",
        {"stage": 3, "from_rank": 1},
    ),
    "a-rank-without-a-batch": (
        "branches",
        "test_a_rank_without_a_batch_takes_part_in_the_step",
        {"stage": 2},
    ),
    "bytes-at-rest": ("bytes_at_rest", "test_what_is_alive_is_what_the_report_counts", {}),
    "a-model-that-is-deleted": ("bytes_at_rest", "test_a_deleted_model_is_freed", {}),
}


@pytest.mark.parametrize("law", LAWS)
def test_it_holds_over_messages_too(group: Group, law: str) -> None:
    """Gathers that are launched ahead, and that every rank must launch, are another code path."""
    file, name, options = LAWS[law]
    body = getattr(importlib.import_module(f"test_{file}"), name)

    body(parity.by_messages(), **options)


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.ranks(3, timeout_s=60.0)
def test_stage_3_trains_by_messages_as_by_reading(group: Group, window: int) -> None:
    """What travels ahead must arrive in the right slot, of the right step, and be waited for."""
    recipe = Recipe(num_micro_batches=2, max_norm=0.5)
    expected = parity.train_alone_by_stage(group, recipe)
    ours = parity.train_sharded(parity.by_messages(), recipe, ZeroConfig(3, window=window))
    parity.assert_same(ours, expected[3], rank=group.rank, what=f"window {window}")


class _Turns(nn.Module):
    """Blocks in an order that a call chooses: what was launched ahead is often not what comes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(parity.Block() for _ in range(5))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = self.blocks[index](x)
        return x


ORDERS = [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [0, 0, 2, 0], [1], [0, 1, 2, 3, 4], [3, 1, 3, 1, 4, 2]]


@pytest.mark.parametrize("window", [1, 2, 4])
def test_a_changed_order_costs_a_late_gather_and_no_number(group: Group, window: int) -> None:
    """Training, evaluation by another way, a loop of varying length: the trace is only a guess."""
    plain = parity.build(_Turns)
    expected = _steps(plain, parity.adamw(plain))
    model = parity.build(_Turns)
    optimizer = parity.adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(3, window=window), group=parity.by_messages())

    assert _steps(model, optimizer) == expected


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step, order in enumerate(ORDERS):
        x = torch.randn(4, parity.WIDTH, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            losses.append(model(x, order[::-1] + order).sum().item())
        loss = model(x, order).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(("window", "is_ahead"), [(1, False), (2, True), (3, True)])
def test_a_window_launches_gathers_ahead_of_use(ranks, window: int, is_ahead: bool) -> None:
    """It is what hides communication: while a unit computes, the next one's values travel."""
    ranks(2).run(_look_ahead, window=window, is_ahead=is_ahead)


def _look_ahead(_: Group, window: int, is_ahead: bool) -> None:
    config = ZeroConfig(3, window=window)
    model, optimizer = parity.build_sharded(parity.by_messages(), config, make=parity.Chain)
    units = [unit for unit in find_sharded(model).units if unit.name.startswith("layers.")]
    travelled: list[bool] = []

    def look(index: int) -> None:
        travels = units[index].state.name == "GATHERING"
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
