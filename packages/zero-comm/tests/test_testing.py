"""The ranks that every other test stands on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from zero_comm import Group, RankFailedError, all_gather_flat
from zero_comm.testing import RankPool, equal


@pytest.fixture
def pool() -> Iterator[RankPool]:
    """Two ranks of this test's own, which it may break."""
    with RankPool(2) as pool:
        yield pool


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_in_rank_order(ranks, world_size: int) -> None:
    """A test compares rank r's result with what rank r should have."""
    answers = ranks(world_size).run(_who_am_i)

    assert [answer["rank"] for answer in answers] == list(range(world_size))
    assert {answer["world_size"] for answer in answers} == {world_size}
    assert len({answer["pid"] for answer in answers} | {os.getpid()}) == world_size + 1
    assert {answer["num_threads"] for answer in answers} == {1}


def _who_am_i(group: Group) -> dict[str, int]:
    if group.rank == 0:
        time.sleep(0.1)
    return {
        "rank": group.rank,
        "world_size": group.world_size,
        "pid": os.getpid(),
        "num_threads": torch.get_num_threads(),
    }


def test_workers_are_kept_between_runs(ranks) -> None:
    """Starting one costs seconds; a suite has hundreds of runs."""
    first, second = ranks(2).run(_pid), ranks(2).run(_pid)

    assert first == second


def _pid(group: Group) -> int:
    return os.getpid()


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_workers_with_many_threads_are_replaced(pool: RankPool) -> None:
    """Threads of process groups that a body keeps wake up 100 times a second."""
    first = pool.run(_keep_groups, count=1)
    second = pool.run(_keep_groups, count=25)
    third = pool.run(_pid)

    assert first == second
    assert not set(second) & set(third)


_KEPT: list[object] = []


def _keep_groups(group: Group, count: int) -> int:
    _KEPT.extend(dist.new_group() for _ in range(count))
    return os.getpid()


def test_arguments_and_results_travel_whole(ranks) -> None:
    """Tensors of any dtype go in and come out bit for bit."""
    values = {"half": torch.randn(5).bfloat16(), "name": "π", "none": None}

    for answer in ranks(2).run(_echo, values=values):
        assert equal(answer["half"], values["half"])
        assert answer["name"] == "π"
        assert answer["none"] is None


def _echo(group: Group, values: dict[str, object]) -> dict[str, object]:
    return values


@pytest.mark.slow
def test_a_failure_carries_rank_and_traceback(pool: RankPool) -> None:
    """Without both, a failing test on ranks is debugged by guessing."""
    with pytest.raises(RankFailedError) as raised:
        pool.run(_raise_on, rank=1, text="no such unit")

    message = str(raised.value)
    assert "rank 1 of 2 failed while running _raise_on()" in message
    assert "ValueError: no such unit" in message
    assert f'File "{__file__}"' in message
    assert "raise ValueError(text)" in message


def _raise_on(group: Group, rank: int, text: str) -> None:
    if group.rank == rank:
        raise ValueError(text)
    _gather(group)  # a peer that waits for the one that raised must not delay the news


@pytest.mark.slow
def test_the_first_error_is_told_and_not_its_echo(pool: RankPool) -> None:
    """A rank that lost its peer knows nothing of why; the reader needs the one that does."""
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 failed") as raised:
        pool.run(_raise_after_closing)

    assert "KeyError" in str(raised.value)


def _raise_after_closing(group: Group) -> None:
    if group.rank == 0:
        _gather(group)
    dist.destroy_process_group()  # rank 0 now fails with a closed connection
    time.sleep(0.5)
    raise KeyError("the cause")


@pytest.mark.slow
def test_a_killed_worker_is_noticed_at_once(pool: RankPool) -> None:
    """The kernel kills for memory, and then nobody answers."""
    started = time.monotonic()
    with pytest.raises(RankFailedError, match=r"rank 0 of 2 failed .*\n.*ended by SIGKILL"):
        pool.run(_kill_on, rank=0)

    assert time.monotonic() - started < 20  # mostly the start of two workers; the timeout is 30


