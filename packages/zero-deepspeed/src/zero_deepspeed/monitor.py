"""Monitors of a training that DeepSpeed's file asks for, by DeepSpeed's names."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, final

from attrs import field, frozen
from torch import Tensor, nn
from zero_comm import ranges
from zero_engine import ConfigError, report
from zero_engine.engine import AbstractMonitor
from zero_engine.observe.metrics import Row, append_row, metrics, open_writer
from zero_partition import memory_report

from .configuration.keys import KEYS

# Key -> package that it needs, which may not be installed.
_PACKAGES: Final = {
    "tensorboard.enabled": "torch.utils.tensorboard",
    "wandb.enabled": "wandb",
    "comms_logger.enabled": "tabulate",
    "flops_profiler.enabled": "tabulate",
}
# Timer of DeepSpeed -> range of ours. A reduction takes as long as something waits for it.
_TIMERS: Final = {
    "forward": "forward",
    "backward": "backward",
    "backward_allreduce": "reduce",
    "step": "optimizer",
}


@final
@frozen
class Monitoring:
    """Makes the monitor that a file asks for, when called with the engine's model.

    Args:
        asked: By path, as in `{"csv_monitor.enabled": True, "csv_monitor.output_path": "logs"}`.
    """

    asked: dict[str, Any] = field(converter=dict, hash=False)

    def check_packages(self) -> None:
        """Raise ConfigError for a package that is missing. Every rank calls it; one writes."""
        for key, module in _PACKAGES.items():
            table = key.replace("enabled", "detailed")
            if not self.asked.get(key) or self.asked.get(table) is False:
                continue
            try:
                import_module(module)
            except ImportError as error:
                name = module.rpartition(".")[2]
                raise ConfigError(
                    f"{key}: expected the package {name}: pip install {name}"
                ) from error

    def __call__(self, model: nn.Module) -> Monitor:
        """Make the monitor, and open the files and services it writes to. Local."""
        return Monitor(self.asked, model)

    def __str__(self) -> str:
        return ", ".join(self.asked)


@final
class Monitor(AbstractMonitor):
    """Writes and prints what its rank sees of an engine's steps. Local."""

    def __init__(self, asked: Mapping[str, Any], model: nn.Module) -> None:
        known = {path: key.default for path, key in KEYS.items() if key.becomes == "monitoring"}
        self._said = said = {**known, **asked}
        self._model = model
        # Losses of the micro-batches of this step, each with the engine's count of samples then.
        self._losses: list[tuple[int, Tensor]] = []
        self._stack, self._writers = ExitStack(), []
        # "forward", "backward" -> flops of the last one.
        self._counters: dict[str, Any] = {}
        self._counting = self._stack.enter_context(ExitStack())
        for name in ("csv_monitor", "tensorboard"):
            if said[f"{name}.enabled"]:
                folder = Path(said[f"{name}.output_path"], said[f"{name}.job_name"])
                to = partial(_append_rows, folder) if name == "csv_monitor" else folder
                self._writers.append(open_writer(to, self._stack))
        if said["wandb.enabled"]:
            project, group, team = (said[f"wandb.{name}"] for name in ("project", "group", "team"))
            run = import_module("wandb").init(project=project, group=group, entity=team)
            self._writers.append(run.log)
        self._end_step = None
        if said["wall_clock_breakdown"] or said["flops_profiler.enabled"]:
            self._end_step = self._stack.enter_context(metrics(model))
        self._count_flops_after(0)

    def note_loss(self, num_samples: int, loss: Tensor) -> None:
        """Keep the loss of one micro-batch of this step."""
        self._losses.append((num_samples, loss))

    def forget(self) -> None:
        """Drop the losses that were noted since the last step."""
        self._losses = []

    def close(self) -> None:
        """Close what it writes to."""
        self._stack.close()

    def step(self, num_steps: int, num_samples: int, values: Row) -> None:
        """End a step: write its values, with its number and the count of samples up to its end."""
        losses, self._losses = self._losses, []
        if losses:
            self._write({"train_loss": float(sum(loss for _, loss in losses))}, losses[0][0])
        self._write(values, num_samples)
        if self._end_step is not None:
            row = self._end_step()
            ms = {timer: 1e3 * row.get(f"time/{of}_s", 0.0) for timer, of in _TIMERS.items()}
            ms["backward_inner"] = max(ms["backward"] - ms["backward_allreduce"], 0.0)
            self._write(
                {f"elapsed_time_ms_{timer}": value for timer, value in ms.items()}, num_samples
            )
            print("time (ms)", *(f"{timer}: {value:.2f}" for timer, value in ms.items()), sep=" | ")
        if self._said["memory_breakdown"]:
            print(memory_report(self._model))
        if self._said["comms_logger.enabled"]:
            print(report(self._model))
        if self._count in ranges.recorders:
            self._counting.close()
            self._tell_flops(num_steps)
        self._count_flops_after(num_steps)

    def _write(self, row: Row, num_samples: int) -> None:
        for write in self._writers:
            write({f"Train/Samples/{name}": value for name, value in row.items()}, num_samples)

    def _count_flops_after(self, num_steps: int) -> None:
        is_next = num_steps == self._said["flops_profiler.profile_step"]
        if is_next and self._said["flops_profiler.enabled"]:
            ranges.start(self._count)
            self._counting.callback(ranges.stop, self._count)

    def _count(self, kind: str, _: str) -> AbstractContextManager[Any]:
        if kind not in {"forward", "backward"}:
            return nullcontext()
        from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415 (it logs a warning)

        return self._counters.setdefault(kind, FlopCounterMode(display=False))

    def _tell_flops(self, num_steps: int) -> None:
        depth, is_detailed, file = (
            self._said[f"flops_profiler.{name}"]
            for name in ("module_depth", "detailed", "output_file")
        )
        found = (f"{kind} {each.get_total_flops():,}" for kind, each in self._counters.items())
        text = f"flops of a micro-batch of one rank in step {num_steps}: {', '.join(found)}"
        if is_detailed and "forward" in self._counters:
            table = self._counters["forward"].get_table(sys.maxsize if depth < 0 else depth + 1)
            text = f"{text}\n{table}"
        if file is None:
            print(text)
        else:
            Path(file).write_text(f"{text}\n")


def _append_rows(folder: Path, row: Row, num_samples: int) -> None:
    for tag, value in row.items():
        file = folder / f"{tag.replace('/', '_')}.csv"
        append_row(file, {tag.rpartition("/")[2]: value}, num_samples)
