"""When the hops of reductions begin: in step with what is launched, and in one order everywhere.

Four ranks are two nodes of two.
"""
# Names private classes: no public call tells when a hop of a reduction in flight begins and ends.

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group, Loco
from zero_comm.watch import Watch
from zero_engine import Precision, Wire
from zero_partition.run.gradients import BufferGradients
from zero_partition.seams import find_sharded

# What is launched is noted where it passes the watch, which only gloo's messages do.
pytestmark = pytest.mark.cpu_only("only gloo's messages are watched")

NUM_UNITS = 5
WIRES: dict[str, tuple[Wire, tuple[str, ...]]] = {
    "one hop": (Wire(), ("whole",)),
    "two hops": (Wire(gradients="int4", levels=2, loco=Loco()), ("inside", "across")),
    "replicas": (Wire(levels=2, replicas=True), ("inside", "across", "across")),
    "coded replicas": (
        Wire(levels=2, replicas=True, gradients="int8"),
        ("inside", "across", "across"),  # within the node; over the nodes, and back
    ),
}


class Late(nn.Module):
    """Units of which some ranks leave one out, and one comes late."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(NUM_UNITS))

    def forward(self, x: Tensor, without: int) -> Tensor:  # noqa: D102
        for index, layer in enumerate(self.layers):
            x = x if index == without else layer(x)
        return x


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("how", WIRES)
def test_a_hop_begins_as_the_next_unit_is_sent_and_ends_a_unit_later(
    ranks, how: str, stage: int
) -> None:
    """What waits for the end of the hop before would leave the slow links idle in backward."""
    for found in ranks(4).run(_journal, how=how, stage=stage):
        assert found == _expected(WIRES[how][1])


@pytest.mark.parametrize("how", WIRES)
def test_ranks_whose_gradients_come_otherwise_launch_in_the_same_order(ranks, how: str) -> None:
    """Ranks that launch in different order wait for each other for ever."""
    journals = ranks(4).run(_journal, how=how, stage=2, is_odd=True)
    expected = _expected(WIRES[how][1])

    for group in (*WIRES[how][1], "end"):
        for found in journals:
            assert [what for what in found if what[0] == group] == [
                what for what in expected if what[0] == group
            ]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_tiny_beside_the_one_before_does_not_end_it(ranks, stage: int) -> None:
    """It fills in no time: backward would wait for the whole of a head's reduction at its norm."""
    for found in ranks(2).run(_journal_of_a_norm, stage=stage):
        assert found[:2] == [("whole", 2), ("whole", 1)]
        assert sorted(found[2:]) == [("end", 0), ("end", 1), ("end", 2), ("whole", 0)]
        assert found.index(("end", 2)) < found.index(("end", 1)) < found.index(("end", 0))


def test_reductions_in_flight_take_no_further_slots(ranks) -> None:
    """A slot is a unit's whole gradient; those on their way across have none."""
    for conflicts, num_bytes in ranks(4).run(_slots):
        assert (conflicts, num_bytes) == (0, 2 * 64 * 64 * 4)


def _expected(hops: tuple[str, ...]) -> list[tuple[str, int]]:
    """With each launch, what was launched before goes on by a hop, the oldest first."""
    units = range(NUM_UNITS - 1, -1, -1)  # backward
    journal: list[tuple[str, int]] = []
    for turn in range(NUM_UNITS + len(hops)):
        if turn < NUM_UNITS:
            journal.append((hops[0], units[turn]))
        for hop in range(len(hops) - 1, 0, -1):
            if 0 <= turn - hop < NUM_UNITS:
                journal.append((hops[hop], units[turn - hop]))
        if 0 <= turn - len(hops) < NUM_UNITS:
            journal.append(("end", units[turn - len(hops)]))
    return journal


def _journal(group: Group, how: str, stage: int, is_odd: bool = False) -> list[tuple[str, int]]:
    """What one backward launches and ends, in order."""
    wire, _ = WIRES[how]
    model = parity.build(Late)
    units = [f"layers.{index}" for index in range(NUM_UNITS)]
    config = ZeroConfig(stage, wire=wire, units=units)
    _, optimizer = zero_engine.shard(model, parity.adamw(model), config, group=group)
    x = torch.ones(2, 64)
    parity.finish_step(model(x, -1).sum(), optimizer)
    loss = model(x, group.rank if is_odd else -1).sum()
    if is_odd and group.rank == 2:
        model.layers[3].weight.register_hook(lambda _: time.sleep(0.1))
    with _recorded(model) as journal:
        loss.backward()
    optimizer.step()
    return journal


def _journal_of_a_norm(group: Group, stage: int) -> list[tuple[str, int]]:
    """What one backward launches and ends through a layer, a norm and another layer."""
    model = parity.build(
        lambda: nn.Sequential(
            nn.Linear(256, 256, bias=False),
            nn.RMSNorm(256),
            nn.Linear(256, 256, bias=False),
        )
    )
    config = ZeroConfig(stage, units=["0", "1", "2"])
    _, optimizer = zero_engine.shard(model, parity.adamw(model), config, group=group)
    x = torch.ones(2, 256)
    parity.finish_step(model(x).sum(), optimizer)
    with _recorded(model) as journal:
        model(x).sum().backward()
    optimizer.step()
    return journal


@contextmanager
def _recorded(model: nn.Module) -> Iterator[list[tuple[str, int]]]:
    sharded = find_sharded(model)
    routes, journal = sharded.routes, []
    inside, across = routes.shards, routes.replicas
    if routes.hops is not None:
        inside, across = routes.hops.inside, routes.hops.across
    name = "whole" if across is None else "inside"
    names = {id(inside.watch): name}
    if across is not None:
        names[id(across.watch)] = "across"
    number = {g.buffer.reduce_tag: n for n, g in enumerate(sharded.reducer.gradients)}
    launch, finish = Watch.launch, BufferGradients.finish

    def noted_launch(self: Watch, operation: str, key: int, **how: Any) -> Any:
        if how["tag"] in number:
            journal.append((names[id(self)], number[how["tag"]]))
        return launch(self, operation, key, **how)

    def noted_finish(self: BufferGradients) -> None:
        journal.append(("end", number[self.buffer.reduce_tag]))
        finish(self)

    with (
        mock.patch.object(Watch, "launch", noted_launch),
        mock.patch.object(BufferGradients, "finish", noted_finish),
    ):
        yield journal


def _slots(group: Group) -> tuple[int, int]:
    wire, _ = WIRES["coded replicas"]
    model = parity.build(Late)
    units = [f"layers.{index}" for index in range(NUM_UNITS)]
    copied = Precision(predivide_factor=2.0)  # else a unit's only gradient takes no slot
    config = ZeroConfig(2, wire=wire, units=units, precision=copied)
    _, optimizer = zero_engine.shard(model, parity.adamw(model), config, group=group)
    for _ in range(2):
        parity.finish_step(model(torch.ones(2, 64), -1).sum(), optimizer)
    pool = find_sharded(model).reducer.pool
    return pool.conflicts, pool.num_bytes
