"""Ranks that wait for each other in different collectives, where messages carry the values."""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple, TypeVar
from weakref import ReferenceType, ref

import torch.distributed as dist
from attrs import asdict, define, evolve, field, frozen
from torch.distributed import distributed_c10d

from .errors import DivergenceError
from .torch_private import default_store

AnyCallable = TypeVar("AnyCallable", bound=Callable[..., Any])

# NOTE(frames): a garbage collection may run a finalizer that lets other threads go on. Where that
# happens as CPython 3.11 makes an object of another thread's frame, of the one behind it or of its
# locals, the frame may be gone when it is read (gh-106883 is one such place). So there is none.

UNEVEN: Final = (
    "if there is none, a rank has ended while others go on (uneven batches): let every rank run as "
    "many"
)
_CAUSES: Final = (
    "A rank that raised, ended, or runs other code than its peers leaves them waiting; look for "
    f"the first error among all ranks; {UNEVEN}."
)
_COLLECTIVE: Final[dict[CodeType, str]] = {}
_READS_FRAMES: Final = threading.Lock()  # a thread per group does; what one holds no other lets go


class TorchCall(NamedTuple):
    """A collective of torch's own that blocks."""

    name: str  # "torch.distributed.barrier()"
    needs: Sequence[int]  # ranks of the job; it does not end before each of them calls it too


def collective(function: AnyCallable) -> AnyCallable:
    """Decorator of a function that all ranks must call; a rank that calls it alone is told so.

    The function is returned as it is, and calls cost nothing: errors find it among the frames of
    the thread that waits. Of several the outermost is named.
    """
    own: Any = inspect.unwrap(function)  # the code of a wrapper is that of all it wraps
    _COLLECTIVE[own.__code__] = f"{own.__name__}()"
    return function


def collective_call(thread: int) -> str:
    """The outermost call of such a function that a thread is in, "save()"; "" if none."""
    with _frame_of(thread) as frame:
        return _outermost(frame)


def causes() -> str:
    """Why a collective of this thread may have failed, for the end of an error."""
    call = _outermost(sys._getframe())
    return f"{call} must be called on all ranks. {_CAUSES}" if call else _CAUSES


def blocking_torch_call() -> TorchCall | None:
    """What the main thread is in, if it cannot end before certain other ranks take part."""
    with _frame_of(threading.main_thread().ident or 0) as frame:
        return None if frame is None else _torch_call(frame)


def _torch_call(frame: FrameType) -> TorchCall | None:
    is_torchs = frame.f_code.co_filename == distributed_c10d.__file__
    if not is_torchs or "async_op" not in frame.f_code.co_varnames:  # no collective
        return None
    given = frame.f_locals
    if given.get("async_op") is not False:
        return None
    group = given.get("group") or dist.group.WORLD
    ranks, own = dist.get_process_group_ranks(group), dist.get_rank(group)
    if "group_src" in given:  # the source may be done before all have received
        ranks = [] if given["group_src"] in (None, own) else [ranks[given["group_src"]]]
    elif "group_dst" in given and given["group_dst"] != own:  # likewise who only sends
        ranks = []
    name, of = frame.f_code.co_name, frame.f_back
    while of is not None and of.f_globals.get("__name__", "").startswith("torch.distributed"):
        name = name if of.f_code.co_name == "wrapper" else of.f_code.co_name
        of = of.f_back
    return TorchCall(f"torch.distributed.{name}()", ranks) if ranks else None


def _outermost(frame: FrameType | None) -> str:
    found = ""
    while frame is not None:
        found = _COLLECTIVE.get(frame.f_code, found)
        frame = frame.f_back
    return found


@contextmanager
def _frame_of(thread: int) -> Iterator[FrameType | None]:
    """Where a thread is; see NOTE(frames)."""
    with _READS_FRAMES:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield sys._current_frames().get(thread)
        finally:
            if was_enabled:
                gc.enable()


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

PATIENCE_S: Final = 3.0

NUM_RECENT: Final = 16  # launches that are remembered

_LOOKS_PER_PATIENCE: Final = 6
_PATIENCES_OF_USER: Final = 10
_DIVERGENCE: Final = "divergence"
_FAILED_AT: Final = "failed at/"  # and a rank: the peer at which it failed
_TOLD_S: Final = 0.05  # a rank breaks its connections some moments before it tells why
_LONG_WAITS: Final = "long waits"  # a count of looks at them, by all ranks
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
    call: str = ""  # which every rank must make
    needs: Sequence[int] = ()  # in a collective of torch's: ranks of the job, in place of `peer`
    beat: int = 0  # how often it has said that

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
    num_launched: int = 0
    # Of the last launches, with their number, in turns.
    recent: list[tuple[Any, ...]] = field(factory=lambda: [()] * NUM_RECENT)


