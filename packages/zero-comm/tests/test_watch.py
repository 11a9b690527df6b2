"""Ranks that wait for each other in different collectives are told so; slow ones are waited for."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transports import MESSAGES, each_world, over, transports, worlds
from zero_comm import (
    CommError,
    DivergenceError,
    Group,
    Purpose,
    all_gather_flat,
    all_reduce_flat,
    broadcast_flat,
    reduce_scatter_flat,
)
from zero_comm.logs import how_to_ask, on_report_signal
from zero_comm.shared_host.process_memory import SWITCH
from zero_comm.testing import equal, rely_on
from zero_comm.watch import Wait, Watch

PATIENCE_S = 0.2
TIMEOUT_S = 4.0  # of a group that is to end by it
SOON_S = 15.0  # the machine may be busy; the group's own timeout is longer by far

UNTOUCHED = -1.0


def _watched(group: Group, transport: str = MESSAGES) -> Group:
    process_group = over(group, transport).process_group
    group = Group.from_process_group(process_group, patience_s=PATIENCE_S)
    group.explain({1: Purpose("fetching apples", "fetch them alike"), 2: Purpose("fetching pears")})
    return group


def _gather(group: Group, tag: int, version: int = 0) -> None:
    """Gather numbers that say of which rank, tag and version they are."""
    own = 10.0 * tag + 100.0 * version
    expected = own + torch.arange(float(group.world_size))
    out = torch.full_like(expected, UNTOUCHED)
    out[group.rank] = expected[group.rank]
    handle = all_gather_flat(
        out, splits=[1] * group.world_size, group=group, tag=tag, version=version or None
    )
    try:
        handle.wait()
        rely_on(group)
    except DivergenceError:
        if group.backend.composes_from_peers:  # on others, values may be wrong until the error
            assert ((out == expected) | (out == UNTOUCHED)).all(), f"took other values: {out}"
        raise
    assert equal(out, expected)


# ---- Ranks that diverge ----


def _other_gathers(group: Group) -> None:
    _gather(group, tag=1 + group.rank % 2)


def _other_versions(group: Group) -> None:
    _gather(group, tag=1, version=4 + group.rank % 2)


def _gather_and_reduction(group: Group) -> None:
    if group.rank % 2:
        reduce_scatter_flat(
            torch.ones(8), splits=[8 // group.world_size] * group.world_size, group=group, tag=2
        ).wait()
    else:
        _gather(group, tag=1)


def _gather_and_all_reduce(group: Group) -> None:
    if group.rank % 2:
        all_reduce_flat(torch.ones(8), group=group, tag=2).wait()
    else:
        _gather(group, tag=1)


def _gather_and_broadcast(group: Group) -> None:
    if group.rank == 0:
        broadcast_flat(torch.ones(8), src=0, group=group).wait()
    else:
        _gather(group, tag=1)


def _other_dtypes(group: Group) -> None:
    """Of as many bytes."""
    dtype = torch.int32 if group.rank % 2 else torch.float32
    out = torch.zeros(group.world_size, dtype=dtype)
    all_gather_flat(out, splits=[1] * group.world_size, group=group, tag=1).wait()


def _other_sizes(group: Group) -> None:
    numel = 2 - group.rank % 2
    out = torch.zeros(numel * group.world_size)
    all_gather_flat(out, splits=[numel] * group.world_size, group=group, tag=1).wait()


def _other_sums(group: Group) -> None:
    """Sizes are checked where they meet, and a smaller message fits into a larger buffer."""
    numel = group.world_size * (2 - group.rank % 2)
    splits = [numel // group.world_size] * group.world_size
    reduce_scatter_flat(torch.ones(numel), splits=splits, group=group, tag=1).wait()


def _after_much_in_common(group: Group) -> None:
    for _ in range(20):
        for tag in (1, 2):
            _gather(group, tag)
    for tag in (1, 1 + group.rank % 2):
        _gather(group, tag)


DIVERGENCES: dict[Callable[[Group], None], tuple[str, str]] = {
    _other_gathers: ("fetching apples", "fetching pears"),
    _other_versions: (r"fetching apples \(version 4\)", r"fetching apples \(version 5\)"),
    _gather_and_reduction: ("fetching apples", "fetching pears"),
    _gather_and_all_reduce: ("fetching apples", "fetching pears"),
    _gather_and_broadcast: ("broadcast", "fetching apples"),
    _after_much_in_common: ("fetching apples", "fetching pears"),
    _other_dtypes: (r"fetching apples of \d elements of torch\.\w+32",) * 2,
    _other_sizes: (r"fetching apples of \d elements of",) * 2,
    _other_sums: (r"fetching apples of \d elements of",) * 2,
}


@pytest.mark.parametrize("how", DIVERGENCES, ids=lambda how: how.__name__.strip("_"))
@each_world(2, 4)
def test_every_rank_hears_what_each_waits_for(
    group: Group, transport: str, how: Callable[[Group], None]
) -> None:
    """A job that hangs for half an hour and then says "timeout" is a day of a user's life.

    The gathers are of equal size, and none takes another's values.
    """
    group = _watched(group, transport)
    began = time.monotonic()

    with pytest.raises(DivergenceError, match=rf"seen on rank {group.rank};") as caught:
        how(group)
        rely_on(group)

    assert time.monotonic() - began < SOON_S
    sides = rf"rank \d (?:waits for rank \d )?in ({'|'.join(DIVERGENCES[how])})"
    assert len(set(re.findall(sides, str(caught.value)))) == 2, caught.value


BLOCKING: dict[str, Callable[[Any], object]] = {
    "barrier": dist.barrier,
    "broadcast_object_list": lambda group: dist.broadcast_object_list([1], group=group),
    "all_gather_object": lambda group: dist.all_gather_object(
        [None] * dist.get_world_size(group), 1, group=group
    ),
}


@pytest.mark.parametrize(
    ("group", "transport", "how"),
    [
        *((*world, "barrier") for world in worlds(2, 4)),
        (2, MESSAGES, "broadcast_object_list"),
        (2, MESSAGES, "all_gather_object"),
    ],
    indirect=["group"],
)
def test_a_peer_in_a_collective_of_torchs_own_is_noticed(
    group: Group, transport: str, how: str
) -> None:
    """`if rank == 0: save()`, and then a barrier: the first thing that everyone writes."""
    group = _watched(group, transport)
    began = time.monotonic()
    if group.rank == 0:
        here = r"at \S+test_watch\.py:\d+ \(called from \S+\)"
        # On a device the host is not where the launch was.
        apples = rf"fetching apples( {here}\n  |; )"
        circle = rf"rank 0 waits for rank (\d) in {apples}rank \1 waits for rank 0"
        said = rf"{circle} in torch\.distributed\.{how}\(\) {here}"
        with pytest.raises(DivergenceError, match=said):
            _gather(group, tag=1)
    with contextlib.suppress(RuntimeError):  # it may have lost its connections
        BLOCKING[how](group.process_group)
    assert time.monotonic() - began < SOON_S


@pytest.mark.ranks(3)
def test_a_circle_of_three_is_noticed(group: Group) -> None:
    """Each waits for another one; no two of them wait for each other."""
    group = _watched(group)
    with pytest.raises(DivergenceError) as caught:
        _gather(group, tag=1 + group.rank)  # the message of the rank before is the first awaited
    for rank in range(3) if group.backend.composes_from_peers else ():
        assert f"rank {rank} waits for rank {(rank - 1) % 3}" in str(caught.value)


def test_the_remedy_is_told_and_the_group_is_over(group: Group) -> None:
    """What a user is to do; and nothing that follows hangs or takes values that are late."""
    group = _watched(group)
    with pytest.raises(
        DivergenceError, match=r"this group can be used no more(?s:.*)fetch them alike\n"
    ):
        _other_gathers(group)

    with pytest.raises(DivergenceError, match="fetching pears"):
        _gather(group, tag=3)


@each_world(2)
def test_a_rank_is_told_that_nobody_will_read_its_memory(group: Group, transport: str) -> None:
    """Its peer has launched all that it waits for, and was interrupted before it read."""
    group = _watched(group, transport)
    began = time.monotonic()
    if group.rank == 0:
        interrupt = mock.patch.object(Watch, "sent", side_effect=KeyboardInterrupt)
        with interrupt, contextlib.suppress(KeyboardInterrupt):
            _gather(group, tag=1)
    else:
        time.sleep(PATIENCE_S)  # else rank 0 reads it as it launches

    with pytest.raises(DivergenceError, match="on rank 0 as it began fetching apples"):
        _gather(group, tag=1)
        rely_on(group)

    assert time.monotonic() - began < SOON_S


@pytest.mark.cpu_only("elsewhere one queue has all: who waits has launched what is before it")
@each_world(2)
def test_a_rank_that_waits_has_not_launched_what_an_exception_ended(
    group: Group, transport: str
) -> None:
    """It waited for what its peer was to launch, and that for what it had counted and not sent."""
    group = _watched(group, transport)
    out, gathered = torch.zeros(group.world_size), None
    if group.rank == 0:
        shard = torch.ones(1)
        gathered = all_gather_flat(out, splits=[1, 1], group=group, shard=shard, tag=2)
        interrupt = mock.patch.object(type(group.watch), "follow", side_effect=KeyboardInterrupt)
        with interrupt, contextlib.suppress(KeyboardInterrupt):
            _gather(group, tag=1)
    began = time.monotonic()

    with pytest.raises(DivergenceError, match="ranks wait for each other"):
        _gather(group, tag=1) if gathered is None else gathered.wait()

    assert time.monotonic() - began < SOON_S


@each_world(2)
@pytest.mark.parametrize("is_joined", [False, True], ids=["apart", "joined"])
def test_a_launch_on_another_group_tells_of_an_exception_before(
    group: Group, transport: str, is_joined: bool
) -> None:
    """A rank that was interrupted as it sent on one of a model's groups waited on another."""
    switch = {SWITCH: "0"} if transport == MESSAGES else {}
    with mock.patch.dict(os.environ, switch):
        made = Group.from_process_group(dist.new_group(), patience_s=PATIENCE_S)
    one, other = _watched(group, transport), made
    assert one.watch is not None and other.watch is not None
    if is_joined:
        other.watch.join(one.watch, range(group.world_size))
    if group.rank == 0:
        interrupt = mock.patch.object(Watch, "sent", side_effect=KeyboardInterrupt)
        with interrupt, contextlib.suppress(KeyboardInterrupt):
            _gather(one, tag=1)
    began = time.monotonic()
    told = other
    if not is_joined:  # where nobody waits for what was not sent
        told = one
        _gather(other, tag=2)

    if is_joined or group.rank:
        with pytest.raises(DivergenceError, match="on rank 0 as it began fetching apples"):
            _gather(told, tag=1)
            _gather(told, tag=1)
            rely_on(told)

    assert time.monotonic() - began < SOON_S


