"""An AdamW step whose state is on disk, against what the disk and the step alone need.

`python benchmarks/run.py swap --path /on/the/disk [--numel 1e8] [--rounds 7]`

The limit of a pipelined step is the larger of two times: reading and writing the state by itself,
at the rate at which the same store moves the same values through as many slots, and the step by
itself, with the state in memory. All four take turns; each ratio is of one round's turns, and the
median counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import torch
from results import write_results
from torch import Tensor, nn
from zero_offload import DiskStore, HostArena, OffloadedOptimizer

HERE: Final = Path(__file__).parent
NUM_SLOTS: Final = 3
MIB: Final = 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table and write the JSON. Returns the exit status."""
    args = _parse(argv)
    torch.set_num_threads(args.threads)
    load_before = os.getloadavg()[0]
    params = [nn.Parameter(torch.randn(int(args.numel) // 8)) for _ in range(8)]
    for param in params:
        param.grad = torch.randn_like(param)
    subgroup_bytes = args.subgroup_mib * MIB
    kind = {"optimizer": torch.optim.AdamW, "subgroup_bytes": subgroup_bytes}
    with DiskStore(args.path) as store:
        on_disk = OffloadedOptimizer(params, **kind, state="disk", store=store)
        in_memory = OffloadedOptimizer(params, **kind, state="host")
        moved = _Moved(store, on_disk.footprint.disk_bytes, subgroup_bytes)
        ways: dict[str, Callable[[], Any]] = {
            "read": lambda: moved.each(store.read),
            "write": lambda: moved.each(store.write),
            "step in memory": in_memory.step,
            "step from disk": on_disk.step,
        }
        seconds = {way: [] for way in ways}
        for turn in range(args.rounds + 1):
            for way, run in reversed(ways.items()) if turn == 0 else ways.items():
                start = time.perf_counter()
                run()
                if turn:  # the first writes files for the first time, and makes the state
                    seconds[way].append(time.perf_counter() - start)
        rows = _rows(seconds, on_disk.footprint.disk_bytes)
    settings = {
        "numel": int(args.numel),
        "threads": args.threads,
        "rounds": args.rounds,
        "subgroup_mib": args.subgroup_mib,
        "load_before": load_before,
    }
    print(f"written to {write_results('swap', rows, folder=args.folder, settings=settings)}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--path", type=Path, required=True, help="a folder on the disk")
    parser.add_argument("--numel", type=float, default=1e8, help="elements of all parameters")
    parser.add_argument("--subgroup-mib", type=int, default=64, help="state moved at a time")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the step")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way")
    parser.add_argument("--folder", type=Path, default=HERE / "results")
    return parser.parse_args(argv)


class _Moved:
    """As many bytes as the state, in values of a sub-group's size, through as many slots."""

    def __init__(self, store: DiskStore, nbytes: int, value_bytes: int) -> None:
        arena = HostArena("benchmark")
        self.slots = [arena.allocate(value_bytes) for _ in range(NUM_SLOTS)]
        for slot in self.slots:
            slot.random_(0, 256)
        sizes = [value_bytes] * (nbytes // value_bytes)
        sizes += [nbytes % value_bytes] if nbytes % value_bytes else []
        self.sizes = {f"value {k}": size for k, size in enumerate(sizes)}
        for (key, size), k in zip(self.sizes.items(), range(len(sizes)), strict=True):
            store.write(key, self.slots[k % NUM_SLOTS][:size]).result()

    def each(self, move: Callable[[str, Tensor], Future[Any]]) -> None:
        """Move all values, a slot each under way."""
        under_way: deque[Future[Any]] = deque()
        for k, (key, size) in enumerate(self.sizes.items()):
            if len(under_way) == NUM_SLOTS:
                under_way.popleft().result()
            under_way.append(move(key, self.slots[k % NUM_SLOTS][:size]))
        for future in under_way:
            future.result()


def _rows(seconds: dict[str, list[float]], nbytes: int) -> list[dict[str, Any]]:
    limits = [
        max(read + write, step)
        for read, write, step in zip(
            seconds["read"], seconds["write"], seconds["step in memory"], strict=True
        )
    ]
    rows = []
    print(f"{'way':16} {'seconds':>8} {'GB/s':>6} {'of the limit':>13} {'of rounds':>14}")
    for way, times in seconds.items():
        ratios = [time / limit for time, limit in zip(times, limits, strict=True)]
        row = {
            "way": way,
            "seconds": statistics.median(times),
            "bytes": nbytes,
            "of_limit": statistics.median(ratios),
            "of_rounds": [min(ratios), max(ratios)],
        }
        rows.append(row)
        rate = nbytes / row["seconds"] / 1e9
        span = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{way:16} {row['seconds']:8.3f} {rate:6.2f} {row['of_limit']:13.2f} {span:>14}")
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
