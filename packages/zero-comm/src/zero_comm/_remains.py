"""Shards that their rank needs no more, kept for the peers that do."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from multiprocessing.util import Finalize
from typing import Any, Final

from attrs import Factory, define
from torch import Tensor

from ._peer_memory import PeerMemory

HAS_LEFT: Final = 2**62  # in place of the newest version that a rank reads no more: it reads none

_CLOSED: Final = 1
_LOOK_S: Final = 0.02
_LINGER_S: Final = 60.0


@define(eq=False)
class Remains:
    """What has to stay until every peer has left too."""

    shards: tuple[Tensor, ...]
    words: ctypes.Array[ctypes.c_int64]
    peers: PeerMemory
    addresses: dict[int, int]  # of each peer's words
    pid: int = Factory(os.getpid)
    has_lingered: bool = False

    def __attrs_post_init__(self) -> None:
        with _LOCK:
            _ALIVE.append(self)
        # It serves where atexit does, and in processes of multiprocessing, which know none. Those
        # that were forked have forgotten what was registered before: hence once per exposure.
        Finalize(None, _linger, exitpriority=10)

    def are_needed(self) -> bool:
        """Whether a peer may still read them."""
        for rank in tuple(self.addresses):
            try:
                word = self.peers.read_word(rank, self.addresses[rank] + 8 * _CLOSED)
            except OSError:
                word = HAS_LEFT
            if word == HAS_LEFT:
                del self.addresses[rank]
        return bool(self.addresses)


_ALIVE: Final[list[Remains]] = []
_LEFT: Final[list[Remains]] = []  # their exposure is gone
# A peer may look at the words after the shards were given back: two words per exposure stay.
_WORDS: Final[list[Any]] = []
_LOCK: Final = threading.RLock()  # a garbage collection may run leave() anywhere


def leave(remains: Remains) -> None:
    """This rank reads no more; its shards go when no peer does. Returns at once."""
    with _LOCK:
        remains.words[_CLOSED] = HAS_LEFT
        _WORDS.append(remains.words)
        _ALIVE.remove(remains)
        if not remains.are_needed():
            return
        _LEFT.append(remains)
        if len(_LEFT) == 1:
            threading.Thread(target=_wait_for_peers, name="zero_comm remains", daemon=True).start()


def _wait_for_peers() -> None:
    while True:
        time.sleep(_LOOK_S)
        with _LOCK:
            for remains in tuple(_LEFT):  # leave() may add some meanwhile
                if not remains.are_needed():
                    _LEFT.remove(remains)
            if not _LEFT:
                return


def _linger() -> None:
    """A process that ends must not take away what its peers still read: it waits, but not long.

    Not after an error: peers that wait for this rank should hear of it at once.
    """
    mine = [
        remains
        for remains in (*_ALIVE, *_LEFT)
        if remains.pid == os.getpid() and not remains.has_lingered
    ]
    if _ends_by_error():
        return
    for remains in mine:
        remains.has_lingered = True
        remains.words[_CLOSED] = HAS_LEFT
        remains.peers.leave()
    deadline = time.monotonic() + _LINGER_S
    while time.monotonic() < deadline and any(r.are_needed() for r in mine):
        time.sleep(_LOOK_S)


def _ends_by_error() -> bool:
    error = sys.exception()  # a process of multiprocessing comes here while it is being handled
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None or getattr(sys, "last_value", None) is not None