@each_world(2)
def test_an_exception_on_a_group_that_was_destroyed_is_of_no_other(
    group: Group, transport: str
) -> None:
    """A notebook that begins anew does so: nobody is left to be told."""
    switch = {SWITCH: "0"} if transport == MESSAGES else {}
    with mock.patch.dict(os.environ, switch):
        made = Group.from_process_group(dist.new_group(), patience_s=PATIENCE_S)
    interrupt = mock.patch.object(Watch, "sent", side_effect=KeyboardInterrupt)
    with interrupt, contextlib.suppress(KeyboardInterrupt):
        _gather(made, tag=1)
    dist.destroy_process_group(made.process_group)
    for tag in (1, 2):
        _gather(_watched(group, transport), tag=tag)


@pytest.mark.cpu_only("on a device no rank reads another one's memory")
@pytest.mark.parametrize("is_launched", [False, True])
def test_a_peer_may_leave_that_has_launched_what_is_waited_for(
    group: Group, is_launched: bool
) -> None:
    """It need not read memory that this rank has offered: only what it never launched is missed."""
    group = _watched(group)
    watch = group.watch
    assert watch is not None
    launch = watch.launch("all_gather", 7)
    with mock.patch.object(watch, "has_ended", lambda _: True):
        watch.begin(Wait(launch, 1 - group.rank, is_launched=is_launched))
        deadline = time.monotonic() + (8 * PATIENCE_S if is_launched else SOON_S)
        while time.monotonic() < deadline and not watch.has_diverged:
            time.sleep(0.05)
        watch.end()
    assert watch.has_diverged is not is_launched


