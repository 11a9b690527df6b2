"""Benchmarks of the disk: swapping a large tensor, and an optimizer's step with state on disk."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import statistics
import subprocess
import tempfile
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from harness import DEEPSPEED, MIB, Row, by_figure, compiled, ratio, suite, take_turns, timed
from team import Team
from torch import Tensor, nn
from zero_offload import DiskSettings, DiskStore, HostArena, OffloadedOptimizer

# ---- disk ----

FIO: Final = tuple(itertools.product(("libaio", "io_uring"), (1, 4), (8, 32)))
THREADS: Final = tuple(itertools.product((1, 4), (2, 8, 16)))
AIO: Final = ((1, 8, True), (8, 32, True), (1, 8, False))
Way = tuple[Callable[[], float], Callable[[], float]]  # write and read; the seconds of each


@suite(
    ("way", "way"),
    ("write GB/s", "write_gb_per_s", ".2f"),
    ("of limit", "write_share_of_limit", ".2f"),
    ("read GB/s", "read_gb_per_s", ".2f"),
    ("of limit", "read_share_of_limit", ".2f"),
    path=(str, "a folder on the disk"),
    mib=(1024, "size of the tensor"),
    rounds=(7, "turns of each way"),
    deepspeed_python=DEEPSPEED,
)
def disk(options: Namespace) -> list[Row]:
    """Swapping a large tensor to disk and back, against the disk's speed.

    The limit is the best of fio's settings (where fio is installed) and of pread and pwrite from a
    C program's threads. All ways take turns in one invocation, on files that exist already,
    O_DIRECT or flushed, and reads find nothing in the page cache. Of each way the median counts.
    """
    nbytes = options.mib * MIB
    memory = HostArena("benchmark").allocate(nbytes)
    pattern = np.random.default_rng(0).integers(0, 256, MIB, dtype=np.uint8)
    memory.view(-1, MIB).copy_(torch.from_numpy(pattern))  # nothing that a disk could compress
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.path)))
        limits = dict(_limits(memory, folder, stack))
        ways = limits | dict(_ways(memory, folder, options.deepspeed_python, stack))
        turns = {way: lambda both=both: (both[0](), both[1]()) for way, both in ways.items()}
        found = take_turns(turns, options.rounds)  # the first finds the blocks on disk
    rows: list[Row] = [{"way": way} for way in found]
    for what, seconds in by_figure(found, "write", "read").items():
        best_s = min(statistics.median(seconds[way]) for way in limits)
        for row in rows:
            median_s = statistics.median(seconds[row["way"]])
            row[f"{what}_gb_per_s"] = nbytes / median_s / 1e9
            row[f"{what}_share_of_limit"] = best_s / median_s
            row[f"{what}_s"] = seconds[row["way"]]
    return rows


def _limits(memory: Tensor, folder: Path, stack: ExitStack) -> Iterator[tuple[str, Way]]:
    library = compiled("disk.cpp", "-std=c++17", "-pthread")
    fd = os.open(folder / "c", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    stack.callback(os.close, fd)

    def move(writes: bool, mib: int, num_threads: int) -> None:
        address, nbytes = ctypes.c_void_p(memory.data_ptr()), ctypes.c_int64(memory.nbytes)
        block = ctypes.c_int64(mib * MIB)
        failed = library.disk_move(fd, int(writes), address, nbytes, block, num_threads)
        assert not failed, "the disk refused pread or pwrite"

    def fio(what: str, engine: str, mib: int, depth: int) -> float:
        """The seconds that fio itself counts, without its start."""
        command = [
            *("fio", "--name=x", f"--filename={folder / 'fio'}", f"--rw={what}", "--direct=1"),
            *(f"--ioengine={engine}", f"--bs={mib}m", f"--iodepth={depth}"),
            *(f"--size={memory.nbytes}", "--output-format=json"),
        ]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        (job,) = json.loads(ran.stdout[ran.stdout.index("{") :])["jobs"]
        return memory.nbytes / job[what]["bw_bytes"]

    for given in THREADS:
        write, read = (timed(lambda w=w, given=given: move(w, *given)) for w in (True, False))
        yield "C, {} MiB, {} threads".format(*given), (write, read)
    for given in FIO if shutil.which("fio") else ():
        write, read = (lambda w=w, given=given: fio(w, *given) for w in ("write", "read"))
        yield "fio {}, {} MiB, depth {}".format(*given), (write, read)


def _ways(memory: Tensor, folder: Path, python: str, stack: ExitStack) -> Iterator[tuple[str, Way]]:
    plain = memory.clone()
    for name, settings, tensor in (
        ("DiskStore, io_uring", DiskSettings(), memory),
        ("DiskStore, io_uring, checksums", DiskSettings(has_checksums=True), memory),
        ("DiskStore, io_uring, not arena memory", DiskSettings(), plain),
        ("DiskStore, threads", DiskSettings(uses_uring=False), memory),
    ):
        store = stack.enter_context(DiskStore(folder, settings))
        moves = store.write, store.read
        write, read = (timed(lambda m=m, t=tensor: m("x", t).result()) for m in moves)
        yield name, (write, read)

    def save() -> None:
        with (folder / "torch").open("wb") as file:
            torch.save(memory, file)
            file.flush()
            os.fsync(file.fileno())

    def load() -> float:
        with (folder / "torch").open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return timed(lambda: torch.load(folder / "torch"))()

    yield "torch.save and load", (timed(save), load)
    for mib, depth, is_locked in AIO if python else ():
        given = {"mib": mib, "depth": depth, "is_locked": is_locked, "nbytes": memory.nbytes}
        file = str(folder / "deepspeed")
        team = stack.enter_context(Team("foreign:aio", python=python, path=file, **given))
        write, read = (lambda t=team, w=what: t.ask(w)[0] for what in ("write", "read"))
        name = f"DeepSpeed aio, {mib} MiB, depth {depth}{'' if is_locked else ', plain tensor'}"
        yield name, (write, read)


# ---- swap ----

NUM_SLOTS: Final = 3


@suite(
    ("way", "way"),
    ("seconds", "seconds", ".3f"),
    ("GB/s", "gb_per_s", ".2f"),
    ("of the limit", "of_limit", ".2f"),
    ("of rounds", "of_limit_range", ".2f"),
    path=(str, "a folder on the disk"),
    numel=(1e8, "elements of all parameters"),
    subgroup_mib=(64, "state moved at a time"),
    threads=(os.cpu_count() or 1, "of the step"),
    rounds=(7, "turns of each way"),
)
def swap(options: Namespace) -> list[Row]:
    """An AdamW step with its state on disk, against the time of the disk and of the step alone.

    The limit of a pipelined step is the larger of two times: reading and writing the state by
    itself, at the rate at which the same store moves the same values through as many slots, and the
    step by itself, with the state in memory. All four take turns; each ratio is of one round's
    turns, and the median counts.
    """
    torch.set_num_threads(options.threads)
    params = [nn.Parameter(torch.randn(int(options.numel) // 8)) for _ in range(8)]
    for param in params:
        param.grad = torch.randn_like(param)
    value_bytes = options.subgroup_mib * MIB
    kind: dict[str, Any] = {"optimizer": torch.optim.AdamW, "subgroup_bytes": value_bytes}
    kind["small_bytes"] = min(MIB, value_bytes // 2)  # at most half of a sub-group
    with DiskStore(options.path) as store:
        on_disk = OffloadedOptimizer(params, **kind, state="disk", store=store)
        in_memory = OffloadedOptimizer(params, **kind, state="host")
        nbytes = on_disk.footprint.disk_bytes
        arena = HostArena("benchmark")
        slots = [arena.allocate(value_bytes).random_(0, 256) for _ in range(NUM_SLOTS)]
        starts = range(0, nbytes, value_bytes)
        values = {
            f"value {k}": slots[k % NUM_SLOTS][: min(value_bytes, nbytes - start)]
            for k, start in enumerate(starts)
        }
        _move_each(store.write, values)
        ways = {
            "read": timed(lambda: _move_each(store.read, values)),
            "write": timed(lambda: _move_each(store.write, values)),
            "step in memory": timed(in_memory.step),
            "step from disk": timed(on_disk.step),
        }
        seconds = take_turns(ways, options.rounds)
    of_rounds = zip(*(seconds[w] for w in ("read", "write", "step in memory")), strict=True)
    limits = [max(read + write, step) for read, write, step in of_rounds]
    return [
        {"way": way, "seconds": statistics.median(times), "bytes": nbytes}
        | {"gb_per_s": nbytes / statistics.median(times) / 1e9}
        | ratio(times, limits, "of_limit")
        for way, times in seconds.items()
    ]


def _move_each(move: Callable[[str, Tensor], Future[Any]], values: dict[str, Tensor]) -> None:
    """Move all values, at most `NUM_SLOTS` at a time."""
    under_way: deque[Future[Any]] = deque()
    for key, slot in values.items():
        if len(under_way) == NUM_SLOTS:
            under_way.popleft().result()
        under_way.append(move(key, slot))
    for future in under_way:
        future.result()
