"""Threads share the elements of one call."""

from __future__ import annotations

import multiprocessing
import threading

import pytest
import torch
from zero_offload._team import ALONE_NUMEL, CUT_NUMEL, Team


@pytest.fixture(autouse=True)
def _three_threads() -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("numel", [0, 1, ALONE_NUMEL - 1, ALONE_NUMEL, 10**6 + 3, 10**9])
def test_every_element_is_somebodys_once(numel: int) -> None:
    """An element stepped twice or never is a wrong weight that nothing reports."""
    parts = _parts(numel)

    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == numel
    assert all(start % CUT_NUMEL == 0 for start, _ in parts)
    assert (len(parts) > 1) == (numel >= ALONE_NUMEL)


def test_threads_are_torchs_in_number() -> None:
    """`torch.set_num_threads` is where a job says how many cores it has."""
    names = set()
    meeting = threading.Barrier(3)

    def work(start: int, stop: int) -> None:
        del stop
        names.add(threading.current_thread().name)
        if start == 0 or len(names) <= 3:
            meeting.wait(timeout=20)

    Team().divide(3, 3, work)

    assert len(names) == 3


def test_an_error_in_a_thread_reaches_the_caller() -> None:
    """Else a step that failed in part would pass for done."""
    caller, raised = threading.current_thread(), threading.Event()

    def work(start: int, stop: int) -> None:
        del start, stop
        if threading.current_thread() is not caller:
            raised.set()
            raise RuntimeError("of a thread")
        raised.wait(timeout=20)

    with pytest.raises(RuntimeError, match="of a thread"):
        Team().share(10**6, work)


def test_a_forked_process_makes_its_own_threads() -> None:
    """Threads do not survive a fork; waiting for them would hang a data loader's worker."""
    team = Team()
    assert _sum(team) == 10**6
    context = multiprocessing.get_context("fork")
    pipe, other = context.Pipe()
    child = context.Process(target=lambda: other.send(_sum(team)))
    child.start()

    assert pipe.poll(20)
    assert pipe.recv() == 10**6
    child.join()


def _parts(numel: int) -> list[tuple[int, int]]:
    parts: list[tuple[int, int]] = []
    Team().share(numel, lambda start, stop: parts.append((start, stop)))
    return sorted(parts)


def _sum(team: Team) -> int:
    found: list[int] = []
    team.share(10**6, lambda start, stop: found.append(stop - start))
    return sum(found)
