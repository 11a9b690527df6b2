"""StopSignals: a job that is told to end saves first, at the same step on every rank."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from types import FrameType
from typing import Any, Final, final

from torch import nn
from zero_comm import all_gather_json
from zero_partition import StateError

from ._errors import ConfigError
from ._writing import sharded_of

_USUAL: Final = (signal.SIGTERM, signal.SIGUSR1)  # of schedulers: Slurm, Kubernetes, spot machines


@final
class StopSignals:
    """Notes signals that ask the job to end, so that it can save between two steps.

        with zero_engine.StopSignals(model) as stop:
            for step in range(...):
                ...
                optimizer.step()
                optimizer.zero_grad()
                if stop.arrived():
                    zero_engine.save(folder, model, optimizer, step=step + 1)
                    break

    Inside the block the signals do nothing else: SIGTERM does not end the process. What was done
    about them before is done again after it.

    Args:
        model: That was sharded: its ranks tell each other.
        signals: Which.

    Raises:
        zero_partition.StateError: The model is not sharded; or, from `with`, this is not the main
            thread, which alone can take signals.
        ConfigError: `signals` are none.
    """

    def __init__(self, model: nn.Module, signals: Iterable[signal.Signals] = _USUAL) -> None:
        self._group = sharded_of(model, None, "StopSignals()").whole
        self._signals = tuple(signals)
        if not self._signals or not all(isinstance(s, signal.Signals) for s in self._signals):
            raise ConfigError(
                "StopSignals.signals: expected some of Python's signal.Signals, such as "
                f"signal.SIGTERM, got {signals!r}"
            )
        self._before: dict[signal.Signals, Any] = {}
        self._noted = ""

    def arrived(self) -> str | None:
        """The name of a signal that some rank has received in this block, or None. Collective.

        The same on every rank: one small message per call.
        """
        said = all_gather_json(self._noted, group=self._group)
        return next((name for name in said if name), None)

    def __enter__(self) -> StopSignals:
        self._noted = ""
        try:
            for each in self._signals:
                self._before[each] = signal.signal(each, self._note)
        except ValueError as error:
            self._put_back()
            raise StateError(f"StopSignals: {error}; enter it in the main thread") from error
        return self

    def __exit__(self, *exception: object) -> None:
        self._put_back()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = signal.Signals(number).name

    def _put_back(self) -> None:
        while self._before:
            each, handler = self._before.popitem()
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
