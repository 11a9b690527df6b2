"""Systems that train side by side and take turns, so that their figures compare."""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import os
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from harness import OptionError, Row, check_known, ratio, say, take_turns
from measure import (
    live_tensor_bytes,
    moved_disk_bytes,
    peak_resident_bytes,
    reset_peak,
    resident_bytes,
)
from model import SHAPES, Shape, build_model, draw_batch, model_numel, read_stdlib
from network import Node
from systems import SYSTEMS, ReportingStep, Setting, System
from team import Team, TeamError

TEXT_BYTES: Final = 4 * 2**20


# ---- In each rank ----


def train(
    system: str,
    shape: str | Shape,
    seed: int,
    *,
    device: str = "cpu",
    memory_gib: float | None = None,
    **setting: Any,
) -> dict[str, Callable[..., Row]]:
    """The job of a rank: import, build the model, note its cost, then apply the system.

    Args:
        system: By name.
        shape: Of the model, or the name of one.
        seed: Of the model.
        device: "cpu", or "cuda", where products are in bf16.
        memory_gib: Device memory that may be used once the system has the model; all when None.
        setting: Other fields of `Setting`.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    chosen, sizes = SYSTEMS[system], SHAPES[shape] if isinstance(shape, str) else shape
    has_cuda = device == "cuda"
    for name in chosen.imports:
        importlib.import_module(name)
    text = read_stdlib(TEXT_BYTES)
    model = build_model(sizes, seed=seed).to(device)
    if has_cuda:
        model.forward = torch.autocast(device, torch.bfloat16)(model.forward)
    built_bytes = resident_bytes()
    reset_peak()
    step = chosen.build(model, Setting(rank, world_size, sizes.batch, device=device, **setting))
    setup_peak_bytes = peak_resident_bytes() - built_bytes
    if has_cuda:
        _limit_device(memory_gib)
    losses: list[float] = []

    def one_step() -> float:
        batch = draw_batch(text, sizes, step=len(losses), rank=rank)
        tokens, targets = (each.to(device) for each in batch)
        start_s = time.perf_counter()
        loss = step(tokens, targets)
        if has_cuda:
            torch.cuda.synchronize()
        elapsed_s = time.perf_counter() - start_s
        losses.append(loss.item())
        return 1000 * elapsed_s

    def warm_up(count: int) -> Row:
        """Train steps in which systems allocate and record, then reset the peak."""
        for _ in range(count):
            one_step()
        reset_peak()
        libraries = ("torch", *({"deepspeed"} & set(chosen.imports)))
        versions = {name: importlib.metadata.version(name) for name in libraries}
        return {"setup_peak_bytes": setup_peak_bytes, "versions": versions}

    def run(count: int) -> Row:
        """Train `count` steps after one that is not counted.

        The first step warms up caches and finishes work that the last round has delayed, just as
        the next round finishes delayed work of this one. So the count includes as much delayed work
        as it causes.
        """
        if world_size > 1:
            dist.barrier()
        one_step()
        before = moved_disk_bytes()
        ms = [one_step() for _ in range(count)]
        return {"ms": ms, "disk_bytes": moved_disk_bytes() - before}

    def report() -> Row:
        """Return memory, and the loss of every step so far. Called between steps."""
        return {
            "peak_bytes": peak_resident_bytes() - built_bytes,  # before the search below
            "idle_resident_bytes": resident_bytes() - built_bytes,
            "idle_tensor_bytes": live_tensor_bytes(),
            "resident_bytes": resident_bytes(),
            "device_peak_bytes": torch.cuda.max_memory_allocated() if has_cuda else 0,
            "losses": losses,
            **(step.report() if isinstance(step, ReportingStep) else {}),
        }

    return {"warm_up": warm_up, "run": run, "report": report}


def _limit_device(memory_gib: float | None) -> None:
    """Limit the device memory of this process, and reset its peak."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if memory_gib is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_gib * 2**30 / total))


# ---- What a suite of trainings is told ----


def training_options(*, rounds: int, model: str = "25m", **changed: Any) -> dict[str, Any]:
    """Return options of a suite of trainings; `changed` are further ones, or other defaults."""
    return {
        "model": {"choices": SHAPES, "default": model},
        "systems": ([], "only these"),
        "ranks": (2, "processes of each system"),
        "rounds": (rounds, "turns of each system"),
        "steps_per_round": (3, "that count; one more runs before them"),
        "warmup": (3, "steps before the first round"),
        "window": {"type": int, "help": "of our prefetch, in units"},
        "lr": (3e-4, "of AdamW"),
        "seed": (0, "of the model"),
        "subgroup_mib": (64, "optimizer state moved at a time"),
        "deepspeed_python": ("", "interpreter of an environment that has it"),
        "timeout": (600.0, "longest wait for a rank, in seconds"),
        **changed,
    }


