"""How values travel is found out once, by all ranks alike, and can be asked about."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transports import BY_READING, MESSAGES, READS, SWITCH, by_messages, over
from zero_comm import (
    CommError,
    Group,
    Reduction,
    all_gather_flat,
    all_reduce_flat,
    check_agreement,
    reduce_scatter_flat,
)
from zero_comm.shared_host.peer_memory import any_peers
from zero_comm.testing import cannot_read, equal, reads_cut_short, without_reads

pytestmark = pytest.mark.cpu_only("ranks read each other's host memory")

each_transport = pytest.mark.parametrize("transport", [READS, MESSAGES])

# ---- What is chosen ----


@pytest.mark.ranks(2, 3, 4)
def test_ranks_of_one_host_read_each_other_s_memory(group: Group) -> None:
    """It is several times as fast, and a quiet fallback would be noticed by nobody."""
    assert group.transport == BY_READING
    assert group.exchanges.reads_peers


# What keeps one rank from reading, and what all ranks then say of whom.
OBSTACLES = {
    "switch": f"has {SWITCH}=0 set",
    "permission": "may not read a peer's memory (another user, container or sand",
    "system": "runs on a system without process_vm_readv",
    "host": "runs on another host than a peer",  # which is the odd one, none can say
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("name", OBSTACLES)
def test_one_rank_that_cannot_read_makes_all_send_messages(
    group: Group, name: Any, odd: int
) -> None:
    """A rank that reads and one that sends would wait for each other; who and why is the remedy."""
    process_group = dist.new_group()
    with cannot_read(name) if group.rank == odd else nullcontext():
        group = Group.from_process_group(process_group)
    named = 0 if name == "host" else odd
    assert group.transport.startswith(f"messages, because rank {named} {OBSTACLES[name]}")
    assert not group.exchanges.reads_peers
    assert _gather_ranks(group) == [0.0, 1.0, 2.0]


def _gather_ranks(group: Group) -> list[float]:
    out = torch.full((group.world_size,), float(group.rank))
    return all_gather_flat(out, splits=[1] * group.world_size, group=group).wait().tolist()


# ---- A group does what it says ----


@each_transport
def test_values_travel_as_the_group_says(group: Group, transport: str) -> None:
    """Else every test of one transport may be a test of the other."""
    group = over(group, transport)
    with _no_messages() if transport == READS else without_reads():
        _one_of_each(group)


def test_what_controls_is_sent_as_a_message(group: Group) -> None:
    """It reaches its peer even if the rank that says it ends at once; memory ends with the rank."""
    group = over(group, READS)
    with without_reads():
        check_agreement({"a": "1"}, group=group)


@contextmanager
def _no_messages() -> Iterator[None]:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a message was sent")

    with mock.patch.object(dist, "isend", refuse), mock.patch.object(dist, "irecv", refuse):
        yield


@pytest.mark.ranks(2, 3)
def test_results_are_the_same_either_way(group: Group) -> None:
    """Bit for bit: a run that resumes in a container that forbids reading is the same run."""
    with reads_cut_short(3 * 2**14 + 5):  # as the kernel does, at 2 GiB
        by_reading = _one_of_each(over(group, READS))
    by_message = _one_of_each(over(group, MESSAGES))
    for name, values in by_reading.items():
        assert equal(values, by_message[name]), name


def _one_of_each(group: Group) -> dict[str, Tensor]:
    numel = 100_003  # pieces of every kind of length
    splits = [numel // group.world_size] * (group.world_size - 1)
    splits.append(numel - sum(splits))
    mine = torch.randn(numel, generator=torch.Generator().manual_seed(group.rank))
    shard = mine[: splits[group.rank]]
    out = torch.zeros(numel)
    return {
        "all_gather": all_gather_flat(out, splits=splits, group=group, shard=shard).wait(),
        "mean": reduce_scatter_flat(mine, splits=splits, group=group).wait(),
        "sum": reduce_scatter_flat(mine, splits=splits, group=group, op=Reduction.SUM).wait(),
        "all_reduce": all_reduce_flat(mine.clone(), group=group).wait(),
        "half": all_reduce_flat(mine.bfloat16(), group=group).wait(),
    }


# ---- Several groups ----


@each_transport
def test_wrapping_a_group_again_says_nothing_to_its_peers(group: Group, transport: str) -> None:
    """One rank may do it alone, in a log line say; and two journals would be two orders."""
    group = over(group, transport)
    if group.rank == 0:
        with _no_messages():
            again = Group.from_process_group(group.process_group)

        assert again.watch is group.watch
        assert again.transport == group.transport
    assert _gather_ranks(group) == [0.0, 1.0]


def test_a_rank_that_does_not_wrap_its_group_is_an_error_in_time(group: Group) -> None:
    """Wrapping is collective the first time, and one rank may have taken another branch."""
    process_group, started = dist.new_group(), time.monotonic()
    if group.rank == 0:
        with pytest.raises(CommError, match=r"meeting the other ranks .* 0.3 s .*(\n.*)*first er"):
            Group.from_process_group(process_group, timeout_s=0.3)
    assert time.monotonic() - started < 10


@pytest.mark.ranks(3)
def test_a_sub_group_finds_out_for_itself(group: Group) -> None:
    """Its members may share a host when the whole job does not, and count from zero."""
    of_all, of_two = dist.new_group(), dist.new_group([0, 2])
    with cannot_read("switch") if group.rank == 1 else nullcontext():
        whole = Group.from_process_group(of_all)
    assert whole.transport == f"messages, because rank 1 has {SWITCH}=0 set"
    if group.rank != 1:
        part = Group.from_process_group(of_two)
        out = torch.full((2,), float(group.rank))
        values = all_gather_flat(out, splits=[1, 1], group=part).wait().tolist()
        assert (part.transport, values) == (BY_READING, [0.0, 2.0])


@each_transport
def test_groups_of_the_same_ranks_do_not_mix(group: Group, transport: str) -> None:
    """Models in one job have groups of their own and use the same tags."""
    groups = [over(group, transport), _another(transport), _another(transport)]
    handles = {}
    for i in [0, 1, 2] if group.rank == 0 else [2, 0, 1]:
        out = torch.full((2,), 10.0 * i + group.rank)
        handles[i] = all_gather_flat(out, splits=[1, 1], group=groups[i])
    for i in range(3):
        assert handles[i].wait().tolist() == [10.0 * i, 10.0 * i + 1]


def _another(transport: str) -> Group:
    return Group.from_process_group(dist.new_group()) if transport == READS else by_messages()


@each_transport
def test_handles_of_two_groups_may_be_waited_on_in_any_order(ranks, transport: str) -> None:
    """As those of one may: a rank that waits in one group is still wanted in the other."""
    for got in ranks(2).run(_wait_crosswise, transport=transport):
        assert got == [[0.0, 1.0], [10.0, 11.0]]


def _wait_crosswise(group: Group, transport: str) -> list[list[float]] | str:
    groups = [over(group, transport), _another(transport)]
    late = {0: [0.2, 0.2], 1: [0.0, 0.6]}[group.rank]  # each comes last to one of the two
    start, handles = time.monotonic(), []
    for i, each in enumerate(groups):
        time.sleep(max(0.0, start + late[i] - time.monotonic()))
        out = torch.full((2,), 10.0 * i + group.rank)
        handles.append(all_gather_flat(out, splits=[1, 1], group=each))
    order = [0, 1] if group.rank == 0 else [1, 0]
    try:
        got = {i: handles[i].wait(timeout_s=1.0).tolist() for i in order}
    except CommError as error:  # returned, so that the workers are kept
        return str(error)
    return [got[0], got[1]]


# No thread speaks for a rank that waits for a message.
_ALONE = pytest.mark.xfail(strict=True, reason="a rank looks at journals only where it reads")


def test_a_group_that_diverged_ends_no_waits_of_others(group: Group) -> None:
    """The sanitizer waits with the memory of any group, and may meet one of an earlier job."""
    others = [Group.from_process_group(dist.new_group([0, 1])) for _ in range(4)]
    dist.barrier(group.process_group)
    for other in others:
        assert other.watch is not None
        other.watch.part("for this test")
    peers = any_peers()
    assert peers is not None
    assert peers.watch is not None
    assert not peers.watch.has_diverged
    dist.barrier(group.process_group)  # peers of those that ended would be told


@pytest.mark.parametrize("transport", [pytest.param(READS, marks=_ALONE), MESSAGES])
def test_a_wait_and_a_message_may_come_in_either_order(ranks, transport: str) -> None:
    """A rank that waits for a message is still wanted by the peer that waits for its own bytes."""
    for got in ranks(2).run(_agree_before_or_after, transport=transport):
        assert got == [0.0, 1.0]


def _agree_before_or_after(group: Group, transport: str) -> list[float] | str:
    group = over(group, transport)
    if group.rank == 1:
        time.sleep(0.2)
    handle = all_gather_flat(torch.full((2,), float(group.rank)), splits=[1, 1], group=group)
    try:
        if group.rank == 0:
            check_agreement({"a": "1"}, group=group, timeout_s=1.0)
        got = handle.wait(timeout_s=1.0).tolist()
        if group.rank == 1:
            check_agreement({"a": "1"}, group=group, timeout_s=1.0)
    except CommError as error:
        return str(error)
    return got


# ---- A borrowed buffer ----


NUMEL = 2_000_000
BORROWED: dict[str, Callable[[Tensor, Group], Tensor]] = {
    "all_gather": lambda buffer, group: all_gather_flat(
        buffer, splits=[NUMEL, 0], group=group
    ).wait(),
    "reduce_scatter": lambda buffer, group: reduce_scatter_flat(
        buffer, splits=[0, NUMEL], group=group, op=Reduction.SUM
    ).wait(),
}


@each_transport
@pytest.mark.parametrize("name", BORROWED)
def test_a_buffer_is_one_s_own_again_after_the_wait(ranks, name: str, transport: str) -> None:
    """The next gradients go there; the late peer, of whom nothing is needed, must not get those."""
    early, late = ranks(2).run(_overwrite_after_the_wait, name=name, transport=transport)
    expected = {"all_gather": 5.0, "reduce_scatter": 5.0 + 1.0}[name]

    assert equal(late["result"], torch.full((NUMEL,), expected))
    assert early["before"] < late["before"]
    if transport == READS:
        assert early["after"] > late["before"]


def _overwrite_after_the_wait(group: Group, name: str, transport: str) -> dict[str, object]:
    group = over(group, transport)
    buffer = torch.full((NUMEL,), 5.0 if group.rank == 0 else 1.0)
    if group.rank == 1:
        time.sleep(0.3)
    before = time.monotonic()  # one clock for all processes
    result = BORROWED[name](buffer, group)
    after = time.monotonic()
    if group.rank == 0:
        buffer.fill_(-1.0)
        return {"before": before, "after": after}
    return {"before": before, "result": result.clone()}
