"""metrics(): numbers of each training step, as a dict, to CSV files, TensorBoard and wandb."""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

import attrs
from torch import Tensor, nn
from zero_comm import all_gather_json, ranges, record_traffic
from zero_partition import StateError, memory_report
from zero_partition.seams import require_sharded

from zero_engine.errors import ConfigError, FileError

from .timeline import Clock, Event, one_at_a_time

Row: TypeAlias = Mapping[str, float]


@contextmanager
def metrics(
    model: nn.Module, *, to: Sequence[Any] = (), mean: bool = False
) -> Iterator[Callable[..., dict[str, float]]]:
    """Measure training steps: a call of the yielded function ends a step and returns a row. Local.

        with zero_engine.metrics(model, to=["run.csv", "runs/board", wandb_run.log]) as end_step:
            for x in loader:
                loss = train_step(x)
                row = end_step(loss=loss, samples=len(x))

    A row has numbers of this rank since the row before. Times are in seconds: `time/step_s` is the
    sum of compute, optimizer, swap and exposed, which is launching gathers, reductions and
    publishing, and waiting for them. Bytes are those sent inside the node and across nodes, those
    of memory at the end of the step (as in `memory_report`), and those read from and written to
    disk per second by the process, where Linux counts them. Arguments of the call are in the row:
    `samples` and `tokens` per second, others (loss, grad_norm, loss_scale) as they are. On CUDA a
    row waits for the device.

    Args:
        model: The very module that `shard` returned.
        to: Where rank 0 writes rows: paths that end in .csv, other paths as folders of TensorBoard,
            and functions of a row and the number of its step.
        mean: Rows have the means over all ranks. Every rank must pass it, and the call that ends a
            step is then collective.

    Raises:
        zero_partition.StateError: Not sharded; or a row is asked for when the context has ended.
        ConfigError: TensorBoard is not installed; or a CSV file has other columns.
        FileError: A CSV file cannot be written.
    """
    group, num_steps, disk = require_sharded(model).whole, 0, _disk_bytes()

    def end_step(**values: float | Tensor) -> dict[str, float]:
        nonlocal num_steps, disk
        if clock not in ranges.recorders:
            raise StateError("the context of metrics() has ended: it measures no further step")
        row = _times(clock.pop_ranges())
        step_s, before, disk = row["time/step_s"], disk, _disk_bytes()
        row["sent/inside_bytes"] = traffic.inside().num_bytes
        row["sent/across_bytes"] = traffic.across().num_bytes
        traffic.counted.clear()
        memory = attrs.asdict(memory_report(model)).items()
        row |= {f"memory/{kind}": held for kind, held in memory if kind.endswith("_bytes")}
        row |= {f"disk/{kind}_per_s": (disk[kind] - before[kind]) / step_s for kind in disk}
        for name, value in values.items():
            number = float(value.detach() if isinstance(value, Tensor) else value)
            is_count = name in {"samples", "tokens"}
            row[f"{name}_per_s" if is_count else name] = number / step_s if is_count else number
        if mean:
            rows = all_gather_json(row, group=group)
            row = {name: fmean(each[name] for each in rows if name in each) for name in row}
        num_steps += 1
        for write in writers:
            write(row, num_steps)
        return row

    with ExitStack() as stack:
        writers = [open_writer(target, stack) for target in to if group.rank == 0]
        traffic, clock = stack.enter_context(record_traffic(group)), Clock(group.device)
        ranges.start(clock)
        stack.callback(ranges.stop, clock)
        yield end_step


def _times(taken: list[Event]) -> dict[str, float]:
    whole, alone = defaultdict[str, float](float), defaultdict[str, float](float)
    for event in taken:
        whole[event.kind] += event.seconds
    for event in one_at_a_time(taken):
        alone[event.kind.split()[0]] += event.seconds
    exposed = {f"time/{kind}_s": alone[kind] for kind in ("gather", "reduce", "publish")}
    calls = {f"time/{kind}_s": whole[kind] for kind in ("forward", "backward") if kind in whole}
    return {
        "time/step_s": whole["compute"],
        "time/compute_s": alone["compute"] + alone["forward"] + alone["backward"],
        "time/optimizer_s": alone["step"],
        "time/swap_s": alone["swap_in"] + alone["swap_out"],
        "time/exposed_s": sum(exposed.values()),
        **exposed,
        # Calls of an engine, with the gathers and reductions inside them.
        **calls,
    }


def _disk_bytes() -> dict[str, int]:
    """Return bytes of disk read and written by this process; {} where a container hides them."""
    with suppress(OSError):
        counts = [line.split(": ") for line in Path("/proc/self/io").read_text().splitlines()]
        return {kind: int(count) for kind, count in counts if kind in {"read_bytes", "write_bytes"}}
    return {}


def open_writer(target: Any, stack: ExitStack) -> Callable[[Row, int], Any]:
    """Return a function that writes a row, with the number of its step, to `target`. Local.

    It writes until `stack` is closed.
    """
    if callable(target):
        return target
    if not isinstance(target, str | os.PathLike):
        raise ConfigError(f"metrics(): expected to= of paths and functions, got {target!r}")
    if Path(target).suffix == ".csv":
        return partial(append_row, Path(target))
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (an extra)
    except ImportError as error:
        raise ConfigError(
            f"{target}: expected TensorBoard, which is not installed: pip install tensorboard"
        ) from error
    board = stack.enter_context(SummaryWriter(target))

    def write(row: Row, step: int) -> None:
        for name, value in row.items():
            board.add_scalar(name, value, step)
        board.flush()

    return write


def append_row(path: Path, row: Row, step: int) -> None:
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
