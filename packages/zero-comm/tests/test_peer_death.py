"""Ranks that read each other's memory, when one of them ends. Real processes, never the pool's."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.util
import os
import pickle
import re
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transports import MESSAGES, READS, over
from zero_comm import (
    CommError,
    Group,
    all_gather_flat,
    all_reduce_flat,
    broadcast_flat,
    check_agreement,
    collective,
    expose,
    reduce_scatter_flat,
)
from zero_comm.testing import RankPool

pytestmark = pytest.mark.slow

GROUP_TIMEOUT_S = 20.0
SOON_S = 2.0


@pytest.fixture(scope="module")
def parent() -> Iterator[RankPool]:
    """One process that has imported torch and talks to nobody: it forks ranks that may die."""
    with RankPool(1) as pool:
        yield pool


def _fork(group: Group, name: str, world_size: int = 2, **kwargs: Any) -> list[Any]:
    """What body `name` returned on each rank; None on one that was ended."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork, beside a thread that sleeps
        pids = []
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                _be_rank(rank, world_size, Path(folder), name, kwargs)
            pids.append(pid)
        try:
            for pid in pids:
                _join(pid)  # those after it stay as zombies, as under a launcher that is busy
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        files = [Path(folder, str(rank)) for rank in range(world_size)]
        results = [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
    for rank, result in enumerate(results):
        assert not isinstance(result, str), f"rank {rank} failed:\n{result}"
    return results


def _join(pid: int) -> None:
    deadline = time.monotonic() + GROUP_TIMEOUT_S + 5.0
    while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.005)


def _be_rank(rank: int, world_size: int, folder: Path, name: str, kwargs: dict[str, Any]) -> None:
    """Run a body as that rank of a new job, and end."""
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "rendezvous"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )
        result = globals()[name](over(Group.from_process_group(), READS), **kwargs)
    except BaseException:
        result = traceback.format_exc()
    Path(folder, f"{rank}.part").write_bytes(pickle.dumps(result))
    Path(folder, f"{rank}.part").rename(folder / str(rank))
    os._exit(0)


LAUNCHES = {
    "all_gather": lambda tensor, group: all_gather_flat(
        tensor, splits=[1] * group.world_size, group=group
    ),
    "reduce_scatter": lambda tensor, group: reduce_scatter_flat(
        tensor, splits=[1] * group.world_size, group=group
    ),
    "all_reduce": lambda tensor, group: all_reduce_flat(tensor, group=group),
}
ALSO = {"broadcast": lambda tensor, group: broadcast_flat(tensor, src=0, group=group)}


def _launch(name: str, group: Group) -> Any:
    return (LAUNCHES | ALSO)[name](torch.full((group.world_size,), 10.0 + group.rank), group)


def _expected(name: str, rank: int, world_size: int) -> list[float]:
    everyone = [10.0 + rank for rank in range(world_size)]
    mean = sum(everyone) / world_size
    return {
        "all_gather": everyone,
        "reduce_scatter": [mean],
        "all_reduce": [mean] * world_size,
    }[name]


# ---- A rank that dies ----


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_rank_that_is_killed_is_named_at_once(parent: RankPool, name: str) -> None:
    """The kernel kills for memory; its peers need not sit out ten minutes to say who it was."""
    ((first, second, third),) = parent.run(_fork, name="_wait_for_the_dead", world_size=3, of=name)

    assert second is None
    for rank, (pid, error, waited_s) in ((0, first), (2, third)):
        assert re.search(
            rf"cannot finish: the process of rank 1 \({pid}\) has ended "
            rf"\(rank {rank}\)\n.*first error among all ranks",
            error,
        )
        assert waited_s < SOON_S


def _wait_for_the_dead(group: Group, of: str) -> tuple[int, str, float]:
    pid = _pids(group)[1]
    if group.rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    return pid, *_failure_of(of, group)


@pytest.mark.parametrize("transport", [READS, MESSAGES])
def test_who_fails_at_a_survivor_names_the_rank_that_failed_first(
    parent: RankPool, transport: str
) -> None:
    """Survivors end one by one: 2 of 36 named one that had only seen the death before them."""
    ((_, _, (third,)),) = parent.run(
        _fork, name="_come_after_all_have_ended", world_size=3, transport=transport
    )

    assert "rank 0 has failed before, and rank 1 was the first" in third


