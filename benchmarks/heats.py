"""Systems that run side by side and take turns, so that their figures compare."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from network import Node
from systems import System
from team import Team, TeamError
from text import read_stdlib
from worker import Assignment

TEXT_BYTES: Final = 4 * 2**20


@dataclass
class Entry:
    """One system in one heat: its team, and what that has shown so far."""

    system: System
    heat: int
    team: Team | None = None
    setup: list[dict[str, Any]] = field(default_factory=list)  # per rank
    round_ms: list[list[float]] = field(default_factory=list)  # per round and step: slowest rank
    round_disk_bytes: list[float] = field(default_factory=list)  # per step, of all ranks
    round_sent_bytes: list[float] = field(default_factory=list)  # per step, of the busiest node
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

    def figures(self) -> dict[str, Any]:
        """What every table begins with; of a system that failed, its name and how."""
        row: dict[str, Any] = {
            "system": self.system.name,
            "title": self.system.title,
            "heat": self.heat,
            "error": self.error,
        }
        if self.error:
            return row
        return row | {
            "ms": statistics.median(itertools.chain(*self.round_ms)),
            "round_ms": self.round_ms,
            "peak_bytes": max(report["peak_bytes"] for report in self.reports),
            "losses": [report["losses"] for report in self.reports],
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


def add_options(parser: argparse.ArgumentParser, *, rounds: int) -> None:
    """What every suite of this kind is told."""
    add = parser.add_argument
    add("--ranks", type=int, default=2)
    add("--rounds", type=int, default=rounds)
    add("--steps-per-round", type=int, default=3, help="that count; one more runs before them")
    add("--warmup", type=int, default=3, help="steps before the first round")
    add("--window", type=int, help="of our prefetch, in units")
    add("--lr", type=float, default=3e-4)
    add("--seed", type=int, default=0)
    add("--deepspeed-python", default="", metavar="PATH", help="of an environment that has it")
    add("--timeout", type=float, default=600.0, help="longest wait for a rank, in seconds")
    add("--folder", type=Path, default=Path(__file__).parent / "results", help="for the JSON")
    # What one suite alone asks for, and an assignment has in any case.
    parser.set_defaults(path=None, subgroup_mib=64)


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Complain of numbers that mean nothing; and note which interpreters there are."""
    options.pythons = {"own": sys.executable}
    if options.deepspeed_python:
        options.pythons["deepspeed"] = options.deepspeed_python
    for name in ("ranks", "rounds", "steps_per_round", "warmup"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What shaped the figures; not where things lie on this machine."""
    places = {"deepspeed_python", "folder", "pythons", "path"}
    return {key: value for key, value in vars(options).items() if key not in places}


def run_heat(
    entries: list[Entry], options: argparse.Namespace, *, nodes: Sequence[Node] = ()
) -> None:
    """Build all systems of the heat, then let them train in turns: A B C A B C.

    Args:
        entries: Of the systems.
        options: Of the suite.
        nodes: On which to run, as many ranks on each; no particular place when empty.
    """
    heat = f"heat {entries[0].heat}"
    with tempfile.TemporaryDirectory() as name, ExitStack() as teams:
        folder, disk = Path(name), ""
        if options.path is not None:  # ranks end without tidying up
            disk = teams.enter_context(tempfile.TemporaryDirectory(dir=options.path))
        (folder / "text").write_bytes(read_stdlib(TEXT_BYTES))
        for entry in entries:
            say(f"{heat}: building {entry.system.name}")
            entry.team = _start(entry.system, options, folder, disk, nodes)
            teams.callback(entry.team.end)
            entry.setup = entry.ask("warm_up", options.warmup)
        for number in range(1, options.rounds + 1):
            say(f"{heat}: round {number} of {options.rounds}")
            for entry in entries:
                before = [node.sent_bytes() for node in nodes]
                answers = entry.ask("run", options.steps_per_round)
                sent = [node.sent_bytes() - b for node, b in zip(nodes, before, strict=True)]
                by_step = zip(*(answer["ms"] for answer in answers), strict=True)
                entry.round_ms.append([max(step) for step in by_step])
                moved = sum(answer["disk_bytes"] for answer in answers)
                entry.round_disk_bytes.append(moved / options.steps_per_round)
                # With the step before those that count.
                entry.round_sent_bytes.append(max(sent, default=0) / (1 + options.steps_per_round))
        for entry in entries:
            entry.reports = entry.ask("report")


def _start(
    system: System, options: argparse.Namespace, folder: Path, disk: str, nodes: Sequence[Node]
) -> Team:
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
            path=disk,
            subgroup_bytes=options.subgroup_mib * 2**20,
        )
        for rank in range(world_size)
    ]
    return Team(
        assignments,
        python=options.pythons[system.environment],
        is_foreign=system.environment != "own",
        folder=folder,
        nodes=nodes,
    )


def round_ratios(entry: Entry, reference: Entry) -> list[float]:
    """Of each round, this system's median step over the other's."""
    return [
        statistics.median(own) / statistics.median(theirs)
        for own, theirs in zip(entry.round_ms, reference.round_ms, strict=True)
    ]


def first_difference(losses: list[list[float]], others: list[list[float]]) -> int | None:
    """The first step in which any rank's loss differs; None where none does."""
    by_step = zip(zip(*losses, strict=True), zip(*others, strict=True), strict=True)
    return next((step for step, (own, other) in enumerate(by_step) if own != other), None)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int]) -> str:
    """Lines of even width; cells of the columns `left` stand at their left."""
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def say(text: str) -> None:
    """What is going on, beside the table."""
    print(text, file=sys.stderr, flush=True)
