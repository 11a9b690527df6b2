"""Collectives against gloo's own, and codecs against a copy of the same memory."""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from harness import Row, device_name, ratio, suite, take_turns
from team import Team
from torch import Tensor
from zero_comm import (
    AbstractCodec,
    Blockwise,
    Group,
    all_gather_flat,
    all_reduce_flat,
    native_status,
    parse_codec,
    reduce_scatter_flat,
)
from zero_comm.codecs import blockwise as _blockwise
from zero_comm.torch_private import all_gather_single, reduce_scatter_single

# ---- collectives ----

OPERATIONS: Final = ("all_reduce", "reduce_scatter", "all_gather")
MEAN: Final = dist.ReduceOp.AVG


@suite(
    ("operation", "operation"),
    ("MB", "megabytes"),
    ("built-in ms", "builtin_s", ".1f", 1000),
    ("ours ms", "ours_s", ".1f", 1000),
    ("speed-up", "speed_up", ".2f"),
    ("rounds", "speed_up_range", ".2f"),
    world_size=(2, "processes; at least 2"),
    megabytes=([4, 16, 64, 100], "sizes of the whole buffer, 10^6 bytes each"),
    rounds=(15, "turns of each way"),
)
def collectives(options: Namespace) -> list[Row]:
    """Our collectives against the built-in ones of gloo, side by side on one machine.

    Both ways of a collective take turns on the same buffers in the same processes, one thread each,
    so that a disturbance hits both. A round's time is that of its slowest rank.
    """
    rows = []
    with Team("bench_comm:collectives_of_rank", world_size=options.world_size) as team:
        for megabytes in options.megabytes:
            for operation in OPERATIONS:
                numel = megabytes * 10**6 // 4
                of_ranks = team.ask("measure", operation, numel, options.rounds)
                slowest = {
                    way: [max(each) for each in zip(*(r[way] for r in of_ranks), strict=True)]
                    for way in ("builtin", "ours")
                }
                row: Row = {"operation": operation, "megabytes": megabytes}
                for way, seconds in slowest.items():
                    row |= {f"{way}_s": statistics.median(seconds), f"each_{way}_s": seconds}
                rows.append(row | ratio(slowest["builtin"], slowest["ours"], "speed_up"))
    return rows


def collectives_of_rank() -> dict[str, Callable[..., Any]]:
    """The job of a rank."""
    group = Group.from_process_group()

    def measure(operation: str, numel: int, rounds: int) -> dict[str, list[float]]:
        ways = _ways(operation, group, numel)
        results = [way().clone() for way in ways.values()]  # also wakes connections and memory
        torch.testing.assert_close(results[1], results[0])

        def turn(way: Callable[[], Tensor]) -> float:
            dist.barrier()
            started = time.perf_counter()
            way()
            return time.perf_counter() - started

        turns = {name: lambda way=way: turn(way) for name, way in ways.items()}
        return take_turns(turns, rounds, skipped=0)

    return {"measure": measure}


def _ways(operation: str, group: Group, numel: int) -> dict[str, Callable[[], Tensor]]:
    """The built-in way and ours, on the same values. Means, so that repeating keeps them finite."""
    shard_numel = numel // group.world_size
    splits = [shard_numel] * group.world_size
    own = slice(group.rank * shard_numel, (group.rank + 1) * shard_numel)
    generator = torch.Generator().manual_seed(group.rank)
    theirs = torch.randn(shard_numel * group.world_size, generator=generator)
    mine = theirs.clone()
    out = torch.empty_like(theirs[own]), torch.empty_like(mine[own])
    builtin, ours = {
        "all_reduce": (
            lambda: (dist.all_reduce(theirs, MEAN, async_op=True), theirs),
            lambda: all_reduce_flat(mine, group=group),
        ),
        "reduce_scatter": (
            lambda: (reduce_scatter_single(out[0], theirs, MEAN, async_op=True), out[0]),
            lambda: reduce_scatter_flat(mine, splits=splits, group=group, out=out[1]),
        ),
        "all_gather": (
            lambda: (all_gather_single(theirs, theirs[own], async_op=True), theirs),
            lambda: all_gather_flat(mine, splits=splits, group=group),
        ),
    }[operation]

    def finished() -> Tensor:
        work, result = builtin()
        work.wait()
        return result

    return {"builtin": finished, "ours": lambda: ours().wait()}


