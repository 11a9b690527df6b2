"""Times that checkpointed calls take, by layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import local
from typing import Any, Final, Literal, final

import torch
from attrs import asdict, define, evolve, field, frozen
from torch import Tensor

from .errors import CheckpointError
from .frame import AbstractCompanion

# Number of pending measurements above which those that are over are added up.
_MAX_PENDING: Final = 1024


# Fields of `Timing`, by which a measurement says what the time was spent on.
Part = Literal["forward_s", "recompute_s", "gather_s", "copy_s"]


@final
@frozen
class Timing:
    """Seconds that one layer took, in all its calls since the profile began.

    Times of a function include the calls inside of it: an inner checkpoint's forward counts for
    both. Calls inside a recomputation count as that recomputation only. Keeping and restoring
    inputs is separate: `gather_s` for messages between ranks, `copy_s` for all else that a saver
    does.
    """

    layer: str
    num_calls: int
    num_recomputations: int
    forward_s: float
    recompute_s: float
    gather_s: float
    copy_s: float


# Seconds of the host's clock (a float), or an event of a stream, which the host does not wait for.
_Moment = Any


@define(eq=False)
class _TimeSpan:
    layer: str
    part: Part
    start: _Moment
    end: _Moment = None
    inner: list[_TimeSpan] = field(factory=list)

    def is_over(self) -> bool:
        return self.end.query() if isinstance(self.end, torch.Event) else self.end is not None

    def whole_s(self) -> float:
        if not isinstance(self.end, torch.Event):
            return self.end - self.start
        self.end.synchronize()
        return self.start.elapsed_time(self.end) / 1000

    def own_s(self) -> float:
        """Return the seconds to count: those of `copy_s` without the spans inside.

        Restoring inputs may gather them, or recompute an outer layer, which have spans of their
        own.
        """
        inner_s = sum(span.whole_s() for span in self.inner) if self.part == "copy_s" else 0.0
        return self.whole_s() - inner_s


@final
class Profile:
    """Measured times of all layers. Waits for no device before `timings` adds them up."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        # `spans` is the stack of spans that a thread is in, innermost last.
        self._open = local()
        self._pending: list[_TimeSpan] = []
        self._timings: dict[str, Timing] = {}

    @contextmanager
    def measure(self, layer: str, part: Part, device: torch.device | None) -> Iterator[None]:
        """Measure the time inside, on the host (None) or on a device's current stream."""
        stack: list[_TimeSpan] = self._open.__dict__.setdefault("spans", [])
        span = _TimeSpan(layer, part, self._moment(device))
        stack.append(span)
        try:
            yield
        finally:
            stack.pop()
            span.end = self._moment(device)
            if stack and stack[-1].part == "copy_s":
                stack[-1].inner.append(span)
            self._pending.append(span)
            if len(self._pending) > _MAX_PENDING:
                self._add_up([span for span in self._pending if span.is_over()])

    def timings(self) -> list[Timing]:
        """Return the timings by layer, in the order of first calls. Waits for the devices."""
        self._add_up(self._pending)
        return list(self._timings.values())

    def _moment(self, device: torch.device | None) -> _Moment:
        if device is None:
            return self._now_s()
        event = torch.Event(device, enable_timing=True)
        event.record(torch.accelerator.current_stream(device))
        return event

    def _add_up(self, spans: Sequence[_TimeSpan]) -> None:
        over = set(map(id, spans))
        self._pending = [span for span in self._pending if id(span) not in over]
        for span in spans:
            timing = self._timings.get(span.layer) or Timing(span.layer, 0, 0, 0.0, 0.0, 0.0, 0.0)
            more: dict[str, Any] = {span.part: getattr(timing, span.part) + span.own_s()}
            if span.part == "forward_s":
                more["num_calls"] = timing.num_calls + 1
            elif span.part == "recompute_s":
                more["num_recomputations"] = timing.num_recomputations + 1
            self._timings[span.layer] = evolve(timing, **more)


@final
@frozen(eq=False)
class Timed(AbstractCompanion):
    """Measurement of both runs of a call, and of keeping and restoring its inputs."""

    _profile: Profile
    _layer: str
    _device: torch.device | None

    @classmethod
    def of(cls, profile: Profile, layer: str, inputs: Sequence[Tensor]) -> Timed:
        """Return a measurement on the accelerator that inputs are on, or else on the host."""
        devices = [tensor.device for tensor in inputs if tensor.device.type not in ("cpu", "meta")]
        return cls(profile, layer, devices[0] if devices else None)

    def measure(self, part: Part) -> AbstractContextManager[None]:
        """Return a context that measures the time inside as `part`."""
        return self._profile.measure(self._layer, part, self._device)

    def forward(self) -> AbstractContextManager[Any]:
        """Return a context that measures the first run."""
        return self.measure("forward_s")

    def recompute(self) -> AbstractContextManager[Any]:
        """Return a context that measures a later run."""
        return self.measure("recompute_s")


def table_of(timings: Sequence[Timing]) -> str:
    """Return the timings as text, one line per layer; CheckpointError without tabulate."""
    try:
        from tabulate import tabulate  # noqa: PLC0415
    except ImportError as error:
        raise CheckpointError(
            "profile_table(): expected tabulate to be installed, which it is not; "
            "pip install tabulate, or use timings()"
        ) from error
    headers = ["layer", "calls", "again", "forward s", "recompute s", "gather s", "copy s"]
    rows = [list(asdict(timing).values()) for timing in timings]
    return tabulate(rows, headers=headers, floatfmt=".6f")
