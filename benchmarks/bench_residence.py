"""One training step with optimizer state and parameters on host or disk, against one without.

`python benchmarks/run.py residence --path /on/the/disk [--model 119m] [--stages 1,3]`

For every stage a heat: the systems of that stage, DDP and the disk by itself take turns, so that
each ratio compares figures of one round. The bound of a step that uses the disk is the larger of
two times of the same round: the step without offload, and the bytes that it moved at the rate at
which the disk alone, read and written at once by as many ranks, moved its own.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from heats import (
    Entry,
    add_options,
    check_options,
    round_ratios,
    run_heat,
    say,
    settings_of,
    table,
)
from model import SHAPES, model_numel
from results import write_results
from systems import SYSTEMS

DISK: Final = "disk"
REFERENCE: Final = "ddp"
RESIDENCES: Final[dict[int, tuple[str, ...]]] = {
    1: ("zero1", "zero1_host", "zero1_disk"),
    2: ("zero2", "zero2_host", "zero2_disk"),
    3: ("zero3", "zero3_host", "zero3_host_all", "zero3_disk", "zero3_disk_all"),
}
PEERS: Final = ("deepspeed3", "deepspeed3_host")
COLUMNS: Final = (
    "system",
    "ms",
    "/ without",
    "rounds",
    "/ DDP",
    "device MB",
    "host MB",
    "disk MB",
    "moved MB",
    "disk GB/s",
    "bound ms",
    "/ bound",
    "rounds",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, print its table, write its file. Returns 1 if a system failed."""
    options = _parse(argv)
    numel = model_numel(SHAPES[options.model])
    settings = settings_of(options) | {"numel": numel, "load_before": os.getloadavg()[0]}
    say(f"{options.model}: {numel:,} parameters, {options.ranks} ranks")
    rows: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    for heat, names in enumerate(_heats(options), start=1):
        entries = [Entry(SYSTEMS[name], heat) for name in names]
        run_heat(entries, options)
        by_name = {entry.system.name: entry for entry in entries}
        # The first of a heat is the one without offload, but for DDP and the disk.
        rows += [_row(entry, without=by_name[names[2]], by_name=by_name) for entry in entries]
        versions |= {k: v for entry in entries for k, v in entry.versions.items()}
    print(table(COLUMNS, [_cells(row) for row in rows], left=(0,)))
    settings |= {"load_after": os.getloadavg()[0]}
    path = write_results(
        "residence", rows, folder=options.folder, settings=settings, versions=versions
    )
    print(f"\nwritten to {path}")
    errors = [row["error"] for row in rows if row["error"]]
    for error in errors:
        say(f"\n{error}")
    return int(bool(errors))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.py residence", description=__doc__)
    add = parser.add_argument
    add_options(parser, rounds=8)
    add("--model", choices=SHAPES, default="25m")
    add("--path", type=Path, required=True, help="a folder on the disk")
    add("--stages", default="1,2,3", help="comma-separated; of each a heat")
    add("--systems", default="", help="only these of the heats; comma-separated")
    add("--subgroup-mib", type=int, default=64, help="optimizer state moved at a time")
    options = parser.parse_args(argv)
    check_options(parser, options)
    try:
        options.stages = [int(stage) for stage in options.stages.split(",") if stage]
        assert set(options.stages) <= RESIDENCES.keys()
    except (AssertionError, ValueError):
        parser.error(f"--stages: expected some of 1,2,3, got {options.stages!r}")
    options.systems = [name for name in options.systems.split(",") if name]
    known = {*itertools.chain(*RESIDENCES.values()), *PEERS}
    if not known.issuperset(options.systems):
        parser.error(f"--systems: expected some of {', '.join(sorted(known))}")
    return options


def _heats(options: argparse.Namespace) -> list[list[str]]:
    """Of each stage, and of the peers if there are any; each led by DDP and the disk."""
    groups: list[tuple[str, ...]] = [RESIDENCES[stage] for stage in options.stages]
    if "deepspeed" in options.pythons:
        groups.append(PEERS)
    return [
        [REFERENCE, DISK, group[0]]
        + [name for name in group[1:] if not options.systems or name in options.systems]
        for group in groups
    ]


def _row(entry: Entry, *, without: Entry, by_name: dict[str, Entry]) -> dict[str, Any]:
    """The figures of one system; those that a failure cost it, or another, are missing."""
    row = entry.figures()
    if entry.error:
        return row
    row["round_disk_bytes"] = entry.round_disk_bytes  # of all ranks
    for kind in ("device_bytes", "host_bytes", "disk_bytes"):  # at rest, the fullest rank
        if kind in entry.reports[0]:
            row[kind] = max(report[kind] for report in entry.reports)
    disk, ddp = by_name[DISK], by_name[REFERENCE]
    if entry is disk:
        row["rate"] = statistics.median(_rates(disk))
        return row
    if not ddp.error:
        row["ratio_to_ddp"] = statistics.median(round_ratios(entry, ddp))
    if not without.error and entry is not ddp:
        ratios = round_ratios(entry, without)
        row["ratio"], row["ratio_range"] = statistics.median(ratios), [min(ratios), max(ratios)]
    if row.get("disk_bytes") and not disk.error and not without.error:
        row |= _against_bound(entry, without=without, disk=disk)
    return row


def _rates(disk: Entry) -> list[float]:
    """Bytes per second of all ranks together, of each round."""
    return [
        1000 * moved / statistics.median(ms)
        for moved, ms in zip(disk.round_disk_bytes, disk.round_ms, strict=True)
    ]


def _against_bound(entry: Entry, *, without: Entry, disk: Entry) -> dict[str, Any]:
    bounds, shares = [], []
    for own, moved, theirs, rate in zip(
        entry.round_ms, entry.round_disk_bytes, without.round_ms, _rates(disk), strict=True
    ):
        bound = max(statistics.median(theirs), 1000 * moved / rate)
        bounds.append(bound)
        # The mean: what a step leaves to the disk, the next one may have to wait for.
        shares.append(statistics.fmean(own) / bound)
    return {
        "moved_bytes": statistics.median(entry.round_disk_bytes) / len(entry.reports),
        "rate": statistics.median(_rates(disk)),
        "bound_ms": statistics.median(bounds),
        "of_bound": statistics.median(shares),
        "of_bound_range": [min(shares), max(shares)],
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if row["error"]:
        failed = "failed: " + row["error"].strip().splitlines()[-1]
        return (f"{row['system']}: {failed}", *("" for _ in COLUMNS[1:]))

    def number(name: str, form: str, unit: float = 1.0) -> str:
        return format(row[name] / unit, form) if name in row else ""

    def span(name: str) -> str:
        return "{:.2f}-{:.2f}".format(*row[name]) if name in row else ""

    return (
        row["system"],
        number("ms", ".1f"),
        number("ratio", ".3f"),
        span("ratio_range"),
        number("ratio_to_ddp", ".2f"),
        number("device_bytes", ".0f", 1e6),
        number("host_bytes", ".0f", 1e6),
        number("disk_bytes", ".0f", 1e6),
        number("moved_bytes", ".0f", 1e6),
        number("rate", ".2f", 1e9),
        number("bound_ms", ".1f"),
        number("of_bound", ".2f"),
        span("of_bound_range"),
    )


if __name__ == "__main__":
    sys.exit(main())
