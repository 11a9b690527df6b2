"""Transfers between processes of one host that read each other's memory.

Every rank keeps a journal in its own memory and only ever writes there: "my buffer for tag T lies
at address A" (an offer), and "I have read what I need for tag T" (done). Peers read the journal,
and then the data, with one copy and no message. A transfer takes place when this rank has launched
it and every peer has offered its buffer; it is over for this rank when every peer is done too,
because only then may it write to the buffer again.

Nothing runs in the background: each launch and each wait also carries out whatever other transfers
have become possible, so that peers are not kept waiting for this rank's own order of waits.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from errno import EFAULT, ESRCH
from functools import partial
from typing import Final, TypeVar
from weakref import WeakSet

import torch
from attrs import Factory, define, field, frozen
from torch import Tensor

from zero_comm.calls import causes, collective_call, in_lines, within
from zero_comm.errors import CommError
from zero_comm.watch import Launch, SeenWait, Wait, Watch

from .journal import (
    DONE,
    OFFER,
    Journal,
    JournalAddress,
    read_entries,
    read_header,
    read_num_read,
)
from .process_memory import read_into, read_word, why


@frozen
class RemoteBuffer:
    """A peer's buffer, which this rank may read until it says that it is done."""

    # Rank whose buffer it is, and rank that reads it.
    owner: int
    reader: int
    pid: int
    address: int

    def read_into(self, tensor: Tensor, *, offset: int) -> None:
        """Fill `tensor` from `offset` bytes into the buffer.

        Raises:
            CommError: The peer has ended, or has no such memory any more.
        """
        try:
            read_into(tensor, self.pid, self.address + offset)
        except OSError as error:
            raise CommError(
                f"rank {self.reader} could not read a buffer that rank {self.owner} (process "
                f"{self.pid}) had shared: {why(error)}. A buffer must stay until its wait() has "
                "returned, on every rank, and a result must go to memory that can be written"
            ) from error


@define(eq=False)
class PeerTransfer:
    """One collective of this rank: every peer may read its buffer until all are done."""

    tag: int
    buffer: Tensor
    # Receives every peer's buffer, by rank.
    carry_out: Callable[[dict[int, RemoteBuffer]], None]
    is_carried_out: bool = False
    # Peers that have read all they need of `buffer`.
    done_by: set[int] = field(factory=set)
    error: Exception | None = None
    launch: Launch | None = None
    # Number of the journal's entries up to the one that says that this rank is done.
    done_entry: int = 0


# How long a wait sleeps between looks: short while peers are probably about to answer, then longer.
_EAGER_LOOKS: Final = 20
_SHORT_SLEEP_S: Final = 30e-6
_LONG_SLEEP_S: Final = 1e-3
_SHORT_FOR_S: Final = 0.1


T = TypeVar("T")


