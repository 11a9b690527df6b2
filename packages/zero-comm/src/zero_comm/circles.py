"""Ranks that wait for each other in a circle, where each message is waited for by the host."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import ReferenceType

import torch
import torch.distributed as dist
from attrs import asdict, define, evolve, field, frozen

from .calls import (
    EVEN,
    SKIPPED,
    advice,
    blocking_torch_call,
    by_all_ranks,
    collective_call,
    how_to_find_line,
    in_lines,
    is_collective,
    thread_behind,
    user_line,
)
from .torch_private import num_gloo_devices
from .watch import LONG_WAITS, Recorded, Wait, Watch

# NOTE(proof): a rank that has waited long writes to the store which launch of which peer it lacks,
# and how often it has launched what; then it follows what others wrote, from the peer it waits for
# to the peer that this peer waits for. If the chain returns to this rank, no rank on it can go on:
# the last one waits for a launch that this rank, which waits, has not made, so what the last one
# wrote is still true, and so on along the chain. A rank that only computes has written nothing, or
# lacks a launch that has been made since: it is waited for. Each rank writes before it reads, so
# the last rank to write sees the whole chain.

# NOTE(torch): a rank whose main thread is in a blocking collective of torch's own writes that too,
# at every look while any rank waits for long; frames are not read before. The collective ends only
# when all ranks that it needs have called it. If one of these waits in its own main thread for the
# rank in the collective, and that rank has written again during the wait, neither can go on.

# NOTE(interrupt): gloo cannot cancel a receive, and torch's `abort` does not end one. But a receive
# that times out closes every connection of its group, which ends all waits in this process and in
# its peers. So we start a receive that no peer answers; it times out after a millisecond.


def break_connections(of: ReferenceType[Any]) -> None:
    """End every wait in this gloo group, for good. Local; peers notice at once."""
    process_group = of()
    if process_group is None:
        return
    # Each peer, because a receive on a closed connection fails at once and closes no other one.
    # Each device, since gloo spreads tags over its network devices.
    for peer in range(process_group.size()):
        if peer == process_group.rank():
            continue
        for tag in range(num_gloo_devices(process_group)):
            blank = torch.empty(1, dtype=torch.uint8, device="cpu")
            # Not by torch's functions: they know no group that was destroyed, and its connections
            # stay open as long as it is kept.
            with contextlib.suppress(RuntimeError):
                work = process_group.recv([blank], peer, tag)
                work.wait(timedelta(milliseconds=1))


@frozen
class _Position:
    """Place where a rank waits, as it tells the others."""

    doing: str
    size: str
    remedy: str
    key: str
    number: int
    # Rank of the scope that the rank waits for.
    peer: int
    # Key -> number of launches that the rank has made.
    launched: Mapping[str, int]
    # Call that the rank is in, and that all ranks must make; "" if none.
    call: str = ""
    # In a collective of torch's: ranks of the job that must call it too, in place of `peer`.
    needs: Sequence[int] = ()
    # How often the rank has written that it is in a collective of torch's.
    beat: int = 0
    called: Mapping[str, int] = field(factory=dict)  # see `Scope.called`
    # Line of the user's code, "train.py:12"; "" if not known.
    place: str = ""

    @property
    def where(self) -> str:
        """The place, as a sentence goes on with it."""
        return f" at {self.place}" if self.place else ""

    def lacks(self, peer: _Position) -> bool:
        """Return whether that peer has yet to launch what this rank waits for."""
        return peer.launched.get(self.key, 0) < self.number


@define(eq=False)
class CircleWatch(Watch):
    """Watch of a group whose collectives are messages that meet by their keys, as those of gloo."""

    # Returns whether a peer's program is over.
    has_ended: Callable[[int], bool] = lambda _: False
    # Number of launches of the scope, and the time since when there are no more.
    _idle: tuple[int, float] = field(default=(-1, 0.0), init=False)
    # The store's count of long waits when it was last read.
    _num_long_waits: int = field(default=0, init=False)
    _beat: int = field(default=0, init=False)
    # Peer -> the first beat of it that was read in the present wait.
    _heard: dict[int, int] = field(factory=dict, init=False)

    def counted_as(self, key: int) -> str:
        """See `Watch`."""
        return f"{self.name}/{key}"

    def compare(self, what: str, *, at_once: bool, timeout_s: float | None) -> None:
        """See `Watch`; what ranks launch meets by its key, so it cannot be taken for another.

        But a call of one rank alone may have ended, having read its peers' memory. So calls are
        counted, for the error that comes later.
        """
        self.scope.called[what] = self.scope.called.get(what, 0) + 1

    def follow(self, recorded: Recorded) -> None:
        """See `Watch`; the counts by key are enough."""

    def look(self, *, seen: float) -> float:
        """See `Watch`."""
        waiting = self._waiting
        if waiting is None:
            # The watch of the scope's first group tells for all of its groups.
            if self.ranks is not None:
                return seen
            with contextlib.suppress(RuntimeError, ValueError):  # the job is ending
                self._tell_of_torch()
            return seen
        wait, since, thread = waiting
        if time.monotonic() - since < self.patience_s:
            return seen
        if since == seen:
            # If a peer has found that ranks diverged, this ends the wait. A wait for a read of
            # memory would not end by itself, as it has no connection that the peer could close.
            self.error()
            whom = f"rank {self.in_scope(wait.peer)}"
            self.tell_user(since, whom, wait.launch.purpose.what)
        else:
            self._heard.clear()
        with contextlib.suppress(RuntimeError, ValueError):  # the job is ending
            self.store.add(self.key_of(LONG_WAITS), 1)
            mine = self._position(wait, thread)
            found = ""
            if chain := self._follow(mine, is_first=since != seen, thread=thread):
                found = _describe(chain)
            elif since == seen and not wait.is_launched and self.has_ended(wait.peer):
                # Two looks have found the same wait, so the peer's last messages have arrived.
                found = _describe_ended(self.scope.rank, mine)
            if found and self._waiting is waiting and not self.has_diverged:
                self.part(found)
        return since

    def _tell_of_torch(self) -> None:
        """Tell the others if this rank is in a collective of torch's that needs them."""
        if self._idle[0] != self.scope.num_launched:
            self._idle = self.scope.num_launched, time.monotonic()
        if time.monotonic() - self._idle[1] < self.patience_s:
            return
        store = self.store
        num_long_waits = store.add(self.key_of(LONG_WAITS), 0)
        if num_long_waits == self._num_long_waits:
            return
        self._num_long_waits = num_long_waits
        call = blocking_torch_call()
        # If a peer has found that ranks diverged, `error` ends the waits of this rank too.
        if call is None or self.error() is not None:
            return
        self._beat += 1
        launched, rank = self.launched(), self.scope.rank
        where = (call.name, "", "", "", 0, rank, launched, "", call.needs, self._beat)
        place = user_line(threading.main_thread().ident or 0)
        mine = _Position(*where, called=self.scope.called, place=place)
        store.set(self.key_of(str(rank)), json.dumps(asdict(mine)))

    def _follow(self, mine: _Position, *, is_first: bool, thread: int) -> dict[int, _Position]:
        """The ranks that wait for each other in a circle, this one among them; else nothing."""
        store, rank = self.store, self.scope.rank
        if is_first:
            store.set(self.key_of(str(rank)), json.dumps(asdict(mine)))
        chain, last = {rank: mine}, mine
        while True:
            peer = last.peer
            theirs = chain.get(peer)
            if theirs is None:
                if not store.check([self.key_of(str(peer))]):
                    return {}
                theirs = _Position(**json.loads(store.get(self.key_of(str(peer)))))
            if not last.lacks(theirs):
                return {}
            if theirs.needs:
                # See NOTE(torch). The beat after the first that was read may have been written
                # before this wait began; the one after that was not.
                is_now = theirs.beat >= self._heard.setdefault(peer, theirs.beat) + 2
                is_main = thread_behind(thread) == threading.main_thread().ident
                needs_us = is_now and is_main and dist.get_rank() in theirs.needs
                return {**chain, peer: evolve(theirs, peer=rank)} if needs_us else {}
            if peer in chain:
                # A circle without this rank is left to the ranks in it.
                return chain if peer == rank else {}
            chain[peer] = last = theirs

    def _position(self, wait: Wait, thread: int) -> _Position:
        launch, purpose = wait.launch, wait.launch.purpose
        key, peer = self.counted_as(launch.key), self.in_scope(wait.peer)
        call, launched = collective_call(thread), self.launched()
        what = (launch.doing(call), launch.recorded.size, purpose.remedy)
        where = (*what, key, launch.number, peer, launched, call)
        return _Position(*where, called=self.scope.called, place=user_line(thread))


