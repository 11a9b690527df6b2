"""Shards that peers read when they like, between the writes of their owner."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from multiprocessing.util import Finalize
from typing import Any, Final
from weakref import finalize

import torch
from attrs import Factory, define, field
from torch import Tensor

from .agreement import check_agreement
from .calls import causes
from .errors import CommError, GroupMismatchError
from .flat import all_gather_flat
from .group import Group
from .peer_memory import PeerMemory, why
from .transport import check_tensor, count_traffic
from .watch import Launch, Wait, Watch

HAS_LEFT: Final = 2**62  # in place of the newest version that a rank reads no more: it reads none

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
        """Whether a peer may still read them. Asked by the end of the process and a thread."""
        with _LOCK:
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


_EXPOSE: Final = -2  # turns are counted beside collectives, whose keys are greater
_OPENED, _CLOSED = 0, 1  # words: the newest version peers may read, the newest we read no more


@define(eq=False)
class Exposure:
    """This rank's shards and where its peers' lie: an all-gather that needs no peer to take part.

    Everyone reads one version of everyone's shards, until all ranks have begun to write; nobody
    reads the next one of a rank before that rank has ended its write. A rank that drops its
    exposure leaves its shards readable until all peers have done so; one that ends without an error
    stays for that, a minute at most.
    """

    group: Group
    shards: tuple[Tensor, ...]
    _peers: PeerMemory
    _words: ctypes.Array[ctypes.c_int64]
    _addresses: dict[int, list[int]]  # of each peer: its words, then its shards
    _numels: list[list[int]]  # of each rank's shards
    _index: dict[int, int] = field(init=False)  # of a shard, by id
    _version: int = field(default=1, init=False)
    _is_writing: bool = field(default=False, init=False)
    _turns: dict[int, Launch] = field(factory=dict, init=False)  # the last one of each word
    _keys: tuple[int, int] = field(init=False)  # of the words' turns, for the group's watch
    _is_current: set[int] = field(factory=set, init=False)  # peers known to have our version open

    def __attrs_post_init__(self) -> None:
        self._index = {id(shard): index for index, shard in enumerate(self.shards)}
        number = self._watch.launch("expose", _EXPOSE).number  # all ranks expose in one order
        self._keys = (_EXPOSE - 2 * number, _EXPOSE - 2 * number - 1)

    @property
    def _watch(self) -> Watch:
        assert self.group.watch is not None, "ranks that read each other's memory have one"
        return self.group.watch

    @property
    def is_writing(self) -> bool:
        """Whether this rank is between `begin_write` and `end_write`."""
        return self._is_writing

    def gather(
        self,
        shard: Tensor,
        out: Tensor,
        *,
        splits: Sequence[int],
        starts: Sequence[int] | None = None,
        payload: Sequence[int] | None = None,
        tag: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Fill `out` with every rank's values of `shard`. Local: peers need not call it.

        Args:
            shard: One of `shards`, the very object.
            out: 1-D, contiguous, on the CPU, `sum(splits)` elements of the shard's dtype.
            splits: Elements per rank, in rank order.
            starts: Where they start in each rank's shard, in elements; at its first when None.
            payload: Elements per rank that carry data, for the traffic count; `splits` when None.
            tag: Whose `Purpose` has the subject that it is counted under; none when None.
            timeout_s: Longest wait for a peer that is writing, in seconds; the group's when None.

        Raises:
            GroupMismatchError: `shard` is none of `shards`, `out` does not fit it or `splits`, or
                they reach past the end of a rank's shard.
            CommError: A peer has ended, has deleted its shards, or did not end its write in time.
        """
        if self._is_writing:
            self.end_write()
        starts = [0] * len(splits) if starts is None else starts
        index = self._check(shard, out, splits, starts)
        count_traffic(self.group, "all_gather", out, splits, payload, sends_own=True, tag=tag)
        for rank, (begin, end) in enumerate(pairwise(accumulate(splits, initial=0))):
            first = starts[rank]
            if rank == self.group.rank:
                out[begin:end].copy_(shard[first : first + end - begin])
            elif begin < end:
                offset = first * shard.element_size()
                self._read(rank, index, offset, out[begin:end], timeout_s)

    def begin_write(self, *, timeout_s: float | None = None) -> None:
        """Wait until no peer reads this version any more. Collective.

        Called again before `end_write`, it does nothing.

        Raises:
            CommError: A peer ended, or does not begin its write in time.
        """
        if self._is_writing:
            return
        self._peers.fence()
        self._words[_CLOSED] = self._version
        self._take_turn(_CLOSED, "waiting to write to the weights (a step, or loading)")
        for rank in self._addresses:
            self._wait_for(rank, _CLOSED, "a write to shards that peers read", timeout_s)
        self._is_writing = True

    def end_write(self) -> None:
        """Let peers read what was written. Local."""
        if self._is_writing:
            self._is_writing = False
            self._version += 1
            self._is_current.clear()
            self._peers.fence()
            self._words[_OPENED] = self._version
            self._take_turn(_OPENED, "reading weights that are being written")

    def move(self, *, tag: int = 0, timeout_s: float | None = None) -> None:
        """Tell the peers where the shards lie now, and learn where theirs do. Collective.

        Between `begin_write` and `end_write`: nobody reads them meanwhile. Numels and dtypes stay.

        Args:
            tag: As for `all_gather_flat`.
            timeout_s: Longest wait for the other ranks, in seconds; the group's own when None.

        Raises:
            CommError: Not while this rank writes, or a rank did not take part in time.
        """
        if not self._is_writing:
            raise CommError(
                f"shards may lie elsewhere only between begin_write() and end_write() (rank "
                f"{self.group.rank}): peers would read their old memory; call begin_write() first"
            )
        rows = _exchange(self.shards, self._words, self.group, tag, timeout_s)
        self._addresses.update(_addresses_in(rows, len(self.shards), self.group.rank))

    def _take_turn(self, word: int, doing: str) -> None:
        """This rank has written a version into a word: what those wait for who have done so too."""
        self._turns[word] = self._watch.launch(doing, self._keys[word])

    def _check(
        self, shard: Tensor, out: Tensor, splits: Sequence[int], starts: Sequence[int]
    ) -> int:
        """Which of the shards it is; GroupMismatchError if memory would be read that is not its."""
        index = self._index.get(id(shard))
        if index is None:
            raise GroupMismatchError(
                f"expected one of the {len(self.shards)} tensors that were exposed, the very "
                f"object, got another of shape {tuple(shard.shape)} (rank {self.group.rank}); what "
                "is computed from it or views it is not known to the peers"
            )
        world_size = self.group.world_size
        if len(splits) != world_size or len(starts) != world_size:
            raise GroupMismatchError(
                f"expected one split and one start per rank, {world_size} each, got {len(splits)} "
                f"and {len(starts)} (rank {self.group.rank})"
            )
        check_tensor(out, sum(splits), self.group, "out", dtype=shard.dtype)
        for rank, (numels, first, split) in enumerate(
            zip(self._numels, starts, splits, strict=True)
        ):
            if split and not 0 <= first <= numels[index] - split:
                raise GroupMismatchError(
                    f"expected a part of the {numels[index]} elements of shard {index} of rank "
                    f"{rank}, got {split} elements from {first} on (rank {self.group.rank})"
                )
        return index

    def _read(
        self, rank: int, index: int, offset: int, out: Tensor, timeout_s: float | None
    ) -> None:
        if rank not in self._is_current:
            self._wait_for(rank, _OPENED, "reading a shard", timeout_s)
            self._is_current.add(rank)
        try:
            self._peers.read(rank, self._addresses[rank][1 + index] + offset, into=out)
        except OSError as error:
            raise self._unreadable(rank, "reading a shard", error) from error

    def _wait_for(self, rank: int, word: int, what: str, timeout_s: float | None) -> None:
        def is_there() -> bool:
            if self._word(rank, word, what) >= self._version:
                return True
            has_left = self._word(rank, _CLOSED, what) == HAS_LEFT
            # Once more: it may have opened this version, and left, since it was asked.
            if has_left and self._word(rank, word, what) < self._version:
                raise CommError(
                    f"{what}: rank {rank} has deleted its model or is ending, and writes no more "
                    f"(rank {self.group.rank}); take as many steps on every rank, and keep the "
                    f"model on each until all have taken the last. {causes()}"
                )
            return False

        def lacks() -> Wait | None:
            turn = self._turns.get(word)
            return None if turn is None else Wait(turn, rank)

        if not self._peers.look_until(is_there, lacks, timeout_s=timeout_s):
            limit_s = self._peers.timeout_s if timeout_s is None else timeout_s
            raise CommError(
                f"{what}: rank {rank} did not reach it within {limit_s:g} s (rank "
                f"{self.group.rank}). Every rank must write to its shards as often: "
                f"optimizer.step() and load_state_dict() belong on all ranks. {causes()}"
            )

    def _word(self, rank: int, word: int, what: str) -> int:
        try:
            return self._peers.read_word(rank, self._addresses[rank][0] + 8 * word)
        except OSError as error:
            raise self._unreadable(rank, what, error) from error

    def _unreadable(self, rank: int, what: str, error: OSError) -> CommError:
        return self._watch.error() or CommError(
            f"{what}: rank {self.group.rank} cannot read the memory of rank {rank}: {why(error)}"
        )