@define(eq=False)
class PeerMemory:
    """This rank's journal, and what it knows of its peers'. Thread-safe."""

    rank: int
    world_size: int
    timeout_s: float
    watch: Watch | None = field(default=None, kw_only=True)
    _peers: dict[int, JournalAddress] = field(factory=dict, init=False)
    # Peers whose processes have ended.
    _gone: set[int] = field(factory=set, init=False)
    _journal: Journal = field(init=False)
    # Peer -> number of entries of its journal that this rank has read.
    _seen: dict[int, int] = field(factory=dict, init=False)
    # By tag, in order: offers of each peer, transfers that this rank has launched and not carried
    # out, and transfers that it has carried out and not every peer is done with.
    _offers: dict[int, dict[int, deque[RemoteBuffer]]] = field(factory=dict, init=False)
    _waiting: dict[int, deque[PeerTransfer]] = field(factory=dict, init=False)
    _shared: dict[int, deque[PeerTransfer]] = field(factory=dict, init=False)
    _is_advancing: bool = field(default=False, init=False)
    # Whether an exception came in the midst of `_advance`, which leaves transfers half done.
    is_broken: bool = field(default=False, init=False)
    _lock: threading.RLock = field(default=Factory(threading.RLock), init=False)

    def __attrs_post_init__(self) -> None:
        self._journal = Journal(self.world_size)
        _ALL.add(self)

    @property
    def whereabouts(self) -> JournalAddress:
        """Address by which peers read this rank's journal."""
        return self._journal.whereabouts

    def meet(self, peers: Sequence[JournalAddress]) -> None:
        """Try to read every peer's journal. Local, once every rank has made its own.

        Raises:
            OSError: A journal cannot be read, or another process is there.
        """
        for rank, where in enumerate(peers):
            if rank == self.rank:
                continue
            token, _, _ = read_header(where)
            if token != where.token:
                raise ProcessLookupError(f"process {where.pid} here is not rank {rank}")
            self._peers[rank], self._seen[rank] = where, 0

    def launch(
        self,
        tag: int,
        buffer: Tensor,
        carry_out: Callable[[dict[int, RemoteBuffer]], None],
        *,
        launch: Launch | None = None,
    ) -> PeerTransfer:
        """Offer `buffer` to the peers; `carry_out` is called once, when all have offered theirs."""
        transfer = PeerTransfer(tag, buffer, carry_out, launch=launch)
        with self._lock:
            self._check_whole()
            self._waiting.setdefault(tag, deque()).append(transfer)
            self._write(OFFER, tag, buffer.data_ptr())
        self._advance()
        return transfer

    def wait(self, transfer: PeerTransfer, what: str, *, timeout_s: float | None = None) -> None:
        """Block until the transfer is carried out and its buffer is this rank's own again.

        Raises:
            CommError: A peer ended, or did not take part in time.
            DivergenceError: A peer cannot take part: it waits for this rank in another collective.
        """
        missing: list[int] = []

        def is_over() -> bool:
            if transfer.error is not None:
                raise transfer.error
            missing[:] = self._missing(transfer)
            if not transfer.is_carried_out and not self._gone.isdisjoint(missing):
                raise self._failure(transfer, what, "cannot finish", missing)
            # Peers must see that this rank is done: after the wait, it may publish nothing more.
            is_done = transfer.is_carried_out and not missing
            return is_done and self._journal.head >= transfer.done_entry

        def lacks() -> Wait | None:
            # A wait counts too where peers have launched the transfer and have yet to read: only
            # while a rank waits does its watch look whether others have diverged.
            if transfer.launch is None or not missing:
                return None
            return Wait(transfer.launch, missing[0], is_launched=transfer.is_carried_out)

        if not self.progress_until(is_over, lacks, timeout_s=timeout_s):
            limit_s = self.timeout_s if timeout_s is None else timeout_s
            raise self._failure(transfer, what, f"did not finish {within(limit_s)}", missing)

    def progress_until(
        self,
        is_over: Callable[[], bool],
        lacks: Callable[[], Wait | None],
        *,
        timeout_s: float | None = None,
    ) -> bool:
        """Carry out what becomes possible until `is_over()`; False if that takes too long.

        Args:
            is_over: Asked again and again.
            lacks: Which launch of which peer it takes, if it takes one; asked when it takes long.
            timeout_s: The longest wait, in seconds; the group's own when None.

        Raises:
            DivergenceError: That peer waits for this rank in another collective.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        start, looks = time.monotonic(), 0
        with SeenWait(self.watch, lacks) as seen_wait:
            while True:
                # All groups advance, since a peer may wait for this rank in another one.
                for peers in tuple(_ALL):
                    if peers is self or not peers.is_over:
                        peers._advance()
                self._check_whole()
                with self._lock:
                    if is_over():
                        return True
                waited = time.monotonic() - start
                if waited > timeout_s:
                    return False
                looks += 1
                if looks <= _EAGER_LOOKS:
                    os.sched_yield()
                elif waited < _SHORT_FOR_S:
                    time.sleep(_SHORT_SLEEP_S)
                else:
                    seen_wait.go_on()
                    time.sleep(_LONG_SLEEP_S)

    def read(self, rank: int, address: int, *, into: Tensor) -> None:
        """Fill a contiguous tensor from a peer's memory.

        Raises:
            OSError: The peer has ended, or has no such memory.
        """
        read_into(into, self._peers[rank].pid, address)

    def read_word(self, rank: int, address: int) -> int:
        """A signed 64-bit integer from a peer's memory. Raises as `read` does."""
        return read_word(self._peers[rank].pid, address)

    def announce_exit(self) -> None:
        """Tell peers that this process is about to end: they need not wait for it. Local."""
        self._journal.announce_exit()

    def is_leaving(self, rank: int) -> bool:
        """Return whether a peer's program is over. Local."""
        where = self._peers.get(rank)
        header = None if where is None else self._look_at(rank, read_header)
        return header is not None and header[2]

    @property
    def is_over(self) -> bool:
        """Return whether nothing can come: a call was interrupted, or ranks have diverged."""
        return self.is_broken or (self.watch is not None and self.watch.has_diverged)

    def fence(self) -> None:
        """Order writes: peers see those before it first. A release, then an acquire."""
        self._journal.fence()

    def _missing(self, transfer: PeerTransfer) -> list[int]:
        """Ranks without which the transfer is not over."""
        if not transfer.is_carried_out:
            offers = self._offers.get(transfer.tag, {})
            return [rank for rank in self._peers if not offers.get(rank)]
        return [
            rank
            for rank in self._peers
            # A peer that has ended reads no more.
            if rank not in self._gone and rank not in transfer.done_by
        ]

    def _advance(self) -> None:
        """Read the news of all peers, and carry out what has become possible."""
        if self.is_broken or not self._lock.acquire(blocking=False):
            return
        try:
            # A signal handler or a garbage collection may call this inside of itself.
            if self._is_advancing:
                return
            self._is_advancing = True
            for rank in self._peers:
                if rank not in self._gone:
                    self._read_news(rank)
            for tag in tuple(self._waiting):
                self._carry_out(tag)
            self._journal.publish(self._read_by_all)
            self._is_advancing = False
        except BaseException:
            # A transfer may be half done. Without a valid journal, peers take this rank for ended
            # and do not wait for it.
            self.is_broken = True
            self._journal.void()
            raise
        finally:
            self._lock.release()

    def _check_whole(self) -> None:
        if self.is_broken:
            raise CommError(
                f"an earlier collective of rank {self.rank} was interrupted (Ctrl-C, an error in a "
                "signal handler, a peer that could not be read), and this group can do no more; "
                "start the job again"
            )

    def _read_news(self, rank: int) -> None:
        header = self._look_at(rank, read_header)
        if header is None:
            return
        token, head, is_leaving = header
        if token != self._peers[rank].token:
            # The process has ended, and its id was given to another one.
            self._gone.add(rank)
            return
        while (seen := self._seen[rank]) < head:
            news = self._look_at(rank, partial(read_entries, seen, head, self.world_size))
            if news is None:
                return
            self._seen[rank] = seen + len(news)
            self._journal.note_read(rank, self._seen[rank])
            for entry in news:
                self._hear(rank, *entry)
        # A peer that leaves writes no more, and has read all that it needs.
        if is_leaving:
            self._gone.add(rank)

    def _look_at(self, rank: int, question: Callable[[JournalAddress], T]) -> T | None:
        """Read something of a peer's journal; None if it has ended, which is noted."""
        where = self._peers[rank]
        try:
            return question(where)
        except OSError as error:
            # With one of these errors, the process has ended or is ending.
            if error.errno not in (ESRCH, EFAULT):
                raise CommError(
                    f"rank {self.rank} can no longer read the memory of rank {rank} (process "
                    f"{where.pid}): {why(error)}"
                ) from error
            self._gone.add(rank)
            return None

    def _hear(self, rank: int, kind: int, tag: int, address: int) -> None:
        if kind == OFFER:
            buffer = RemoteBuffer(rank, self.rank, self._peers[rank].pid, address)
            self._offers.setdefault(tag, {}).setdefault(rank, deque()).append(buffer)
            self._carry_out(tag)
            return
        # Peers are done with the transfers of a tag in order, and with none before it is offered:
        # this is the first that the peer was not done with.
        for transfer in (*self._shared.get(tag, ()), *self._waiting.get(tag, ())):
            if rank not in transfer.done_by:
                transfer.done_by.add(rank)
                break
        self._forget_read(tag)

    def _carry_out(self, tag: int) -> None:
        """Carry out the transfers of a tag, in order, as far as all peers have offered."""
        waiting, offers = self._waiting.get(tag), self._offers.get(tag, {})
        while waiting and all(offers.get(rank) for rank in self._peers):
            transfer = waiting.popleft()
            buffers = {rank: offers[rank].popleft() for rank in self._peers}
            try:
                # Any wait may come here, in any mode. Inference tensors may be written in this one.
                with torch.inference_mode():
                    transfer.carry_out(buffers)
            except Exception as error:
                # Raised by the wait for this transfer, which may be another one than the present.
                transfer.error = error
            transfer.is_carried_out = True
            self._shared.setdefault(tag, deque()).append(transfer)
            self._write(DONE, tag, 0)
            transfer.done_entry = self._journal.num_written
            self._forget_read(tag)
        if not waiting:
            self._waiting.pop(tag, None)
        if not any(offers.values()):
            self._offers.pop(tag, None)

    def _forget_read(self, tag: int) -> None:
        """Forget buffers that every peer is done with."""
        shared = self._shared.get(tag)
        while shared and not self._missing(shared[0]):
            shared.popleft()
        if not shared:
            self._shared.pop(tag, None)

    def _write(self, kind: int, tag: int, address: int) -> None:
        self._journal.write((kind, tag, address), read_by_all=self._read_by_all)

    def _read_by_all(self, head: int) -> int:
        """How many of the `head` entries of this rank's journal every peer has read."""
        return min(self._read_by(rank, head) for rank in self._peers)

    def _read_by(self, rank: int, head: int) -> int:
        if rank in self._gone:
            return head
        num_read = self._look_at(rank, partial(read_num_read, self.rank))
        return head if num_read is None else num_read

    def _failure(
        self, transfer: PeerTransfer, what: str, how: str, missing: Sequence[int]
    ) -> CommError:
        gone = sorted(self._gone.intersection(missing))
        verb = "read" if transfer.is_carried_out else "offered"
        state = "peers do not read the journal"
        if missing:
            state = f"rank {missing[0]} has not {verb} its part"
        if gone:
            state = f"the process of rank {gone[0]} ({self._peers[gone[0]].pid}) has ended"
        # A peer may have told of a divergence before it ended.
        told = None if self.watch is None else self.watch.error()
        blame = ""
        if self.watch is not None and told is None and missing:
            blame = self.watch.blame((gone or missing)[0])
        launch = transfer.launch
        doing = what if launch is None else launch.doing(collective_call())
        said = what if doing == what else f"{doing}: {what}"
        remark = "" if self.watch is None else self.watch.scope.remark
        heading = f"{said} {how}: {state} (rank {self.rank})"
        return told or CommError(in_lines(heading, blame, causes(), remark))


_ALL: Final[WeakSet[PeerMemory]] = WeakSet()


def any_peers() -> PeerMemory | None:
    """Return the PeerMemory of any group that is not broken, or None.

    `progress_until` of one instance advances all. A group whose ranks have diverged is not
    returned, since its error would end waits of other groups.
    """
    return next((peers for peers in tuple(_ALL) if not peers.is_over), None)
