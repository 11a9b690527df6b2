"""What a step has sent, by operation, level and unit, for who asks afterwards."""

from __future__ import annotations

from functools import partial

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import nn
from zero_comm import Group, Sent, Traffic, record_traffic
from zero_engine import Wire
from zero_partition import StateError, traffic_report

WIRES = {
    "as one": Wire(),
    "near": Wire(levels=2, secondary=True),
    "replicas": Wire(levels=2, replicas=True),
}


@pytest.mark.parametrize("how", WIRES)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_report_is_of_the_last_step_alone(ranks, stage: int, how: str) -> None:
    """Prefetch for the next step has begun by then, and another model shares the group."""
    if stage == 1 and how == "near":
        how = "as one"
    for reported, recorded, by_unit in ranks(4).run(_report_a_step, stage=stage, how=how):
        assert reported == recorded
        assert by_unit == reported


Totals = dict[str, tuple[int, Sent, Sent]]


def _report_a_step(group: Group, stage: int, how: str) -> tuple[Totals, Totals, Totals]:
    # No prefetch: a record would count the gathers of the next step with this one's.
    config = ZeroConfig(stage, window=2, prefetch_numel=0, wire=WIRES[how])
    pairs = [parity.build_sharded(group, config) for _ in range(2)]
    for model, optimizer in pairs:
        parity.run_steps(model, optimizer, range(2), rank=group.rank)
    with record_traffic(group) as recorded:
        parity.run_steps(*pairs[0], range(2, 3), rank=group.rank)
    parity.run_steps(*pairs[1], range(2, 3), rank=group.rank)
    model = pairs[0][0]
    reported = traffic_report(model)

    table = zero_engine.report(model)
    assert all(name in table for name in reported.operations)
    assert "blocks.0" in table
    total = reported.inside() + reported.across()
    agreed = reported.operations["agree"].sent
    assert f"{(total + agreed).padding_bytes:,}" in table
    return _totals(reported), _totals(recorded), _sum_of_subjects(reported)


def _totals(traffic: Traffic) -> Totals:
    return {
        name: (operation.calls, operation.inside, operation.across)
        for name, operation in traffic.operations.items()
    }


def _sum_of_subjects(traffic: Traffic) -> Totals:
    totals: Totals = {}
    for operations in traffic.subjects.values():
        for name, (calls, inside, across) in _totals(Traffic(operations)).items():
            before = totals.get(name, (0, Sent(), Sent()))
            totals[name] = before[0] + calls, before[1] + inside, before[2] + across
    return totals


def test_units_of_equal_size_cost_the_same(ranks) -> None:
    """Each unit's share is its own: gathered across once, and reduced."""
    for subjects in ranks(4).run(_units_of_a_chain):
        assert set(subjects) == {f"layers.{i}" for i in range(4)} | {""}
        assert {subjects[f"layers.{i}"] for i in range(4)} == {2 * 64 * 64 // 4 * 2}


def _units_of_a_chain(group: Group) -> dict[str, int]:
    model = parity.build(partial(parity.Chain, 4))
    config = ZeroConfig(3, window=1, wire=Wire(levels=2, secondary=True))
    _, optimizer = zero_engine.shard(model, parity.adamw(model), config, group=group)
    for _ in range(3):
        parity.finish_step(model(torch.ones(1, 64)).sum(), optimizer)
    return {
        subject: Traffic(operations).across().payload_numel
        for subject, operations in traffic_report(model).subjects.items()
    }


def test_a_plain_model_has_no_report() -> None:
    """It sends nothing by us."""
    with pytest.raises(StateError, match=r"was not; call zero_engine\.shard"):
        zero_engine.report(nn.Linear(1, 1))
