"""Swapping a large tensor to disk and back, against what the disk can do.

`python benchmarks/run.py disk --path /on/the/disk [--rounds 7] [--deepspeed-python ...]`

The limit is the best of fio's settings (where fio is installed) and of pread and pwrite from a C
program's threads. All ways take turns in one invocation, on files that exist already, O_DIRECT or
flushed, and reads find nothing in the page cache. Of each way the median turn counts.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from attrs import frozen
from results import write_results
from torch import Tensor
from zero_offload import DiskSettings, DiskStore, HostArena
from zero_offload.build import find_compiler

HERE: Final = Path(__file__).parent
MIB: Final = 2**20
FIO: Final = tuple(itertools.product(("libaio", "io_uring"), (1, 4), (8, 32)))
THREADS: Final = tuple(itertools.product((1, 4), (2, 8, 16)))


@frozen
class Way:
    """Writes and reads the tensor once; each returns the seconds it took."""

    write: Callable[[], float]
    read: Callable[[], float]
    is_limit: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table and write the JSON. Returns the exit status."""
    args = _parse(argv)
    load_before = os.getloadavg()[0]
    nbytes = args.mib * MIB
    memory = HostArena("benchmark").allocate(nbytes)
    pattern = np.random.default_rng(0).integers(0, 256, MIB, dtype=np.uint8)
    memory.view(-1, MIB).copy_(torch.from_numpy(pattern))  # nothing that a disk could compress
    seconds: dict[str, tuple[list[float], list[float]]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="zero-bench-disk-", dir=args.path) as name,
        contextlib.ExitStack() as stack,
    ):
        ways = _ways(memory, Path(name), args, stack)
        for turn, (way, each) in itertools.product(range(args.rounds + 1), ways.items()):
            taken = each.write(), each.read()
            if turn:  # the first finds the blocks on disk
                for times, one in zip(seconds.setdefault(way, ([], [])), taken, strict=True):
                    times.append(one)
        rows = _rows(seconds, {way for way, each in ways.items() if each.is_limit}, nbytes)
    settings = {"mib": args.mib, "rounds": args.rounds, "load_before": load_before}
    print(f"written to {write_results('disk', rows, folder=args.folder, settings=settings)}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--path", type=Path, required=True, help="a folder on the disk")
    parser.add_argument("--mib", type=int, default=1024, help="size of the tensor")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way")
    parser.add_argument("--folder", type=Path, default=HERE / "results")
    parser.add_argument(
        "--deepspeed-python", help="interpreter of an environment with DeepSpeed, to time as well"
    )
    return parser.parse_args(argv)


def _rows(
    seconds: dict[str, tuple[list[float], list[float]]], limits: set[str], nbytes: int
) -> list[dict[str, Any]]:
    median_s = {way: [statistics.median(each) for each in both] for way, both in seconds.items()}
    best_s = [min(median_s[way][index] for way in limits) for index in (0, 1)]
    print(f"{'way':<46}{'write GB/s':>11}{'of limit':>9}{'read GB/s':>11}{'of limit':>9}")
    rows = []
    for way, both in median_s.items():
        speeds = [nbytes / each / 1e9 for each in both]
        shares = [best / each for best, each in zip(best_s, both, strict=True)]
        print(
            f"{way:<46}{speeds[0]:>11.2f}{shares[0]:>9.2f}{speeds[1]:>11.2f}{shares[1]:>9.2f}",
            flush=True,
        )
        rows.append(
            {
                "way": way,
                "write_gb_per_s": speeds[0],
                "write_share_of_limit": shares[0],
                "read_gb_per_s": speeds[1],
                "read_share_of_limit": shares[1],
                "write_s": seconds[way][0],
                "read_s": seconds[way][1],
            }
        )
    return rows


# ---- The ways ----


def _ways(
    memory: Tensor, folder: Path, args: argparse.Namespace, stack: contextlib.ExitStack
) -> dict[str, Way]:
    ways = dict(_in_c(memory, folder, stack))
    if shutil.which("fio"):
        for engine, mib, depth in FIO:
            ways[f"fio {engine}, {mib} MiB, depth {depth}"] = Way(
                partial(_fio, folder, "write", memory.nbytes, engine=engine, mib=mib, depth=depth),
                partial(_fio, folder, "read", memory.nbytes, engine=engine, mib=mib, depth=depth),
                is_limit=True,
            )
    plain = memory.clone()
    for name, settings, tensor in (
        ("DiskStore, io_uring", DiskSettings(), memory),
        ("DiskStore, io_uring, checksums", DiskSettings(has_checksums=True), memory),
        ("DiskStore, io_uring, not arena memory", DiskSettings(), plain),
        ("DiskStore, threads", DiskSettings(uses_uring=False), memory),
    ):
        store = stack.enter_context(DiskStore(folder, settings))
        ways[name] = _store(store, tensor)
    ways["torch.save and load"] = Way(
        lambda: _flushed(folder / "torch", lambda file: torch.save(memory, file)),
        lambda: _cold(folder / "torch", torch.load),
    )
    ways["numpy tofile and fromfile"] = Way(
        lambda: _flushed(folder / "numpy", lambda file: memory.numpy().tofile(file)),
        lambda: _cold(folder / "numpy", lambda path: np.fromfile(path, dtype=np.uint8)),
    )
    if args.deepspeed_python:
        ways |= _deepspeed(folder, memory.nbytes, args.deepspeed_python, stack)
    return ways