def expose(
    shards: Sequence[Tensor], *, group: Group, tag: int = 0, timeout_s: float | None = None
) -> Exposure | None:
    """Let peers read these shards; None where the group's ranks cannot. Collective.

    Args:
        shards: 1-D, contiguous, on the CPU, in the same order and dtypes on every rank. They must
            stay where they are while the exposure lives, unless `move` says so, and may be written
            between `begin_write` and `end_write`.
        group: The ranks whose shards belong together.
        tag: As for `all_gather_flat`.
        timeout_s: Longest wait for the other ranks, in seconds; the group's own when None.

    Raises:
        GroupMismatchError: A shard is not 1-D, contiguous and on the group's device.
        AgreementError: Ranks differ in the number of shards or in their dtypes.
        CommError: A rank did not take part in time.
    """
    for index, shard in enumerate(shards):
        check_tensor(shard, shard.numel(), group, f"shard {index}")
    if group.peers is None:
        return None
    timeout_s = group.peers.timeout_s if timeout_s is None else timeout_s
    facts = {"exposed shards": ", ".join(str(shard.dtype) for shard in shards)}
    check_agreement(facts, group=group, tag=tag, timeout_s=timeout_s)
    words = (ctypes.c_int64 * 2)(1, 0)
    rows = _exchange(shards, words, group, tag, timeout_s)
    addresses = _addresses_in(rows, len(shards), group.rank)
    numels = [row[1 + len(shards) :] for row in rows]
    exposure = Exposure(group, tuple(shards), group.peers, words, addresses, numels)
    remains = Remains(tuple(shards), words, group.peers, {r: a[0] for r, a in addresses.items()})
    finalize(exposure, leave, remains).atexit = False  # type: ignore[attr-defined]
    return exposure


def _exchange(
    shards: Sequence[Tensor],
    words: ctypes.Array[ctypes.c_int64],
    group: Group,
    tag: int,
    timeout_s: float | None,
) -> list[list[int]]:
    """Of each rank: the address of its words, those of its shards, and their numels. Collective."""
    mine = [ctypes.addressof(words)]
    mine += [shard.data_ptr() for shard in shards]
    mine += [shard.numel() for shard in shards]
    table = torch.tensor(mine * group.world_size, dtype=torch.int64, device="cpu")
    splits = [len(mine)] * group.world_size
    handle = all_gather_flat(table, splits=splits, group=group, tag=tag, control=True)
    return handle.wait(timeout_s=timeout_s).view(group.world_size, -1).tolist()  # type: ignore[no-any-return]


def _addresses_in(rows: list[list[int]], num_shards: int, own: int) -> dict[int, list[int]]:
    """Of each peer: its words, then its shards."""
    return {rank: row[: 1 + num_shards] for rank, row in enumerate(rows) if rank != own}
