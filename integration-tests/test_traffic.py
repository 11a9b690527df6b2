"""Elements on the wire are the formulas of the ZeRO paper, padding and control messages apart."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import nn
from zero_comm import Group, OperationTraffic, Sent, Traffic, record_traffic
from zero_engine import Wire
from zero_partition import StateError, traffic_report

BLOCK = 64 * 64
NUM_BLOCKS = 4
PSI = NUM_BLOCKS * BLOCK  # parameters of parity.Chain


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_0_to_2_move_as_much_as_an_all_reduce(ranks, stage: int, world_size: int) -> None:
    """2 psi (N-1)/N per rank: sharding the optimizer costs no communication."""
    sent = ranks(world_size).run(_payload_of_a_step, stage=stage)

    assert _total(sent) == 2 * PSI * (world_size - 1)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_stage_3_gathers_forward_and_backward_and_reduces_once(
    ranks, window: int, world_size: int
) -> None:
    """3 psi (N-1)/N at most: what is still in its slot when backward begins is not sent again."""
    sent = ranks(world_size).run(_payload_of_a_step, stage=3, window=window)

    resident = window
    assert _total(sent, "all_gather") == (2 * NUM_BLOCKS - resident) * BLOCK * (world_size - 1)
    assert _total(sent, "reduce_scatter") == PSI * (world_size - 1)
    assert _total(sent) <= 3 * PSI * (world_size - 1)


def _payload_of_a_step(group: Group, stage: int, window: int = 3) -> dict[str, int]:
    model, optimizer = _shard(group, ZeroConfig(stage, window=window))
    for _ in range(2):  # the order is recorded in the first
        _backward(model)
        _update(optimizer)
    with record_traffic(group) as traffic:
        _backward(model)
        _update(optimizer)
    return {name: operation.payload_numel for name, operation in traffic.operations.items()}


@pytest.mark.parametrize("stage", parity.STAGES)
def test_a_model_with_every_difficulty_stays_within_the_formula(ranks, stage: int) -> None:
    """Ties travel once, padding apart; what is frozen or unused is not charged for more."""
    payload, psi = zip(*ranks(4).run(_payload_of_tiny, stage=stage), strict=True)

    factor = 3 if stage == 3 else 2
    assert sum(payload) <= factor * psi[0] * 3


def _payload_of_tiny(group: Group, stage: int) -> tuple[int, int]:
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
    parity.run_steps(model, optimizer, range(2), rank=group.rank)
    with record_traffic(group) as traffic:
        parity.run_steps(model, optimizer, range(2, 3), rank=group.rank)
    return traffic.payload_numel(), sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("stage", parity.STAGES)
def test_accumulation_under_no_sync_reduces_once(ranks, stage: int) -> None:
    """That is what it is for."""
    sent = ranks(2).run(_reductions_while_accumulating, stage=stage)

    reduced = [numel for numel, _ in sent]
    assert sum(reduced) == (2 if stage == 0 else 1) * PSI
    assert all(in_between == 0 for _, in_between in sent)


def _reductions_while_accumulating(group: Group, stage: int) -> tuple[int, int]:
    model, optimizer = _shard(group, ZeroConfig(stage))
    _backward(model)
    _update(optimizer)
    with record_traffic(group) as traffic:
        with zero_engine.no_sync(model):
            for _ in range(3):
                _backward(model)
        in_between = traffic.payload_numel("all_reduce", "reduce_scatter")
        _backward(model)
        _update(optimizer)
    return traffic.payload_numel("all_reduce", "reduce_scatter"), in_between


@pytest.mark.parametrize("stage", parity.STAGES)
def test_two_models_in_one_backward_reduce_once_each(ranks, stage: int) -> None:
    """Each has an end of backward of its own; one that ran twice would send everything again."""
    sent = ranks(2).run(_reductions_of_two_models, stage=stage)

    assert sum(sent) == 2 * (2 if stage == 0 else 1) * PSI


def _reductions_of_two_models(group: Group, stage: int) -> int:
    pairs = [_shard(group, ZeroConfig(stage)) for _ in range(2)]
    with record_traffic(group) as traffic:
        sum(model(torch.ones(1, 64)).sum() for model, _ in pairs).backward()
        for _, optimizer in pairs:
            _update(optimizer)
    return traffic.payload_numel("all_reduce", "reduce_scatter")


def test_evaluation_at_stage_3_gathers_each_parameter_once_at_most(ranks) -> None:
    """There is no backward to gather again for."""
    sent = ranks(2).run(_payload_of_an_evaluation)

    assert 0 < sum(sent) <= PSI


def _payload_of_an_evaluation(group: Group) -> int:
    model, optimizer = _shard(group, ZeroConfig(3))
    for _ in range(2):
        _backward(model)
        _update(optimizer)
    with torch.no_grad():
        model(torch.ones(1, 64))  # records the order of evaluation
        _change_weights(model)
        with record_traffic(group) as traffic:
            model(torch.ones(1, 64))
    return traffic.payload_numel()


def _change_weights(model: nn.Module) -> None:
    """Without a step, which would gather ahead for training."""
    shape = (64, 64)
    model.load_state_dict({f"layers.{i}.weight": torch.ones(shape) for i in range(NUM_BLOCKS)})


def _shard(group: Group, config: ZeroConfig) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = parity.build(parity.Chain)
    return zero_engine.shard(model, parity.adamw(model), config, group=group)


def _backward(model: nn.Module) -> None:
    model(torch.ones(1, 64)).sum().backward()


def _update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _total(sent: list[dict[str, int]], *names: str) -> int:
    """Summed over ranks; of all operations but the control messages when none is named."""
    return sum(
        numel
        for operations in sent
        for name, numel in operations.items()
        if (name in names if names else name != "agree")
    )


# ---- The report of a step ----


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
    return _totals(reported.operations), _totals(recorded.operations), _sum_of_subjects(reported)


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
        subject: sum(o.across.payload_numel for name, o in operations.items() if name != "agree")
        for subject, operations in traffic_report(model).subjects.items()
    }


def test_a_plain_model_has_no_report() -> None:
    """It sends nothing by us."""
    with pytest.raises(StateError, match=r"was not; call zero_engine\.shard"):
        zero_engine.report(nn.Linear(1, 1))
