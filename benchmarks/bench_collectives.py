"""Our collectives against the built-in ones of gloo, side by side on one machine.

`python benchmarks/bench_collectives.py [--world-size 2] [--megabytes 4,16,64,100] [--rounds 15]`

Both ways of a collective take turns on the same buffers in the same processes, one thread each, so
that a disturbance hits both. A round's time is that of its slowest rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from results import write_results
from zero_comm import Group, all_gather_flat, all_reduce_flat, reduce_scatter_flat
from zero_comm.testing import RankPool
from zero_comm.torch_private import all_gather_single, reduce_scatter_single

RESULTS: Final = Path(__file__).parent / "results"
OPERATIONS: Final = ("all_reduce", "reduce_scatter", "all_gather")
MEAN: Final = dist.ReduceOp.AVG

Way = Callable[[], torch.Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table and write the JSON. Returns the exit status."""
    args = _parse(argv)
    load_before = os.getloadavg()[0]
    rows = []
    print(f"{'operation':<16}{'MB':>6}{'built-in ms':>13}{'ours ms':>10}{'speed-up':>10}  rounds")
    with RankPool(args.world_size) as pool:
        for megabytes in args.megabytes:
            for operation in OPERATIONS:
                times = pool.run(
                    _measure,
                    operation=operation,
                    numel=megabytes * 10**6 // 4,
                    rounds=args.rounds,
                    timeout_s=600,
                )
                rows.append(_row(operation, megabytes, times))
                _print_row(rows[-1])
    settings = vars(args) | {
        "load_before": load_before,
        "backend": "gloo",
        "dtype": "float32",
        "op": "mean",
    }
    path = write_results("collectives", rows, folder=RESULTS, settings=settings)
    print(f"written to {path}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--world-size", type=int, default=2, help="processes; at least 2")
    parser.add_argument(
        "--megabytes",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[4, 16, 64, 100],
        help="sizes of the whole buffer, 10^6 bytes each, by commas",
    )
    parser.add_argument("--rounds", type=int, default=15, help="turns of each way")
    args = parser.parse_args(argv)
    if args.world_size < 2:
        parser.error("--world-size: nothing travels with less than 2")
    return args


def _row(operation: str, megabytes: int, times: list[list[tuple[float, float]]]) -> dict[str, Any]:
    """One line of the table, of `times[rank][round]` in seconds."""
    slowest = [
        [max(rank_times[turn][way] for rank_times in times) for turn in range(len(times[0]))]
        for way in range(2)
    ]
    ratios = [builtin / ours for builtin, ours in zip(*slowest, strict=True)]
    return {
        "operation": operation,
        "world_size": len(times),
        "megabytes": megabytes,
        "builtin_s": statistics.median(slowest[0]),
        "ours_s": statistics.median(slowest[1]),
        "speed_up": statistics.median(ratios),
        "lowest_speed_up": min(ratios),
        "highest_speed_up": max(ratios),
        "each_builtin_s": slowest[0],
        "each_ours_s": slowest[1],
    }


def _print_row(row: dict[str, Any]) -> None:
    print(
        f"{row['operation']:<16}{row['megabytes']:>6}{row['builtin_s'] * 1e3:>13.1f}"
        f"{row['ours_s'] * 1e3:>10.1f}{row['speed_up']:>10.2f}"
        f"  {row['lowest_speed_up']:.2f} to {row['highest_speed_up']:.2f}",
        flush=True,
    )


# ---- In each rank ----


def _measure(group: Group, operation: str, numel: int, rounds: int) -> list[tuple[float, float]]:
    """Seconds of the built-in and of our way, in turns, on this rank."""
    ways = _ways(operation, group, numel)
    results = [way().clone() for way in ways]  # also wakes the connections and the memory
    torch.testing.assert_close(results[1], results[0])
    times = []
    for turn in range(rounds):
        seconds = [0.0, 0.0]
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            dist.barrier()
            started = time.perf_counter()
            ways[which]()
            seconds[which] = time.perf_counter() - started
        times.append((seconds[0], seconds[1]))
    return times


def _ways(operation: str, group: Group, numel: int) -> tuple[Way, Way]:
    """The built-in way and ours, on the same values. Means, so that repeating keeps them finite."""
    shard_numel = numel // group.world_size
    splits = [shard_numel] * group.world_size
    own = slice(group.rank * shard_numel, (group.rank + 1) * shard_numel)
    generator = torch.Generator().manual_seed(group.rank)
    theirs = torch.randn(shard_numel * group.world_size, generator=generator)
    mine = theirs.clone()

    def done(work: Any, result: torch.Tensor) -> torch.Tensor:
        work.wait()
        return result

    if operation == "all_reduce":
        return (
            lambda: done(dist.all_reduce(theirs, MEAN, async_op=True), theirs),
            lambda: all_reduce_flat(mine, group=group).wait(),
        )
    if operation == "reduce_scatter":
        out = torch.empty_like(theirs[own]), torch.empty_like(mine[own])
        return (
            lambda: done(reduce_scatter_single(out[0], theirs, MEAN, async_op=True), out[0]),
            lambda: reduce_scatter_flat(mine, splits=splits, group=group, out=out[1]).wait(),
        )
    return (
        lambda: done(all_gather_single(theirs, theirs[own], async_op=True), theirs),
        lambda: all_gather_flat(mine, splits=splits, group=group).wait(),
    )


if __name__ == "__main__":
    raise SystemExit(main())
