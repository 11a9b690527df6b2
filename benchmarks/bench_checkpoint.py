"""What activation checkpoints cost and save: twelve blocks, against torch's and against none.

    python benchmarks/run.py checkpoint

Every system has a process of its own, with the same model and the same input. They take turns, one
step each; a ratio is that of two turns of one round. A step is forward and backward. What is
counted is the processor's time, which a machine that does other things disturbs less. The peak is
the most memory resident in a step, above what was resident when the model had been built and a tiny
step had loaded whatever libraries the system loads on first use; it is measured in processes whose
allocator gives back at once what is freed, as holes in its heap would count otherwise.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
import zero_ckpt
from measure import peak_resident_bytes, reset_peak, resident_bytes
from model import Block
from results import write_results
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

Run = Callable[[nn.Module, Tensor], Tensor]


def _none(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def _torch(block: nn.Module, x: Tensor) -> Tensor:
    return torch_checkpoint(block, x, use_reentrant=False)


def _torch_reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return torch_checkpoint(block, x, use_reentrant=True)


SYSTEMS: Final[dict[str, Run]] = {
    "none": _none,
    "torch": _torch,
    "torch, reentrant": _torch_reentrant,
    "zero_ckpt": zero_ckpt.Checkpointer().checkpoint,
}


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(argv)

    times = {
        system: seconds for system, (seconds, _) in _take_turns(options, options.rounds).items()
    }
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    peaks = {system: max(peaks) for system, (_, peaks) in _take_turns(options, 2).items()}
    rows = []
    print(f"{'system':20s} {'ms':>7s}  {'/ torch':>7s} {'of rounds':>14s}  {'/ none':>6s}", end="")
    print(f"  {'peak MB':>7s}  {'/ torch':>7s}")
    for system, seconds in times.items():
        to_torch, to_none = _ratios(seconds, times["torch"]), _ratios(seconds, times["none"])
        median_ms, peak = statistics.median(seconds) * 1e3, peaks[system]
        peak_ratio = peak / peaks["torch"]
        print(
            f"{system:20s} {median_ms:7.1f}  {statistics.median(to_torch):7.3f} "
            f"{min(to_torch):6.2f} to {max(to_torch):4.2f}  {statistics.median(to_none):6.3f}"
            f"  {peak / 1e6:7.1f}  {peak_ratio:7.3f}"
        )
        rows.append(
            {"system": system, "median_ms": median_ms, "peak_bytes": peak}
            | {"ratio_to_torch": statistics.median(to_torch)}
            | {"ratio_to_none": statistics.median(to_none), "peak_ratio_to_torch": peak_ratio}
            | {"ms_of_rounds": [sample * 1e3 for sample in seconds]}
        )
    import_ms = min(_import_ms() for _ in range(2))
    print(f"import zero_ckpt after import torch: {import_ms:.0f} ms")
    rows.append({"system": "import zero_ckpt", "median_ms": import_ms})
    settings = {key: value for key, value in vars(options).items() if key != "folder"}
    print(write_results("checkpoint", rows, folder=options.folder, settings=settings))
    return 0


def _import_ms() -> float:
    program = (
        "import time, torch; start = time.perf_counter(); import zero_ckpt; "
        "print(1e3 * (time.perf_counter() - start))"
    )
    written = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as folder:  # compiled once, as an installed package is
        for _ in range(2):
            ran = subprocess.run(
                [sys.executable, "-c", program],
                capture_output=True,
                check=True,
                env=written | {"PYTHONPYCACHEPREFIX": folder},
            )
    return float(ran.stdout)


def _ratios(seconds: list[float], others: list[float]) -> list[float]:
    return [a / b for a, b in zip(seconds, others, strict=True)]


def _take_turns(
    options: argparse.Namespace, rounds: int
) -> dict[str, tuple[list[float], list[int]]]:
    context = multiprocessing.get_context("spawn")
    ends: dict[str, Connection] = {}
    workers = []
    for system in SYSTEMS:
        ours, theirs = context.Pipe()
        worker = context.Process(target=_work, args=(system, options, theirs), daemon=True)
        worker.start()
        theirs.close()
        ends[system] = ours
        workers.append(worker)
    found: dict[str, tuple[list[float], list[int]]] = {system: ([], []) for system in SYSTEMS}
    for round_index in range(rounds + 2):
        for system, end in ends.items():
            end.send(True)
            seconds, peak = end.recv()
            if round_index >= 2:  # those before wake caches and allocators
                found[system][0].append(seconds)
                found[system][1].append(peak)
    for end, worker in zip(ends.values(), workers, strict=True):
        end.send(False)
        worker.join()
    return found


def _work(system: str, options: Any, orders: Connection) -> None:
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    heads = options.width // 64
    blocks = nn.ModuleList(
        nn.Sequential(Block(options.width, heads), nn.Dropout(0.1)) for _ in range(options.blocks)
    )
    x = torch.randn(options.batch, options.sequence, options.width, requires_grad=True)
    for param in blocks.parameters():
        param.grad = torch.zeros_like(param)
    run = SYSTEMS[system]
    tiny = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    run(tiny, torch.ones(1, 2, requires_grad=True)).sum().backward()
    built = resident_bytes()
    while orders.recv():
        reset_peak()
        start = time.process_time()
        hidden = x
        for block in blocks:
            hidden = run(block, hidden)
        hidden.square().mean().backward()
        orders.send((time.process_time() - start, peak_resident_bytes() - built))


if __name__ == "__main__":
    raise SystemExit(main())
