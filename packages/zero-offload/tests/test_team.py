"""Threads share the elements of one call."""

from __future__ import annotations

import multiprocessing
import threading

import pytest
import torch
from zero_offload.testing import share

LINE_NUMEL = 64  # cuts fall on these, so that no two threads write one cache line


@pytest.fixture(autouse=True)
def _three_threads() -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("numel", [0, 1, 1000, 2**16 - 1, 2**16, 10**6 + 3, 10**9])
def test_every_element_is_somebodys_once(numel: int) -> None:
    """An element stepped twice or never is a wrong weight that nothing reports."""
    parts: list[tuple[int, int]] = []
    share(numel, lambda start, stop: parts.append((start, stop)))
    parts.sort()

    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == numel
    assert all(start % LINE_NUMEL == 0 for start, _ in parts)
    assert (len(parts) > 1) == (numel >= 2**16)  # below, waking a thread costs more than it does


def test_threads_are_torchs_in_number() -> None:
    """`torch.set_num_threads` is where a job says how many cores it has."""
    names = set()
    meeting = threading.Barrier(3)

    def work(start: int, stop: int) -> None:
        del start, stop
        name = threading.current_thread().name
        if name not in names:
            names.add(name)
            meeting.wait(timeout=20)

    share(10**6, work)

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
        share(10**6, work)


def test_a_forked_process_makes_its_own_threads() -> None:
    """Threads do not survive a fork; waiting for them would hang a data loader's worker."""
    assert _sum() == 10**6
    context = multiprocessing.get_context("fork")
    pipe, other = context.Pipe()
    child = context.Process(target=lambda: other.send(_sum()), daemon=True)
    child.start()

    assert pipe.poll(20)
    assert pipe.recv() == 10**6
    child.join()


def _sum() -> int:
    found: list[int] = []
    share(10**6, lambda start, stop: found.append(stop - start))
    return sum(found)