def _kill_on(group: Group, rank: int) -> None:
    if group.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    _gather(group)


@pytest.mark.slow
def test_a_hang_names_who_is_silent_and_where(pool: RankPool) -> None:
    """Which rank left which collective out is the whole question of a hang."""
    with pytest.raises(RankFailedError, match=r"within 1 s .* ranks \[0\] of 2") as raised:
        pool.run(_leave_out, rank=1, timeout_s=1)

    assert "in _leave_out" in str(raised.value)
    assert "rank 0 is at" in str(raised.value)
    assert "rank 1 is at" not in str(raised.value)


def _leave_out(group: Group, rank: int) -> None:
    if group.rank != rank:
        _gather(group)


def test_a_pool_serves_again_after_a_failure(pool: RankPool) -> None:
    """One failing test must not take the rest of the session with it."""
    before = pool.run(_pid)
    with pytest.raises(RankFailedError):
        pool.run(_raise_on, rank=0, text="once")

    after = pool.run(_pid)

    assert pool.pids == after
    assert not set(before) & set(after)
    assert not any(_is_alive(pid) for pid in before)


def test_a_result_that_cannot_travel_is_an_error(pool: RankPool) -> None:
    """A rank that cannot answer must say so, not leave the parent waiting."""
    with pytest.raises(RankFailedError, match=r"failed .*(?s:.)*pickle"):
        pool.run(_return_a_lambda)


def _return_a_lambda(group: Group) -> object:
    return lambda: None


def test_a_body_must_be_importable(ranks) -> None:
    """A closure would silently lose what it closes over."""

    def inner(group: Group) -> None: ...

    with pytest.raises(ValueError, match=r"expected a top-level function of a file, got .*inner"):
        ranks(1).run(inner)
    with pytest.raises(ValueError, match="top-level function"):
        ranks(1).run(lambda group: None)


def test_a_pool_has_at_least_one_rank() -> None:
    """No rank would return no result, and a test that compares them one by one would pass."""
    with pytest.raises(ValueError, match="must be >= 1"):
        RankPool(0)


@pytest.mark.cpu_only("what a rank sends alone never ends on a device")
def test_a_message_of_one_run_does_not_reach_the_next(ranks) -> None:
    """Else a test that forgot a wait would corrupt the one after it."""
    ranks(2).run(_send_and_forget, value=1.0)

    received = ranks(2).run(_send_to_the_other, value=2.0)

    assert received == [2.0, 2.0]


@pytest.mark.skipif("config.getoption('device') == 'cpu'", reason="of waits for a device")
def test_an_error_that_a_finalizer_gets_fails_the_run(ranks) -> None:
    """Else a finalizer that waits for the device would hide what was wrong before."""
    with pytest.raises(RankFailedError, match="lost in a finalizer"):
        ranks(1).run(_raise_in_a_finalizer)


def _raise_in_a_finalizer(_: Group) -> None:
    def fail() -> None:
        raise ValueError("lost in a finalizer")

    held = type("Held", (), {})()
    weakref.finalize(held, fail)
    del held


def _send_and_forget(group: Group, value: float) -> None:
    dist.isend(torch.tensor([value]), 1 - group.rank, tag=7)


def _send_to_the_other(group: Group, value: float) -> float:
    received = torch.zeros(1)
    work = dist.irecv(received, 1 - group.rank, tag=7)
    dist.send(torch.tensor([value]), 1 - group.rank, tag=7)
    work.wait()
    return received.item()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_leaves_no_mark(ranks, world_size: int) -> None:
    """Tests pass in any order only if each finds the ranks as the first one did."""
    fresh = ranks(world_size).run(_look_around)
    ranks(world_size).run(_make_a_mess)

    assert ranks(world_size).run(_look_around) == fresh


