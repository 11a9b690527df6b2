"""Secondary shards (hpZ): gathers of backward stay inside a node, and nothing else changes.

Four ranks are two nodes of two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import parity
import pytest
import torch
import zero_engine
from parity import Recipe, ZeroConfig
from parking import PoisonedBackup
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zero_comm import Group, Levels, Sent, even_splits, record_traffic
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


HOW: dict[str, dict[str, Any]] = {
    "clipped": {"max_norm": 0.05},
    "reduced once": {"num_micro_batches": 2},
    "reduced each time": {"num_micro_batches": 2, "reduces_once": False},
    "recomputed": {"make": Recomputed},
}


OPTIONS: dict[str, dict[str, Any]] = {
    "cut between rows": {"cut": "row"},
    "shards on the host": {"offload": Offload(optimizer="host", params="host")},
    "small ones whole": {"small_param_numel": 13},
    "bf16 with masters": {"precision": Precision(params=torch.bfloat16)},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_so_it_is_with_every_other_choice(ranks, option: str) -> None:
    """Uneven shards, shards elsewhere and masters each have a way of their own to be gathered."""
    ranks(4).run(_train_both, window=1, num_steps=2, option=option)


@pytest.mark.parametrize(
    ("how", "window"), [*zip(HOW, (1, 3, 1, 3), strict=True), ("recomputed", 1)]
)
def test_training_with_secondary_shards_changes_no_bit(ranks, how: str, window: int) -> None:
    """A copy that is one step old, or another unit's, would train without an error."""
    ranks(4).run(_train_both, window=window, how=how)


def _train_both(
    group: Group, window: int, how: str | None = None, option: str | None = None, **settings: Any
) -> None:
    recipe = Recipe(**settings, **(HOW[how] if how else {"make": Recomputed}))
    options = OPTIONS[option] if option else {}
    configs = [ZeroConfig(3, window=window, wire=wire, **options) for wire in (Wire(), NEAR)]
    expected, found = (parity.train_sharded(group, recipe, config) for config in configs)

    assert found.losses == expected.losses
    torch.testing.assert_close(found.weights, expected.weights, rtol=0, atol=0)


# ---- What travels, and what it costs ----


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("window", [1, 2, 4])
def test_parameters_cross_to_other_nodes_once_per_step(
    ranks, window: int, num_micro_batches: int
) -> None:
    """ZeRO++: of 3M(W-L)/W across nodes the M of backward goes; with accumulation, far more."""
    counts = ranks(4).run(_sent_in_a_step, window=window, num_micro_batches=num_micro_batches)

    others, mates = 2, 1  # ranks of the other node, and of this one
    passes, resident = 2 * num_micro_batches, window
    # What is whole when a pass ends is whole when the next begins.
    again = passes * NUM_BLOCKS - (passes - 1) * min(resident, NUM_BLOCKS) - NUM_BLOCKS
    again = again if window < NUM_BLOCKS else 0
    for traffic in counts:
        gathers, reductions = traffic
        assert gathers[1] == PSI // 4 * others
        assert reductions == (
            num_micro_batches * PSI // 4 * mates,
            num_micro_batches * PSI // 4 * others,
        )
        assert gathers[0] == PSI // 4 * mates + again * BLOCK // 2 * mates


