"""The gate of speed: the fixed commit and the tree take turns; a step takes 1.03 times at most.

    python benchmarks/house/speed.py                          # a quiet machine; some 20 minutes
    python benchmarks/house/speed.py --quick                  # between two steps of a move
    python benchmarks/house/speed.py --suites step --systems zero3
    python benchmarks/house/speed.py --model tiny --numel 1e6 --rounds 1  # does it run at all?

Each side runs its own benchmarks, with its own packages: the workers of `bench step`, `residence`
and `wire` in turns, in processes that stay, and `bench swap` in turns of one process each. The
ratio of a round is the tree's median step over the fixed commit's; the median over the rounds
counts. Exits with 1 where one is above `--limit`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from reference import ROOT, build_native, environment, reference_worktree

sys.path.insert(0, str(ROOT / "benchmarks"))

from network import Node, two_nodes, why_not
from team import Team
from text import read_stdlib
from worker import Assignment

SUITES: Final[dict[str, tuple[str, ...]]] = {
    "step": ("zero0", "zero1", "zero2", "zero3"),
    "residence": ("zero1_host", "zero2_disk", "zero3_host_all", "zero3_disk_all"),
    "swap": ("step in memory", "step from disk"),
    "wire": ("zero3_nodes", "zero3_nodes_all"),
}
QUICK: Final = ("zero1", "zero3", "zero3_host_all", "zero3_disk_all", "step from disk")


def main() -> int:
    """Measure, print, and return the exit status."""
    options = _parse()
    reference = reference_worktree(options.reference)
    build_native(ROOT)
    sides = (reference, ROOT)
    print(f"load {os.getloadavg()[0]:.1f}; {reference} and {ROOT}", flush=True)
    worst = 0.0
    with tempfile.TemporaryDirectory(dir=options.path) as name:
        folder = Path(name)
        (folder / "text").write_bytes(read_stdlib(4 * 2**20))
        for suite in options.suites:
            if suite == "swap":
                found = _swap(sides, options, folder)
            else:
                found = {
                    system: _train(suite, system, sides, options, folder)
                    for system in _chosen(suite, options)
                }
            for system, rounds in found.items():
                worst = max(worst, _report(suite, system, rounds))
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
    if unknown := set(options.suites) - SUITES.keys():
        parser.error(f"--suites: expected some of {', '.join(SUITES)}, got {', '.join(unknown)}")
    return options


def _chosen(suite: str, options: argparse.Namespace) -> list[str]:
    return [s for s in SUITES[suite] if not options.systems or s in options.systems]


def _report(suite: str, system: str, rounds: Sequence[tuple[float, float]]) -> float:
    """Of each round, the time of the fixed commit and of the tree, in ms. Returns the ratio."""
    ratios = [tree / reference for reference, tree in rounds]
    ratio, (before, now) = (
        statistics.median(ratios),
        map(statistics.median, zip(*rounds, strict=True)),
    )
    print(
        f"{suite:10} {system:16} {before:9.1f} ms -> {now:9.1f} ms: {ratio:.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f})",
        flush=True,
    )
    return ratio


# ---- step, residence, wire ----


def _train(
    suite: str, system: str, sides: Sequence[Path], options: argparse.Namespace, folder: Path
) -> list[tuple[float, float]]:
    rounds = []
    with ExitStack() as stack:
        nodes: Sequence[Node] = ()
        if suite == "wire":
            if problem := why_not():
                print(f"wire: skipped: {problem}")
                return [(1.0, 1.0)]
            nodes = stack.enter_context(two_nodes(options.gbit))
        teams = []
        for side in sides:
            own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
            teams.append(_start(system, side, own, options, nodes))
            stack.callback(teams[-1].end)
            teams[-1].ask("warm_up", 3)
        for number in range(options.rounds):
            times = [0.0, 0.0]
            for index in (0, 1) if number % 2 == 0 else (1, 0):
                answers = teams[index].ask("run", options.steps)
                by_step = zip(*(answer["ms"] for answer in answers), strict=True)
                times[index] = statistics.median(max(step) for step in by_step)
            rounds.append((times[0], times[1]))
    return rounds


def _start(
    system: str, side: Path, own: Path, options: argparse.Namespace, nodes: Sequence[Node]
) -> Team:
    world_size = 4 if nodes else 2
    assignments = [
        Assignment(
            system=system,
            shape=options.model,
            rank=rank,
            world_size=world_size,
            lr=3e-4,
            window=None,
            seed=0,
            text_file=str(own.parent / "text"),
            rendezvous_file=str(own / "rendezvous"),
            timeout_s=600.0,
            path=str(own),
            subgroup_bytes=64 * 2**20,
        )
        for rank in range(world_size)
    ]
    with _packages_of(side):
        return Team(
            assignments,
            python=sys.executable,
            is_foreign=False,
            folder=own,
            nodes=nodes,
            worker=side / "benchmarks" / "worker.py",
        )


@contextmanager
def _packages_of(side: Path) -> Iterator[None]:
    """A team's processes have the environment of who starts them."""
    before = dict(os.environ)
    os.environ.update(environment(side))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# ---- swap ----


def _swap(
    sides: Sequence[Path], options: argparse.Namespace, folder: Path
) -> dict[str, list[tuple[float, float]]]:
    """Each turn is a process of its own, as the suite has no workers."""
    ways = _chosen("swap", options)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(options.rounds if ways else 0):
        times: list[dict[str, float]] = [{}, {}]
        for index in (0, 1) if number % 2 == 0 else (1, 0):
            times[index] = _swap_once(sides[index], options, folder)
        for way in ways:
            found[way].append((times[0][way], times[1][way]))
    return found


def _swap_once(side: Path, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        command: list[Any] = [sys.executable, side / "benchmarks" / "run.py", "swap"]
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
