"""The count of what travels, against the published formulas."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
import torch
from zero_comm import (
    Group,
    OperationTraffic,
    Traffic,
    all_gather_coalesced,
    all_gather_flat,
    all_reduce_coalesced,
    all_reduce_flat,
    broadcast_flat,
    check_agreement,
    record_traffic,
    reduce_scatter_coalesced,
    reduce_scatter_flat,
)

SPLITS = [(6,), (3, 3), (5, 0), (2, 2, 2), (1, 4, 0), (2, 2, 2, 2), (5, 0, 1, 2)]


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_each_collective_sends_what_its_formula_says(ranks, splits: Sequence[int]) -> None:
    """Per rank exactly, and summed over N ranks M(N-1), that is M(N-1)/N each on average."""
    world_size, numel = len(splits), sum(splits)
    counts = ranks(world_size).run(_one_of_each, splits=splits)

    for rank, operations in enumerate(counts):
        gathered = splits[rank] * (world_size - 1)
        scattered = numel - splits[rank]
        broadcast = numel * (world_size - 1) if rank == world_size - 1 else 0
        assert operations == {
            "all_gather": _traffic(1, gathered),
            "reduce_scatter": _traffic(1, scattered),
            "all_reduce": _traffic(1, gathered + scattered),
            "broadcast": _traffic(1, broadcast),
        }

    totals = {name: sum(c[name].payload_numel for c in counts) for name in counts[0]}
    assert totals == {
        "all_gather": numel * (world_size - 1),
        "reduce_scatter": numel * (world_size - 1),
        "all_reduce": 2 * numel * (world_size - 1),  # 2 psi (N-1)/N on each of N ranks
        "broadcast": numel * (world_size - 1),
    }


def _traffic(calls: int, payload_numel: int, *, itemsize: int = 4) -> OperationTraffic:
    return OperationTraffic(calls, payload_numel, payload_numel * itemsize, 0)


def _one_of_each(group: Group, splits: Sequence[int]) -> dict[str, OperationTraffic]:
    buffer = torch.zeros(sum(splits))
    with record_traffic(group) as traffic:
        all_gather_flat(buffer, splits=splits, group=group).wait()
        reduce_scatter_flat(buffer, splits=splits, group=group).wait()
        all_reduce_flat(buffer, group=group, splits=splits).wait()
        broadcast_flat(buffer, src=group.world_size - 1, group=group).wait()
    return traffic.operations


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_padding_is_counted_apart(ranks, world_size: int) -> None:
    """The formulas count what a model needs; padding is the layout's price, and shown as such."""
    for rank, operations in enumerate(ranks(world_size).run(_with_padding)):
        payload = [8] * (world_size - 1) + [5]
        others = 8 * (world_size - 1)
        gathered, scattered = payload[rank] * (world_size - 1), sum(payload) - payload[rank]
        assert operations["all_gather"] == OperationTraffic(
            1, gathered, 2 * gathered, 2 * (others - gathered)
        )
        assert operations["reduce_scatter"] == OperationTraffic(
            1, scattered, 2 * scattered, 2 * (others - scattered)
        )


def _with_padding(group: Group) -> dict[str, OperationTraffic]:
    splits = [8] * group.world_size
    payload = [8] * (group.world_size - 1) + [5]
    buffer = torch.zeros(sum(splits), dtype=torch.bfloat16)
    with record_traffic(group) as traffic:
        all_gather_flat(buffer, splits=splits, group=group, payload=payload).wait()
        reduce_scatter_flat(buffer, splits=splits, group=group, payload=payload).wait()
    return traffic.operations


def test_a_list_costs_one_call_per_dtype(ranks) -> None:
    """That is what coalescing is for: hundreds of tensors, one message."""
    for operations in ranks(2).run(_lists):
        assert {name: op.calls for name, op in operations.items()} == {
            "all_gather": 2,
            "reduce_scatter": 2,
            "all_reduce": 2,
        }
        assert operations["all_gather"].payload_bytes == 100 * (4 * 4 + 2 * 2)
        assert operations["reduce_scatter"].payload_bytes == 50 * (4 * 4 + 2 * 2)


def _lists(group: Group) -> dict[str, OperationTraffic]:
    tensors = 100 * [torch.zeros(4), torch.zeros(2, dtype=torch.bfloat16)]
    with record_traffic(group) as traffic:
        all_gather_coalesced(tensors, group=group).wait()
        reduce_scatter_coalesced(tensors, group=group).wait()
        all_reduce_coalesced(tensors, group=group).wait()
    return traffic.operations


def test_agreement_is_control_and_not_payload(ranks) -> None:
    """Checksums must not disturb a comparison with the published volume of a step."""
    for traffic in ranks(2).run(_agree_and_gather):
        assert set(traffic["operations"]) == {"agree", "all_gather"}
        assert traffic["calls"] == 3  # two of check_agreement, one scalar of a caller
        assert traffic["payload_numel"] == 1
        assert traffic["gathered"] == 1
        assert traffic["of_nothing"] == 0
        assert traffic["agreed"] > 0


def _agree_and_gather(group: Group) -> dict[str, object]:
    with record_traffic(group) as traffic:
        check_agreement({"seed": "1"}, group=group)
        all_gather_flat(torch.zeros(2), splits=[1, 1], group=group, control=True).wait()
        all_gather_flat(torch.zeros(2), splits=[1, 1], group=group).wait()
    return {
        "operations": list(traffic.operations),
        "calls": traffic.operations["agree"].calls,
        "payload_numel": traffic.payload_numel(),
        "gathered": traffic.payload_numel("all_gather"),
        "agreed": traffic.payload_numel("agree"),
        "of_nothing": traffic.payload_numel("broadcast"),
    }


def test_a_record_ends_with_its_context() -> None:
    """Nested records each see what is launched inside them, and no record outlives an error."""
    group = Group.solo()
    with record_traffic(group) as outer:
        _gather(group)
        with pytest.raises(KeyError), record_traffic(group) as inner:
            _gather(group)
            raise KeyError
        _gather(group)
    _gather(group)

    assert _calls(outer) == 3
    assert _calls(inner) == 1
    assert group.recorders == []


def test_groups_are_counted_apart() -> None:
    """Two axes of a mesh are two budgets."""
    one, other = Group.solo(), attrs.evolve(Group.solo(), recorders=[])
    with record_traffic(one) as traffic:
        _gather(other)

    assert _calls(traffic) == 0


def _gather(group: Group) -> None:
    all_gather_flat(torch.zeros(1), splits=[1], group=group).wait()


def _calls(traffic: Traffic) -> int:
    return sum(operation.calls for operation in traffic.operations.values())
