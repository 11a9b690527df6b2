"""metrics(): numbers of each training step, as a dict, to CSV files, TensorBoard and wandb."""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias, final

import attrs
import torch
from attrs import define, field
from torch import Tensor, nn
from zero_comm import Group, Traffic, all_gather_json, ranges, record_traffic
from zero_partition import StateError, memory_report
from zero_partition.seams import require_sharded

from zero_engine.errors import ConfigError, FileError

from .timeline import Clock, Event, one_at_a_time

Writer: TypeAlias = Callable[[Mapping[str, float], int], None]  # of a row, and of which step


def _disk_bytes() -> dict[str, int]:
    """Of this process so far, as Linux counts them; some containers do not tell."""
    with suppress(OSError):
        lines = Path("/proc/self/io").read_text().splitlines()
        counts = dict(line.split(": ") for line in lines)
        return {kind: int(counts[kind]) for kind in ("read_bytes", "write_bytes")}
    return {}


@final
@define(eq=False)
class Metrics:
    """What `metrics` yields."""

    _model: nn.Module
    _group: Group
    _clock: Clock
    _traffic: Traffic
    _writers: list[Writer]
    _mean: bool
    _num_steps: int = field(default=0, init=False)
    _disk: dict[str, int] = field(factory=_disk_bytes, init=False)

    def step(
        self, *, samples: float | None = None, tokens: float | None = None, **values: float | Tensor
    ) -> dict[str, float]:
        """End a step. Returns its row, which rank 0 writes. Local, but collective with `mean`.

        Args:
            samples: The row has them per second. Whether this rank's or all ranks' is yours to say.
            tokens: Likewise.
            values: For the row as they are: loss, grad_norm, loss_scale. A tensor has one element.

        Raises:
            zero_partition.StateError: The context has ended.
            ConfigError: A CSV file has other columns.
            FileError: It cannot be written.
        """
        if self._clock not in ranges.recorders:
            raise StateError("Metrics.step(): the context that metrics() opened has ended")
        row = _times(self._clock.take())
        for name, count in (("samples_per_s", samples), ("tokens_per_s", tokens)):
            if count is not None:
                row[name] = count / row["time/step_s"]
        row["sent/inside_bytes"] = self._traffic.inside().num_bytes
        row["sent/across_bytes"] = self._traffic.across().num_bytes
        self._traffic.counted.clear()
        memory = attrs.asdict(memory_report(self._model)).items()
        row |= {f"memory/{kind}": held for kind, held in memory if kind.endswith("_bytes")}
        if self._group.device.type == "cuda":
            row["memory/peak_bytes"] = torch.cuda.max_memory_allocated(self._group.device)
        before, self._disk = self._disk, _disk_bytes()
        for kind, count in before.items():
            row[f"disk/{kind}_per_s"] = (self._disk[kind] - count) / row["time/step_s"]
        row |= {name: float(value) for name, value in values.items()}
        if self._mean:
            rows = all_gather_json(row, group=self._group)
            row = {name: fmean(each[name] for each in rows if name in each) for name in row}
        self._num_steps += 1
        for write in self._writers if self._group.rank == 0 else ():
            write(row, self._num_steps)
        return row


def _times(taken: list[Event]) -> dict[str, float]:
    whole, alone = defaultdict[str, float](float), defaultdict[str, float](float)
    for event in taken:
        whole[event.kind] += event.seconds
    for event in one_at_a_time(taken):
        alone[event.kind.split()[0]] += event.seconds
    exposed = {f"time/{kind}_s": alone[kind] for kind in ("gather", "reduce", "publish")}
    return {
        "time/step_s": whole["compute"],
        "time/compute_s": alone["compute"] + alone["forward"] + alone["backward"],
        "time/optimizer_s": alone["step"],
        "time/swap_s": alone["swap_in"] + alone["swap_out"],
        "time/exposed_s": sum(exposed.values()),
        **exposed,
        **{f"time/{kind}_s": whole[kind] for kind in ("forward", "backward") if kind in whole},
    }


@contextmanager
def metrics(model: nn.Module, *, to: Sequence[Any] = (), mean: bool = False) -> Iterator[Metrics]:
    """Measure each training step inside the context. Local.

        with zero_engine.metrics(model, to=["run.csv", "runs/board"]) as measured:
            for x in loader:
                loss = train_step(x)
                row = measured.step(loss=loss, samples=len(x))

    A row has what this rank did since the one before: seconds (`time/step_s`, the sum of compute,
    optimizer, swap and exposed: what it launched of gathers, reductions and publishing, and waited
    for; of an `Engine` also all of forward and backward), bytes that it sent on the model's group
    (`sent/`), bytes that rest now (`memory/`, of `memory_report`), and bytes that the process read
    and wrote on disk (`disk/`). On CUDA each row waits for the device, whose times these are.

    Args:
        model: The very module that `shard` returned.
        to: Where rank 0 writes rows: a path that ends in .csv, another path as a folder for
            TensorBoard, a SummaryWriter, a run of wandb.
        mean: Rows have means over the ranks, and every rank calls `Metrics.step`.

    Raises:
        zero_partition.StateError: Not sharded.
        ConfigError: `to` has something else, or TensorBoard is not installed.
    """
    group = require_sharded(model).whole
    with ExitStack() as stack:
        writers = [open_writer(target, stack) for target in to]
        traffic, clock = stack.enter_context(record_traffic(group)), Clock(group.device)
        ranges.start(clock)
        stack.callback(ranges.stop, clock)
        yield Metrics(model, group, clock, traffic, writers, mean)


def open_writer(target: Any, stack: ExitStack) -> Writer:
    """What writes rows there. A file is opened for the first of them; `stack` closes it. Local."""
    if isinstance(target, str | os.PathLike):
        if Path(target).suffix == ".csv":
            return partial(append_row, Path(target))
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (an extra)
        except ImportError as error:
            raise ConfigError(
                f"{target}: TensorBoard is not installed: pip install 'zero-engine[tensorboard]', "
                "or let the path end in .csv"
            ) from error
        return partial(_add_scalars, cache(lambda: stack.enter_context(SummaryWriter(target))))
    if hasattr(target, "add_scalar"):
        return partial(_add_scalars, lambda: target)
    if hasattr(target, "log"):
        return lambda row, step: target.log(dict(row), step=step)
    raise ConfigError(f"expected a path, a SummaryWriter or a run of wandb, got {target!r}")


def _add_scalars(find: Callable[[], Any], row: Mapping[str, float], step: int) -> None:
    for name, value in row.items():
        find().add_scalar(name, value, step)
    find().flush()


def append_row(path: Path, row: Mapping[str, float], step: int) -> None:
    """Write a line at the end of a CSV file; before the first, one with the names. Local."""
    lines = [["step", *row], [step, *row.values()]]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+", newline="") as file:
            file.seek(0)
            names = next(csv.reader([file.readline()]), None)
            if names and names != lines[0]:
                raise ConfigError(f"{path}: expected columns {lines[0]}, got {names}; move it away")
            csv.writer(file).writerows(lines[1:] if names else lines)
    except OSError as error:
        raise FileError(f"{path}: cannot be written ({error.strerror})") from error