def _make_a_mess(group: Group) -> None:
    torch.manual_seed(99)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    os.environ["ZERO_COMM_MESS"] = "1"
    os.chdir("/")
    warnings.simplefilter("ignore")
    if group.world_size > 1:
        dist.new_group([0])


def _look_around(group: Group) -> dict[str, object]:
    return {
        "random": (random.random(), torch.rand(1).item()),
        "tensor": (torch.ones(1).dtype, str(torch.ones(1).device)),
        "grad": torch.is_grad_enabled(),
        "environment": "ZERO_COMM_MESS" in os.environ,
        "folder": str(Path.cwd()),
        "filters": len(warnings.filters),
        "recorders": len(group.recorders),
        "is_initialized": dist.is_initialized(),
    }


def test_warnings_mean_the_same_in_a_rank(pool: RankPool) -> None:
    """A suite that turns warnings into errors must hear those of its ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pool.run(_warn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RankFailedError, match="DeprecationWarning: old"):
            pool.run(_warn)


def _warn(group: Group) -> None:
    warnings.warn("old", DeprecationWarning, stacklevel=1)


def test_a_body_may_import_its_neighbours(ranks, tmp_path: Path) -> None:
    """An oracle shared by several test files sits beside them."""
    Path(tmp_path, "neighbour_of_a_body.py").write_text("VALUE = 17\n")
    Path(tmp_path, "some_bodies.py").write_text(
        "import neighbour_of_a_body\ndef body(group):\n    return neighbour_of_a_body.VALUE\n"
    )
    namespace: dict[str, object] = {}
    sys.path.insert(0, str(tmp_path))
    try:
        exec("from some_bodies import body", namespace)  # as a test module would be imported
    finally:
        sys.path.remove(str(tmp_path))

    assert ranks(2).run(namespace["body"]) == [17, 17]


_PARENT = """
import os, sys, time
from pathlib import Path
from zero_comm.testing import RankPool

def body(group, folder):
    Path(folder, f"pid-{os.getpid()}").touch()
    time.sleep(60)

if __name__ == "__main__":
    RankPool(2).run(body, folder=sys.argv[1], timeout_s=60)
"""


@pytest.mark.slow
def test_workers_do_not_outlive_their_parent(tmp_path: Path) -> None:
    """A killed test run must not leave ranks that wait for each other for ever."""
    script = Path(tmp_path, "parent.py")
    script.write_text(_PARENT)
    with subprocess.Popen([sys.executable, str(script), str(tmp_path)]) as parent:
        _wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
        parent.kill()
    pids = [int(file.name.removeprefix("pid-")) for file in tmp_path.glob("pid-*")]

    assert len(pids) == 2

    _wait_until(lambda: not any(_is_alive(pid) for pid in pids))

    assert not any(_is_alive(pid) for pid in pids)


def _wait_until(condition: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    """Running, and no zombie that waits for whoever adopted it."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _gather(group: Group) -> None:
    all_gather_flat(
        torch.zeros(group.world_size), splits=[1] * group.world_size, group=group
    ).wait()


ANYWHERE = """
import pytest

@pytest.mark.cpu_only("it has a reason")
def test_of_the_cpu(group): pass

def test_anywhere(group): assert group.device.type == "cpu"
"""


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "xpu"])
def test_ranks_are_on_the_device_that_is_asked_for_or_say_why_not(
    tmp_path: Path, device: str
) -> None:
    """On the CPU in its place, a run would say nothing of the device."""
    (tmp_path / "test_one.py").write_text(ANYWHERE)
    command = [sys.executable, "-m", "pytest", "-rs", "--device", device, "test_one.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    if device == "cpu":
        assert "2 passed" in ran.stdout, ran.stdout
        return
    assert "1 skipped, 1 error" in ran.stdout, ran.stdout
    assert "on the CPU only: it has a reason" in ran.stdout
    assert "expected a kind of device that this process has" in ran.stdout