def _sent_in_a_step(
    group: Group, window: int, num_micro_batches: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    model, optimizer = _chain(group, window=window)
    for _ in range(2):  # the order is recorded in the first
        _step(model, optimizer, num_micro_batches)
    with record_traffic(group) as traffic:
        _step(model, optimizer, num_micro_batches)
    gathers, reductions = (traffic.operations[n] for n in ("all_gather", "reduce_scatter"))
    assert gathers.padding_bytes == reductions.padding_bytes == 0
    return (
        (gathers.inside.payload_numel, gathers.across.payload_numel),
        (reductions.inside.payload_numel, reductions.across.payload_numel),
    )


@pytest.mark.parametrize("window", [1, 3, 4])
def test_its_bytes_are_half_of_each_unit_that_shares_a_slot(ranks, window: int) -> None:
    """Beside slots it is the largest thing that hpZ adds; who plans memory must know it exactly."""
    for found, shared in ranks(4).run(_bytes_after_two_steps, window=window):
        assert found == shared * BLOCK * 4 // 2
        assert shared == (0 if window == NUM_BLOCKS else NUM_BLOCKS if window == 1 else shared)


def _bytes_after_two_steps(group: Group, window: int) -> tuple[int, int]:
    model, optimizer = _chain(group, window=window)
    for _ in range(3):
        _step(model, optimizer)
    sharded = find_sharded(model)
    report = memory_report(model)
    assert report.total_bytes - report.secondary_bytes == report.model_state_bytes + (
        report.padding_bytes + report.slots_bytes + report.reduction_bytes + report.scalars_bytes
    )
    slots = [unit.slot.index for unit in sharded.units if unit.slot is not None]
    zero_engine.release_buffers(model)
    assert memory_report(model).secondary_bytes == 0
    return report.secondary_bytes, sum(slots.count(slot) > 1 for slot in slots)


@pytest.mark.ranks(4)
def test_its_padding_is_zero(group: Group) -> None:
    """What lies there travels with every gather, and a NaN would spread."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(3, window=1, wire=NEAR))
    parity.run_steps(model, optimizer, range(2), rank=group.rank)
    kept = 0
    for unit in find_sharded(model).units:
        if unit.secondary is None or unit.secondary.version < 0:
            continue
        for buffer, part in zip(unit.buffers, unit.secondary._parts, strict=True):
            layout = buffer.plan.layout
            splits = even_splits(layout.numel, 2)
            start = sum(splits[: unit.secondary.group.rank])
            in_tensor = torch.zeros(layout.numel, dtype=torch.bool)
            for span in layout.spans:
                in_tensor[span.as_slice()] = True
            padding = part[~in_tensor[start : start + part.numel()]]
            assert padding.eq(0).all(), unit.name
            kept += padding.numel()

    assert kept > 0


# ---- When it is out of date ----


def _load(model: nn.Module, value: Tensor) -> None:
    model.load_state_dict({f"layers.{i}.weight": value for i in range(NUM_BLOCKS)})


def _set_one(model: nn.Module, value: Tensor) -> None:
    for layer in model.layers:
        zero_engine.set_full_param(layer.weight, value)


def _set_local(model: nn.Module, value: Tensor) -> None:
    for layer in model.layers:
        part = zero_engine.local_param(layer.weight)
        zero_engine.set_local_param(layer.weight, torch.full_like(part, float(value[0, 0])))


def _modify(model: nn.Module, value: Tensor) -> None:
    with zero_engine.GatheredParameters(list(model.parameters()), modifier_rank=3):
        for layer in model.layers:
            if torch.distributed.get_rank() == 3:
                layer.weight.data.copy_(value)


WRITES: dict[str, Callable[[nn.Module, Tensor], None]] = {
    "load_state_dict": _load,
    "set_full_param": _set_one,
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

        torch.testing.assert_close(model(x), first, rtol=0, atol=0)
        assert traffic.across("all_gather") == crossed  # nothing has changed

        WRITES[write](model, torch.full((64, 64), 0.01))
        expected = 0.5 * 0.64**NUM_BLOCKS
        torch.testing.assert_close(model(x), torch.full((1, 64), expected))


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


def test_one_node_has_nothing_to_keep(ranks) -> None:
    """Every gather is local there: the copy would be memory for nothing."""
    for report in ranks(2).run(_train_on_one_node):
        assert report == (Sent(), 0)


def _train_on_one_node(group: Group) -> tuple[Sent, int]:
    model, optimizer = _chain(group, window=1, wire=Wire(levels=2, secondary=True))
    with record_traffic(group) as traffic:
        _step(model, optimizer)
    return traffic.across(), memory_report(model).secondary_bytes


def _at_stage_2() -> None:
    ZeroConfig(2, wire=Wire(secondary=True))


def _with_replicas() -> None:
    Wire(secondary=True, replicas=True)


def _with_a_word() -> None:
    Wire(secondary="yes")


def _with_no_levels() -> None:
    Wire(levels=0)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (_at_stage_2, ConfigError, "ZeroConfig.wire: .*secondary.*use stage 3"),
        (_with_replicas, PartitionError, "every gather is local already"),
        (_with_a_word, PartitionError, "Wire.secondary: expected True or False, got 'yes'"),
        (_with_no_levels, PartitionError, "Wire.levels: expected .* got 0"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_said(
    make: Callable[[], None], error: type[Exception], text: str
) -> None:
    """Without ranks, and before a job has waited for its turn."""
    with pytest.raises(error, match=text):
        make()


@pytest.mark.ranks(4)
def test_what_the_ranks_do_not_allow_is_refused_on_all(group: Group) -> None:
    """One rank to a node would hold all parameters, which stage 2 does better."""
    other = Levels.of_nodes(parity.by_messages(), 2)
    for wire, text in (
        (Wire(levels=1, secondary=True), "one rank to a node.*use stage 2"),
        (Wire(levels=other, secondary=True), "levels of the group that the model is given"),
    ):
        with pytest.raises(PartitionError, match=text):
            _chain(group, window=1, wire=wire)
    levels = Levels.of_nodes(group, 2)
    _chain(group, window=1, wire=Wire(levels=levels, secondary=True))


def _chain(group: Group, window: int, wire: Wire = NEAR) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = parity.build(partial(parity.Chain, NUM_BLOCKS))
    config = ZeroConfig(3, window=window, wire=wire)
    return zero_engine.shard(model, parity.adamw(model), config, group=group)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, num_micro_batches: int = 1) -> None:
    for _ in range(num_micro_batches):
        model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
