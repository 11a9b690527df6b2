"""Comparison of what ranks launch, where collectives pair up in the order of their launches."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from weakref import ReferenceType

import torch
import torch.distributed as dist
from attrs import asdict, define, field, frozen

from .calls import (
    CAUSES,
    alone,
    blocking_torch_call,
    causes,
    collective_call,
    in_lines,
    user_line,
    within,
)
from .errors import CommError, DivergenceError
from .torch_private import backend_of, sequence_number
from .traces import Trace, Traced, difference
from .watch import LONG_WAITS, Recorded, Wait, Watch

# NOTE(order): backends such as NCCL pair up the n-th collective of each rank, whatever it is, and
# the host does not wait for it. So each launch adds its identity (operation, tag, dtype, sizes) to
# a fingerprint. Once a step, and wherever the host is about to rely on what other ranks say, a
# rank adds its fingerprint to a counter in the job's store, which is called a mark; once all ranks
# have, the sum is right, or some rank has launched something else. A step compares the sum of the
# step before, which is complete unless a rank is late by a step. Many launches without a step are
# compared in the same way.

# NOTE(stuck): a rank whose last launch has not ended for long writes to the store what it launched
# last, and reads what the others did; ranks that have launched nothing for long answer. Proofs that
# it cannot go on are: the n-th launches of two ranks differ, or a rank waits for this one in a
# collective of torch's, or a rank has ended. A device may take long, so without a proof no error is
# raised before the group's timeout has nearly passed.

# NOTE(end): a rank that has made its last mark has seen that all others made the one before. The
# others have one mark left to make, and the rank that hosts the store may have ended by then. So a
# store that is lost at one mark is no error, and at the next mark it is.

_FACTOR: Final = 1_103_515_245
_PRIME: Final = 2**31 - 1
_LAUNCHES_PER_MARK: Final = 256
# Counts a rank in the high bits of a mark's counter, whose low 48 bits are the sum of fingerprints.
_ONE: Final = 1 << 48
_PEERS_AT_A_LOOK: Final = 64
_FIRST_PAUSE_S: Final = 20e-6
_LONGEST_PAUSE_S: Final = 2e-3
# Shortest time for which ranks that diverged wait to read what the others launched.
_LEAST_S: Final = 2.0
# How long before the backend's timeout, which ends the process, a wait raises an error.
_MARGIN_S: Final = 1.5


def abort(of: ReferenceType[Any], device: torch.device) -> None:
    """End what this rank has launched in a group of a device, for good. Local.

    What its collectives write is then undefined, and the host is not told: no use of it may follow.
    """
    process_group = of()
    if process_group is not None:
        # Not every backend can abort.
        with contextlib.suppress(RuntimeError):
            backend_of(process_group, device).abort()


@frozen
class _State:
    """Message of a rank to the others while one of them is stuck."""

    # Number of the last launch, and fingerprint of all launches up to it.
    number: int
    fingerprint: int
    sequence: int  # number of collectives that torch has counted
    doing: str
    since_s: float  # seconds since the last launch
    # Call of the main thread that all ranks must make; "" if none.
    call: str
    # The main thread's blocking collective of torch's, and the job's ranks that must call it too.
    torch_call: str
    needs: Sequence[int]
    beat: int  # number of this message


@define(eq=False)
class OrderWatch(Watch):
    """Watch of a group whose collectives meet in the order of their launches."""

    world_size: int = field(kw_only=True)
    # Device of the tensors of the collectives, and torch's backend for it.
    device: torch.device = field(kw_only=True)
    backend: Any = field(kw_only=True)
    timeout_s: float = field(kw_only=True)
    # Whether the store keeps what is written to it.
    _can_tell: bool = field(default=False, init=False)
    _has_lost_store: bool = field(default=False, init=False)
    _fingerprint: int = field(default=0, init=False)
    _num_marks: int = field(default=0, init=False)
    # Number of the launch at the last mark, and what this rank added to the mark's counter; None
    # once the counter has been compared.
    _marked: int = field(default=0, init=False)
    _mark: int | None = field(default=None, init=False)
    # Stream that waits for the last launch.
    _stream: Any = field(default=None, init=False)
    # Time of a launch, and an event after it; see `_stuck_since`.
    _passed: tuple[float, Any] = field(default=(0.0, None), init=False)
    _launched_at: float = field(default=0.0, init=False)
    # Start and limit, in seconds, of the wait for a mark of all ranks; None outside of one.
    _polls: tuple[float, float] | None = field(default=None, init=False)
    # The store's count of long waits when it was last read.
    _num_long_waits: int = field(default=0, init=False)
    # `number` and `sequence` of the last launch in the trace that was written last.
    _told: tuple[int, int] = field(default=(-1, 0), init=False)
    _beat: int = field(default=0, init=False)
    # Peer -> the first beat of it that was read while this rank is stuck.
    _heard: dict[int, int] = field(factory=dict, init=False)
    # The result of `_stuck_since` at the last look.
    _stuck: float | None = field(default=None, init=False)
    # Distance, in ranks, of the peer to look at next.
    _next_peer: int = field(default=1, init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        # The store of a fake process group keeps nothing, and raises.
        with contextlib.suppress(RuntimeError):
            self.store.set(self.key_of(f"process/{self.rank}"), json.dumps(_process()))
            self._can_tell = True

    def counted_as(self, key: int) -> str:
        """See `Watch`."""
        return self.name

    def key_of(self, what: str) -> str:
        """See `Watch`; of the group and not of its scope, as no circle is looked for."""
        return f"zero_comm/order/{self.name}/{what}"

    def sequence(self) -> int:
        """See `Watch`."""
        return sequence_number(self.backend)

    def follow(self, recorded: Recorded) -> None:
        """See `Watch`."""
        self._fingerprint = (self._fingerprint * _FACTOR + recorded.key) % _PRIME
        self._launched_at = time.monotonic()
        if self._can_tell and recorded.number - self._marked >= _LAUNCHES_PER_MARK:
            with self._telling():
                self._compare_marks(recorded.purpose.what, self.timeout_s)
                self._make_mark(recorded)

    def begin(self, wait: Wait) -> None:
        """See `Watch`; on an accelerator a stream begins to wait, and this thread goes on."""
        if self.device.type == "cpu":
            super().begin(wait)
        else:
            self._stream = torch.accelerator.current_stream(self.device)

    # ---- Marks ----

    def compare(self, what: str, *, at_once: bool, timeout_s: float | None) -> None:
        """Do what `Group.compare_launches` documents."""
        if not self._can_tell:
            return
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        with self._telling(may_end=not at_once):
            self._compare_marks(what, limit_s)
            # The launch that follows counts as marked, so `follow` makes no mark for it.
            self._marked = self.scope.launched.get(self.name, 0) + 1
            launch = self.launch(what, int(at_once), call=collective_call(), sends=True)
            self._make_mark(launch.recorded)
            self.sent()
            if at_once:
                self._compare_marks(what, limit_s)

    @contextlib.contextmanager
    def _telling(self, *, may_end: bool = True) -> Iterator[None]:
        """Say so if the store is lost, but see NOTE(end).

        Args:
            may_end: This may be the last that a rank tells the others.
        """
        try:
            yield
        except dist.DistError as error:
            # The store is lost: peers need not be told that the launch was interrupted.
            self.sent()
            if not may_end or self._has_lost_store:
                raise CommError(in_lines(f"{self._lost} ({error})", causes())) from error
            self._has_lost_store, self._mark = True, None

    @property
    def _lost(self) -> str:
        return (
            f"rank {self.rank} lost the store of the job: the process that hosts it, rank 0's or "
            "the launcher's, has ended"
        )

    def _make_mark(self, last: Recorded) -> None:
        """Add all launches up to this one to the counter of all ranks."""
        self._num_marks, self._marked = self._num_marks + 1, last.number
        self._mark = (self._fingerprint + last.sequence) % _PRIME
        self.store.add(self.key_of(f"mark/{self._num_marks}"), _ONE + self._mark)

    def _compare_marks(self, what: str, limit_s: float) -> None:
        """Wait until all ranks have made the last mark, and compare."""
        if self._mark is None:
            return
        store, key = self.store, self.key_of(f"mark/{self._num_marks}")
        pause_s, since = _FIRST_PAUSE_S, time.monotonic()
        try:
            while (total := store.add(key, 0)) < self.world_size * _ONE:
                if self.has_diverged:
                    raise self.verdict()
                if time.monotonic() - since > limit_s:
                    count = total // _ONE
                    raise CommError(
                        in_lines(
                            f"{what} did not finish {within(limit_s)}: {count} of "
                            f"{self.world_size} ranks came to it (rank {self.rank})",
                            causes(),
                        )
                    )
                self._polls = since, limit_s
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        finally:
            self._polls = None
        expected, self._mark = self.world_size * (_ONE + self._mark), None
        if total != expected:
            raise self._parted()
        # All ranks have made this mark, and so have compared the one before: delete that one.
        if self.rank == 0 and self._num_marks > 1:
            store.delete_key(self.key_of(f"mark/{self._num_marks - 1}"))

    def _parted(self) -> DivergenceError:
        """Find out where, with the others, who find it out too."""
        self._tell()
        deadline = time.monotonic() + max(_LEAST_S, self.patience_s)
        while time.monotonic() < deadline:
            for peer in range(self.world_size):
                found = "" if peer == self.rank else self._difference(peer)
                if found:
                    self.part(found)
            if (error := self.error()) is not None:
                return error
            time.sleep(_LONGEST_PAUSE_S)
        heading = (
            "ranks launched different collectives since the last step, and may have taken each "
            "other's values"
        )
        self.part(in_lines(heading, causes()))
        return self.verdict()

    # ---- Looks ----

    def look(self, *, seen: float) -> float:
        """See `Watch`."""
        if self.has_diverged or not self._can_tell:
            return seen
        stuck, now = self._stuck_since(), time.monotonic()
        is_stuck = stuck is not None and now - stuck >= self.patience_s
        if not is_stuck and now - self._launched_at < self.patience_s:
            return seen
        if stuck != self._stuck:
            self._heard.clear()
            self._stuck = stuck
        try:
            num_long_waits = self.store.add(self.key_of(LONG_WAITS), int(is_stuck))
            if num_long_waits == self._num_long_waits:
                # No rank has waited for long since the last look.
                return seen
            self._num_long_waits = num_long_waits
            if self.error() is None:
                mine = self._tell()
                if stuck is not None and is_stuck:
                    self._look_at_peers(mine, stuck)
        except dist.DistError as error:
            if is_stuck:
                self.part(
                    in_lines(f"{self._lost} ({error}), and this rank makes no progress", CAUSES)
                )
        except (RuntimeError, ValueError):  # the job is ending
            pass
        return seen

    def _stuck_since(self) -> float | None:
        """Return since when this rank, or its device, makes no progress.

        The device is asked when nothing was launched for long, so never in the midst of what users
        record as a graph: by an event after what waits for the last launch. Torch's work of the
        launch would say it too, but keeps what was gathered alive.
        """
        since, stream = self._launched_at, self._stream
        if (polls := self._polls) is not None:
            return polls[0]
        if self._waiting is not None:
            return self._waiting[1]
        if stream is None or time.monotonic() - since < self.patience_s:
            return None
        # An error of the device is raised where its results are waited for.
        with contextlib.suppress(RuntimeError):
            asked, event = self._passed
            if asked != since:
                with torch.accelerator.device_index(self.device.index):
                    event = stream.record_event()
                self._passed = since, event
            if event.query():
                return None
        return since

    def _tell(self) -> _State:
        """Let the others know what this rank has launched, and where it is."""
        store, recent = self.store, self._own_launches()
        last = recent[-1] if recent else None
        number = 0 if last is None else last.number
        call, torch_call = collective_call(_main_thread()), blocking_torch_call()
        in_torch = "" if torch_call is None else f"{torch_call.name} at {user_line(_main_thread())}"
        self._beat += 1
        state = _State(
            number=number,
            fingerprint=self._fingerprint,
            sequence=self.sequence(),
            doing="nothing" if last is None else last.purpose.what,
            since_s=time.monotonic() - self._launched_at,
            call=call,
            torch_call=in_torch,
            needs=() if torch_call is None else torch_call.needs,
            beat=self._beat,
        )
        told = (number, state.sequence)
        if self._told != told:
            self._told = told
            trace = self._trace()
            store.set(
                self.key_of(f"launches/{self.rank}"), json.dumps([trace.counted, *trace.launches])
            )
        store.set(self.key_of(f"state/{self.rank}"), json.dumps(asdict(state)))
        return state

    def _own_launches(self) -> list[Recorded]:
        return [each for each in self.recent() if each.group == self.name]

    def _trace(self) -> Trace:
        return Trace(self.rank, self.sequence(), [*map(Traced.of, self._own_launches())])

    def _look_at_peers(self, mine: _State, since: float) -> None:
        behind: list[tuple[int, _State | None]] = []
        for peer in self._peers_in_turn():
            theirs = self._state_of(peer)
            if theirs is None or theirs.number < mine.number:
                behind.append((peer, theirs))
            found = self._proof(peer, mine, theirs)
            if found and self._stuck_since() == since:
                self.part(found)
                return
        waited_s = time.monotonic() - since
        if not behind:
            return
        peer, theirs = behind[0]
        self.tell_user(since, f"rank {peer}", mine.doing)
        polls = self._polls
        if waited_s > (self.timeout_s if polls is None else polls[1]) - _MARGIN_S:
            heading = (
                f"rank {self.rank} has waited {waited_s:.0f} s for rank {peer} in {mine.doing}"
            )
            where = _whereabouts(peer, theirs)
            self.part(in_lines(f"{heading}, {where}", alone(self.rank, mine.call)))

    def _proof(self, peer: int, mine: _State, theirs: _State | None) -> str:
        """Return why this rank can never go on because of that one; "" if it may."""
        is_behind = theirs is None or theirs.number < mine.number
        waits, advised = f"rank {self.rank} waits for rank {peer}", alone(self.rank, mine.call)
        if is_behind and self._has_ended(peer):
            where = "" if theirs is None else f", {_whereabouts(peer, theirs)}"
            ended = f"but the process of rank {peer} has ended{where}"
            return in_lines(f"{waits} in {mine.doing}, {ended}", advised)
        if theirs is None:
            return ""
        said = [(each.number, each.fingerprint, each.sequence) for each in (mine, theirs)]
        if said[0] != said[1] and (found := self._difference(peer)):
            return found
        # The beat after the first that was read may have been written before this rank was stuck;
        # the one after that was not.
        is_now = theirs.beat >= self._heard.setdefault(peer, theirs.beat) + 2
        if is_now and dist.get_rank() in theirs.needs and theirs.number < mine.number:
            its = f"rank {peer} waits for rank {self.rank} in {theirs.torch_call}"
            return in_lines(f"{waits} in {mine.doing}; {its}", advised)
        return ""

    def _difference(self, peer: int) -> str:
        store, key = self.store, self.key_of(f"launches/{peer}")
        if not store.check([key]):
            return ""
        counted, *launches = json.loads(store.get(key))
        theirs = Trace(peer, counted, [Traced(*each) for each in launches])
        return difference(self._trace(), theirs, self.purposes)

    def _peers_in_turn(self) -> Iterator[int]:
        """A part of the others, another one at each look."""
        for _ in range(min(_PEERS_AT_A_LOOK, self.world_size - 1)):
            yield (self.rank + self._next_peer) % self.world_size
            self._next_peer = self._next_peer % (self.world_size - 1) + 1

    def _state_of(self, peer: int) -> _State | None:
        store, key = self.store, self.key_of(f"state/{peer}")
        return _State(**json.loads(store.get(key))) if store.check([key]) else None

    def _has_ended(self, peer: int) -> bool:
        store, key = self.store, self.key_of(f"process/{peer}")
        if not store.check([key]):
            return False
        host, process, started = json.loads(store.get(key))
        return host == _host() and _started(process) != started


def _whereabouts(peer: int, state: _State | None) -> str:
    if state is None:
        return f"and rank {peer} has launched nothing on this group, or does not answer"
    call = f", and is in {state.call or state.torch_call}" if state.call or state.torch_call else ""
    return (
        f"and rank {peer} has launched nothing for {state.since_s:.0f} s, since {state.doing}{call}"
    )


def _main_thread() -> int:
    return threading.main_thread().ident or 0


def _process() -> tuple[str, int, str]:
    """Return host, number and start of this process, which no other one has."""
    return _host(), os.getpid(), _started(os.getpid())


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else ""


def _started(process: int) -> str:
    """Return when a process of this host began; "" if it ended, or the system does not say."""
    with contextlib.suppress(OSError):
        state, *rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]
    return ""
