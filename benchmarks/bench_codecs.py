"""Codecs against a copy of the same memory, on one thread.

    python benchmarks/run.py codecs

Each codec encodes, decodes and decodes to add, compiled and in plain torch, in turns with a copy;
figures are bytes of the values (not of the wire) per second, of the fastest turn, and their ratio
to the copy's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from results import write_results
from zero_comm import AbstractCodec, native_status, parse_codec
from zero_comm.codecs import blockwise as _blockwise

CODECS = ("int8", "int4", "bf16")


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--megabytes", type=int, default=64, help="of float32 values, 10^6 bytes")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    numel = options.megabytes * 10**6 // 4
    ways = ["plain torch"] if native_status() else ["compiled", "plain torch"]

    jobs: dict[tuple[str, str, str], Callable[[], object]] = {}
    source, target = torch.randn(numel), torch.zeros(numel)
    jobs["copy", "", ""] = lambda: target.copy_(source)
    for name in CODECS:
        codec = parse_codec(name)
        assert codec is not None
        for way in ways if name.startswith("int") else ways[-1:]:
            for job, run in _jobs(codec, numel).items():
                jobs[name, way, job] = run if way == "compiled" else _in_plain_torch(run)

    fastest = dict.fromkeys(jobs, float("inf"))
    for round_index in range(options.rounds + 1):  # the first one touches memory
        for key, run in jobs.items():
            start = time.perf_counter()
            run()
            if round_index:
                fastest[key] = min(fastest[key], time.perf_counter() - start)

    rows = []
    print(f"{'codec':8s}{'way':14s}{'':12s}{'GB/s':>8s}{'/ copy':>8s}")
    for (name, way, job), seconds in fastest.items():
        rate, ratio = 4 * numel / seconds / 1e9, fastest["copy", "", ""] / seconds
        print(f"{name:8s}{way:14s}{job:12s}{rate:8.2f}{ratio:8.2f}")
        rows.append({"codec": name, "way": way, "job": job, "gb_per_s": rate, "by_copy": ratio})
    settings = {"rounds": options.rounds, "megabytes": options.megabytes}
    print(write_results("codecs", rows, folder=options.folder, settings=settings))
    return 0


def _jobs(codec: AbstractCodec, numel: int) -> dict[str, Callable[[], object]]:
    values, out = torch.randn(numel), torch.zeros(numel)
    wire = codec.encode(values)
    return {
        "encode": lambda: codec.encode(values, wire),
        "decode": lambda: codec.decode(wire, out),
        "decode_add": lambda: codec.decode_add(wire, out),
    }


def _in_plain_torch(run: Callable[[], object]) -> Callable[[], object]:
    def without_kernels() -> None:
        with mock.patch.object(_blockwise, "kernels", return_value=None):
            run()

    return without_kernels


if __name__ == "__main__":
    raise SystemExit(main())