def _timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _store(store: DiskStore, tensor: Tensor) -> Way:
    return Way(
        lambda: _timed(lambda: store.write("x", tensor).result()),
        lambda: _timed(lambda: store.read("x", tensor).result()),
    )


def _in_c(memory: Tensor, folder: Path, stack: contextlib.ExitStack) -> Iterator[tuple[str, Way]]:
    built = folder / "disk.so"
    flags = ["-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-o", str(built)]
    subprocess.run([*find_compiler(os.environ), *flags, str(HERE / "disk.cpp")], check=True)
    library = ctypes.CDLL(str(built))
    fd = os.open(folder / "c", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    stack.callback(os.close, fd)

    def move(writes: bool, mib: int, num_threads: int) -> float:
        address, nbytes = ctypes.c_void_p(memory.data_ptr()), ctypes.c_int64(memory.nbytes)
        block = ctypes.c_int64(mib * MIB)
        started = time.perf_counter()
        failed = library.disk_move(fd, int(writes), address, nbytes, block, num_threads)
        taken = time.perf_counter() - started
        assert not failed, "the disk refused pread or pwrite"
        return taken

    for mib, num_threads in THREADS:
        yield (
            f"C, {mib} MiB, {num_threads} threads",
            Way(
                partial(move, True, mib, num_threads),
                partial(move, False, mib, num_threads),
                is_limit=True,
            ),
        )


def _fio(folder: Path, what: str, nbytes: int, *, engine: str, mib: int, depth: int) -> float:
    """The seconds that fio itself counts, without its start."""
    command = [
        *("fio", "--name=x", f"--filename={folder / 'fio'}", f"--rw={what}", "--direct=1"),
        *(f"--ioengine={engine}", f"--bs={mib}m", f"--iodepth={depth}", f"--size={nbytes}"),
        "--output-format=json",
    ]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    (job,) = json.loads(ran.stdout[ran.stdout.index("{") :])["jobs"]
    return nbytes / job[what]["bw_bytes"]


def _flushed(path: Path, write: Callable[[Any], Any]) -> float:
    with path.open("wb") as file:

        def write_and_flush() -> None:
            write(file)
            file.flush()
            os.fsync(file.fileno())

        return _timed(write_and_flush)


def _cold(path: Path, read: Callable[[Path], Any]) -> float:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return _timed(lambda: read(path))


# ---- DeepSpeed, in an environment of its own ----

PROGRAM: Final = """
import sys, time, torch
from deepspeed.ops.op_builder import AsyncIOBuilder
path, nbytes = sys.argv[1], int(sys.argv[2])
handle = AsyncIOBuilder().load().aio_handle(%(block)d * 2**20, %(depth)d, False, True, 1)
if %(locked)d:
    memory = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
else:
    memory = torch.empty(nbytes, dtype=torch.uint8)
memory.random_()
print("ready", flush=True)
for line in sys.stdin:
    start = time.perf_counter()
    if line.strip() == "write":
        handle.sync_pwrite(memory, path, 0)
    else:
        handle.sync_pread(memory, path, 0)
    print(time.perf_counter() - start, flush=True)
"""


def _deepspeed(
    folder: Path, nbytes: int, python: str, stack: contextlib.ExitStack
) -> dict[str, Way]:
    ways = {}
    for block, depth, locked in ((1, 8, 1), (8, 32, 1), (1, 8, 0)):
        name = f"DeepSpeed aio, {block} MiB, depth {depth}{'' if locked else ', plain tensor'}"
        program = PROGRAM % {"block": block, "depth": depth, "locked": locked}
        process = stack.enter_context(
            subprocess.Popen(
                [python, "-W", "ignore", "-c", program, str(folder / "deepspeed"), str(nbytes)],
                env=_deepspeed_environment(python),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
        while (line := _line(process)) != "ready":
            assert line is not None, "DeepSpeed ended before it was ready; does its async_io build?"
        ways[name] = Way(
            partial(_ask, process, "write"),
            partial(_ask, process, "read"),
        )
    return ways


def _ask(process: subprocess.Popen[str], what: str) -> float:
    assert process.stdin is not None, "it was started with a pipe"
    process.stdin.write(f"{what}\n")
    process.stdin.flush()
    while True:
        line = _line(process)
        assert line is not None, "DeepSpeed ended"
        with contextlib.suppress(ValueError):  # it also says what it thinks of disks
            return float(line)


def _line(process: subprocess.Popen[str]) -> str | None:
    assert process.stdout is not None, "it was started with a pipe"
    line = process.stdout.readline()
    return line.strip() if line else None


def _deepspeed_environment(python: str) -> dict[str, str]:
    changed = {"DS_ACCELERATOR": "cpu", "PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | changed


if __name__ == "__main__":
    raise SystemExit(main())
