"""Launches of a rank on a group, its waits, and the verdict that ranks tell each other."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from attrs import define, evolve, field, frozen

from .calls import in_lines
from .errors import DivergenceError
from .logs import how_to_ask
from .torch_private import default_store

PATIENCE_S: Final = 3.0

NUM_RECENT: Final = 1024  # launches that are remembered
# Largest number of ranks for which an error lists the elements by rank.
_NUM_NAMED: Final = 8
_NUM_REPORTED: Final = 16  # launches in a report

# Key of a counter that each rank raises at each look at a long wait of its own.
LONG_WAITS: Final = "long waits"

_LOOKS_PER_PATIENCE: Final = 6
_PATIENCES_OF_USER: Final = 10
_DIVERGENCE: Final = "divergence"
# A key, followed by a rank; its value is the peer at which that rank failed.
_FAILED_AT: Final = "failed at/"
# Pause before others' reasons are read: a rank closes its connections before it tells why.
_TOLD_S: Final = 0.05
_LOG: Final = logging.getLogger("zero_comm")


@frozen
class Purpose:
    """Purpose of a collective, in the words of an error."""

    what: str  # such as "gathering unit 'blocks.0'"
    # What to do where a rank does not take part.
    remedy: str = ""
    subject: str = ""  # name in traffic counts, such as "blocks.0"


# Dtype of a flat buffer, and its elements by rank.
Shape = tuple[torch.dtype, Sequence[int]]


class Recorded(NamedTuple):
    """A launch, as a rank remembers it."""

    at: int  # position among all launches of the scope, from 1
    group: str
    key: int
    number: int
    operation: str
    tag: int | None
    version: int | None
    shape: Shape | None
    sequence: int  # number of collectives that torch had counted on the group before
    call: str  # user's call that the launch is part of, such as "save()"
    purposes: dict[int, Purpose]

    @property
    def purpose(self) -> Purpose:
        """Purpose of it, as errors say."""
        known = None if self.tag is None else self.purposes.get(self.tag)
        purpose = known or Purpose(self.operation)
        if self.version is None:
            return purpose
        return evolve(purpose, what=f"{purpose.what} (version {self.version})")

    @property
    def size(self) -> str:
        """Elements and dtype of what it moves; "" if that is not known."""
        if self.shape is None:
            return ""
        dtype, numels = self.shape
        each = f", {list(numels)} by rank" if len(numels) <= _NUM_NAMED else ""
        return f"{sum(numels)} elements of {dtype}{each}"


@define(eq=False)
class Launch:
    """One collective, launched by this rank."""

    watch: Watch
    recorded: Recorded

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return self.recorded.operation

    @property
    def key(self) -> int:
        """Key of its messages, which meet those of the same key."""
        return self.recorded.key

    @property
    def number(self) -> int:
        """Position among the launches that are counted as it is; see `Watch.counted_as`."""
        return self.recorded.number

    @property
    def purpose(self) -> Purpose:
        """Purpose of it, as errors say."""
        return self.recorded.purpose

    def doing(self, call: str) -> str:
        """Return the user's call, if there is one, and the words of its purpose, if it has one."""
        what = self.purpose.what
        if not call:
            return what
        return call if what == self.operation else f"{call}: {what}"


@frozen(eq=False)
class Wait:
    """A launch of `peer` that a rank blocks on."""

    launch: Launch
    peer: int
    # Whether the peer has launched it, and has yet to read this rank's memory.
    is_launched: bool = False

    def is_another(self, other: Wait) -> bool:
        """Return whether something else is lacking, of the same launch."""
        return (self.peer, self.is_launched) != (other.peer, other.is_launched)


@define(eq=False)
class Scope:
    """Where ranks tell each other: one for groups that share ranks, as a circle may go through all.

    Of the first of the groups, which has all ranks of the others.
    """

    # In keys of the store; the same on every rank, and no other scope's.
    name: str
    rank: int
    # Name of `Watch.counted_as` -> number of launches.
    launched: dict[str, int] = field(factory=dict)
    num_launched: int = 0
    # Call of a user's that all ranks must make -> how often this rank has begun it.
    called: dict[str, int] = field(factory=dict)
    # A sentence that errors of the scope's collectives repeat: where ranks have parted.
    remark: str = ""
    # A ring of the last launches; None where there were fewer.
    recent: list[Any] = field(factory=lambda: [None] * NUM_RECENT)


