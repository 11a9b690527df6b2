"""Ranks that wait for each other in different collectives, where messages carry the values."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from weakref import ReferenceType, ref

from attrs import asdict, define, evolve, field, frozen

from ._errors import DivergenceError
from ._torch_compat import default_store

# NOTE(proof): a rank that has waited long writes down which launch of which peer it
# lacks, and how often it has itself launched what; then it follows what others wrote, from the peer
# that it lacks to the peer which that one lacks. Where the chain comes back to itself, nobody on it
# can ever go on: the next rank on the chain waits for a launch that we, who wait, have not made, so
# what it wrote still stands, and so on along the chain. A rank that only computes has written
# nothing, or something whose launch has been made since: it is waited for. Each rank writes before
# it reads, so the last one of a chain sees all of it, and nobody has to ask twice.

PATIENCE_S: Final = 3.0

_LOOKS_PER_PATIENCE: Final = 6
_PATIENCES_OF_USER: Final = 10
_DIVERGENCE: Final = "divergence"
_LOG: Final = logging.getLogger("zero_comm")


@frozen
class Purpose:
    """What a collective is for, in words of whoever reads an error."""

    what: str  # "gathering unit 'blocks.0'"
    remedy: str = ""  # what to do where a rank does not come to it
    subject: str = ""  # what its traffic is counted under: "blocks.0"


@define(eq=False)
class Launch:
    """One collective, launched by this rank."""

    watch: Watch
    operation: str
    key: int  # its messages meet those of the same key,
    number: int  # and in this order: the how-manieth of its key it is
    tag: int | None
    version: int | None

    @property
    def purpose(self) -> Purpose:
        """What it is for."""
        known = None if self.tag is None else self.watch.purposes.get(self.tag)
        purpose = known or Purpose(self.operation)
        if self.version is None:
            return purpose
        return evolve(purpose, what=f"{purpose.what} (version {self.version})")


@frozen(eq=False)
class Wait:
    """What a rank blocks on: that `peer` launches the same."""

    launch: Launch
    peer: int


@frozen
class _Position:
    """Where a rank waits: what it tells the others."""

    doing: str
    remedy: str
    key: str
    number: int
    peer: int  # in the scope
    launched: Mapping[str, int]  # by key

    def lacks(self, peer: _Position) -> bool:
        """Whether that peer has yet to launch what this rank waits for."""
        return peer.launched.get(self.key, 0) < self.number


@define(eq=False)
class Scope:
    """Where ranks tell each other: one for groups that share ranks, as a circle may go through all.

    Of the first of the groups, which has all ranks of the others.
    """

    name: str  # of its own in the store, the same on every rank
    rank: int
    launched: dict[str, int] = field(factory=dict)  # by group and key


@define(eq=False)
class Watch:
    """What one rank launched on one process group, and what it waits for now."""

    name: str  # that no other group has, the same on every rank
    rank: int
    interrupt: Callable[[], None]  # ends all waits of this rank, and its peers' for it
    patience_s: float = PATIENCE_S
    purposes: dict[int, Purpose] = field(factory=dict, init=False)  # by tag
    _scope: Scope = field(init=False)
    _ranks: Sequence[int] | None = field(default=None, init=False)  # in the scope; the same if None
    has_diverged: bool = field(default=False, init=False)  # found here, or heard of
    _waiting: tuple[Wait, float] | None = field(default=None, init=False)  # since when
    _divergence: str = field(default="", init=False)
    _told_user_of: float = field(default=0.0, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._scope = Scope(self.name, self.rank)

    def join(self, other: Watch, ranks: Sequence[int]) -> None:
        """Find circles that go through the other's group too. Local, on every rank of both.

        Args:
            other: Of a group that has all ranks of this one.
            ranks: Where these are in it.
        """
        if self._scope is not other._scope:
            other._scope.launched.update(self._scope.launched)
            self._scope, self._ranks = other._scope, tuple(ranks)

    def launch(
        self, operation: str, key: int, *, tag: int | None = None, version: int | None = None
    ) -> Launch:
        """Count a collective that begins."""
        launched, name = self._scope.launched, self._name_of(key)
        number = launched[name] = launched.get(name, 0) + 1
        return Launch(self, operation, key, number, tag, version)

    def begin(self, wait: Wait) -> None:
        """This thread blocks now, until `end` is called."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_keep_watch, args=(ref(self),), name="zero_comm watch", daemon=True
            )
            self._thread.start()
        self._waiting = (wait, time.monotonic())

    def end(self) -> None:
        """It blocks no more."""
        self._waiting = None

    def error(self) -> DivergenceError | None:
        """Why waits fail, if it is because ranks diverged; those who wait for us are told."""
        with contextlib.suppress(RuntimeError, ValueError):  # a store that is gone
            store, key = default_store(), self._key(_DIVERGENCE)
            if not self.has_diverged and store.check([key]):
                self._diverge(store.get(key).decode())
        if not self.has_diverged:
            return None
        return DivergenceError(
            "ranks wait for each other in different collectives, and none would ever end: "
            f"{self._divergence} (seen on rank {self._scope.rank}; this group can be used no more)"
        )

    def look(self, *, seen: float) -> float:
        """See whether this rank waits for what cannot come.

        Args:
            seen: What the last look returned; 0 for the first.

        Returns:
            When the wait began that was looked at last: each is looked at once.
        """
        waiting = self._waiting
        if waiting is None:
            return seen
        wait, since = waiting
        if since == seen:
            self.error()  # a peer may have found it; who looks into memory has no connection to it
            self._tell_user(wait, since)
            return seen
        if time.monotonic() - since < self.patience_s:
            return seen
        with contextlib.suppress(RuntimeError, ValueError):  # the job is ending
            chain = self._tell_and_follow(wait)
            if chain and self._waiting is waiting:
                text = _describe(chain)
                default_store().set(self._key(_DIVERGENCE), text)
                self._diverge(text)
        return since

    def _tell_user(self, wait: Wait, since: float) -> None:
        waited_s = time.monotonic() - since
        if waited_s > _PATIENCES_OF_USER * self.patience_s and self._told_user_of != since:
            self._told_user_of = since
            _LOG.warning(
                "rank %d has waited %.0f s for rank %d in %s; that rank computes, or waits for "
                "something else than a collective of this library",
                *(self._scope.rank, waited_s, self._in_scope(wait.peer), wait.launch.purpose.what),
            )

    def _diverge(self, text: str) -> None:
        self._divergence, self.has_diverged = text, True
        self.interrupt()

    def _tell_and_follow(self, wait: Wait) -> dict[int, _Position]:
        """The ranks that wait for each other in a circle, this one among them; else nothing."""
        mine, rank = self._position(wait), self._scope.rank
        store = default_store()
        store.set(self._key(str(rank)), json.dumps(asdict(mine)))
        chain, last = {rank: mine}, mine
        while True:
            peer = last.peer
            theirs = chain.get(peer)
            if theirs is None:
                if not store.check([self._key(str(peer))]):
                    return {}
                theirs = _Position(**json.loads(store.get(self._key(str(peer)))))
            if not last.lacks(theirs):
                return {}
            if peer in chain:
                return chain if peer == rank else {}  # those in that circle notice it
            chain[peer] = last = theirs

    def _position(self, wait: Wait) -> _Position:
        launch, purpose = wait.launch, wait.launch.purpose
        key, peer = self._name_of(launch.key), self._in_scope(wait.peer)
        launched = dict(self._scope.launched)
        return _Position(purpose.what, purpose.remedy, key, launch.number, peer, launched)

    def _in_scope(self, rank: int) -> int:
        return rank if self._ranks is None else self._ranks[rank]

    def _name_of(self, key: int) -> str:
        return f"{self.name}/{key}"

    def _key(self, what: str) -> str:
        return f"zero_comm/watch/{self._scope.name}/{what}"


