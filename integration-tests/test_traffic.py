"""Elements on the wire are the formulas of the ZeRO paper, padding and control messages apart."""

from __future__ import annotations

from collections.abc import Mapping

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import nn
from zero_comm import Group, OperationTraffic, Sent, Traffic, all_gather_json, record_traffic
from zero_engine import Wire
from zero_partition import StateError, traffic_report
from zero_partition.seams import find_sharded

BLOCK = 64 * 64
NUM_BLOCKS = 4
PSI = NUM_BLOCKS * BLOCK  # parameters of parity.Chain


REDUCTIONS = ("all_reduce", "reduce_scatter")


def _sent(group: Group, traffic: Traffic, *names: str) -> int:
    """Payload elements of all ranks; of all but the control messages when none is named."""
    return sum(all_gather_json(traffic.payload_numel(*names), group=group))


@pytest.mark.parametrize(
    ("stage", "window"), [(0, 3), (1, 3), (2, 3), *((3, w) for w in range(1, 5))]
)
@pytest.mark.ranks(2, 4)
def test_a_step_moves_as_much_as_the_paper_says(group: Group, stage: int, window: int) -> None:
    """2 psi (N-1)/N per rank as an all-reduce, and 3 at stage 3, which gathers twice.

    But what is still in its slot when backward begins is not sent again.
    """
    model, optimizer = _shard(group, ZeroConfig(stage, window=window))
    for _ in range(2):  # the order is recorded in the first
        _backward(model)
        _update(optimizer)
    with record_traffic(group) as traffic:
        _backward(model)
        _update(optimizer)

    others = group.world_size - 1
    if stage == 3:
        assert _sent(group, traffic, "reduce_scatter") == PSI * others
        assert _sent(group, traffic) == (2 * PSI - window * BLOCK + PSI) * others
    else:
        assert _sent(group, traffic) == 2 * PSI * others