@define(eq=False)
class Watch(ABC):
    """Launches and waits of one rank on one process group."""

    # The same on every rank of the group, and no other group's.
    name: str
    rank: int
    # Ends all waits of this rank, and those of its peers for this rank.
    interrupt: Callable[[], None]
    patience_s: float = PATIENCE_S
    purposes: dict[int, Purpose] = field(factory=dict, init=False)  # by tag
    # Whether this rank has found that ranks diverged, or has read so in the store.
    has_diverged: bool = field(default=False, init=False)
    scope: Scope = field(init=False)
    # torch's default group when the watch was made.
    _job: ReferenceType[Any] = field(init=False)
    # Rank in the scope of each rank of the group; None if they are the same.
    ranks: Sequence[int] | None = field(default=None, init=False)
    # The present wait, when it began, and the id of its thread.
    _waiting: tuple[Wait, float, int] | None = field(default=None, init=False)
    _divergence: str = field(default="", init=False)
    # Start of the wait that was logged last.
    _told_user_of: float = field(default=0.0, init=False)

    def __attrs_post_init__(self) -> None:
        self.scope, self._job = Scope(self.name, self.rank), ref(dist.group.WORLD)
        threading.Thread(
            target=_keep_watch, args=(ref(self),), name="zero_comm watch", daemon=True
        ).start()

    def remark(self, sentence: str) -> None:
        """Let errors of collectives on groups of this scope end with a sentence. Local."""
        self.scope.remark = sentence

    def wait_longer(self, patience_s: float) -> None:
        """Look at waits of this rank only after so many seconds. Local."""
        self.patience_s = patience_s

    @abstractmethod
    def look(self, *, seen: float) -> float:
        """See whether this rank waits for what cannot come.

        Args:
            seen: What the last look returned; 0 for the first.

        Returns:
            When the wait began that was looked at last.
        """

    @abstractmethod
    def counted_as(self, key: int) -> str:
        """Return what launches with this key are counted as: those of one name meet in order."""

    @abstractmethod
    def compare(self, what: str, *, at_once: bool, timeout_s: float | None) -> None:
        """Do what `Group.compare_launches` documents."""

    @abstractmethod
    def follow(self, recorded: Recorded) -> None:
        """Note what `launch` has recorded."""

    def sequence(self) -> int:
        """Return how many collectives torch has counted on the group, where that matters."""
        return 0

    @property
    def store(self) -> Any:
        """Store of the job, in which its ranks tell each other.

        Raises:
            ValueError: The job has ended; there may be another one in this process.
        """
        if dist.group.WORLD is not self._job():
            raise ValueError("the default process group was destroyed")
        return default_store()

    def join(self, other: Watch, ranks: Sequence[int]) -> None:
        """Find circles that go through the other's group too. Local, on every rank of both.

        Args:
            other: Of a group that has all ranks of this one.
            ranks: Where these are in it.
        """
        if self.scope is not other.scope:
            other.scope.launched.update(self.scope.launched)
            self.scope, self.ranks = other.scope, tuple(ranks)

    def launch(
        self,
        operation: str,
        key: int,
        *,
        tag: int | None = None,
        version: int | None = None,
        shape: Shape | None = None,
        call: str = "",
        sends: bool = False,
    ) -> Launch:
        """Count a collective that begins.

        Args:
            operation: What it does.
            key: See `Launch`.
            tag: Of its purpose.
            version: Of the values.
            shape: Of its buffer.
            call: Of a user's, if it is known to be in one.
            sends: Messages follow from this thread, until `sent` is called.

        Raises:
            DivergenceError: An exception came before all messages of an earlier one were sent, or
                ranks have diverged.
        """
        if self.has_diverged:
            raise self.verdict()
        scope, name, thread = self.scope, self.counted_as(key), threading.get_ident()
        if torn := _SENDING.get(thread):
            if not torn.watch.has_diverged:
                torn.watch.tell_of_exception(torn.purpose)
            # Removed last: if an exception comes before, the next launch tells the peers.
            _SENDING.pop(thread, None)
            if torn.watch.scope is scope:
                # Those that wait on this group may not look for what was told on the other.
                if self.error() is None:
                    self.part(torn.watch._divergence)
                raise self.verdict()
        number = scope.launched.get(name, 0) + 1
        # Noted before the launch is counted: peers would wait for one that is counted and not sent.
        if sends:
            known = None if tag is None else self.purposes.get(tag)
            _SENDING[thread] = _Sending(self, known or Purpose(operation), name, number)
        scope.launched[name] = number
        scope.num_launched = at = scope.num_launched + 1
        what, torchs = (operation, tag, version, shape), self.sequence()
        recorded = Recorded(at, self.name, key, number, *what, torchs, call, self.purposes)
        scope.recent[at % NUM_RECENT] = recorded
        self.follow(recorded)
        return Launch(self, recorded)

    def sent(self) -> None:
        """Note that all messages of this thread's last launch are on their way."""
        _SENDING.pop(threading.get_ident(), None)

    def launched(self) -> dict[str, int]:
        """Return how many launches of each name are on their way to peers, or have been."""
        found = dict(self.scope.launched)
        for each in tuple(_SENDING.values()):
            if each.watch.scope is self.scope and each.name in found:
                found[each.name] = min(found[each.name], each.number - 1)
        return found

    def tell_of_exception(self, purpose: Purpose) -> None:
        """Tell every rank that peers wait for what this one will never send."""
        self.part(
            f"an exception (Ctrl-C, no memory, an error in a signal handler) came on rank "
            f"{self.scope.rank} as it began {purpose.what}, and its peers wait for what it "
            "did not send; start the job again from its last checkpoint"
        )

    def part(self, text: str) -> None:
        """Tell all ranks why they cannot go on, and end the waits of this one."""
        # What was told on another group of the scope ends with it.
        text = text if self.scope.remark in text else in_lines(text, self.scope.remark)
        with contextlib.suppress(RuntimeError, ValueError):  # the job is ending
            self.store.set(self.key_of(_DIVERGENCE), text)
            # All ranks that see the count raised look again.
            self.store.add(self.key_of(LONG_WAITS), 1)
        self._diverge(text)

    def begin(self, wait: Wait) -> None:
        """Note that this thread blocks until `end` is called."""
        self._waiting = (wait, time.monotonic(), threading.get_ident())

    def end(self) -> None:
        """Note that this thread blocks no more."""
        self._waiting = None

    def error(self) -> DivergenceError | None:
        """Why waits fail, if it is because ranks diverged; those who wait for us are told."""
        with contextlib.suppress(RuntimeError, ValueError):  # the job is ending
            store, key = self.store, self.key_of(_DIVERGENCE)
            if not self.has_diverged and store.check([key]):
                self._diverge(store.get(key).decode())
        return self.verdict() if self.has_diverged else None

    def verdict(self) -> DivergenceError:
        """Return why ranks that have diverged cannot go on."""
        heading, *lines = self._divergence.split("\n")
        seen = f"(seen on rank {self.scope.rank}; this group can be used no more)"
        return DivergenceError("\n".join([f"{heading} {seen}{':' if lines else ''}", *lines]))

    def blame(self, peer: int) -> str:
        """Tell the others that this rank fails at `peer`, and return which rank failed first.

        A rank that fails ends, and then its peers fail at it: each follows what the others told to
        the rank that did not tell anything.

        Returns:
            A line; "" where `peer` itself is the first, as far as is known.
        """
        own, peer = self.scope.rank, self.in_scope(peer)
        chain = [own, peer]
        with contextlib.suppress(RuntimeError, ValueError):  # the job is ending
            store = self.store
            if not store.check([self.key_of(f"{_FAILED_AT}{own}")]):
                store.set(self.key_of(f"{_FAILED_AT}{own}"), str(peer))
            time.sleep(_TOLD_S)
            while store.check([key := self.key_of(f"{_FAILED_AT}{chain[-1]}")]):
                chain.append(int(store.get(key)))
                # Ranks that failed at each other: none of them is known to be the first.
                if chain[-1] in chain[:-1]:
                    return ""
        if len(chain) == 2:
            return ""
        return f"rank {peer} has failed before, and rank {chain[-1]} was the first"

    def describe(self, in_flight: Callable[[], Collection[Launch]]) -> dict[str, str]:
        """Describe the last launches on groups of this scope, by number, and the wait. Local.

        Args:
            in_flight: Finds all of this rank's launches that were not waited for yet. Called after
                the recent launches were read, since another thread may launch more meanwhile.
        """
        recent, waiting = self.recent(), self._waiting
        found = {"collectives": str(recent[-1].at if recent else 0), "waits for": "no rank"}
        if waiting is not None:
            wait, since, _ = waiting
            rank, what = self.in_scope(wait.peer), wait.launch.purpose.what
            found["waits for"] = f"rank {rank} for {time.monotonic() - since:.0f} s in {what}"
        flying = {(launch.watch.name, launch.key, launch.number) for launch in in_flight()}
        for each in recent[-_NUM_REPORTED:]:
            is_flying = (each.group, each.key, each.number) in flying
            state = "in flight" if is_flying else "finished"
            found[str(each.at)] = f"{each.purpose.what}, {state}"
        return found

    def recent(self) -> list[Recorded]:
        """Return the last launches of the scope, oldest first."""
        return sorted((each for each in (*self.scope.recent,) if each), key=lambda each: each.at)

    def tell_user(self, since: float, whom: str, what: str) -> None:
        """Log a wait that has lasted for many patiences, once."""
        waited_s = time.monotonic() - since
        if waited_s > _PATIENCES_OF_USER * self.patience_s and self._told_user_of != since:
            self._told_user_of = since
            _LOG.warning(
                "zero_comm: rank %d has waited %.0f s for %s in %s; that rank computes, or waits "
                "for something else than a collective of this library%s",
                *(self.scope.rank, waited_s, whom, what, how_to_ask()),
            )

    def _diverge(self, text: str) -> None:
        self._divergence, self.has_diverged = text, True
        self.interrupt()

    def in_scope(self, rank: int) -> int:
        """Return where a rank of the group is in the scope."""
        return rank if self.ranks is None else self.ranks[rank]

    def key_of(self, what: str) -> str:
        """Return the key in the job's store under which ranks tell each other `what`."""
        return f"zero_comm/watch/{self.scope.name}/{what}"


@frozen(eq=False)
class _Sending:
    """A launch whose messages are not all on their way."""

    watch: Watch
    purpose: Purpose
    # Name and number by which the scope counts it.
    name: str
    number: int


# Id of a thread -> its launch, on any group. If an exception ends a launch, the thread's next one,
# perhaps on another group, tells the peers of the first group. If the thread waits instead, peers
# read that it has not made the launch; see `Watch.launched`.
_SENDING: Final = dict[int, _Sending]()


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
        if now is None or self.told is None or now.is_another(self.told):
            self.end()
            if now is not None:
                self.watch.begin(now)
            self.told = now
        if self.watch.has_diverged:
            raise self.watch.verdict()

    def end(self) -> None:
        """Note that nothing is lacking."""
        if self.watch is not None and self.told is not None:
            self.watch.end()

    def __enter__(self) -> SeenWait:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _keep_watch(of: ReferenceType[Watch]) -> None:
    seen = 0.0
    while (watch := of()) is not None and not watch.has_diverged:
        seen = watch.look(seen=seen)
        pause_s = watch.patience_s / _LOOKS_PER_PATIENCE
        # Its group may be freed during the pause.
        del watch
        time.sleep(pause_s)
