"""Time and memory of activation checkpoints: twelve blocks, against torch's and against none."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import torch
import zero_ckpt
from harness import Row, by_figure, ratio, suite, take_turns
from measure import RETURNS_FREED, peak_resident_bytes, reset_peak, resident_bytes
from model import Block
from team import Team
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

SYSTEMS: Final[dict[str, Callable[..., Any]]] = {
    "none": lambda block, x: block(x),
    "torch": partial(torch_checkpoint, use_reentrant=False),
    "torch, reentrant": partial(torch_checkpoint, use_reentrant=True),
    "zero_ckpt": zero_ckpt.Checkpointer().checkpoint,
}
SIZES: Final = ("blocks", "width", "sequence", "batch")


@suite(
    ("system", "system"),
    ("ms", "median_ms", ".1f"),
    ("/ torch", "ratio_to_torch", ".3f"),
    ("of rounds", "ratio_to_torch_range", ".2f"),
    ("/ none", "ratio_to_none", ".3f"),
    ("peak MB", "peak_bytes", ".1f", 1e-6),
    ("/ torch", "peak_ratio_to_torch", ".3f"),
    rounds=(30, "turns of each"),
    blocks=(12, "of the GPT"),
    width=(512, "of a block"),
    sequence=(256, "tokens"),
    batch=(4, "sequences"),
    threads=(1, "of each process"),
)
def checkpoint(options: Namespace) -> list[Row]:
    """Time and memory of activation checkpoints: twelve blocks, against torch's and against none.

    Every system has a process of its own, with the same model and the same input. They take turns,
    one step each; a ratio is that of two turns of one round. A step is forward and backward. What
    is counted is the processor's time, which a machine that does other things disturbs less. The
    peak is the most memory resident in a step, above what was resident when the model had been
    built and a tiny step had loaded the libraries that the system loads on first use. It is
    measured in processes with an allocator that returns freed memory to the system at once, since
    holes in its heap would count otherwise. Last, the import of zero_ckpt after that of torch.
    """
    seconds, _ = _take_turns(options, options.rounds, {})
    _, of_rounds = _take_turns(options, 2, RETURNS_FREED)
    peaks = {system: max(each) for system, each in of_rounds.items()}
    rows = [
        {"system": system, "median_ms": statistics.median(times) * 1e3}
        | {"ms_of_rounds": [each * 1e3 for each in times], "peak_bytes": peaks[system]}
        | {"peak_ratio_to_torch": peaks[system] / peaks["torch"]}
        | ratio(times, seconds["torch"], "ratio_to_torch")
        | ratio(times, seconds["none"], "ratio_to_none")
        for system, times in seconds.items()
    ]
    return [*rows, {"system": "import zero_ckpt", "median_ms": min(_import_ms() for _ in range(2))}]


def _take_turns(
    options: Namespace, rounds: int, changes: Mapping[str, str]
) -> tuple[dict[str, list[Any]], ...]:
    """By system, of each round: seconds, and bytes at the peak."""
    given: dict[str, Any] = {name: getattr(options, name) for name in SIZES}
    given["environment"] = {"OMP_NUM_THREADS": str(options.threads), **changes}
    with ExitStack() as stack:
        turns = {}
        for system in SYSTEMS:
            team = Team("bench_checkpoint:blocks_of", system=system, **given)
            turns[system] = partial(stack.enter_context(team).slowest, "turn")
        # Those before wake caches and allocators.
        found = take_turns(turns, rounds, skipped=2)
    return tuple(by_figure(found, "seconds", "peaks").values())


def blocks_of(
    *, system: str, blocks: int, width: int, sequence: int, batch: int
) -> dict[str, Callable[[], tuple[float, int]]]:
    """The job of a system's process."""
    torch.manual_seed(0)
    model = nn.ModuleList(
        nn.Sequential(Block(width, width // 64), nn.Dropout(0.1)) for _ in range(blocks)
    )
    x = torch.randn(batch, sequence, width, requires_grad=True)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    run = SYSTEMS[system]
    tiny = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    run(tiny, torch.ones(1, 2, requires_grad=True)).sum().backward()
    built = resident_bytes()

    def turn() -> tuple[float, int]:
        reset_peak()
        start = time.process_time()
        hidden = x
        for block in model:
            hidden = run(block, hidden)
        hidden.square().mean().backward()
        return time.process_time() - start, peak_resident_bytes() - built

    return {"turn": turn}


def _import_ms() -> float:
    program = (
        "import time, torch; start = time.perf_counter(); import zero_ckpt; "
        "print(1e3 * (time.perf_counter() - start))"
    )
    written = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", program]
    with tempfile.TemporaryDirectory() as folder:  # compiled once, as an installed package is
        environment = written | {"PYTHONPYCACHEPREFIX": folder}
        subprocess.run(command, check=True, capture_output=True, env=environment)
        ran = subprocess.run(command, check=True, capture_output=True, env=environment)
    return float(ran.stdout)
