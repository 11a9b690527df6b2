"""How long a step takes, against how long `estimate_step` says it does.

`python benchmarks/run.py plan --path /on/the/disk [--model 119m] [--ranks 4]`

Stages, and stage 3 with parameters or state elsewhere, take turns with `probe`, so that rates and
steps are of the same round. Each configuration is planned from a model without memory; the plan and
the rates of a round give the time of a step if all that can overlap does (`least`), and if nothing
does (`most`). `/ least` and `/ most` are the measured over these: the medians over the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from heats import Entry, add_options, check_options, run_heat, say, settings_of, table
from model import GPT, SHAPES, model_numel
from results import write_results
from systems import OURS, SYSTEMS, Setting, our_config
from zero_engine import plan
from zero_engine.planning import Plan, Rates, StepEstimate, estimate_step

PROBE: Final = "probe"
CHOICES: Final = ("zero0", "zero1", "zero2", "zero3", "zero3_host_all")
ON_DISK: Final = ("zero3_disk",)
COLUMNS: Final = ("system", "ms", "least", "most", "/ least", "/ most", "rounds", "longest", "ms")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, print its table, write its file. Returns 1 if a system failed."""
    options = _parse(argv)
    numel = model_numel(SHAPES[options.model])
    settings = settings_of(options) | {"numel": numel, "load_before": os.getloadavg()[0]}
    say(f"{options.model}: {numel:,} parameters, {options.ranks} ranks")
    entries = [Entry(SYSTEMS[name], 1) for name in (PROBE, *options.systems)]
    run_heat(entries, options)
    probed, *trained = entries
    rates = [] if probed.error else _rates(probed, options)
    rows = [_row(entry, rates, options) for entry in trained]
    print(table(COLUMNS, [_cells(row) for row in rows], left=(0, len(COLUMNS) - 2)))
    settings |= {"rates": [attrs.asdict(each) for each in rates]}
    versions = {k: v for entry in entries for k, v in entry.versions.items()}
    path = write_results("plan", rows, folder=options.folder, settings=settings, versions=versions)
    print(f"\nwritten to {path}")
    errors = [entry.error for entry in entries if entry.error]
    for error in errors:
        say(f"\n{error}")
    return int(bool(errors))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.py plan", description=__doc__)
    add = parser.add_argument
    add_options(parser, rounds=6)
    add("--model", choices=SHAPES, default="25m")
    add("--path", type=Path, help="a folder on the disk; without it nothing rests there")
    add("--systems", default="", help=f"comma-separated, of {', '.join(OURS)}")
    options = parser.parse_args(argv)
    check_options(parser, options)
    chosen = [name for name in options.systems.split(",") if name]
    options.systems = chosen or [*CHOICES, *(ON_DISK if options.path else ())]
    for name in options.systems:
        if name not in OURS:
            parser.error(f"no system of ours {name!r}; there are {', '.join(OURS)}")
    return options


def _rates(probed: Entry, options: argparse.Namespace) -> list[Rates]:
    """Of each round: the medians of its probes, but for the one that wakes the caches."""
    found = probed.reports[0]["rates"][options.warmup :]
    per_round = 1 + options.steps_per_round
    rounds = [found[first + 1 : first + per_round] for first in range(0, len(found), per_round)]
    return [Rates(**{name: _median(name, probes) for name in probes[0]}) for probes in rounds]


def _median(name: str, probes: Sequence[dict[str, Any]]) -> Any:
    values = [probe[name] for probe in probes if probe[name] is not None]
    return statistics.median(values) if values else None


def _row(entry: Entry, rates: Sequence[Rates], options: argparse.Namespace) -> dict[str, Any]:
    row = entry.figures()
    if entry.error or not rates:
        return row
    planned, shape = _plan(entry.system.name, options), SHAPES[options.model]
    tokens = shape.batch * shape.sequence
    estimates = [estimate_step(planned, each, tokens=tokens) for each in rates]
    row |= {"estimates_s": [dict(each.seconds) for each in estimates]}
    row |= {"bottleneck": estimates[0].bottleneck}
    for name in ("least_s", "most_s"):
        # The mean: what a step leaves to the disk, the next one may have to wait for.
        ratios = [
            statistics.fmean(ms) / 1000 / getattr(each, name)
            for ms, each in zip(entry.round_ms, estimates, strict=True)
        ]
        row[name] = statistics.median(getattr(each, name) for each in estimates)
        row[f"of_{name}"] = statistics.median(ratios)
        row[f"of_{name}_range"] = [min(ratios), max(ratios)]
    row["seconds"] = _medians(estimates)
    return row


def _plan(name: str, options: argparse.Namespace) -> Plan:
    setting = Setting(
        rank=0,
        world_size=options.ranks,
        batch=SHAPES[options.model].batch,
        lr=options.lr,
        window=options.window,
        path=str(options.path or ""),
        subgroup_bytes=options.subgroup_mib * 2**20,
    )
    arguments = {key: value for key, value in OURS[name].items() if key != "reads_peers"}
    with torch.device("meta"):
        model = GPT(SHAPES[options.model])
    return plan(
        model,
        our_config(setting, **arguments),
        world_size=options.ranks,
        device="cpu",
        reads_peers=OURS[name].get("reads_peers"),
    )


def _medians(estimates: Sequence[StepEstimate]) -> dict[str, float]:
    names = estimates[0].seconds
    return {name: statistics.median(each.seconds[name] for each in estimates) for name in names}


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "seconds" not in row:
        failed = "failed: " + (row["error"] or "no rates").strip().splitlines()[-1]
        return (f"{row['system']}: {failed}", *("" for _ in COLUMNS[1:]))
    return (
        row["system"],
        f"{row['ms']:.1f}",
        f"{1000 * row['least_s']:.1f}",
        f"{1000 * row['most_s']:.1f}",
        f"{row['of_least_s']:.2f}",
        f"{row['of_most_s']:.2f}",
        "{:.2f}-{:.2f}".format(*row["of_most_s_range"]),
        row["bottleneck"],
        ", ".join(f"{name} {1000 * value:.1f}" for name, value in row["seconds"].items()),
    )


if __name__ == "__main__":
    sys.exit(main())
