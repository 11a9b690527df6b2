"""timeline(): actions of each rank with their times, and how long it waited for other ranks."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, Final, final

import torch
from attrs import astuple, define, field, frozen
from torch import nn
from zero_comm import Group, all_gather_json, collective, ranges
from zero_partition import StateError
from zero_partition.seams import require_sharded

from zero_engine.errors import FileError
from zero_engine.reports import as_table, new_figure, save_figure

# Class of an event, as `class_of` returns it -> color in a plot.
COLORS: Final = {
    "compute": "#9db4c0",
    "forward": "#c3d0d6",
    "backward": "#7d96a3",
    "gather": "#2a6f97",
    "reduce": "#e07a1f",
    "wait": "#c1121f",
    "publish": "#52b0d8",
    "step": "#4f772d",
    "swap": "#7b2cbf",
}
# Number of comparisons of the hosts' clocks, of which the median counts.
_NUM_MEETINGS: Final = 5


@frozen
class Event:
    """One action of a rank, with its start and end."""

    # "gather", "gather wait", "reduce", "reduce wait", "publish", "step", "compute", ...
    kind: str
    # Name of the unit; empty if the event belongs to none.
    subject: str
    # Seconds since the timeline began, on the clock of rank 0.
    start_s: float
    stop_s: float

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.stop_s - self.start_s


@final
@define(eq=False)
class Timeline:
    """Events of all ranks; none until the context has ended. The same on every rank."""

    # Events of each rank, in the order of time.
    ranks: tuple[tuple[Event, ...], ...] = field(default=(), init=False)

    def save(self, path: Path | str) -> None:
        """Write a trace that Perfetto and chrome://tracing show: a process for each rank. Local.

        Each rank has a second track: operations in flight, from their launch to the wait for them.

        Raises:
            zero_partition.StateError: The context has not ended.
            FileError: It cannot be written there.
        """
        rows: list[dict[str, Any]] = []
        for rank, events in enumerate(self._recorded("save()")):
            named = {
                "name": "process_name",
                "ph": "M",
                "pid": rank,
                "args": {"name": f"rank {rank}"},
            }
            rows.append(named)
            rows += [_row(rank, 0, event) for event in events]
            rows += [_row(rank, 1, event) for event in _in_flight(events)]
        try:
            Path(path).write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}))
        except OSError as error:
            raise FileError(f"{path}: cannot be written ({error.strerror})") from error

    def plot(self, path: Path | str) -> None:
        """Draw the events, a row for each rank. Local. Needs matplotlib.

        Args:
            path: File of the picture; its suffix says the format, ".png" for one.

        Raises:
            zero_partition.StateError: The context has not ended.
            ConfigError: matplotlib is missing, or does not know the format.
            FileError: It cannot be written there.
        """
        ranks = self._recorded("plot()")
        figure = new_figure(12, 1.2 + 0.7 * len(ranks))
        axis = figure.subplots()
        for rank, events in enumerate(ranks):
            for name, color in COLORS.items():
                spans = [(e.start_s * 1e3, e.seconds * 1e3) for e in events if class_of(e) == name]
                axis.broken_barh(
                    spans, (rank - 0.4, 0.8), color=color, label=None if rank else name
                )
        axis.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
        axis.set_xlabel("ms")
        axis.invert_yaxis()
        axis.legend(ncols=len(COLORS), frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
        save_figure(figure, path)

    def summary(self) -> str:
        """Milliseconds of a rank, the mean over all, by unit; and the rank that others wait for.

        Exposed is the time in which a rank could do nothing else: launching, reading and waiting.
        Hidden is the time that operations were in flight while the rank did something else.

        Raises:
            zero_partition.StateError: The context has not ended.
            ConfigError: tabulate is missing.
        """
        exposed, hidden = defaultdict[tuple[str, str], float](float), defaultdict[Any, float](float)
        ranks = self._recorded("summary()")
        for events in ranks:
            for event in events:
                exposed[event.subject, event.kind.split()[0]] += event.seconds * 1e3
            for flight in _in_flight(events):
                hidden[flight.subject, flight.kind.split()[0]] += flight.seconds * 1e3
        rows = [
            [subject or "-", kind, total / len(ranks), hidden[subject, kind] / len(ranks)]
            for (subject, kind), total in exposed.items()
        ]
        table = as_table(rows, headers=["unit", "", "exposed ms", "hidden ms"], floatfmt=".2f")
        busy = [sum(e.seconds for e in events if class_of(e) != "wait") for events in ranks]
        slowest = max(range(len(busy)), key=busy.__getitem__)
        said = f"{table}\n\nrank {slowest} was busy longest: {busy.pop(slowest) * 1e3:.2f} ms"
        return f"{said}, the others {fmean(busy) * 1e3:.2f} ms on average" if busy else said

    def _recorded(self, what: str) -> tuple[tuple[Event, ...], ...]:
        if not self.ranks:
            raise StateError(
                f"Timeline.{what}: nothing is recorded yet; call it when the context that "
                "timeline() opened has ended, without an exception"
            )
        return self.ranks


def _row(rank: int, track: int, event: Event) -> dict[str, Any]:
    return {
        "name": f"{event.kind} {event.subject}".rstrip(),
        "cat": event.kind,
        "ph": "X",
        "pid": rank,
        "tid": track,
        "ts": event.start_s * 1e6,
        "dur": event.seconds * 1e6,
    }


def class_of(event: Event) -> str:
    """Return the key of COLORS for an event."""
    return "wait" if event.kind.endswith(" wait") else event.kind.split("_")[0]


def _in_flight(events: tuple[Event, ...]) -> Iterator[Event]:
    """Yield an event from the end of each launch to the beginning of the wait for it."""
    launched: dict[tuple[str, str], Event] = {}
    for event in events:
        kind, subject = event.kind.split()[0], event.subject
        if event.kind == kind:
            launched[kind, subject] = event
        elif (launch := launched.pop((kind, subject), None)) is not None:
            yield Event(kind, subject, launch.stop_s, event.start_s)


@define(eq=False)
class Clock:
    """Takes the time of ranges: on the host's clock, or by events of a device beside the CPU."""

    device: torch.device
    # Subtracted from each time: seconds by which this host's clock is ahead of rank 0's. On a
    # device, whose events count from `began`, the host's time at `began` is subtracted from it.
    offset_s: float = 0.0
    # A moment: seconds on the CPU, an event on other devices, as in `_found`.
    began: Any = field(init=False)
    _found: list[tuple[str, str, Any, Any]] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
            self.offset_s -= time.monotonic()
        self.began = self._now()

    def __call__(self, kind: str, subject: str) -> AbstractContextManager[None]:
        """Return the context manager that a range runs in."""
        return self._around(kind, subject)

    @contextmanager
    def _around(self, kind: str, subject: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self._found.append((kind, subject, start, self._now()))

    def _now(self) -> Any:
        if self.device.type == "cpu":
            return time.monotonic()
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def pop_ranges(self) -> list[Event]:
        """Return ranges since the last call, some nested, and all that time as "compute".

        Waits for the device, unless that is the CPU.
        """
        began, end, on_host = self.began, self._now(), self.device.type == "cpu"
        if not on_host:
            torch.accelerator.synchronize(self.device)

        def seconds(moment: Any) -> float:
            since = moment if on_host else began.elapsed_time(moment) / 1e3
            return since - self.offset_s

        found = [("compute", "", self.began, end), *self._found]
        self.began, self._found = end, []
        return [Event(kind, of, seconds(start), seconds(stop)) for kind, of, start, stop in found]


def one_at_a_time(events: list[Event]) -> Iterator[Event]:
    """Cut events where another begins inside; they continue when that has ended."""
    # Events that contain the current moment; the innermost is last.
    open_now: list[Event] = []
    now = 0.0
    # A coarse clock of a device may give start and stop the same time.
    events = [event for event in events if event.seconds > 0]
    edges = [(e.start_s, 1, -e.stop_s, e) for e in events] + [(e.stop_s, 0, 0.0, e) for e in events]
    for moment, begins, _, event in sorted(edges, key=lambda edge: edge[:3]):
        if open_now and moment > now:
            yield Event(open_now[-1].kind, open_now[-1].subject, now, moment)
        now = moment
        if begins:
            open_now.append(event)
        else:
            open_now.remove(event)


@collective
@contextmanager
def timeline(model: nn.Module) -> Iterator[Timeline]:
    """Record the actions of each rank inside the context, such as a few training steps. Collective.

        with zero_engine.timeline(model) as recorded:
            train(3)
        print(recorded.summary())
        recorded.save("run.json")
        recorded.plot("run.png")

    Events are gathers, reductions, waits for them, and the optimizer's step, of every sharded model
    of the process. All time between is compute, except an engine's forward and backward, which are
    events, too. On CUDA these are times of the device's stream. Recording an event costs a few
    microseconds.

    Args:
        model: The very module that `shard` returned.

    Yields:
        A Timeline, which has all ranks' events when the context has ended.

    Raises:
        zero_partition.StateError: Not sharded.
        zero_comm.CommError: A rank did not take part in time.
    """
    group = require_sharded(model).whole
    clock, recorded = Clock(group.device, _offset_of(group)), Timeline()
    ranges.start(clock)
    try:
        yield recorded
    finally:
        ranges.stop(clock)
    events = one_at_a_time(clock.pop_ranges())
    every = all_gather_json([astuple(event) for event in events], group=group)
    first_s = min(events[0][2] for events in every)
    recorded.ranks = tuple(
        tuple(Event(kind, of, start - first_s, stop - first_s) for kind, of, start, stop in events)
        for events in every
    )


def _offset_of(group: Group) -> float:
    """Return the seconds by which this rank's clock is ahead of rank 0's; 0 on one host."""
    hosts = all_gather_json(Path("/proc/sys/kernel/random/boot_id").read_text(), group=group)
    if hosts.count(hosts[0]) == len(hosts):
        return 0.0
    found = []
    for _ in range(_NUM_MEETINGS):
        # Ranks leave this call at nearly the same moment, so they read their clocks together.
        all_gather_json(None, group=group)
        moments = all_gather_json(time.monotonic(), group=group)
        found.append(moments[group.rank] - moments[0])
    return sorted(found)[_NUM_MEETINGS // 2]
