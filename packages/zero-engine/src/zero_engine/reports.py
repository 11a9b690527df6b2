"""Reports as tables to print, and access to the extras tabulate and matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
from torch import nn
from zero_comm import OperationTraffic, Sent
from zero_partition import schedule_report, traffic_report

from .errors import ConfigError, FileError


def as_table(rows: Sequence[Sequence[Any]], headers: Sequence[str] = (), **options: Any) -> str:
    """Return rows as text in columns, laid out by the package tabulate. Local.

    Raises:
        ConfigError: The package is not installed.
    """
    try:
        from tabulate import tabulate  # noqa: PLC0415 (an extra)
    except ImportError as error:
        raise ConfigError(
            "a table needs tabulate: pip install tabulate, or read the values themselves"
        ) from error
    return tabulate(rows, headers, **options)


def new_figure(width: float, height: float) -> Any:
    """Return a figure of matplotlib's, with width and height in inches. Local.

    Raises:
        ConfigError: The package is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (an extra)
    except ImportError as error:
        raise ConfigError(
            "a picture needs matplotlib: pip install matplotlib, or read the values themselves"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path | str) -> None:
    """Write a figure to a file; the suffix of its name sets the format. Local.

    Raises:
        ConfigError: matplotlib does not know the format.
        FileError: The file cannot be written.
    """
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise FileError(f"{path}: cannot be written ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; use an ending such as .png") from error


def schedule_table(model: nn.Module) -> str:
    """Return a table of when units of a model sharded at stage 3 are gathered and released. Local.

    The table has one line for each gather of the last training step, or of the last evaluation
    where nothing was trained yet. It is known from the second forward on.
    `zero_partition.schedule_report(model)` returns the same values.

    Raises:
        zero_partition.StateError: Not sharded.
    """
    report = schedule_report(model)
    rows = [attrs.astuple(row) for row in report.rows]
    table = as_table(rows, headers=["unit", "bytes", "slot", "gathered", "used", "released"])
    return (
        f"{table}\n\nat most {report.peak_live_numel:,} elements whole at once; "
        f"slots of {report.slots_bytes:,} bytes"
    )


def report(model: nn.Module) -> str:
    """Return tables of the bytes that this rank sent for a model in its last step. Local.

    One table is by operation, one by unit. Bytes sent inside the node are counted apart from those
    sent across to other nodes, as far as nodes are known: from `Wire(levels=...)`, or from the
    hosts that gloo ranks run on. With `Wire(replicas=True)` a reduction is a reduce_scatter inside
    and an all_reduce across. `zero_partition.traffic_report(model)` returns the same values.

    Raises:
        zero_partition.StateError: Not sharded.
    """
    traffic = traffic_report(model)
    headers = ["inside", "across", "of these padding", "scales"]
    operations = [
        [name, operation.calls, *_bytes_of([operation])]
        for name, operation in sorted(traffic.operations.items())
    ]
    every = traffic.operations.values()
    total = ["total", sum(operation.calls for operation in every), *_bytes_of(every)]
    units = [
        [subject or "(no unit)", *_bytes_of(of_subject.values())]
        for subject, of_subject in traffic.subjects.items()
    ]
    by_operation = as_table([*operations, total], headers=["operation", "calls", *headers])
    return f"{by_operation}\n\n{as_table(units, headers=['unit', *headers])}"


def _bytes_of(operations: Iterable[OperationTraffic]) -> list[str]:
    inside, across = Sent(), Sent()
    for operation in operations:
        inside, across = inside + operation.inside, across + operation.across
    both = inside + across
    numbers = (inside.num_bytes, across.num_bytes, both.padding_bytes, both.scale_bytes)
    return [f"{number:,}" for number in numbers]