@pytest.mark.parametrize("stage", parity.STAGES)
@pytest.mark.ranks(4)
def test_a_model_with_every_difficulty_stays_within_the_formula(group: Group, stage: int) -> None:
    """Ties travel once, padding apart; what is frozen or unused is not charged for more."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
    parity.run_steps(model, optimizer, range(2), rank=group.rank)
    with record_traffic(group) as traffic:
        parity.run_steps(model, optimizer, range(2, 3), rank=group.rank)
    psi = sum(param.numel() for param in model.parameters())
    assert _sent(group, traffic) <= (3 if stage == 3 else 2) * psi * 3


@pytest.mark.parametrize("stage", parity.STAGES)
def test_accumulation_under_no_sync_reduces_once(group: Group, stage: int) -> None:
    """That is what it is for."""
    model, optimizer = _shard(group, ZeroConfig(stage))
    _backward(model)
    _update(optimizer)
    with record_traffic(group) as traffic:
        with zero_engine.no_sync(model):
            for _ in range(3):
                _backward(model)
        assert not traffic.payload_numel(*REDUCTIONS)
        _backward(model)
        _update(optimizer)
    assert _sent(group, traffic, *REDUCTIONS) == (2 if stage == 0 else 1) * PSI


@pytest.mark.parametrize("stage", parity.STAGES)
def test_two_models_in_one_backward_reduce_once_each(group: Group, stage: int) -> None:
    """Each has an end of backward of its own; one that ran twice would send everything again."""
    pairs = [_shard(group, ZeroConfig(stage)) for _ in range(2)]
    with record_traffic(group) as traffic:
        sum(model(torch.ones(1, 64)).sum() for model, _ in pairs).backward()
        for _, optimizer in pairs:
            _update(optimizer)
    assert _sent(group, traffic, *REDUCTIONS) == 2 * (2 if stage == 0 else 1) * PSI


def test_evaluation_at_stage_3_gathers_each_parameter_once_at_most(group: Group) -> None:
    """There is no backward to gather again for."""
    model, optimizer = _shard(group, ZeroConfig(3))
    for _ in range(2):
        _backward(model)
        _update(optimizer)
    with torch.no_grad():
        model(torch.ones(1, 64))  # records the order of evaluation
        # Changes weights without a step, which would gather ahead for training.
        names = [f"layers.{index}.weight" for index in range(NUM_BLOCKS)]
        model.load_state_dict({name: torch.ones(64, 64) for name in names})
        with record_traffic(group) as traffic:
            model(torch.ones(1, 64))
    assert 0 < _sent(group, traffic) <= PSI


def _shard(group: Group, config: ZeroConfig) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = parity.build(parity.Chain)
    return zero_engine.shard(model, parity.adamw(model), config, group=group)


def _backward(model: nn.Module) -> None:
    model(torch.ones(1, 64)).sum().backward()


def _update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


# ---- The report of a step ----


WIRES = {
    "as one": Wire(),
    "near": Wire(levels=2, secondary=True),
    "replicas": Wire(levels=2, replicas=True),
}


Totals = dict[str, tuple[int, Sent, Sent]]


@pytest.mark.parametrize(
    ("stage", "how"), [(1, "as one"), (1, "replicas"), *((3, how) for how in WIRES)]
)
@pytest.mark.ranks(4)
def test_a_report_is_of_the_last_step_alone(group: Group, stage: int, how: str) -> None:
    """Prefetch for the next step has begun by then, and another model shares the group."""
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
    totals = _totals(reported.operations)
    assert totals == _totals(recorded.operations) == _sum_of_subjects(reported)


def _totals(operations: Mapping[str, OperationTraffic]) -> Totals:
    return {
        name: (operation.calls, operation.inside, operation.across)
        for name, operation in operations.items()
    }


def _sum_of_subjects(traffic: Traffic) -> Totals:
    totals: Totals = {}
    for operations in traffic.subjects.values():
        for name, (calls, inside, across) in _totals(operations).items():
            before = totals.get(name, (0, Sent(), Sent()))
            totals[name] = before[0] + calls, before[1] + inside, before[2] + across
    return totals


@pytest.mark.parametrize("stage", parity.STAGES)
def test_every_unit_is_counted_under_its_own_name(group: Group, stage: int) -> None:
    """A unit's gather and its reduction have tags of their own, by which peers and reports meet."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero_engine.shard(model, optimizer, ZeroConfig(stage, min_unit_bytes=0), group=group)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    subjects = traffic_report(model).subjects
    operations = {name: {*found} for name, found in subjects.items() if name}
    assert set(operations) == {str(index) for index in range(5)}
    assert len({frozenset(found) for found in operations.values()}) == 1, operations
    buffers = [buffer for unit in find_sharded(model).units for buffer in unit.buffers]
    tags = [tag for buffer in buffers for tag in (buffer.gather_tag, buffer.reduce_tag)]
    assert len({*tags}) == len(tags)


@pytest.mark.ranks(4)
def test_units_of_equal_size_cost_the_same(group: Group) -> None:
    """Each unit's share is its own: gathered across once, and reduced."""
    wire = Wire(levels=2, secondary=True)
    model, optimizer = _shard(group, ZeroConfig(3, window=1, wire=wire))
    for _ in range(3):
        parity.finish_step(model(torch.ones(1, 64)).sum(), optimizer)
    sent = {
        subject: sum(o.across.payload_numel for name, o in operations.items() if name != "agree")
        for subject, operations in traffic_report(model).subjects.items()
    }
    assert sent == {"": sent[""]} | {f"layers.{i}": 2 * BLOCK // 4 * 2 for i in range(NUM_BLOCKS)}


def test_a_plain_model_has_no_report() -> None:
    """It sends nothing by us."""
    with pytest.raises(StateError, match=r"was not; call zero_engine\.shard"):
        zero_engine.report(nn.Linear(1, 1))
