"""Monitor: what DeepSpeed's file asks to see of a training, by DeepSpeed's names."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn
from zero_comm import ranges
from zero_partition import memory_report

from zero_engine.deepspeed_file.keys import KEYS
from zero_engine.errors import ConfigError
from zero_engine.observe.metrics import Row, append_row, metrics, open_writer
from zero_engine.reports import report


@final
class Monitor:
    """Writes and prints what its rank sees of an engine's steps. Local."""

    def __init__(self, asked: Mapping[str, Any], model: nn.Module) -> None:
        known = {path: key.default for path, key in KEYS.items() if key.becomes == "monitoring"}
        self._said = said = {**known, **asked}
        self._model, self._stack = model, ExitStack()
        self._losses: list[Tensor] = []  # of the step at hand
        self._num_before = 0  # samples before it
        self._counted: list[tuple[str, Any]] = []  # its forwards and backwards
        self._writers = []
        for name in ("csv_monitor", "tensorboard"):
            folder = Path(said[f"{name}.output_path"], said[f"{name}.job_name"])
            to = partial(_append_rows, folder) if name == "csv_monitor" else folder
            if said[f"{name}.enabled"]:
                self._writers.append(open_writer(to, self._stack))
        if said["wandb.enabled"]:
            self._writers.append(_wandb_run(said).log)
        self._end_step = None
        if said["wall_clock_breakdown"] or said["flops_profiler.enabled"]:
            self._end_step = self._stack.enter_context(metrics(model))
        self._count_flops_after(0)

    def close(self) -> None:
        """Measure no more, and close files."""
        if self._count in ranges.recorders:
            ranges.stop(self._count)
        self._stack.close()

    def note_loss(self, loss: Tensor, num_before: int) -> None:
        """Of a micro-batch, divided by their number; and how many samples came before its step."""
        self._losses.append(loss.detach().mean())
        self._num_before = num_before

    def step(self, num_steps: int, num_samples: int, values: Row) -> None:
        """End a step: its number, samples up to its end, and what is to be written of it."""
        losses, self._losses = self._losses, []
        if losses:
            self._write({"train_loss": float(sum(losses))}, self._num_before)
        self._write(values, num_samples)
        if self._end_step is not None:
            times = _times_ms(self._end_step())
            self._write({f"elapsed_time_ms_{call}": ms for call, ms in times.items()}, num_samples)
            print("time (ms)", *(f"{call}: {ms:.2f}" for call, ms in times.items()), sep=" | ")
        if self._said["memory_breakdown"]:
            print(memory_report(self._model))
        if self._said["comms_logger.enabled"]:
            print(report(self._model))
        if self._count in ranges.recorders:
            ranges.stop(self._count)
            self._tell_flops(num_steps)
        self._count_flops_after(num_steps)

    def _write(self, row: Row, num_samples: int) -> None:
        for write in self._writers:
            write({f"Train/Samples/{name}": value for name, value in row.items()}, num_samples)

    def _count_flops_after(self, num_steps: int) -> None:
        is_next = num_steps == self._said["flops_profiler.profile_step"]
        if is_next and self._said["flops_profiler.enabled"]:
            ranges.start(self._count)

    def _count(self, kind: str, _: str) -> AbstractContextManager[Any]:
        if kind not in {"forward", "backward"}:
            return nullcontext()
        from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415 (it logs a warning)

        self._counted.append((kind, FlopCounterMode(display=False)))
        return self._counted[-1][1]

    def _tell_flops(self, num_steps: int) -> None:
        flops = {"forward": Counter[str](), "backward": Counter[str]()}  # by module
        for kind, counter in self._counted:
            for module, operators in counter.get_flop_counts().items():
                flops[kind][module] += sum(operators.values())
        all_of = ", ".join(f"{kind} {of.pop('Global', 0):,}" for kind, of in flops.items())
        lines, num_shown = [f"flops of one rank in step {num_steps}: {all_of}"], Counter[int]()
        names = ("module_depth", "top_modules", "detailed", "output_file")
        deepest, top, detailed, file = (self._said[f"flops_profiler.{name}"] for name in names)
        for module, count in flops["forward"].most_common():
            depth = module.count(".")
            num_shown[depth] += 1
            if (detailed or num_shown[depth] <= top) and (deepest < 0 or depth <= deepest):
                lines.append(f"{module}: forward {count:,}")
        if file is None:
            print(*lines, sep="\n")
        else:
            Path(file).write_text("\n".join(lines) + "\n")


def _append_rows(folder: Path, row: Row, num_samples: int) -> None:
    for tag, value in row.items():
        file = folder / f"{tag.replace('/', '_')}.csv"
        append_row(file, {tag.rpartition("/")[2]: value}, num_samples)


def _wandb_run(said: Mapping[str, Any]) -> Any:
    try:
        wandb = import_module("wandb")
    except ImportError as error:
        raise ConfigError("wandb: expected its package, got none: pip install wandb") from error
    project, group, team = (said[f"wandb.{name}"] for name in ("project", "group", "team"))
    return wandb.init(project=project, group=group, entity=team)


def _times_ms(row: Row) -> dict[str, float]:
    """By the names of DeepSpeed's timers; a reduction takes as long as something waits for it."""
    seconds = defaultdict[str, float](float, row)
    backward, reduce = seconds["time/backward_s"], seconds["time/reduce_s"]
    found = {
        "forward": seconds["time/forward_s"],
        "backward": backward,
        "backward_inner": max(backward - reduce, 0.0),
        "backward_allreduce": reduce,
        "step": seconds["time/optimizer_s"] + seconds["time/publish_s"],
    }
    return {call: 1e3 * each for call, each in found.items()}