# ---- Ranks that do not ----


@pytest.mark.ranks(3)
@pytest.mark.parametrize("transport", transports(3))
def test_a_slow_rank_is_waited_for(group: Group, transport: str) -> None:
    """It loads data, saves a checkpoint, or has the longer batch: no reason to end a job."""
    group = _watched(group, transport)
    for slow in range(3):
        if group.rank == slow:
            time.sleep(3 * PATIENCE_S)
        # Rank 1 is one collective ahead of rank 0, which waits for the slow one.
        for tag in (1, 2):
            _gather(group, tag)


def test_a_wait_of_many_patiences_is_told_once(ranks) -> None:
    """The peer may be in a barrier that nobody can see: who reads the log should know whose."""
    told, nothing = ranks(2).run(_be_very_slow)

    assert len(told) == 1
    assert "rank 0 has waited 1 s for rank 1 in fetching apples;" in told[0]
    assert not nothing


def test_a_warning_says_how_to_ask_for_reports_only_where_ranks_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The signal ends a process that has no handler, and torchrun's children are the ranks."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("ZERO_REPORT", "/some folder")
    before = signal.getsignal(signal.SIGUSR1)
    try:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        assert how_to_ask() == ""
        signal.signal(signal.SIGUSR1, on_report_signal)
        assert how_to_ask().endswith(f"pkill -USR1 -P {os.getppid()}; zero report '/some folder'")
        monkeypatch.delenv("TORCHELASTIC_RUN_ID")
        assert how_to_ask() == ""
    finally:
        signal.signal(signal.SIGUSR1, before)


