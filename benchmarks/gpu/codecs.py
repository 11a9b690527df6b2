"""Codecs of a CUDA device against a copy of the same memory.

    python benchmarks/gpu/codecs.py
    python benchmarks/gpu/codecs.py --device cpu      # does it run at all?

Each codec encodes, decodes and decodes to add, by kernels and in plain torch, in turns with a copy
of float32 values; every run is timed by events of the device. A row says how many bytes of values
(not of the wire) pass per second, their ratio to the copy's, and `memory`: bytes that the job has
to read and write per second, by those of the copy. 1 there is the speed of the memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # beside the other suites

import torch
from results import write_results
from torch import Tensor
from zero_comm import AbstractCodec, Blockwise, native_status, parse_codec
from zero_comm.codecs import blockwise as _blockwise

CODECS: Final = ("int8", "int4", "bf16")
DTYPES: Final = (torch.float32, torch.bfloat16)
Job = tuple[Callable[[], object], int]  # and the bytes that it has to read and write


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--mib", type=int, default=256, help="of float32 values; beyond the cache")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent.parent / "results")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu shows only whether this script runs")
    numel = (options.mib if options.device == "cuda" else 1) * 2**18
    reason = native_status(options.device)
    print(f"kernels: {reason or 'in use'}")

    jobs: dict[tuple[str, ...], Job] = {}
    source, target = torch.randn(2, numel, device=options.device)
    jobs["copy", "", "", ""] = (lambda: target.copy_(source)), 8 * numel
    for name in CODECS:
        codec = parse_codec(name)
        assert codec is not None
        has_kernels = isinstance(codec, Blockwise) and not reason
        for dtype in DTYPES:
            for job, (run, moved) in _jobs(codec, source.to(dtype)).items():
                key = (name, str(dtype).removeprefix("torch."), job)
                if has_kernels:
                    jobs[*key, "kernels"] = run, moved
                jobs[*key, "plain torch"] = _in_plain_torch(run), moved

    times: dict[tuple[str, ...], list[float]] = {key: [] for key in jobs}
    for round_index in range(options.rounds + 2):  # the first ones compile, and touch memory
        for key, (run, _) in jobs.items():
            seconds = _timed(run, options.device)
            if round_index >= 2:
                times[key].append(seconds)

    rows = []
    medians = {key: statistics.median(found) for key, found in times.items()}
    copied = medians["copy", "", "", ""]
    print(f"{'codec':6}{'values':10}{'':12}{'way':13}{'GB/s':>8}{'/ copy':>8}{'memory':>8}")
    for (name, dtype, job, way), seconds in medians.items():
        itemsize = 2 if dtype == "bfloat16" else 4
        rate, memory = itemsize * numel / seconds, jobs[name, dtype, job, way][1] / seconds
        row = {"codec": name, "dtype": dtype, "job": job, "way": way, "gb_per_s": rate / 1e9}
        row |= {"by_copy": rate * copied / (4 * numel), "memory": memory * copied / (8 * numel)}
        figures = f"{row['gb_per_s']:8.1f}{row['by_copy']:8.2f}{row['memory']:8.2f}"
        print(f"{name:6}{dtype:10}{job:12}{way:13}{figures}")
        rows.append(row | {"seconds": times[name, dtype, job, way]})
    settings = {"rounds": options.rounds, "numel": numel, "why_plain_torch": reason}
    settings["device_name"] = "cpu" if options.device == "cpu" else torch.cuda.get_device_name()
    print(write_results("gpu-codecs", rows, folder=options.folder, settings=settings))
    return 0


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


def _timed(run: Callable[[], object], device: str) -> float:
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


if __name__ == "__main__":
    sys.exit(main())