def _come_after_all_have_ended(group: Group, transport: str) -> tuple[str]:
    pids = _pids(group)
    group = over(group, transport)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 0:
        _failure_of("all_reduce", group)
        os._exit(0)
    _wait_until(pids[0], "Z")
    return (_failure_of("broadcast", group)[0],)  # which needs rank 0 alone


def test_a_rank_killed_in_the_middle_of_an_all_reduce_is_named(parent: RankPool) -> None:
    """Its gradients were read, and the sums that it owes will never come."""
    ((first, _),) = parent.run(_fork, name="_wait_for_the_second_half")
    pid, error, waited_s = first

    assert f"all_reduce cannot finish: the process of rank 1 ({pid}) has en" in error
    assert waited_s < SOON_S


def _wait_for_the_second_half(group: Group) -> tuple[int, str, float]:
    pid = _pids(group)[1]
    if group.rank == 1:
        _launch("all_reduce", group)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    return pid, *_failure_of("all_reduce", group)


def test_a_buffer_whose_owner_died_is_not_read_as_zeros(parent: RankPool) -> None:
    """It was offered, and heard of, and then there was no such memory any more."""
    ((first, _),) = parent.run(_fork, name="_read_from_the_dead")
    error, waited_s = first

    assert re.search(
        r"rank 0 could not read a buffer that rank 1 .* shared: its process has ended", error
    )
    assert waited_s < SOON_S


def _read_from_the_dead(group: Group) -> tuple[str, float]:
    if group.rank == 1:
        all_gather_flat(torch.ones(2), splits=[1, 1], group=group, tag=1)
    _pids(group)  # rank 0 hears of the offer, too
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    started = time.monotonic()
    with pytest.raises(CommError) as raised:
        all_gather_flat(torch.zeros(2), splits=[1, 1], group=group, tag=1).wait()
    return str(raised.value), time.monotonic() - started


def test_an_exposed_shard_whose_owner_died_is_an_error(parent: RankPool) -> None:
    """Nothing waits for the owner there, and nothing of its shard can be read any more."""
    (((error,), _),) = parent.run(_fork, name="_gather_from_the_dead")

    assert re.search(r"cannot read the memory of rank 1: its process has ended\n  look for", error)


def _gather_from_the_dead(group: Group) -> tuple[str]:
    shard = torch.ones(1)
    exposure = expose([shard], group=group)
    pid = _pids(group)[1]
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _wait_until(pid, "Z")
    with pytest.raises(CommError) as raised:
        exposure.gather(shard, torch.zeros(2), splits=[1, 1])
    return (str(raised.value),)


def _failure_of(name: str, group: Group) -> tuple[str, float]:
    started = time.monotonic()
    with pytest.raises(CommError) as raised:
        _launch(name, group).wait()
    return str(raised.value), time.monotonic() - started


def _pids(group: Group) -> list[int]:
    out = torch.full((group.world_size,), os.getpid())
    return all_gather_flat(out, splits=[1] * group.world_size, group=group).wait().tolist()


# ---- A rank that is done ----


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_rank_that_ends_after_its_last_wait_leaves_its_peers_whole(
    parent: RankPool, name: str
) -> None:
    """Every script ends with some collective, and its ranks return from that one by one."""
    for late in (0.0, 0.0, 0.0, 0.01, 0.01):
        for late_rank in (0, 1):
            ((first, _),) = parent.run(
                _fork, name="_end_after_the_wait", of=name, late=late, late_rank=late_rank
            )

            assert first == _expected(name, 0, 2)


def _end_after_the_wait(group: Group, of: str, late: float, late_rank: int) -> list[float]:
    if group.rank == late_rank:
        time.sleep(late)
    result = _launch(of, group).wait().tolist()
    if group.rank == 1:
        os._exit(0)
    return result


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_rank_that_gave_its_group_away_leaves_its_peers_whole(
    parent: RankPool, name: str
) -> None:
    """Its journal is other objects' memory then, and the process still runs."""
    ((first, second),) = parent.run(_fork, name="_tear_down_after_the_wait", of=name)

    assert first == _expected(name, 0, 2)
    assert second == _expected(name, 1, 2)


