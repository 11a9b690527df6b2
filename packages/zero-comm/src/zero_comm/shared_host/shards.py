"""Versions of shards that peers read, between the writes of their owner."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from multiprocessing.util import Finalize
from typing import Any, Final
from weakref import finalize

from attrs import Factory, define, field
from torch import Tensor

from zero_comm.calls import causes, in_lines, within
from zero_comm.errors import CommError
from zero_comm.watch import PATIENCE_S, Launch, Wait, Watch

from .peer_memory import PeerMemory
from .process_memory import why

# Value of a rank's `_CLOSED` word once it reads no version any more.
HAS_LEFT: Final = 2**62

_LOOK_S: Final = 0.02
_EXIT_WAIT_S: Final = 60.0
_CONNECTED_S: Final = 2 * PATIENCE_S


@define(eq=False)
class SharedShardLifetime:
    """Memory of one exposure, which must stay allocated until no peer reads it."""

    shards: tuple[Tensor, ...]
    words: ctypes.Array[ctypes.c_int64]
    peers: PeerMemory
    # Peer that may still read -> address of its words; `are_needed` removes those that do not.
    addresses: dict[int, int]
    pid: int = Factory(os.getpid)
    has_lingered: bool = False

    def __attrs_post_init__(self) -> None:
        with _LOCK:
            _ALIVE.append(self)
        # A Finalize runs where atexit functions do, and in processes of multiprocessing, which run
        # none. A forked process has lost those of its parent, so each exposure registers one.
        Finalize(None, _wait_for_readers_at_exit, exitpriority=10)

    def are_needed(self) -> bool:
        """Return whether a peer may still read the shards. Called at exit and by a thread, too."""
        with _LOCK:
            for rank in tuple(self.addresses):
                try:
                    word = self.peers.read_word(rank, self.addresses[rank] + 8 * _CLOSED)
                except OSError:
                    word = HAS_LEFT
                if word == HAS_LEFT:
                    del self.addresses[rank]
            return bool(self.addresses)


_ALIVE: Final[list[SharedShardLifetime]] = []
# Lifetimes whose `SharedShards` is deleted, and whose shards peers may still read.
_LEFT: Final[list[SharedShardLifetime]] = []
# A peer may read the words after the shards were freed: the two words of an exposure stay.
_WORDS: Final[list[Any]] = []
# Reentrant, since a garbage collection may call `stop_reading` anywhere, also under the lock.
_LOCK: Final = threading.RLock()


def stop_reading(lifetime: SharedShardLifetime) -> None:
    """Note that this rank reads no more; free its shards when no peer does. Returns at once."""
    with _LOCK:
        lifetime.words[_CLOSED] = HAS_LEFT
        _WORDS.append(lifetime.words)
        _ALIVE.remove(lifetime)
        if not lifetime.are_needed():
            return
        _LEFT.append(lifetime)
        if len(_LEFT) == 1:
            threading.Thread(target=_wait_for_peers, name="zero_comm remains", daemon=True).start()


def _wait_for_peers() -> None:
    while True:
        time.sleep(_LOOK_S)
        with _LOCK:
            # A copy, since a garbage collection may call `stop_reading` in the loop.
            for lifetime in tuple(_LEFT):
                if not lifetime.are_needed():
                    _LEFT.remove(lifetime)
            if not _LEFT:
                return


def _wait_for_readers_at_exit() -> None:
    """Keep a process that ends alive while peers read its shards, for `_EXIT_WAIT_S` at most.

    Does nothing after an error: peers that wait for this rank should learn of it at once. They do
    by its closed connections, so these are closed if the wait is long; shards stay readable.
    """
    mine = [
        lifetime
        for lifetime in (*_ALIVE, *_LEFT)
        if lifetime.pid == os.getpid() and not lifetime.has_lingered
    ]
    if _ends_by_error():
        return
    for lifetime in mine:
        lifetime.has_lingered = True
        lifetime.words[_CLOSED] = HAS_LEFT
        lifetime.peers.announce_exit()
    began = time.monotonic()
    deadline, are_connected = began + _EXIT_WAIT_S, True
    while time.monotonic() < deadline and any(r.are_needed() for r in mine):
        # A peer that waits for us in a collective of ours finds first that this program is over.
        if are_connected and time.monotonic() - began > _CONNECTED_S:
            are_connected = False
            for watch in {id(r.peers): r.peers.watch for r in mine}.values():
                if watch is not None:
                    watch.interrupt()
        time.sleep(_LOOK_S)


def _ends_by_error() -> bool:
    # A process of multiprocessing ends while its error is being handled.
    error = sys.exception()
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None or getattr(sys, "last_value", None) is not None


# Key of the launch of an exposure; those of its words are smaller, those of collectives greater.
_EXPOSE: Final = -2
# Words of a rank: the newest version that peers may read, and the newest that it reads no more.
_OPENED, _CLOSED = 0, 1


Words = ctypes.Array[ctypes.c_int64]


def new_words() -> Words:
    """Return words of a rank whose first version peers may read."""
    return (ctypes.c_int64 * 2)(1, 0)


@define(eq=False)
class SharedShards:
    """This rank's shards and the addresses of its peers' shards, read without their owners.

    All ranks read the same version of all shards until every rank has begun to write. Peers read a
    rank's next version only after that rank has ended its write. After a rank has deleted this
    object, its shards stay readable until all peers have deleted theirs; a process that ends
    without an error waits for that, a minute at most.
    """

    shards: tuple[Tensor, ...]
    _memory: PeerMemory
    _words: Words
    # Peer -> address of its words, then those of its shards.
    _addresses: dict[int, list[int]]
    _version: int = field(default=1, init=False)
    _is_writing: bool = field(default=False, init=False)
    # Word -> the launch counted when this rank last wrote it; and, by word, such launches' keys.
    _turns: dict[int, Launch] = field(factory=dict, init=False)
    _keys: tuple[int, int] = field(init=False)
    # Peers known to have opened this rank's version; emptied when the version changes.
    _is_current: set[int] = field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        # The number is the same on every rank, as all ranks expose in one order.
        number = self._watch.launch("expose", _EXPOSE).number
        self._keys = (_EXPOSE - 2 * number, _EXPOSE - 2 * number - 1)
        words = {peer: where[0] for peer, where in self._addresses.items()}
        lifetime = SharedShardLifetime(self.shards, self._words, self._memory, words)
        finalize(self, stop_reading, lifetime).atexit = False  # type: ignore[attr-defined]

    @property
    def _watch(self) -> Watch:
        assert self._memory.watch is not None, "ranks that read each other's memory have one"
        return self._memory.watch

    @property
    def is_writing(self) -> bool:
        """Return whether this rank is between `begin_write` and `end_write`."""
        return self._is_writing

    def begin_write(
        self,
        doing: str = "writing to the weights (optimizer.step())",
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Wait until no peer reads this version any more. Collective.

        Called again before `end_write`, it does nothing.

        Args:
            doing: What it is for, in the words of an error.
            timeout_s: The longest wait, in seconds; the group's own when None.

        Raises:
            CommError: A peer ended, or does not begin its write in time.
        """
        if self._is_writing:
            return
        self._memory.fence()
        self._words[_CLOSED] = self._version
        self._take_turn(_CLOSED, doing)
        for rank in self._addresses:
            self._wait_for(rank, _CLOSED, "a write to shards that peers read", timeout_s)
        self._is_writing = True

    def end_write(self) -> None:
        """Let peers read what was written. Local."""
        if self._is_writing:
            self._is_writing = False
            self._version += 1
            self._is_current.clear()
            self._memory.fence()
            self._words[_OPENED] = self._version
            self._take_turn(_OPENED, "reading weights that are being written")

    def _take_turn(self, word: int, doing: str) -> None:
        """Count a launch for the version that this rank has written to a word.

        Waits for the same word of a peer refer to that launch.
        """
        self._turns[word] = self._watch.launch(doing, self._keys[word])

    def _wait_for(self, rank: int, word: int, what: str, timeout_s: float | None) -> None:
        def is_there() -> bool:
            if self._word(rank, word, what) >= self._version:
                return True
            has_left = self._word(rank, _CLOSED, what) == HAS_LEFT
            # The word is read again: the peer may have opened this version, and left, since.
            if has_left and self._word(rank, word, what) < self._version:
                raise CommError(
                    in_lines(
                        f"{what}: rank {rank} has deleted its model or is ending, and writes no "
                        f"more (rank {self._memory.rank}); take as many steps on every rank, and "
                        "keep the model on each until all have taken the last",
                        causes(),
                    )
                )
            return False

        def lacks() -> Wait | None:
            turn = self._turns.get(word)
            return None if turn is None else Wait(turn, rank)

        if not self._memory.progress_until(is_there, lacks, timeout_s=timeout_s):
            limit_s = self._memory.timeout_s if timeout_s is None else timeout_s
            raise CommError(
                in_lines(
                    f"{what}: rank {rank} did not reach it {within(limit_s)} (rank "
                    f"{self._memory.rank}). Every rank must write to its shards as often: "
                    "optimizer.step() and load_state_dict() belong on all ranks",
                    causes(),
                )
            )

    def _word(self, rank: int, word: int, what: str) -> int:
        try:
            return self._memory.read_word(rank, self._addresses[rank][0] + 8 * word)
        except OSError as error:
            raise self._unreadable(rank, what, error) from error

    def _unreadable(self, rank: int, what: str, error: OSError) -> CommError:
        return self._watch.error() or CommError(
            f"{what}: rank {self._memory.rank} cannot read the memory of rank {rank}: {why(error)}"
        )

    def read(
        self, rank: int, index: int, offset: int, out: Tensor, *, timeout_s: float | None = None
    ) -> None:
        """Fill `out` with values of a peer's shard, of this rank's version. Local.

        Args:
            rank: The peer.
            index: Position of the shard.
            offset: Where they start in it, in bytes.
            out: 1-D, contiguous, on the CPU.
            timeout_s: Longest wait for a peer that is writing, in seconds; the group's when None.

        Raises:
            CommError: The peer has ended, has deleted its shards, or did not end its write in time.
        """
        if rank not in self._is_current:
            self._wait_for(rank, _OPENED, "reading a shard", timeout_s)
            self._is_current.add(rank)
        try:
            self._memory.read(rank, self._addresses[rank][1 + index] + offset, into=out)
        except OSError as error:
            raise self._unreadable(rank, "reading a shard", error) from error
