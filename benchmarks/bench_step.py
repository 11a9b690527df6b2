"""Time and memory of one training step: the same model under every system, in turns."""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from model import SHAPES, model_numel
from results import available_bytes, write_results
from systems import SYSTEMS, System
from team import Team, TeamError
from text import read_stdlib
from worker import Assignment

REFERENCE: Final = "ddp"
TEXT_BYTES: Final = 4 * 2**20
# What the hungriest system takes per rank, to judge how many fit side by side.
BYTES_PER_PARAM: Final = 28
BYTES_PER_PROCESS: Final = 400 * 2**20


@dataclass
class Entry:
    """One system in one heat: its team, and what that has shown so far."""

    system: System
    heat: int
    team: Team | None = None
    setup: list[dict[str, Any]] = field(default_factory=list)  # per rank
    round_ms: list[list[float]] = field(default_factory=list)  # per round and step: slowest rank
    reports: list[dict[str, Any]] = field(default_factory=list)  # per rank
    error: str = ""

    @property
    def versions(self) -> dict[str, str]:
        """Of the libraries that ran, as its ranks saw them."""
        place = self.system.environment
        return {
            name if place in ("own", name) else f"{name} ({place})": version
            for rank in self.setup
            for name, version in rank["versions"].items()
        }

    def ask(self, verb: str, *arguments: object) -> list[dict[str, Any]]:
        """Ask the team, unless it has failed; a failure is kept, and the others go on."""
        if self.error or self.team is None:
            return []
        try:
            return self.team.ask(verb, *arguments)
        except TeamError as error:
            self.error = str(error)
            return []


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, print its table, write its file. Returns 1 if a system failed."""
    options = _parse(argv)
    numel = model_numel(SHAPES[options.model])
    heats = _plan_heats(options.systems, at_once=options.at_once or _fitting(options, numel))
    settings = _settings(options) | {"numel": numel, "load_before": os.getloadavg()[0]}
    _say(f"{options.model}: {numel:,} parameters, {options.ranks} ranks, {len(heats)} heat(s)")

    rows: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    for number, names in enumerate(heats, start=1):
        entries = [Entry(SYSTEMS[name], number) for name in names]
        _run_heat(entries, options)
        rows += [_row(entry, reference=entries[0], numel=numel) for entry in entries]
        versions |= {k: v for entry in entries for k, v in entry.versions.items()}

    print(_table(rows))
    path = write_results("step", rows, folder=options.folder, settings=settings, versions=versions)
    print(f"\nwritten to {path}")
    errors = [row["error"] for row in rows if row["error"]]
    for error in errors:
        _say(f"\n{error}")
    return int(bool(errors))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.py step", description=__doc__)
    add = parser.add_argument
    add("--model", choices=SHAPES, default="25m")
    add("--systems", default="", help=f"comma-separated, of {', '.join(SYSTEMS)}")
    add("--ranks", type=int, default=2)
    add("--rounds", type=int, default=8)
    add("--steps-per-round", type=int, default=3, help="that count; one more runs before them")
    add("--warmup", type=int, default=3, help="steps before the first round")
    add("--window", type=int, help="of our prefetch, in units")
    add("--lr", type=float, default=3e-4)
    add("--seed", type=int, default=0)
    add("--at-once", type=int, help="systems side by side, DDP among them; else as many as fit")
    add("--deepspeed-python", default="", metavar="PATH", help="of an environment that has it")
    add("--timeout", type=float, default=600.0, help="longest wait for a rank, in seconds")
    add("--folder", type=Path, default=Path(__file__).parent / "results", help="for the JSON")
    options = parser.parse_args(argv)
    options.pythons = {"own": sys.executable}
    if options.deepspeed_python:
        options.pythons["deepspeed"] = options.deepspeed_python
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
    for name in ("ranks", "rounds", "steps_per_round", "warmup"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
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


def _run_heat(entries: list[Entry], options: argparse.Namespace) -> None:
    """Build all systems of the heat, then let them train in turns: A B C A B C."""
    heat = f"heat {entries[0].heat}"
    with tempfile.TemporaryDirectory() as name, ExitStack() as teams:
        folder = Path(name)
        (folder / "text").write_bytes(read_stdlib(TEXT_BYTES))
        for entry in entries:
            _say(f"{heat}: building {entry.system.name}")
            entry.team = _start(entry.system, options, folder)
            teams.callback(entry.team.end)
            entry.setup = entry.ask("warm_up", options.warmup)
        for number in range(1, options.rounds + 1):
            _say(f"{heat}: round {number} of {options.rounds}")
            for entry in entries:
                answers = entry.ask("run", options.steps_per_round)
                by_step = zip(*(answer["ms"] for answer in answers), strict=True)
                entry.round_ms.append([max(step) for step in by_step])
        for entry in entries:
            entry.reports = entry.ask("report")


def _start(system: System, options: argparse.Namespace, folder: Path) -> Team:
    world_size = 1 if system.is_alone else options.ranks
    assignments = [
        Assignment(
            system=system.name,
            shape=options.model,
            rank=rank,
            world_size=world_size,
            lr=options.lr,
            window=options.window,
            seed=options.seed,
            text_file=str(folder / "text"),
            rendezvous_file=str(folder / f"{system.name}.rendezvous"),
            timeout_s=options.timeout,
        )
        for rank in range(world_size)
    ]
    return Team(
        assignments,
        python=options.pythons[system.environment],
        is_foreign=system.environment != "own",
        folder=folder,
    )


def _row(entry: Entry, *, reference: Entry, numel: int) -> dict[str, Any]:
    """The figures of one system; those that a failure cost it are missing."""
    row: dict[str, Any] = {
        "system": entry.system.name,
        "title": entry.system.title,
        "heat": entry.heat,
        "error": entry.error,
    }
    if entry.error:
        return row
    row |= {
        "ms": statistics.median(itertools.chain(*entry.round_ms)),
        "round_ms": entry.round_ms,
        "peak_bytes": max(report["peak_bytes"] for report in entry.reports),
        "setup_peak_bytes": max(rank["setup_peak_bytes"] for rank in entry.setup),
        "idle_resident_bytes": max(report["idle_resident_bytes"] for report in entry.reports),
        "idle_bytes_per_param": max(r["idle_tensor_bytes"] for r in entry.reports) / numel,
        "last_loss": statistics.fmean(report["losses"][-1] for report in entry.reports),
        "losses": [report["losses"] for report in entry.reports],
    }
    if not reference.error:
        ratios = [
            statistics.median(own) / statistics.median(theirs)
            for own, theirs in zip(entry.round_ms, reference.round_ms, strict=True)
        ]
        row["ratio"] = statistics.median(ratios)
        row["ratio_range"] = [min(ratios), max(ratios)]
        # A process alone sees the data of the first rank only, so its losses are others.
        if entry is not reference and not entry.system.is_alone:
            theirs = [report["losses"] for report in reference.reports]
            row["same_losses"] = row["losses"] == theirs  # in every step, on every rank, every bit
            row["first_other_loss"] = _first_difference(row["losses"], theirs)
    return row


def _first_difference(losses: list[list[float]], others: list[list[float]]) -> int | None:
    """The first step in which any rank's loss differs; None where none does."""
    by_step = zip(zip(*losses, strict=True), zip(*others, strict=True), strict=True)
    return next((step for step, (own, other) in enumerate(by_step) if own != other), None)


def _table(rows: list[dict[str, Any]]) -> str:
    columns = "system", "heat", "ms", "/ DDP", "rounds", "peak MB", "idle B/param", "last loss", ""
    lines = [columns, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if 0 < i < len(columns) - 1 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


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


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """What shaped the figures; not where things lie on this machine."""
    places = {"deepspeed_python", "folder", "pythons"}
    return {key: value for key, value in vars(options).items() if key not in places}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
