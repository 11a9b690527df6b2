"""ZeroRedundancyOptimizer, ours against torch's: the step under DDP, and its whole state."""

from __future__ import annotations

import importlib
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
from bench_step import step
from harness import Row, by_figure, ratio, run_suite, suite, take_turns
from measure import RETURNS_FREED, peak_resident_bytes, reset_peak, resident_bytes
from model import SHAPES, build_model
from team import Team

LIBRARIES: Final = {"torch": "torch.distributed.optim", "ours": "zero_partition"}
STEP_SYSTEMS: Final = "ddp,torch_zro,zro,zro_overlap,zro_hook"


@suite(
    ("consolidation", "system"),
    ("s", "median_s", ".2f"),
    ("torch / it", "gain", ".2f"),
    ("of rounds", "gain_range", ".2f"),
    ("peak MB", "peak_bytes", ".1f", 1e-6),
    ("/ torch", "peak_share", ".3f"),
    model={"choices": SHAPES, "default": "25m"},
    ranks=(2, "processes of each"),
    rounds=(5, "turns of each"),
    no_step=(False, "consolidation only"),
)
def redundancy(options: Namespace) -> list[Row]:
    """ZeroRedundancyOptimizer, ours against torch's: the step under DDP, and its whole state.

    First the suite `step` with the systems that concern it, then consolidation: every system has
    two processes of its own (or `--ranks`) with the same model and Adam's state after one step. The
    systems take turns; a ratio is that of two turns of one round. Time is that of the slowest rank,
    from a barrier on. The peak is the growth of resident memory meanwhile, on the rank where it is
    largest; it includes the consolidated state, which rank 0 then has. Between rounds that state is
    dropped.
    """
    if not options.no_step:
        passed = ["--model", options.model, "--ranks", str(options.ranks)]
        passed += ["--rounds", str(options.rounds), "--folder", str(options.folder)]
        if run_suite("step", step, [*passed, "--systems", STEP_SYSTEMS]):
            return [{"system": "step", "error": "a system of the suite `step` failed: see above"}]
    with ExitStack() as stack:
        turns = {}
        for system, library in LIBRARIES.items():
            team = Team(
                "bench_redundancy:consolidation",
                world_size=options.ranks,
                environment=RETURNS_FREED,
                library=library,
                model=options.model,
            )
            turns[system] = partial(stack.enter_context(team).slowest, "turn")
        found = take_turns(turns, options.rounds, skipped=0)
    seconds, peaks = by_figure(found, "seconds", "peaks").values()
    return [
        {"system": system, "median_s": statistics.median(seconds[system])}
        | {"peak_bytes": statistics.median(peaks[system])}
        | {"s_of_rounds": seconds[system], "peak_bytes_of_rounds": peaks[system]}
        | ratio(seconds["torch"], seconds[system], "gain")
        | ratio(peaks[system], peaks["torch"], "peak_share")
        for system in found
    ]


def consolidation(library: str, model: str) -> dict[str, Callable[[], tuple[float, int]]]:
    """The job of a rank."""
    kind = importlib.import_module(library).ZeroRedundancyOptimizer
    params = list(build_model(SHAPES[model], seed=0).parameters())
    optimizer = kind(params, torch.optim.Adam, lr=1e-3)
    for param in params:
        param.grad = torch.full_like(param, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    small = kind([torch.nn.Parameter(torch.ones(2, 2))], torch.optim.SGD, lr=1.0)
    small.consolidate_state_dict()  # libraries load what they load on first use

    def turn() -> tuple[float, int]:
        for attribute in ("_all_state_dicts", "_whole"):  # what the last round has left
            if getattr(optimizer, attribute, None):
                setattr(optimizer, attribute, [] if attribute == "_all_state_dicts" else None)
        before = resident_bytes()
        reset_peak()
        dist.barrier()
        start = time.perf_counter()
        optimizer.consolidate_state_dict(to=0)
        return time.perf_counter() - start, peak_resident_bytes() - before

    return {"turn": turn}
