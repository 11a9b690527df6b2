"""Reports as tables to print."""

from __future__ import annotations

import attrs
from tabulate import tabulate
from torch import nn
from zero_partition import schedule_report


def schedule_table(model: nn.Module) -> str:
    """When each unit of a model sharded at stage 3 is whole: one line for each gather. Local.

    Of the last training step, or the last evaluation where nothing was trained yet; from the second
    forward on. The values behind it are `zero_partition.schedule_report(model)`.

    Raises:
        zero_partition.StateError: Not sharded.
    """
    report = schedule_report(model)
    rows = [attrs.astuple(row) for row in report.rows]
    table = tabulate(rows, headers=["unit", "bytes", "slot", "gathered", "used", "released"])
    return (
        f"{table}\n\nat most {report.peak_live_numel:,} elements whole at once; "
        f"slots of {report.slots_bytes:,} bytes"
    )
