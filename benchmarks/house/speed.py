"""The gate of speed: the fixed commit and the tree take turns; a step takes 1.03 times at most.

    python benchmarks/house/speed.py                          # a quiet machine; some 20 minutes
    python benchmarks/house/speed.py --quick                  # between two steps of a move
    python benchmarks/house/speed.py --suites step --systems zero3
    python benchmarks/house/speed.py --model tiny --numel 1e6 --rounds 1  # does it run at all?

The benchmarks of the tree run with the packages of either side: the systems of `bench step`,
`residence` and `wire` in turns, in processes that stay, and `bench swap` in turns of one process
each. The ratio of a round is the tree's median step over the fixed commit's; the median over the
rounds counts. Exits with 1 where one is above `--limit`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

from reference import ROOT, build_native, environment, reference_worktree

sys.path.insert(0, str(ROOT / "benchmarks"))

from harness import OptionError, check_known, ratio, take_turns
from network import two_nodes, why_not
from systems import SYSTEMS
from training import Entry, run_heat

SUITES: Final[dict[str, tuple[str, ...]]] = {
    "step": ("zero0", "zero1", "zero2", "zero3"),
    "residence": ("zero1_host", "zero2_disk", "zero3_host_all", "zero3_disk_all"),
    "swap": ("step in memory", "step from disk"),
    "wire": ("zero3_nodes", "zero3_nodes_all"),
}
QUICK: Final = ("zero1", "zero3", "zero3_host_all", "zero3_disk_all", "step from disk")
Times = tuple[Sequence[float], Sequence[float]]  # ms of each round: the fixed commit's, the tree's


def main() -> int:
    """Measure, print, and return the exit status."""
    options = _parse()
    sides = reference_worktree(options.reference), ROOT
    build_native(ROOT)
    print(f"load {os.getloadavg()[0]:.1f}; {sides[0]} and {sides[1]}", flush=True)
    worst = 0.0
    for suite in options.suites:
        chosen = [s for s in SUITES[suite] if not options.systems or s in options.systems]
        if suite == "wire" and (problem := why_not()):
            print(f"wire: skipped: {problem}")
        elif suite == "swap" and chosen:
            for system, times in _swap(sides, options).items():
                if system in chosen:
                    worst = max(worst, _report(suite, system, times))
        else:
            for system in chosen:
                times = _train(system, sides, options, has_nodes=suite == "wire")
                worst = max(worst, _report(suite, system, times))
    print(f"worst {worst:.3f}, limit {options.limit}")
    return int(worst > options.limit)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--reference", type=Path, help="a worktree of the fixed commit")
    add("--suites", default=",".join(SUITES), help="comma-separated")
    add("--systems", default="", help="only these, comma-separated")
    add("--rounds", type=int, default=7)
    add("--steps", type=int, default=3, help="of a round")
    add("--model", default="25m", help="of benchmarks/model.py")
    add("--numel", type=float, default=3e7, help="of swap")
    add("--gbit", type=float, default=1.0, help="of wire, per second")
    add("--path", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk")
    add("--limit", type=float, default=1.03)
    add("--quick", action="store_true", help=f"3 rounds of {', '.join(QUICK)}")
    options = parser.parse_args()
    options.suites = options.suites.split(",")
    options.systems = [name for name in options.systems.split(",") if name]
    if options.quick:
        options.rounds, options.systems = 3, options.systems or list(QUICK)
    try:
        check_known("suites", options.suites, SUITES)
    except OptionError as error:
        parser.error(str(error))
    return options


def _report(suite: str, system: str, times: Times) -> float:
    """Print both medians and the ratio, and return that."""
    before, now = map(statistics.median, times)
    row = ratio(times[1], times[0])
    print(
        f"{suite:10} {system:16} {before:9.1f} ms -> {now:9.1f} ms: {row['ratio']:.3f} "
        "({:.3f} to {:.3f})".format(*row["ratio_range"]),
        flush=True,
    )
    return row["ratio"]


def _train(
    system: str, sides: Sequence[Path], options: argparse.Namespace, *, has_nodes: bool
) -> Times:
    asked = argparse.Namespace(
        model=options.model,
        ranks=4 if has_nodes else 2,
        rounds=options.rounds,
        steps_per_round=options.steps,
        warmup=3,
        window=None,
        lr=3e-4,
        seed=0,
        subgroup_mib=64,
        timeout=600.0,
        path=options.path,
        pythons={"own": ""},
    )
    entries = [Entry(SYSTEMS[system], environment=environment(side)) for side in sides]
    with two_nodes(options.gbit) if has_nodes else nullcontext(()) as nodes:
        run_heat(entries, asked, nodes)
    if errors := [entry.error for entry in entries if entry.error]:
        raise SystemExit("\n".join(errors))
    return entries[0].median_ms, entries[1].median_ms


def _swap(sides: Sequence[Path], options: argparse.Namespace) -> dict[str, Times]:
    """Each turn is a process of its own, as the suite has no ranks."""
    turns = {side: lambda side=side: _swap_once(side, options) for side in sides}
    before, now = take_turns(turns, options.rounds, skipped=0).values()
    return {way: ([each[way] for each in before], [each[way] for each in now]) for way in before[0]}


def _swap_once(side: Path, options: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=options.path) as name:
        command: list[Any] = [sys.executable, ROOT / "benchmarks" / "run.py", "swap"]
        command += ["--path", name, "--folder", name, "--numel", options.numel]
        command += ["--rounds", options.steps, "--threads", 1, "--subgroup-mib", 16]
        subprocess.run(
            [str(word) for word in command],
            env=environment(side),
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (written,) = Path(name).glob("*.json")
        rows = json.loads(written.read_text())["rows"]
    return {row["way"]: 1000 * row["seconds"] for row in rows}


if __name__ == "__main__":
    sys.exit(main())
