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

from .calls import UNEVEN, blocking_torch_call, collective_call
from .torch_private import num_gloo_devices
from .watch import LONG_WAITS, Recorded, Wait, Watch

# NOTE(proof): a rank that has waited long writes down which launch of which peer it
# lacks, and how often it has itself launched what; then it follows what others wrote, from the peer
# that it lacks to the peer which that one lacks. Where the chain comes back to itself, nobody on it
# can ever go on: the next rank on the chain waits for a launch that we, who wait, have not made, so
# what it wrote still stands, and so on along the chain. A rank that only computes has written
# nothing, or something whose launch has been made since: it is waited for. Each rank writes before
# it reads, so the last one of a chain sees all of it.

# NOTE(torch): a rank whose main thread is in a blocking collective of torch's own says so too,
# again at every look while any rank waits for long: no frames are read before. It leaves it only
# when all whom it needs have come to it: where one of those waits in its own main thread for that
# rank, and hears it say so meanwhile, neither can go on.

# NOTE(interrupt): gloo knows no way to give up a receive, and torch's `abort` returns without one.
# But a receive that times out closes every connection of its group, and with them all waits end, in
# this process and in the peers'. So a receive that nobody answers is posted, and given a moment.


def break_connections(of: ReferenceType[Any]) -> None:
    """End every wait in this gloo group, for good. Local; peers notice at once."""
    process_group = of()
    if process_group is None:
        return
    try:
        ranks = dist.get_process_group_ranks(process_group)
    except KeyError:  # it was destroyed, with its connections
        return
    # Each peer, because a connection that is closed already fails at once and closes no other;
    # each device, over which gloo spreads tags.
    for peer in ranks:
        for tag in range(num_gloo_devices(process_group)):
            blank = torch.empty(1, dtype=torch.uint8, device="cpu")
            with contextlib.suppress(RuntimeError, ValueError):  # ValueError: the peer is this rank
                work = dist.irecv(blank, peer, group=process_group, tag=tag)
                assert work is not None, "this rank is in the group"
                work.wait(timedelta(milliseconds=1))


@frozen
class _Position:
    """Place where a rank waits, as it tells the others."""

    doing: str
    size: str
    remedy: str
    key: str
    number: int
    peer: int  # in the scope
    launched: Mapping[str, int]  # by key
    call: str = ""  # which every rank must make
    needs: Sequence[int] = ()  # in a collective of torch's: ranks of the job, in place of `peer`
    beat: int = 0  # how often it has said that

    def lacks(self, peer: _Position) -> bool:
        """Return whether that peer has yet to launch what this rank waits for."""
        return peer.launched.get(self.key, 0) < self.number


@define(eq=False)
class CircleWatch(Watch):
    """Watch of a group whose collectives are messages that meet by their keys, as those of gloo."""

    has_ended: Callable[[int], bool] = lambda _: False  # whether a peer's program is over
    _idle: tuple[int, float] = field(default=(-1, 0.0), init=False)  # of so many, since when
    _num_long_waits: int = field(default=0, init=False)  # when last asked for
    _beat: int = field(default=0, init=False)
    _heard: dict[int, int] = field(factory=dict, init=False)  # beats of peers, first in a wait

    def counted_as(self, key: int) -> str:
        """See `Watch`."""
        return f"{self.name}/{key}"

    def compare(self, what: str, *, at_once: bool, timeout_s: float | None) -> None:
        """See `Watch`; what ranks launch meets by its key, so it cannot be taken for another."""

    def follow(self, recorded: Recorded) -> None:
        """See `Watch`; the counts by key are enough."""

    def look(self, *, seen: float) -> float:
        """See `Watch`."""
        waiting = self._waiting
        if waiting is None:
            if self.ranks is not None:  # the scope's own watch does it for all groups
                return seen
            with contextlib.suppress(RuntimeError, ValueError):  # the job is ending
                self._tell_of_torch()
            return seen
        wait, since, thread = waiting
        if time.monotonic() - since < self.patience_s:
            return seen
        if since == seen:
            self.error()  # a peer may have found it; who looks into memory has no connection to it
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
                # Its last part has had time to come.
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
        if call is None or self.error() is not None:  # found by a peer: it ends here too
            return
        self._beat += 1
        launched, rank = self.launched(), self.scope.rank
        mine = _Position(call.name, "", "", "", 0, rank, launched, "", call.needs, self._beat)
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
            if theirs.needs:  # see NOTE(torch)
                # One word more may have been late; the next one was then seen during this wait.
                is_now = theirs.beat >= self._heard.setdefault(peer, theirs.beat) + 2
                is_main = thread == threading.main_thread().ident
                needs_us = is_now and is_main and dist.get_rank() in theirs.needs
                return {**chain, peer: evolve(theirs, peer=rank)} if needs_us else {}
            if peer in chain:
                return chain if peer == rank else {}  # those in that circle notice it
            chain[peer] = last = theirs

    def _position(self, wait: Wait, thread: int) -> _Position:
        launch, purpose = wait.launch, wait.launch.purpose
        key, peer = self.counted_as(launch.key), self.in_scope(wait.peer)
        call, launched = collective_call(thread), self.launched()
        doing = call if call and purpose.what == launch.operation else purpose.what
        what = (doing, launch.recorded.size, purpose.remedy)
        return _Position(*what, key, launch.number, peer, launched, call)


def _describe(chain: Mapping[int, _Position]) -> str:
    ranks = sorted(chain)
    is_alike = len({chain[r].doing for r in ranks}) == 1  # but for dtypes and sizes
    places = [
        f"rank {r} waits for rank {chain[r].peer} in {chain[r].doing}"
        + (f" of {chain[r].size}" if is_alike and chain[r].size else "")
        for r in ranks
    ]
    alone = [
        f"rank {rank} is in {chain[rank].call}, which must be called on all ranks, after as many "
        "backwards and steps on each"
        for rank in ranks
        if chain[rank].call and any(chain[r].call != chain[rank].call for r in ranks)
    ]
    remedies = dict.fromkeys(alone or [chain[rank].remedy for rank in ranks])
    text = "; ".join((*places, *filter(None, remedies)))
    return f"ranks wait for each other in different collectives, and none would ever end: {text}"


def _describe_ended(rank: int, mine: _Position) -> str:
    alone = f"{mine.call} must be called on all ranks; " if mine.call else ""
    return (
        f"rank {rank} waits for rank {mine.peer} in {mine.doing}, but the program of rank "
        f"{mine.peer} has ended: {alone}look for the first error among all ranks; {UNEVEN}"
    )
