"""Secondary shards (hpZ): gathers of backward stay inside a node, and nothing else changes.

Four ranks are two nodes of two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import zero_engine
from parity import Recipe, ZeroConfig
from parking import PoisonedBackup
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zero_comm import Group, Levels, Sent, record_traffic
from zero_comm.testing import assert_close
from zero_engine import ConfigError, Offload, Precision, Wire
from zero_partition import PartitionError, StateKind, memory_report
from zero_partition.seams import find_sharded, offload_states, reload_states

BLOCK = 64 * 64
NUM_BLOCKS = 4
PSI = NUM_BLOCKS * BLOCK  # parameters of parity.Chain
NEAR: Any = Wire(levels=2, secondary=True)


# ---- The same numbers ----


class Recomputed(nn.Module):
    """Blocks whose forward runs again in backward, one of them used twice, around a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(parity.VOCABULARY, parity.WIDTH)
        self.blocks = nn.ModuleList(parity.Block() for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.head = nn.Linear(parity.WIDTH, parity.VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        x = self.embed(tokens)
        for block in (*self.blocks, self.blocks[0]):
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


TRAININGS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # window, recipe, config
    "clipped": (1, {"max_norm": 0.05}, {}),
    "reduced once": (3, {"num_micro_batches": 2}, {}),
    "reduced each time": (1, {"num_micro_batches": 2, "reduces_once": False}, {}),
    "recomputed": (3, {"make": Recomputed}, {}),
    "cut between rows": (1, {"make": Recomputed}, {"cut": "row"}),
    "on the host": (1, {"make": Recomputed}, {"offload": Offload(optimizer="host", params="host")}),
    "small ones whole": (1, {"make": Recomputed}, {"small_param_numel": 13}),
    "masters": (1, {"make": Recomputed}, {"precision": Precision(params=torch.bfloat16)}),
}


@pytest.mark.parametrize("how", TRAININGS)
@pytest.mark.ranks(4)
def test_training_with_secondary_shards_changes_no_bit(group: Group, how: str) -> None:
    """A copy that is one step old, or another unit's, would train without an error."""
    window, settings, options = TRAININGS[how]
    recipe = Recipe(**settings)
    expected, found = (
        parity.train_sharded(group, recipe, ZeroConfig(3, window=window, wire=wire, **options))
        for wire in (Wire(), NEAR)
    )

    parity.assert_same(found, expected, rank=group.rank, what=how)


# ---- What travels, and what it costs ----


@pytest.mark.parametrize(("window", "num_micro_batches"), [(1, 1), (1, 3), (2, 3), (4, 3)])
@pytest.mark.ranks(4)
def test_parameters_cross_to_other_nodes_once_per_step(
    group: Group, window: int, num_micro_batches: int
) -> None:
    """ZeRO++: of 3M(W-L)/W across nodes the M of backward goes; with accumulation, far more."""
    model, optimizer = _chain(group, window=window)
    for _ in range(3):  # the order is recorded in the first
        with record_traffic(group) as traffic:
            parity.step_chain(model, optimizer, num_micro_batches)
    gathers, reductions = (traffic.operations[n] for n in ("all_gather", "reduce_scatter"))

    others, mates = 2, 1  # ranks of the other node, and of this one
    passes = 2 * num_micro_batches
    # What is whole when a pass ends is whole when the next begins.
    again = passes * NUM_BLOCKS - (passes - 1) * window - NUM_BLOCKS if window < NUM_BLOCKS else 0
    assert gathers.padding_bytes == reductions.padding_bytes == 0
    assert gathers.across.payload_numel == PSI // 4 * others
    assert gathers.inside.payload_numel == PSI // 4 * mates + again * BLOCK // 2 * mates
    assert reductions.across.payload_numel == num_micro_batches * PSI // 4 * others
    assert reductions.inside.payload_numel == num_micro_batches * PSI // 4 * mates


@pytest.mark.parametrize("window", [1, 3, 4])
@pytest.mark.ranks(4)
def test_its_bytes_are_half_of_each_unit_that_shares_a_slot(group: Group, window: int) -> None:
    """Beside slots it is the largest thing that hpZ adds; who plans memory must know it exactly."""
    model, optimizer = _chain(group, window=window)
    for _ in range(3):
        parity.step_chain(model, optimizer)
    slots = [unit.slot.index for unit in find_sharded(model).units if unit.slot is not None]
    shared = sum(slots.count(slot) > 1 for slot in slots)
    report = memory_report(model)

    assert report.secondary_bytes == shared * BLOCK * 4 // 2
    assert shared == {1: NUM_BLOCKS, 3: shared, 4: 0}[window]
    parts = (report.padding_bytes, report.slots_bytes, report.reduction_bytes)
    rest = sum(parts) + report.model_state_bytes + report.scalars_bytes
    assert report.total_bytes == rest + report.secondary_bytes
    zero_engine.release_buffers(model)
    assert memory_report(model).secondary_bytes == 0


# ---- When it is out of date ----


def _set_local(layer: nn.Module, value: Tensor) -> None:
    part = zero_engine.local_param(layer.weight)
    zero_engine.set_local_param(layer.weight, torch.full_like(part, float(value[0, 0])))


def _modify(layer: nn.Module, value: Tensor) -> None:
    with zero_engine.GatheredParameters(layer.weight, modifier_rank=3):
        if torch.distributed.get_rank() == 3:
            layer.weight.data.copy_(value)


WRITES: dict[str, Callable[[nn.Module, Tensor], Any]] = {  # of one layer
    "load_state_dict": lambda layer, value: layer.load_state_dict({"weight": value}),
    "set_full_param": lambda layer, value: zero_engine.set_full_param(layer.weight, value),
    "set_local_param": _set_local,
    "GatheredParameters": _modify,
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.ranks(4)
def test_a_write_makes_the_copy_void(group: Group, write: str) -> None:
    """Else a loaded checkpoint is computed with in one half of a step only."""
    model, _ = _chain(group, window=1)
    x = torch.full((1, 64), 0.5)
    with torch.no_grad(), record_traffic(group) as traffic:
        first = model(x)
        crossed = traffic.across("all_gather")
        assert crossed.payload_numel == PSI // 2

        assert_close(model(x), first, rtol=0, atol=0)
        assert traffic.across("all_gather") == crossed  # nothing has changed

        for layer in model.layers:
            WRITES[write](layer, torch.full((64, 64), 0.01))
        expected = 0.5 * 0.64**NUM_BLOCKS
        assert_close(model(x), torch.full((1, 64), expected))


@pytest.mark.ranks(4)
def test_parking_gives_its_memory_back_and_training_goes_on(group: Group) -> None:
    """Between phases another process wants the memory, and a copy is no state to keep."""
    losses = []
    for wire in (Wire(), NEAR):
        model, optimizer = parity.build_sharded(group, ZeroConfig(3, window=1, wire=wire))
        for step in range(3):
            losses += parity.run_steps(model, optimizer, [step], rank=group.rank)
            offload_states(model, PoisonedBackup(), StateKind)
            assert memory_report(model).secondary_bytes == 0
            reload_states(model)

    assert losses[:3] == losses[3:]


# ---- Where there is nothing for it to do ----


def test_one_node_has_nothing_to_keep(group: Group) -> None:
    """Every gather is local there: the copy would be memory for nothing."""
    model, optimizer = _chain(group, window=1)
    with record_traffic(group) as traffic:
        parity.step_chain(model, optimizer)
    assert (traffic.across(), memory_report(model).secondary_bytes) == (Sent(), 0)


def test_what_cannot_be_is_refused_when_it_is_said() -> None:
    """Without ranks, and before a job has waited for its turn."""
    with pytest.raises(ConfigError, match=r"ZeroConfig.wire: .*secondary.*use stage 3"):
        ZeroConfig(2, wire=Wire(secondary=True))
    for options, text in (
        ({"secondary": True, "replicas": True}, "every gather is local already"),
        ({"secondary": "yes"}, "Wire.secondary: expected True or False, got 'yes'"),
        ({"levels": 0}, "Wire.levels: expected .* got 0"),
    ):
        with pytest.raises(PartitionError, match=text):
            Wire(**options)


@pytest.mark.ranks(4)
def test_what_the_ranks_do_not_allow_is_refused_on_all(group: Group) -> None:
    """One rank to a node would hold all parameters, which stage 2 does better."""
    whole = Group.from_process_group(torch.distributed.new_group(), device=group.device)
    other = Levels.of_nodes(whole, 2)
    for wire, text in (
        (Wire(levels=1, secondary=True), "one rank to a node.*use stage 2"),
        (Wire(levels=other, secondary=True), "levels of the group that the model is given"),
    ):
        with pytest.raises(PartitionError, match=text):
            _chain(group, window=1, wire=wire)
    levels = Levels.of_nodes(group, 2)
    _chain(group, window=1, wire=Wire(levels=levels, secondary=True))


def _chain(group: Group, window: int, wire: Wire = NEAR) -> tuple[nn.Module, torch.optim.Optimizer]:
    return parity.shard_chain(group, ZeroConfig(3, window=window, wire=wire))
