"""One rank of one system: started by `team.py`, works when asked, sleeps on a pipe in between.

Runs in the environment of its system, so it imports nothing but torch and its siblings.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import (
    live_tensor_bytes,
    moved_disk_bytes,
    peak_resident_bytes,
    reset_peak,
    resident_bytes,
)
from model import SHAPES, build_model
from systems import SYSTEMS, ReportingStep, Setting, Step
from text import draw_batch


@dataclass(frozen=True)
class Assignment:
    """Everything a rank is told at its start; plain values, since it crosses a pipe."""

    system: str
    shape: str
    rank: int
    world_size: int
    lr: float
    window: int | None
    seed: int
    text_file: str
    rendezvous_file: str
    timeout_s: float
    path: str  # of a folder on a disk; empty: nothing may go there
    subgroup_bytes: int


@dataclass
class Rank:
    """The system being trained here. `built_bytes` is what the bare model costs."""

    assignment: Assignment
    text: bytes
    step: Step
    built_bytes: int
    numel: int
    setup_peak_bytes: int
    losses: list[float] = field(default_factory=list)

    @classmethod
    def build(cls, assignment: Assignment) -> Rank:
        """Import, meet the others, build the model, note its cost, then apply the system."""
        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)
        chosen, shape = SYSTEMS[assignment.system], SHAPES[assignment.shape]
        for name in chosen.imports:
            importlib.import_module(name)
        if assignment.world_size > 1:
            _meet(assignment)
        text = Path(assignment.text_file).read_bytes()
        model = build_model(shape, seed=assignment.seed)
        numel = sum(param.numel() for param in model.parameters())
        built_bytes = resident_bytes()
        reset_peak()
        step = chosen.build(
            model,
            Setting(
                rank=assignment.rank,
                world_size=assignment.world_size,
                batch=shape.batch,
                lr=assignment.lr,
                window=assignment.window,
                path=assignment.path,
                subgroup_bytes=assignment.subgroup_bytes,
            ),
        )
        return cls(assignment, text, step, built_bytes, numel, peak_resident_bytes())

    def warm_up(self, count: int) -> dict[str, Any]:
        """Let first steps allocate and record what they like, then start to watch the peak."""
        self._run(count)
        reset_peak()
        return {
            "numel": self.numel,
            "setup_peak_bytes": self.setup_peak_bytes - self.built_bytes,
            "versions": {name: importlib.metadata.version(name) for name in self._libraries()},
        }

    def run(self, count: int) -> dict[str, Any]:
        """Train `count` steps after one that is not counted.

        That first step wakes the caches, and takes over what the last round left in flight, as the
        next round's will from this one: so work that a system puts off is paid within the count.
        """
        if self.assignment.world_size > 1:
            dist.barrier()
        self._run(1)
        before = moved_disk_bytes()
        return {"ms": self._run(count), "disk_bytes": moved_disk_bytes() - before}

    def report(self) -> dict[str, Any]:
        """Memory, and the loss of every step so far. Call between steps."""
        return {
            "peak_bytes": peak_resident_bytes() - self.built_bytes,  # before the search below
            "idle_resident_bytes": resident_bytes() - self.built_bytes,
            "idle_tensor_bytes": live_tensor_bytes(),
            "losses": self.losses,
            **(self.step.report() if isinstance(self.step, ReportingStep) else {}),
        }

    def _run(self, count: int) -> list[float]:
        return [self._timed_step() for _ in range(count)]

    def _timed_step(self) -> float:
        shape, rank = SHAPES[self.assignment.shape], self.assignment.rank
        tokens, targets = draw_batch(self.text, shape, step=len(self.losses), rank=rank)
        start_s = time.perf_counter()
        loss = self.step(tokens, targets)
        elapsed_s = time.perf_counter() - start_s
        self.losses.append(loss.item())
        return 1000 * elapsed_s

    def _libraries(self) -> tuple[str, ...]:
        return ("torch", *({"deepspeed"} & set(SYSTEMS[self.assignment.system].imports)))


def _meet(assignment: Assignment) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{assignment.rendezvous_file}",
        rank=assignment.rank,
        world_size=assignment.world_size,
        timeout=timedelta(seconds=assignment.timeout_s),
    )


def serve(parent: Connection) -> None:
    """Answer requests, (verb, *arguments), until the parent hangs up or something fails."""
    rank = Rank.build(Assignment(**parent.recv()))
    verbs = {"warm_up": rank.warm_up, "run": rank.run, "report": rank.report}
    while True:
        verb, *arguments = parent.recv()
        parent.send(verbs[verb](*arguments))


if __name__ == "__main__":
    pipe = Connection(int(sys.argv[1]))
    try:
        serve(pipe)
    except EOFError:
        pass
    except BaseException:  # whatever it was, the parent should print it
        pipe.send({"error": traceback.format_exc()})
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(0)  # a collective that the others left would keep a tidy exit waiting
