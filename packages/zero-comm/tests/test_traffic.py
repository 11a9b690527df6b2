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


@pytest.mark.parametrize(
    ("group", "splits"), [(len(each), each) for each in SPLITS], indirect=["group"], ids=str
)
def test_each_collective_sends_what_its_formula_says(group: Group, splits: Sequence[int]) -> None:
    """Per rank exactly: summed over N ranks M(N-1), that is M(N-1)/N each on average."""
    buffer, others = torch.zeros(sum(splits)), group.world_size - 1
    with record_traffic(group) as traffic:
        all_gather_flat(buffer, splits=splits, group=group).wait()
        reduce_scatter_flat(buffer, splits=splits, group=group).wait()
        all_reduce_flat(buffer, group=group, splits=splits).wait()
        broadcast_flat(buffer, src=others, group=group).wait()

    gathered, scattered = splits[group.rank] * others, sum(splits) - splits[group.rank]
    sent = {
        "all_gather": gathered,
        "reduce_scatter": scattered,
        "all_reduce": gathered + scattered,
        "broadcast": sum(splits) * others if group.rank == others else 0,
    }
    assert traffic.operations == {
        name: OperationTraffic(1, numel, 4 * numel, 0) for name, numel in sent.items()
    }


def test_all_who_wrap_a_process_group_count_the_same(group: Group) -> None:
    """A model that was given no group has wrapped the job's itself."""
    first, second = (Group.from_process_group(group.process_group) for _ in range(2))
    with record_traffic(first) as traffic:
        broadcast_flat(torch.zeros(3), src=0, group=second).wait()

    assert traffic.operations["broadcast"].calls == 1


@pytest.mark.ranks(1, 2, 3)
def test_padding_is_counted_apart(group: Group) -> None:
    """The formulas count what a model needs; padding is the layout's price, and shown as such."""
    others = group.world_size - 1
    payload = [8] * others + [5]
    how = {"splits": [8] * group.world_size, "group": group, "payload": payload}
    buffer = torch.zeros(8 * group.world_size, dtype=torch.bfloat16)
    with record_traffic(group) as traffic:
        all_gather_flat(buffer, **how).wait()
        reduce_scatter_flat(buffer, **how).wait()

    own = payload[group.rank]
    sent = {"all_gather": own * others, "reduce_scatter": sum(payload) - own}
    assert traffic.operations == {
        name: OperationTraffic(1, numel, 2 * numel, 2 * (8 * others - numel))
        for name, numel in sent.items()
    }


def test_a_list_costs_one_call_per_dtype(group: Group) -> None:
    """That is what coalescing is for: hundreds of tensors, one message."""
    tensors = 100 * [torch.zeros(4), torch.zeros(2, dtype=torch.bfloat16)]
    with record_traffic(group) as traffic:
        all_gather_coalesced(tensors, group=group).wait()
        reduce_scatter_coalesced(tensors, group=group).wait()
        all_reduce_coalesced(tensors, group=group).wait()

    num_bytes = 100 * (4 * 4 + 2 * 2)
    assert {name: (op.calls, op.payload_bytes) for name, op in traffic.operations.items()} == {
        "all_gather": (2, num_bytes),
        "reduce_scatter": (2, num_bytes // 2),
        "all_reduce": (2, num_bytes),
    }


def test_agreement_is_control_and_not_payload(group: Group) -> None:
    """Checksums must not disturb a comparison with the published volume of a step."""
    with record_traffic(group) as traffic:
        check_agreement({"seed": "1"}, group=group)
        all_gather_flat(torch.zeros(2), splits=[1, 1], group=group, control=True).wait()
        all_gather_flat(torch.zeros(2), splits=[1, 1], group=group).wait()

    assert set(traffic.operations) == {"agree", "all_gather"}
    assert traffic.operations["agree"].calls == 3  # two of check_agreement, one of a caller
    assert traffic.payload_numel() == traffic.payload_numel("all_gather") == 1
    assert traffic.payload_numel("broadcast") == 0
    assert traffic.payload_numel("agree") > 0


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