def _describe(chain: Mapping[int, _Position]) -> str:
    ranks = sorted(chain)
    # If all ranks do the same, they differ in dtypes or sizes, so the sizes are shown.
    is_alike = len({chain[r].doing for r in ranks}) == 1
    sizes = {r: f" of {chain[r].size}" if is_alike and chain[r].size else "" for r in ranks}
    places = [
        f"rank {r} waits for rank {chain[r].peer} in {chain[r].doing}{sizes[r]}{chain[r].where}"
        for r in ranks
    ]
    calls, remedies = ({r: getattr(chain[r], each) for r in ranks} for each in ("call", "remedy"))
    if not any(calls.values()):
        calls |= {r: chain[r].doing for r in ranks if chain[r].needs}
    ended = [] if len({*calls.values()}) > 1 else _called_alone(chain)
    advised = advice(calls, remedies)
    if ended and advised:
        # Some calls, such as `full_param()`, may be made alone: then it is the other cause.
        first, *rest = advised
        advised = [f"either {ended[0]}", *ended[1:], f"or {SKIPPED}: {first}", *rest]
    advised = [*(advised or ended), how_to_find_line() if any(remedies.values()) else ""]
    heading = "ranks wait for each other in different collectives, and none would ever end"
    return in_lines(heading, *places, *advised)


def _called_alone(chain: Mapping[int, _Position]) -> list[str]:
    """Say which calls one rank has made more often than another, and what to do."""
    found = []
    for call in sorted({call for each in chain.values() for call in each.called}):
        counts = {rank: chain[rank].called.get(call, 0) for rank in sorted(chain)}
        most, least = (pick(counts, key=counts.__getitem__) for pick in (max, min))
        if is_collective(call) and counts[most] > counts[least]:
            found.append(
                f"rank {most} has called {call} more often than rank {least}: call it on all "
                "ranks, not inside `if rank == 0:`, after the same number of backwards and steps"
            )
    return found


def _describe_ended(rank: int, mine: _Position) -> str:
    if mine.call:
        advised = f"{by_all_ranks(mine.call)}; if it is, look for an error of rank {mine.peer}"
    else:
        advised = (
            "by an error, which it has printed, or since it had fewer batches (uneven batches): "
            f"{EVEN}"
        )
    return (
        f"rank {rank} waits for rank {mine.peer} in {mine.doing}{mine.where}, but the program of "
        f"rank {mine.peer} has ended: {advised}"
    )
