"""ZeroRedundancyOptimizer, ours against torch's: the step under DDP, and its whole state.

    python benchmarks/run.py redundancy --model 119m

First the suite `step` with the systems that concern it, then consolidation: every system has two
processes of its own (or `--ranks`) with the same model and Adam's state after one step. The systems
take turns; a ratio is that of two turns of one round. Time is that of the slowest rank, from a
barrier on. The peak is the most memory resident meanwhile above what was before, on the fullest
rank; what was put together, which rank 0 then has, is in it. Between rounds it is dropped.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import bench_step
import torch
import torch.distributed as dist
from measure import peak_resident_bytes, reset_peak, resident_bytes
from model import SHAPES, build_model
from results import write_results

LIBRARIES: Final = {"torch": "torch.distributed.optim", "ours": "zero_partition"}
STEP_SYSTEMS: Final = "ddp,torch_zro,zro,torch_zro_packed,zro_packed,zro_overlap,zro_hook"


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="run.py redundancy", description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="25m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-step", action="store_true", help="consolidation only")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(argv)
    status = 0
    if not options.no_step:
        passed = ["--model", options.model, "--ranks", str(options.ranks)]
        passed += ["--rounds", str(options.rounds), "--folder", str(options.folder)]
        status = bench_step.main([*passed, "--systems", STEP_SYSTEMS])
    rows = _consolidate(options)
    settings = {key: value for key, value in vars(options).items() if key != "folder"}
    print(write_results("redundancy", rows, folder=options.folder, settings=settings))
    return status


def _consolidate(options: argparse.Namespace) -> list[dict[str, Any]]:
    found: dict[str, list[tuple[float, int]]] = {system: [] for system in LIBRARIES}
    with tempfile.TemporaryDirectory() as folder:
        teams = {system: _start(system, options, folder) for system in LIBRARIES}
        for _ in range(options.rounds):
            for system, team in teams.items():
                for _, end in team:
                    end.send(True)
                answers = [end.recv() for _, end in team]
                seconds, peaks = zip(*answers, strict=True)
                found[system].append((max(seconds), max(peaks)))
        for team in teams.values():
            for worker, end in team:
                end.send(False)
                worker.join()
    rows = []
    print(f"\n{'consolidation':14s} {'s':>7s} {'torch / it':>11s} {'of rounds':>15s}", end="")
    print(f"  {'peak MB':>8s} {'/ torch':>8s}")
    for system, of_rounds in found.items():
        pairs = list(zip(found["torch"], of_rounds, strict=True))
        gains = [theirs[0] / mine[0] for theirs, mine in pairs]
        shares = [mine[1] / theirs[1] for theirs, mine in pairs]
        seconds = statistics.median(s for s, _ in of_rounds)
        peak = statistics.median(p for _, p in of_rounds)
        print(
            f"{system:14s} {seconds:7.2f} {statistics.median(gains):11.2f} "
            f"{min(gains):6.2f} to {max(gains):5.2f}  {peak / 1e6:8.1f} "
            f"{statistics.median(shares):8.3f}"
        )
        rows.append(
            {"system": system, "median_s": seconds, "peak_bytes": peak}
            | {"gain": statistics.median(gains), "peak_share": statistics.median(shares)}
            | {"s_of_rounds": [s for s, _ in of_rounds]}
            | {"peak_bytes_of_rounds": [p for _, p in of_rounds]}
        )
    return rows


def _start(system: str, options: argparse.Namespace, folder: str) -> list[tuple[Any, Connection]]:
    context = multiprocessing.get_context("spawn")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed memory is given back at once
    team = []
    for rank in range(options.ranks):
        ours, theirs = context.Pipe()
        arguments = (system, options.model, rank, options.ranks)
        links = {"meeting": f"{folder}/{system}", "orders": theirs}
        worker = context.Process(target=_work, args=arguments, kwargs=links, daemon=True)
        worker.start()
        theirs.close()
        team.append((worker, ours))
    return team


def _work(
    system: str, model: str, rank: int, world_size: int, *, meeting: str, orders: Connection
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(meeting, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    kind = importlib.import_module(LIBRARIES[system]).ZeroRedundancyOptimizer
    params = list(build_model(SHAPES[model], seed=0).parameters())
    optimizer = kind(params, torch.optim.Adam, lr=1e-3)
    for param in params:
        param.grad = torch.full_like(param, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    small = kind([torch.nn.Parameter(torch.ones(2, 2))], torch.optim.SGD, lr=1.0)
    small.consolidate_state_dict()  # libraries load what they load on first use
    while orders.recv():
        for attribute in ("_all_state_dicts", "_whole"):  # what the last round has left
            if getattr(optimizer, attribute, None):
                setattr(optimizer, attribute, [] if attribute == "_all_state_dicts" else None)
        before = resident_bytes()
        reset_peak()
        dist.barrier()
        start = time.perf_counter()
        optimizer.consolidate_state_dict(to=0)
        orders.send((time.perf_counter() - start, peak_resident_bytes() - before))
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
