"""One training step on two nodes with a slow network between them, by what travels how.

`python benchmarks/run.py wire [--model 119m] [--gbit 1]`

Two network namespaces, joined by a pair of virtual interfaces that lets through so much, hold half
of the ranks each. Stage 3 exact, with each of ZeRO++'s ways of sending less (arXiv 2306.10209), and
with all of them, and FSDP2, take turns. `node MB` is what a node put on the cable in one step, as
the kernel counts; where the network is the slowest part, time should follow it. Linux, root.
"""

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
    round_ratios,
    run_heat,
    say,
    settings_of,
    table,
)
from model import SHAPES, model_numel
from network import two_nodes, why_not
from results import write_results
from systems import SYSTEMS

REFERENCE: Final = "zero3_nodes"
CHOICES: Final = (
    REFERENCE,
    "zero3_nodes_qwz",
    "zero3_nodes_hpz",
    "zero3_nodes_qgz",
    "zero3_nodes_all",
    "fsdp2",
)
COLUMNS: Final = (
    "system",
    "ms",
    "exact / it",
    "rounds",
    "node MB",
    "bytes of exact / its",
    "cable s",
    "last loss",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, print its table, write its file. Returns 1 if a system failed."""
    options = _parse(argv)
    if problem := why_not():
        say(f"skipped: {problem}")
        return 0
    numel = model_numel(SHAPES[options.model])
    settings = settings_of(options) | {"numel": numel, "load_before": os.getloadavg()[0]}
    entries = [Entry(SYSTEMS[name], 1) for name in options.systems]
    with two_nodes(options.gbit) as nodes:
        run_heat(entries, options, nodes=nodes)
    rows = [_row(entry, reference=entries[0], gbit=options.gbit) for entry in entries]
    print(table(COLUMNS, [_cells(row) for row in rows], left=(0,)))
    versions = {k: v for entry in entries for k, v in entry.versions.items()}
    path = write_results("wire", rows, folder=options.folder, settings=settings, versions=versions)
    print(f"\nwritten to {path}")
    errors = [row["error"] for row in rows if row["error"]]
    for error in errors:
        say(f"\n{error}")
    return int(bool(errors))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.py wire", description=__doc__)
    add = parser.add_argument
    add("--model", choices=SHAPES, default="119m")
    add("--gbit", type=float, default=1.0, help="per second, in each direction")
    add("--systems", default=",".join(CHOICES), help="comma-separated; the first is compared with")
    add_options(parser, rounds=3)
    parser.set_defaults(ranks=4, steps_per_round=1, warmup=2)
    options = parser.parse_args(argv)
    check_options(parser, options)
    options.systems = options.systems.split(",")
    for name in options.systems:
        if name not in SYSTEMS:
            parser.error(f"no system {name!r}; there are {', '.join(SYSTEMS)}")
    if options.ranks % 2:
        parser.error("--ranks must be even: two nodes have half of them each")
    return options


def _row(entry: Entry, *, reference: Entry, gbit: float) -> dict[str, Any]:
    row = entry.figures()
    if entry.error or reference.error:
        return row
    ratios = [1 / ratio for ratio in round_ratios(entry, reference)]
    node_bytes = statistics.median(entry.round_sent_bytes)
    return row | {
        "speed": statistics.median(ratios),
        "speed_range": [min(ratios), max(ratios)],
        "node_bytes": node_bytes,
        "byte_ratio": statistics.median(reference.round_sent_bytes) / node_bytes,
        "cable_s": node_bytes * 8 / gbit / 1e9,
        "last_loss": statistics.fmean(report["losses"][-1] for report in entry.reports),
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "speed" not in row:
        return row["system"], *(len(COLUMNS) - 1) * ("-",)
    low, high = row["speed_range"]
    return (
        row["system"],
        f"{row['ms']:.0f}",
        f"{row['speed']:.2f}",
        f"{low:.2f}-{high:.2f}",
        f"{row['node_bytes'] / 1e6:.0f}",
        f"{row['byte_ratio']:.2f}",
        f"{row['cable_s']:.2f}",
        f"{row['last_loss']:.4f}",
    )


if __name__ == "__main__":
    sys.exit(main())