def _be_very_slow(group: Group) -> list[str]:
    group = Group.from_process_group(_watched(group).process_group, patience_s=0.1)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zero_comm").addHandler(handler)
    if group.rank == 1:
        time.sleep(1.4)
    _gather(group, tag=1)
    logging.getLogger("zero_comm").removeHandler(handler)
    return told


@pytest.mark.parametrize("transport", transports(3))
def test_what_a_rank_said_long_ago_accuses_nobody(group: Group, transport: str) -> None:
    """Each waits long for the other, one after the other: their words make a circle on paper."""
    group = _watched(group, transport)
    for turn in range(4):
        if group.rank == turn % 2:
            time.sleep(2.5 * PATIENCE_S)
        _gather(group, tag=1 + turn % 2)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("transport", transports(3))
def test_a_barrier_of_torchs_own_accuses_nobody_who_will_come(group: Group, transport: str) -> None:
    """Ranks sit in barriers for long, and compute for long after them: none is stuck."""
    group = _watched(group, transport)
    alone = dist.new_group([1, 2])
    # All sit in a barrier, and then wait for one of those who sat there: its last word is old.
    if group.rank == 2:
        time.sleep(3 * PATIENCE_S)
    dist.barrier(group.process_group)
    if group.rank == 1:
        time.sleep(3 * PATIENCE_S)
    _gather(group, tag=1)
    # Rank 0 waits for rank 1, which sits in what does not need it.
    if group.rank == 2:
        time.sleep(4 * PATIENCE_S)
    if group.rank:
        dist.barrier(alone)
    _gather(group, tag=1)