@define(eq=False)
class Watch:
    """What one rank launched on one process group, and what it waits for now."""

    name: str  # that no other group has, the same on every rank
    rank: int
    interrupt: Callable[[], None]  # ends all waits of this rank, and its peers' for it
    patience_s: float = PATIENCE_S
    has_ended: Callable[[int], bool] = lambda _: False  # whether a peer's program is over
    purposes: dict[int, Purpose] = field(factory=dict, init=False)  # by tag
    _scope: Scope = field(init=False)
    _ranks: Sequence[int] | None = field(default=None, init=False)  # in the scope; the same if None
    has_diverged: bool = field(default=False, init=False)  # found here, or heard of
    # Since when, and in which thread:
    _waiting: tuple[Wait, float, int] | None = field(default=None, init=False)
    _sending: dict[int, tuple[str, int | None]] = field(factory=dict, init=False)  # by thread
    _idle: tuple[int, float] = field(default=(-1, 0.0), init=False)  # of so many, since when
    _num_long_waits: int = field(default=0, init=False)  # when last asked for
    _beat: int = field(default=0, init=False)
    _heard: dict[int, int] = field(factory=dict, init=False)  # beats of peers, first in a wait
    _divergence: str = field(default="", init=False)
    _told_user_of: float = field(default=0.0, init=False)

    def __attrs_post_init__(self) -> None:
        self._scope = Scope(self.name, self.rank)
        threading.Thread(
            target=_keep_watch, args=(ref(self),), name="zero_comm watch", daemon=True
        ).start()

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
        self,
        operation: str,
        key: int,
        *,
        tag: int | None = None,
        version: int | None = None,
        sends: bool = False,
    ) -> Launch:
        """Count a collective that begins.

        Args:
            operation: What it does.
            key: See `Launch`.
            tag: Of its purpose.
            version: Of the values.
            sends: Messages follow from this thread, until `sent` is called.

        Raises:
            DivergenceError: An exception came before all messages of an earlier one were sent.
        """
        if sends:
            thread = threading.get_ident()
            if thread in self._sending:
                raise self._break(self._sending[thread])
            self._sending[thread] = operation, tag
        scope, name = self._scope, self._name_of(key)
        number = scope.launched[name] = scope.launched.get(name, 0) + 1
        scope.num_launched = at = scope.num_launched + 1
        scope.recent[at % NUM_RECENT] = at, self.name, key, number, operation, tag, self.purposes
        return Launch(self, operation, key, number, tag, version)

    def sent(self) -> None:
        """All messages of what this thread launched last are on their way."""
        self._sending.pop(threading.get_ident(), None)

    def _break(self, torn: tuple[str, int | None]) -> DivergenceError:
        """Tell every rank that peers wait for what this one will never send."""
        operation, tag = torn
        purpose = (None if tag is None else self.purposes.get(tag)) or Purpose(operation)
        text = (
            f"an exception (Ctrl-C, no memory, an error in a signal handler) came on rank "
            f"{self._scope.rank} as it began {purpose.what}, and its peers wait for what it did "
            "not send; start the job again from its last checkpoint"
        )
        with contextlib.suppress(RuntimeError, ValueError):  # the job is ending
            default_store().set(self._key(_DIVERGENCE), text)
            default_store().add(self._key(_LONG_WAITS), 1)
        self._diverge(text)
        error = self.error()
        assert error is not None, "it has just been said"
        return error

    def begin(self, wait: Wait) -> None:
        """This thread blocks now, until `end` is called."""
        self._waiting = (wait, time.monotonic(), threading.get_ident())

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
            f"{self._divergence} (seen on rank {self._scope.rank}; this group can be used no more)"
        )

    def blame(self, peer: int) -> str:
        """Tell the others that this rank fails at `peer`, and return which rank failed first.

        A rank that fails ends, and then its peers fail at it: each follows what the others told to
        the rank that did not tell anything.

        Returns:
            A sentence and a space; "" where `peer` itself is the first, as far as is known.
        """
        own, peer = self._scope.rank, self._in_scope(peer)
        chain = [own, peer]
        with contextlib.suppress(RuntimeError, ValueError):  # the store has ended with its rank
            store = default_store()
            if not store.check([self._key(f"{_FAILED_AT}{own}")]):
                store.set(self._key(f"{_FAILED_AT}{own}"), str(peer))
            time.sleep(_TOLD_S)
            while store.check([key := self._key(f"{_FAILED_AT}{chain[-1]}")]):
                chain.append(int(store.get(key)))
                if chain[-1] in chain[:-1]:  # two that failed at each other: neither is the first
                    return ""
        if len(chain) == 2:
            return ""
        return f"Rank {peer} has failed before, and rank {chain[-1]} was the first. "

    def describe(self, in_flight: Callable[[], Collection[Launch]]) -> dict[str, str]:
        """What was launched last on groups of this scope, by number, and what is waited for. Local.

        Args:
            in_flight: Finds all of this rank's launches that were not waited for yet; called when
                the rest has been read, as another thread goes on meanwhile.
        """
        recent, waiting = [*self._scope.recent], self._waiting  # none is half replaced
        recent = sorted(filter(None, recent))
        found = {"collectives": str(recent[-1][0] if recent else 0), "waits for": "nobody"}
        if waiting is not None:
            wait, since, _ = waiting
            rank, what = self._in_scope(wait.peer), wait.launch.purpose.what
            found["waits for"] = f"rank {rank} for {time.monotonic() - since:.0f} s in {what}"
        flying = {(launch.watch.name, launch.key, launch.number) for launch in in_flight()}
        for number, name, key, count, operation, tag, purposes in recent:
            what = (purposes.get(tag) or Purpose(operation)).what
            is_flying = (name, key, count) in flying
            found[str(number)] = f"{what}, {'in flight' if is_flying else 'finished'}"
        return found

    def look(self, *, seen: float) -> float:
        """See whether this rank waits for what cannot come.

        Args:
            seen: What the last look returned; 0 for the first.

        Returns:
            When the wait began that was looked at last.
        """
        waiting = self._waiting
        if waiting is None:
            if self._ranks is not None:  # the scope's own watch does it for all groups
                return seen
            with contextlib.suppress(RuntimeError, ValueError):  # the job is ending
                self._tell_of_torch()
            return seen
        wait, since, thread = waiting
        if time.monotonic() - since < self.patience_s:
            return seen
        if since == seen:
            self.error()  # a peer may have found it; who looks into memory has no connection to it
            self._tell_user(wait, since)
        else:
            self._heard.clear()
        with contextlib.suppress(RuntimeError, ValueError):  # the job is ending
            default_store().add(self._key(_LONG_WAITS), 1)
            mine = self._position(wait, thread)
            found = ""
            if chain := self._follow(mine, is_first=since != seen, thread=thread):
                found = _describe(chain)
            elif since == seen and self.has_ended(wait.peer):  # its last part has had time to come
                found = _describe_ended(self._scope.rank, mine)
            if found and self._waiting is waiting and not self.has_diverged:
                default_store().set(self._key(_DIVERGENCE), found)
                default_store().add(self._key(_LONG_WAITS), 1)  # so that all look once more
                self._diverge(found)
        return since

    def _tell_of_torch(self) -> None:
        """Where this rank is, if that is in a collective of torch's that needs others."""
        if self._idle[0] != self._scope.num_launched:
            self._idle = self._scope.num_launched, time.monotonic()
        if time.monotonic() - self._idle[1] < self.patience_s:
            return
        store = default_store()
        num_long_waits = store.add(self._key(_LONG_WAITS), 0)
        if num_long_waits == self._num_long_waits:
            return
        self._num_long_waits = num_long_waits
        call = blocking_torch_call()
        if call is None or self.error() is not None:  # found by a peer: it ends here too
            return
        self._beat += 1
        launched, rank = dict(self._scope.launched), self._scope.rank
        mine = _Position(call.name, "", "", 0, rank, launched, "", call.needs, self._beat)
        store.set(self._key(str(rank)), json.dumps(asdict(mine)))

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

    def _follow(self, mine: _Position, *, is_first: bool, thread: int) -> dict[int, _Position]:
        """The ranks that wait for each other in a circle, this one among them; else nothing."""
        store, rank = default_store(), self._scope.rank
        if is_first:
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
        key, peer = self._name_of(launch.key), self._in_scope(wait.peer)
        call, launched = collective_call(thread), dict(self._scope.launched)
        doing = call if call and purpose.what == launch.operation else purpose.what
        return _Position(doing, purpose.remedy, key, launch.number, peer, launched, call)

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
    ranks = sorted(chain)
    places = [f"rank {r} waits for rank {chain[r].peer} in {chain[r].doing}" for r in ranks]
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