def check_options(options: Namespace, known: Sequence[str], default: Sequence[str] = ()) -> None:
    """Raise OptionError for invalid options; set the interpreters and the model's size."""
    options.pythons = {"own": ""}
    if options.deepspeed_python:
        options.pythons["deepspeed"] = options.deepspeed_python
    for name in ("ranks", "rounds", "steps_per_round", "warmup"):
        if getattr(options, name) < 1:
            raise OptionError(f"--{name.replace('_', '-')} must be at least 1")
    check_known("systems", options.systems, known)
    options.systems = options.systems or list(default)
    for name in options.systems:
        if SYSTEMS[name].environment not in options.pythons:
            raise OptionError(f"{name} needs --{SYSTEMS[name].environment}-python PATH")
    options.numel = model_numel(SHAPES[options.model])
    say(f"{options.model}: {options.numel:,} parameters, {options.ranks} ranks")


# ---- Systems in turns ----


@dataclass
class Entry:
    """One system in one heat: its team, and what that has shown so far."""

    system: System
    heat: int = 1
    environment: Mapping[str, str] | None = None  # what differs in that of its ranks
    arguments: Mapping[str, Any] = field(default_factory=dict)  # further ones of `train`
    team: Team | None = None
    setup: list[Row] = field(default_factory=list)  # per rank
    round_ms: list[list[float]] = field(default_factory=list)  # per round and step: slowest rank
    round_disk_bytes: list[float] = field(default_factory=list)  # per step, of all ranks
    round_sent_bytes: list[float] = field(default_factory=list)  # per step, of the busiest node
    reports: list[Row] = field(default_factory=list)  # per rank
    error: str = ""

    @property
    def median_ms(self) -> list[float]:
        """Of each round."""
        return [statistics.median(each) for each in self.round_ms]

    @property
    def versions(self) -> dict[str, str]:
        """Of the libraries that ran, as its ranks saw them."""
        place = self.system.environment
        return {
            name if place in ("own", name) else f"{name} ({place})": version
            for rank in self.setup
            for name, version in rank["versions"].items()
        }

    def figures(self) -> Row:
        """What every table begins with; of a system that failed, its name and how."""
        row: Row = {"system": self.system.name, "heat": self.heat}
        if self.error:
            return row | {"error": self.error}
        return row | {
            "ms": statistics.median(itertools.chain(*self.round_ms)),
            "round_ms": self.round_ms,
            "peak_bytes": max(report["peak_bytes"] for report in self.reports),
            "losses": [report["losses"] for report in self.reports],
            "last_loss": statistics.fmean(report["losses"][-1] for report in self.reports),
        }

    def ratio(self, reference: Entry, name: str = "ratio") -> Row:
        """To another's steps; empty where one of the two has failed."""
        if self.error or reference.error:
            return {}
        return ratio(self.median_ms, reference.median_ms, name)

    def ask(self, verb: str, *arguments: object) -> list[Row]:
        """Ask the team, unless it has failed; a failure is kept, and the others go on."""
        if self.error or self.team is None:
            return []
        try:
            return self.team.ask(verb, *arguments)
        except TeamError as error:
            self.error = str(error)
            return []

    def run(self, count: int, nodes: Sequence[Node]) -> None:
        """One turn."""
        before = [node.sent_bytes() for node in nodes]
        answers = self.ask("run", count)
        sent = [node.sent_bytes() - b for node, b in zip(nodes, before, strict=True)]
        by_step = zip(*(answer["ms"] for answer in answers), strict=True)
        self.round_ms.append([max(step) for step in by_step])
        self.round_disk_bytes.append(sum(answer["disk_bytes"] for answer in answers) / count)
        # With the step before those that count.
        self.round_sent_bytes.append(max(sent, default=0) / (1 + count))


def run_heat(entries: Sequence[Entry], options: Namespace, nodes: Sequence[Node] = ()) -> None:
    """Build all systems of the heat, then let them train in turns.

    Args:
        entries: One for each system.
        options: Options of the suite.
        nodes: Nodes to run on, equally many ranks on each; when empty, ranks run without network
            namespaces.
    """
    heat = f"heat {entries[0].heat}"
    with ExitStack() as stack:
        path = getattr(options, "path", "") and stack.enter_context(
            tempfile.TemporaryDirectory(dir=options.path)  # ranks do not remove their files
        )
        for entry in entries:
            say(f"{heat}: building {entry.system.name}")
            entry.team = Team(
                "training:train",
                world_size=1 if entry.system.is_alone else options.ranks,
                python=options.pythons[entry.system.environment],
                environment=entry.environment,
                nodes=nodes,
                timeout_s=options.timeout,
                system=entry.system.name,
                shape=options.model,
                seed=options.seed,
                **setting_arguments(options, path),
                **entry.arguments,
            )
            stack.callback(entry.team.end)
            entry.setup = entry.ask("warm_up", options.warmup)
        say(f"{heat}: {options.rounds} rounds")
        turns = {
            number: lambda entry=entry: entry.run(options.steps_per_round, nodes)
            for number, entry in enumerate(entries)
        }
        take_turns(turns, options.rounds, skipped=0)
        for entry in entries:
            entry.reports = entry.ask("report")
            getattr(options, "versions", {}).update(entry.versions)


def setting_arguments(options: Namespace, path: str) -> dict[str, Any]:
    """Return the fields of `Setting` other than the ranks and the batch."""
    return {
        "lr": options.lr,
        "window": options.window,
        "path": path,
        "subgroup_bytes": options.subgroup_mib * 2**20,
    }