@pytest.mark.cpu_only("on devices collectives meet in the order of their launches")
def test_ranks_may_launch_in_another_order(group: Group) -> None:
    """Both have launched what the other waits for; one of the messages only takes long."""
    group = _watched(group)
    order = (1, 2) if group.rank == 0 else (2, 1)
    outs = {tag: torch.full((2,), float(tag + group.rank)) for tag in order}
    handles = [all_gather_flat(outs[tag], splits=[1, 1], group=group, tag=tag) for tag in order]
    if group.rank == 0:
        time.sleep(2 * PATIENCE_S)
    for handle in handles:
        handle.wait()
    assert {tag: out.tolist() for tag, out in outs.items()} == {1: [1, 2], 2: [2, 3]}


def test_a_launch_is_described_under_its_own_number(group: Group) -> None:
    """A rank goes on while it is described; what is launched then is not what has been."""
    watch, before = group.watch, sys.gettrace()
    numbers = itertools.count(1 + int(watch.describe(list)["collectives"]))

    def launch(frame: Any, *_: Any) -> Any:
        """What another thread may do between any two instructions."""
        frame.f_trace_opcodes = True
        if frame.f_code.co_name == "describe":
            watch.launch(f"number {next(numbers)}", 0)
        return launch

    sys.settrace(launch)
    try:
        first, second = watch.describe(list), watch.describe(list)
    finally:
        sys.settrace(before)
    described = [(n, what) for n, what in (first | second).items() if "number" in what]
    assert described == [(n, f"number {n}, finished") for n, _ in described] != []


def test_a_group_that_is_gone_leaves_no_thread_and_no_buffer(group: Group) -> None:
    """Jobs make many groups; what watched a long wait must not keep what travelled in it."""
    threads = set(threading.enumerate())
    group = Group.from_process_group(dist.new_group(), patience_s=PATIENCE_S)
    if group.rank == 0:
        time.sleep(2 * PATIENCE_S)
    out = torch.zeros(2)
    all_gather_flat(out, splits=[1, 1], group=group).wait()  # looked at on rank 1
    buffer = weakref.ref(out)
    watch = weakref.ref(group.watch)
    process_group = group.process_group

    del out, group
    _until(lambda: buffer() is None)

    dist.destroy_process_group(process_group)
    del process_group
    _until(lambda: watch() is None)
    _until(lambda: not {each for each in threading.enumerate() if "watch" in each.name} - threads)


@each_world(2)
def test_a_group_whose_ranks_have_parted_goes_too(group: Group, transport: str) -> None:
    """It stayed with three threads of gloo, as what had not been read held it."""
    switch = {SWITCH: "0"} if transport == MESSAGES else {}
    with mock.patch.dict(os.environ, switch):
        made = Group.from_process_group(dist.new_group(), patience_s=PATIENCE_S)
    with pytest.raises(DivergenceError):
        _gather_and_reduction(made)
        rely_on(made)
    process_group = made.process_group
    is_alive = weakref.ref(process_group)

    dist.destroy_process_group(process_group)
    del made, process_group

    _until(lambda: is_alive() is None)


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.02)


@each_world(2)
def test_a_rank_in_another_group_is_named_and_nothing_is_used(group: Group, transport: str) -> None:
    """Nothing meets there, so it ends with the group's timeout, and no values were taken."""
    switch = {SWITCH: "0"} if transport == MESSAGES else {}
    with mock.patch.dict(os.environ, switch):
        groups = [
            Group.from_process_group(
                dist.new_group(timeout=timedelta(seconds=TIMEOUT_S)), patience_s=PATIENCE_S
            )
            for _ in range(group.world_size)
        ]
    began = time.monotonic()
    with pytest.raises(CommError, match="gather") as error:
        _gather(groups[group.rank], tag=1)
    assert f"rank {1 - group.rank}" in str(error.value)
    assert time.monotonic() - began < TIMEOUT_S + SOON_S
