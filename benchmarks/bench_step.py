"""Time and memory of one training step: the same model under every system, in turns."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any, Final

from heats import (
    Entry,
    add_options,
    check_options,
    first_difference,
    round_ratios,
    run_heat,
    say,
    settings_of,
    table,
)
from model import SHAPES, model_numel
from results import available_bytes, write_results
from systems import SYSTEMS

REFERENCE: Final = "ddp"
# What the hungriest system takes per rank, to judge how many fit side by side.
BYTES_PER_PARAM: Final = 28
BYTES_PER_PROCESS: Final = 400 * 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, print its table, write its file. Returns 1 if a system failed."""
    options = _parse(argv)
    numel = model_numel(SHAPES[options.model])
    heats = _plan_heats(options.systems, at_once=options.at_once or _fitting(options, numel))
    settings = settings_of(options) | {"numel": numel, "load_before": os.getloadavg()[0]}
    say(f"{options.model}: {numel:,} parameters, {options.ranks} ranks, {len(heats)} heat(s)")

    rows: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    for number, names in enumerate(heats, start=1):
        entries = [Entry(SYSTEMS[name], number) for name in names]
        run_heat(entries, options)
        rows += [_row(entry, reference=entries[0], numel=numel) for entry in entries]
        versions |= {k: v for entry in entries for k, v in entry.versions.items()}

    print(_table(rows))
    path = write_results("step", rows, folder=options.folder, settings=settings, versions=versions)
    print(f"\nwritten to {path}")
    errors = [row["error"] for row in rows if row["error"]]
    for error in errors:
        say(f"\n{error}")
    return int(bool(errors))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.py step", description=__doc__)
    add = parser.add_argument
    add("--model", choices=SHAPES, default="25m")
    add("--systems", default="", help=f"comma-separated, of {', '.join(SYSTEMS)}")
    add("--at-once", type=int, help="systems side by side, DDP among them; else as many as fit")
    add_options(parser, rounds=8)
    options = parser.parse_args(argv)
    check_options(parser, options)
    options.systems = [name for name in options.systems.split(",") if name] or [
        name
        for name, system in SYSTEMS.items()
        if system.environment in options.pythons and not system.is_variant
    ]
    for name in options.systems:
        if name not in SYSTEMS:
            parser.error(f"no system {name!r}; there are {', '.join(SYSTEMS)}")
        if SYSTEMS[name].environment not in options.pythons:
            parser.error(f"{name} needs --{SYSTEMS[name].environment}-python PATH")
    return options


def _fitting(options: argparse.Namespace, numel: int) -> int:
    team_bytes = options.ranks * (BYTES_PER_PARAM * numel + BYTES_PER_PROCESS)
    return available_bytes() // team_bytes


def _plan_heats(names: list[str], *, at_once: int) -> list[list[str]]:
    """Split the systems into heats that fit in memory, each led by the reference."""
    others = [name for name in dict.fromkeys(names) if name != REFERENCE]
    seats = max(1, at_once - 1)
    heats = [[REFERENCE, *others[i : i + seats]] for i in range(0, len(others), seats)]
    return heats or [[REFERENCE]]


def _row(entry: Entry, *, reference: Entry, numel: int) -> dict[str, Any]:
    """The figures of one system; those that a failure cost it are missing."""
    row = entry.figures()
    if entry.error:
        return row
    row |= {
        "setup_peak_bytes": max(rank["setup_peak_bytes"] for rank in entry.setup),
        "idle_resident_bytes": max(report["idle_resident_bytes"] for report in entry.reports),
        "idle_bytes_per_param": max(r["idle_tensor_bytes"] for r in entry.reports) / numel,
        "last_loss": statistics.fmean(report["losses"][-1] for report in entry.reports),
    }
    if not reference.error:
        ratios = round_ratios(entry, reference)
        row["ratio"] = statistics.median(ratios)
        row["ratio_range"] = [min(ratios), max(ratios)]
        # A process alone sees the data of the first rank only, so its losses are others.
        if entry is not reference and not entry.system.is_alone:
            theirs = [report["losses"] for report in reference.reports]
            row["same_losses"] = row["losses"] == theirs  # in every step, on every rank, every bit
            row["first_other_loss"] = first_difference(row["losses"], theirs)
    return row


def _table(rows: list[dict[str, Any]]) -> str:
    columns = "system", "heat", "ms", "/ DDP", "rounds", "peak MB", "idle B/param", "last loss", ""
    return table(columns, [_cells(row) for row in rows], left=(0, len(columns) - 1))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    head = row["system"], str(row["heat"])
    if row["error"]:
        return *head, *6 * ("-",), "failed: " + row["error"].strip().splitlines()[-1]
    low, high = row.get("ratio_range", (float("nan"), float("nan")))
    verdict = {
        True: "losses = DDP",
        False: f"losses differ from step {row.get('first_other_loss')}",
        None: "",
    }
    return (
        *head,
        f"{row['ms']:.1f}",
        f"{row.get('ratio', float('nan')):.3f}",
        f"{low:.2f}-{high:.2f}",
        f"{row['peak_bytes'] / 1e6:.0f}",
        f"{row['idle_bytes_per_param']:.2f}",
        repr(row["last_loss"]),
        verdict[row.get("same_losses")],
    )


if __name__ == "__main__":
    sys.exit(main())
