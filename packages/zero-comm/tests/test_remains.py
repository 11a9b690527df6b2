"""A process that ends keeps its shards for its peers, once and for a while."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from multiprocessing import util
from unittest import mock

import pytest
import torch
from zero_comm import _remains
from zero_comm._peer_memory import PeerMemory
from zero_comm._remains import HAS_LEFT, Remains

LINGER_S = 0.3
CLOSED = 1  # the word that tells of it


@pytest.fixture
def remains(monkeypatch: pytest.MonkeyPatch) -> Iterator[Remains]:
    """Of a rank whose only peer lives in this process too, and does not leave."""
    monkeypatch.setattr(_remains, "_LINGER_S", LINGER_S)
    memories = [PeerMemory(rank, 2, timeout_s=1.0) for rank in range(2)]
    memories[0].meet([memory.whereabouts for memory in memories])
    words, theirs = ((ctypes.c_int64 * 2)(1, 0) for _ in memories)
    with mock.patch.dict(util._finalizer_registry, clear=True):  # as in a process just forked
        made = Remains((torch.ones(2),), words, memories[0], {1: ctypes.addressof(theirs)})
        yield made
    _remains._ALIVE.remove(made)


def _end() -> float:
    """What the end of a process runs; how long it takes."""
    started = time.monotonic()
    util._run_finalizers(0)
    return time.monotonic() - started


def test_a_process_lingers_once(remains: Remains) -> None:
    """A job whose last rank hangs should be over in a minute, not in several."""
    others = [
        Remains(remains.shards, remains.words, remains.peers, dict(remains.addresses))
        for _ in range(2)
    ]

    assert LINGER_S <= _end() < 2 * LINGER_S
    assert remains.words[CLOSED] == HAS_LEFT
    for other in others:
        _remains._ALIVE.remove(other)


def test_a_process_whose_peers_have_left_ends_at_once(remains: Remains) -> None:
    """The usual end of a script."""
    address = remains.addresses[1]
    (ctypes.c_int64 * 2).from_address(address)[CLOSED] = HAS_LEFT

    assert _end() < LINGER_S


@pytest.mark.parametrize("error", [ZeroDivisionError(), SystemExit(1), KeyboardInterrupt()])
def test_a_process_of_multiprocessing_that_fails_ends_at_once(
    remains: Remains, error: BaseException
) -> None:
    """torch.multiprocessing.spawn hears of it only when it has ended."""
    with pytest.raises(type(error)):
        try:
            raise error
        finally:  # as in multiprocessing.process
            took_s = _end()

    assert took_s < LINGER_S


def test_one_that_leaves_by_exit_without_an_error_lingers(remains: Remains) -> None:
    """sys.exit() is an exception too."""
    with pytest.raises(SystemExit):
        try:
            raise SystemExit(0)
        finally:
            took_s = _end()

    assert took_s >= LINGER_S