def _tear_down_after_the_wait(group: Group, of: str) -> list[float]:
    if group.rank == 0:
        time.sleep(0.1)  # so that rank 1 has all it needs as soon as this rank launches
        handle = _launch(of, group)
        time.sleep(0.2 if of != "all_reduce" else 0.0)
        return handle.wait().tolist()
    result = _launch(of, group).wait().tolist()
    dist.destroy_process_group()
    del group
    gc.collect()
    rubbish = [torch.full((numel,), 1) for numel in range(1000, 9000, 500) for _ in range(10)]
    time.sleep(0.4)
    assert len(rubbish) == 160
    return result


def test_a_rank_that_ends_after_agreeing_leaves_its_peers_whole(parent: RankPool) -> None:
    """A check is the last thing that a failing script does, and all ranks must hear of it."""
    for late_rank in (0, 1) * 3:
        ((first, _),) = parent.run(_fork, name="_end_after_agreeing", late_rank=late_rank)

        assert first is True


def _end_after_agreeing(group: Group, late_rank: int) -> bool:
    if group.rank == late_rank:
        time.sleep(0.01)
    check_agreement({"a": "1"}, group=group)
    if group.rank == 1:
        os._exit(0)
    return True


def test_a_rank_that_ended_without_an_error_is_missed_soon(parent: RankPool) -> None:
    """It had fewer batches, or left a call to its peer; it stays for who reads its shards."""
    ((first, _),) = parent.run(_fork, name="_go_on_without_it")
    (training, trained_s), (alone, waited_s) = first

    assert "the process of rank 1" in training
    assert "uneven batches" in training
    assert "must be called" not in training
    assert trained_s < SOON_S
    place = r"\S+test_peer_death\.py:\d+ \(called from \S+\)"
    ended = (
        rf"rank 0 waits for rank 1 in _agree\(\) at {place}, but the program of rank 1 has ended"
    )
    assert re.search(ended, alone)
    assert "_agree() must be called on all ranks, not inside `if rank == 0:`" in alone
    assert "look for an error of rank 1" in alone
    assert waited_s < SOON_S


def _go_on_without_it(group: Group) -> list[tuple[str, float]]:
    group = Group.from_process_group(group.process_group, patience_s=0.2)
    exposure = expose([torch.ones(1)], group=group)
    if group.rank == 1:
        multiprocessing.util._exit_function()  # as at the end of a program
        return []
    assert exposure is not None
    training = _failure_of("reduce_scatter", group)
    started = time.monotonic()
    with pytest.raises(CommError) as raised:
        _agree(group)
    return [training, (str(raised.value), time.monotonic() - started)]


@collective
def _agree(group: Group) -> None:
    check_agreement({"a": "1"}, group=group)


# ---- A rank that stands still ----


@pytest.mark.parametrize("offers", [False, True], ids=["before", "after"])
def test_a_rank_that_is_stopped_is_an_error_in_time(parent: RankPool, offers: bool) -> None:
    """It has not ended, and may go on: only the timeout can tell. Its memory can still be read."""
    ((first, _),) = parent.run(_fork, name="_wait_for_the_stopped", offers=offers)
    error, waited_s = first
    verb = "read" if offers else "offered"

    assert "all_gather did not finish within 0.5 s (if a rank is only slow" in error
    assert f": rank 1 has not {verb} its part" in error
    assert 0.5 <= waited_s < 0.5 + SOON_S


def _wait_for_the_stopped(group: Group, offers: bool) -> tuple[str, float]:
    pid = _pids(group)[1]
    if group.rank == 1:
        if offers:
            _launch("all_gather", group)
        os.kill(os.getpid(), signal.SIGSTOP)
    _wait_until(pid, "T")
    started = time.monotonic()
    try:
        with pytest.raises(CommError) as raised:
            _launch("all_gather", group).wait(timeout_s=0.5)
    finally:
        os.kill(pid, signal.SIGKILL)
    return str(raised.value), time.monotonic() - started


def _wait_until(pid: int, state: str) -> None:
    deadline = time.monotonic() + 10.0
    stat = Path("/proc", str(pid), "stat")
    while stat.read_text().rpartition(")")[2].split()[0] != state:
        assert time.monotonic() < deadline, f"rank 1 does not come to state {state}"
        time.sleep(0.005)