# ---- codecs ----

CODECS: Final = ("int8", "int4", "bf16")
COPY: Final = ("copy", "", "", "")
Job = tuple[Callable[[], object], int]  # and the bytes that it has to read and write


@suite(
    ("codec", "codec"),
    ("values", "dtype"),
    ("job", "job"),
    ("way", "way"),
    ("GB/s", "gb_per_s", ".2f"),
    ("/ copy", "by_copy", ".2f"),
    ("memory", "memory", ".2f"),
    rounds=(30, "turns of each"),
    megabytes=(64, "of float32 values, 10^6 bytes; beyond the cache"),
    device=("cpu", "or cuda"),
)
def codecs(options: Namespace) -> list[Row]:
    """Codecs against a copy of the same memory: on one thread, or on a CUDA device.

    Each codec encodes, decodes and decodes to add, by kernels and in plain torch, in turns with a
    copy of float32 values; on a device every run is timed by its events. A row says how many bytes
    of values (not of the wire) pass per second, their ratio to the copy's, and `memory`: bytes that
    the job has to read and write per second, by those of the copy. 1 there is the memory's speed.
    Of the CPU the fastest turn counts, which nothing disturbed; of a device the median.
    """
    torch.set_num_threads(1)
    device, numel = options.device, options.megabytes * 10**6 // 4
    options.device_name = device_name(device)
    options.why_plain_torch = reason = native_status(device)
    source, target = torch.randn(2, numel, device=device)
    jobs: dict[tuple[str, ...], Job] = {COPY: (lambda: target.copy_(source), 8 * numel)}
    for name in CODECS:
        codec = parse_codec(name)
        assert codec is not None
        has_kernels = isinstance(codec, Blockwise) and not reason
        for dtype in (torch.float32, torch.bfloat16):
            for job, (run, moved) in _jobs(codec, source.to(dtype)).items():
                key = (name, str(dtype).removeprefix("torch."), job)
                if has_kernels:
                    jobs[*key, "kernels"] = run, moved
                jobs[*key, "plain torch"] = _in_plain_torch(run), moved
    turns = {key: lambda run=run: _seconds(run, device) for key, (run, _) in jobs.items()}
    found = take_turns(turns, options.rounds, skipped=2)  # the first compile, and touch memory
    counts = min if device == "cpu" else statistics.median
    copied = counts(found[COPY])
    rows = []
    for key, times in found.items():
        seconds, itemsize = counts(times), 2 if "bfloat16" in key else 4
        row = dict(zip(("codec", "dtype", "job", "way"), key, strict=True))
        rate = itemsize * numel / seconds
        row |= {"gb_per_s": rate / 1e9, "by_copy": rate * copied / (4 * numel), "seconds": times}
        rows.append(row | {"memory": jobs[key][1] / seconds * copied / (8 * numel)})
    return rows


def _jobs(codec: AbstractCodec, values: Tensor) -> dict[str, Job]:
    wire = codec.encode(values)
    moved = wire.nbytes + values.nbytes
    out = torch.zeros_like(values)
    jobs: dict[str, Job] = {
        "encode": ((lambda: codec.encode(values, wire)), moved),
        "decode": ((lambda: codec.decode(wire, out)), moved),
    }
    if out.dtype == torch.float32:
        jobs["decode_add"] = (lambda: codec.decode_add(wire, out)), moved + out.nbytes
    return jobs


def _in_plain_torch(run: Callable[[], object]) -> Callable[[], object]:
    def without_kernels() -> None:
        with mock.patch.object(_blockwise, "kernels", return_value=None):
            run()

    return without_kernels


def _seconds(run: Callable[[], object], device: str) -> float:
    if device == "cpu":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)  # so that launches by the host do not count
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1000
