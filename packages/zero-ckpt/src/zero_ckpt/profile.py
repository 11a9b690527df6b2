"""Where the time of checkpointed calls goes, by layer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from threading import local
from typing import Any, Final, final

import torch
from attrs import asdict, define, field, frozen
from torch import Tensor

from zero_ckpt.inputs.savers import AbstractKept

from .errors import CheckpointError
from .frame import AbstractCompanion

_MAX_PENDING: Final = 1024  # measurements, before those that are over are added up


class Part(Enum):
    """What time is spent on."""

    FORWARD = "forward_s"
    RECOMPUTE = "recompute_s"
    GATHER = "gather_s"
    COPY = "copy_s"


@final
@frozen
class Timing:
    """Seconds that one layer took, in all its calls since the profile began.

    Times of functions hold what was called inside of them: an inner checkpoint's forward counts for
    both. What runs inside a recomputation counts as that recomputation only. Keeping and restoring
    inputs is apart: `gather_s` of messages between ranks, `copy_s` of all else that a saver does.
    """

    layer: str
    num_calls: int
    num_recomputations: int
    forward_s: float
    recompute_s: float
    gather_s: float
    copy_s: float


class _Moment(ABC):
    @abstractmethod
    def has_passed(self) -> bool: ...

    @abstractmethod
    def seconds_until(self, end: Any) -> float: ...


@frozen
class _HostMoment(_Moment):
    at_s: float

    def has_passed(self) -> bool:
        return True

    def seconds_until(self, end: _HostMoment) -> float:
        return end.at_s - self.at_s


@frozen(eq=False)
class _DeviceMoment(_Moment):
    """A moment of the current stream, which the host need not wait for."""

    event: torch.Event

    @classmethod
    def now(cls, device: torch.device) -> _DeviceMoment:
        event = torch.Event(device, enable_timing=True)
        event.record(torch.accelerator.current_stream(device))
        return cls(event)

    def has_passed(self) -> bool:
        return self.event.query()

    def seconds_until(self, end: _DeviceMoment) -> float:
        end.event.synchronize()
        return self.event.elapsed_time(end.event) / 1000


@define(eq=False)
class _Span:
    layer: str
    part: Part
    start: _Moment
    end: _Moment | None = None
    inner: list[_Span] = field(factory=list)

    def is_over(self) -> bool:
        return self.end is not None and self.end.has_passed()

    def whole_s(self) -> float:
        return self.start.seconds_until(self.end)

    def own_s(self) -> float:
        """What is to be counted: restoring inputs may gather them, or compute an outer layer."""
        inner_s = sum(span.whole_s() for span in self.inner) if self.part is Part.COPY else 0.0
        return self.whole_s() - inner_s


@final
class Profile:
    """Measures, and adds up when it is asked. Waits for no device before that.

    Args:
        now_s: The host's clock.
    """

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self._open = local()  # the spans that a thread is in
        self._pending: list[_Span] = []
        self._sums: dict[str, dict[Part, float]] = {}
        self._counts: dict[str, dict[Part, int]] = {}

    @contextmanager
    def measure(self, layer: str, part: Part, device: torch.device | None) -> Iterator[None]:
        """What happens inside, on the host (None) or on a device's current stream."""
        stack: list[_Span] = self._open.__dict__.setdefault("spans", [])
        span = _Span(layer, part, self._moment(device))
        stack.append(span)
        try:
            yield
        finally:
            stack.pop()
            span.end = self._moment(device)
            if stack and stack[-1].part is Part.COPY:
                stack[-1].inner.append(span)
            self._pending.append(span)
            if len(self._pending) > _MAX_PENDING:
                self._add_up([span for span in self._pending if span.is_over()])

    def timings(self) -> list[Timing]:
        """By layer, in the order of first calls. Waits for the devices."""
        self._add_up(self._pending)
        return [
            Timing(
                layer=layer,
                num_calls=self._counts[layer][Part.FORWARD],
                num_recomputations=self._counts[layer][Part.RECOMPUTE],
                **{part.value: seconds for part, seconds in sums.items()},
            )
            for layer, sums in self._sums.items()
        ]

    def _moment(self, device: torch.device | None) -> _Moment:
        return _HostMoment(self._now_s()) if device is None else _DeviceMoment.now(device)

    def _add_up(self, spans: Sequence[_Span]) -> None:
        over = set(map(id, spans))
        self._pending = [span for span in self._pending if id(span) not in over]
        for span in spans:
            sums = self._sums.setdefault(span.layer, dict.fromkeys(Part, 0.0))
            counts = self._counts.setdefault(span.layer, dict.fromkeys(Part, 0))
            sums[span.part] += span.own_s()
            counts[span.part] += 1


@final
@frozen(eq=False)
class Timed(AbstractCompanion):
    """Measures both runs of a call, and what is kept of its inputs."""

    _profile: Profile
    _layer: str
    _device: torch.device | None

    @classmethod
    def of(cls, profile: Profile, layer: str, inputs: Sequence[Tensor]) -> Timed:
        """On the accelerator that inputs are on, or else on the host."""
        devices = [tensor.device for tensor in inputs if tensor.device.type not in ("cpu", "meta")]
        return cls(profile, layer, devices[0] if devices else None)

    def _measure(self, part: Part) -> AbstractContextManager[None]:
        return self._profile.measure(self._layer, part, self._device)

    def forward(self) -> AbstractContextManager[Any]:
        """The first run."""
        return self._measure(Part.FORWARD)

    def recompute(self) -> AbstractContextManager[Any]:
        """A later one."""
        return self._measure(Part.RECOMPUTE)

    def copying(self) -> AbstractContextManager[Any]:
        """Keeping inputs, restoring them."""
        return self._measure(Part.COPY)

    def gathering(self) -> AbstractContextManager[Any]:
        """Messages between ranks, while inputs are restored."""
        return self._measure(Part.GATHER)


@final
@frozen(eq=False)
class TimedKept(AbstractKept):
    """Measures how long another takes."""

    _kept: AbstractKept
    _timed: Timed

    @classmethod
    def of(cls, kept: AbstractKept, timed: Timed) -> TimedKept:
        """Tells it how to measure its gathers."""
        kept.measures_gathers(timed.gathering)
        return cls(kept, timed)

    def restore(self) -> Sequence[Tensor]:
        """As the other does."""
        with self._timed.copying():
            return self._kept.restore()

    def prefetch(self) -> None:
        """As the other does."""
        with self._timed.copying():
            self._kept.prefetch()


def table_of(timings: Sequence[Timing]) -> str:
    """One line per layer.

    Raises:
        CheckpointError: tabulate is not installed.
    """
    try:
        from tabulate import tabulate  # noqa: PLC0415
    except ImportError as error:
        raise CheckpointError(
            "profile_table(): expected tabulate to be installed, which it is not; "
            "pip install 'zero-ckpt[table]', or use timings()"
        ) from error
    headers = ["layer", "calls", "again", "forward s", "recompute s", "gather s", "copy s"]
    rows = [list(asdict(timing).values()) for timing in timings]
    return tabulate(rows, headers=headers, floatfmt=".6f")