@define(eq=False)
class SeenWait:
    """A wait that looks by itself whether it is over, and that the watch sees all the same."""

    watch: Watch | None
    lacks: Callable[[], Wait | None]
    told: Wait | None = None

    def go_on(self) -> None:
        """Say what is lacking now; raise DivergenceError if it cannot come."""
        if self.watch is None:
            return
        now = self.lacks()
        if now is None or self.told is None or now.peer != self.told.peer:
            self.end()
            if now is not None:
                self.watch.begin(now)
            self.told = now
        error = self.watch.error() if self.watch.has_diverged else None
        if error is not None:
            raise error

    def end(self) -> None:
        """Nothing is lacking."""
        if self.watch is not None and self.told is not None:
            self.watch.end()

    def __enter__(self) -> SeenWait:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _keep_watch(of: ReferenceType[Watch]) -> None:
    seen = 0.0
    while (watch := of()) is not None:
        seen = watch.look(seen=seen)
        pause_s = watch.patience_s / _LOOKS_PER_PATIENCE
        del watch  # its group may go meanwhile
        time.sleep(pause_s)


def _describe(chain: Mapping[int, _Position]) -> str:
    places = [
        f"rank {rank} waits for rank {chain[rank].peer} in {chain[rank].doing}"
        for rank in sorted(chain)
    ]
    remedies = dict.fromkeys(chain[rank].remedy for rank in sorted(chain))
    return "; ".join((*places, *filter(None, remedies)))
