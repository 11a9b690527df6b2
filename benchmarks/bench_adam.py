"""Adam's step on the CPU against the limit that memory sets.

`python benchmarks/bench_adam.py [--numel 1e8] [--threads 1,2] [--rounds 9]`

The limit is a loop in C with the same reads and writes and next to no arithmetic, over the same
tensors, divided among the same threads. All ways take turns in one process. `of limit` compares
their fastest turns: what disturbs a turn makes it slower, never faster. `by rounds` is the median
of the same ratio within each round, for machines on which no turn is undisturbed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from results import write_results
from torch import Tensor, nn
from zero_offload import CPUAdam, native_status
from zero_offload.adam.parallel import Team
from zero_offload.build import find_compiler

HERE: Final = Path(__file__).parent
BYTES_PER_ELEMENT: Final = 28  # of either dtype: see stream.cpp
MANY: Final = 2_000  # small tensors
SMALL_NUMEL: Final = 256

Way = Callable[[], Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table and write the JSON. Returns the exit status."""
    args = _parse(argv)
    load_before = os.getloadavg()[0]
    print(native_status())
    shares = f"{'of limit':>10}{'by rounds':>11}"
    print(f"{'work':<8}{'threads':>8}  {'way':<34}{'ms':>10}{'GB/s':>8}{shares}")
    rows = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        for work, ways in (("fp32", _fp32), ("bf16", _bf16), ("small", _small)):
            if work in args.work:
                rows += _measure(work, ways(args.numel), threads, args)
    if args.deepspeed_python:
        rows += _deepspeed(args)
    settings = {name: value for name, value in vars(args).items() if name != "deepspeed_python"}
    settings |= {"load_before": load_before, "kernels": native_status().isa}
    path = write_results("adam", rows, folder=HERE / "results", settings=settings)
    print(f"written to {path}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--numel", type=lambda text: int(float(text)), default=10**8)
    parser.add_argument(
        "--threads", type=lambda text: [int(each) for each in text.split(",")], default=[1, 2]
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns of each way")
    parser.add_argument(
        "--work",
        type=lambda text: text.split(","),
        default=["fp32", "bf16", "small"],
        help="fp32, bf16 (with unscaling and clipping), small (many small tensors), by commas",
    )
    parser.add_argument(
        "--deepspeed-python", help="interpreter of an environment with DeepSpeed, to time as well"
    )
    return parser.parse_args(argv)


def _measure(
    work: str, ways: dict[str, Way], threads: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(args.rounds + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if turn:  # the first makes state and wakes threads
                seconds[name].append(time.perf_counter() - started)
    numel = MANY * SMALL_NUMEL if work == "small" else args.numel
    limits = seconds.get("limit")
    limit = None if limits is None else min(limits)
    rows = []
    for name, all_s in seconds.items():
        pairs = [] if limits is None else zip(limits, all_s, strict=True)
        ratios = [limit_s / each_s for limit_s, each_s in pairs]
        by_rounds = median(ratios) if ratios else None
        rows.append(
            _row(work, threads, name, numel=numel, each_s=all_s, limit_s=limit, by_rounds=by_rounds)
        )
    return rows


def _row(
    work: str,
    threads: int,
    way: str,
    *,
    numel: int,
    each_s: list[float],
    limit_s: float | None,
    by_rounds: float | None = None,
) -> dict[str, Any]:
    best = min(each_s)
    share = None if limit_s is None else limit_s / best
    rate = numel * BYTES_PER_ELEMENT / best / 1e9
    print(
        f"{work:<8}{threads:>8}  {way:<34}{best * 1e3:>10.2f}{rate:>8.1f}"
        + ("" if share is None else f"{share:>10.3f}")
        + ("" if by_rounds is None else f"{by_rounds:>11.3f}"),
        flush=True,
    )
    return {
        "work": work,
        "threads": threads,
        "way": way,
        "numel": numel,
        "best_s": best,
        "share_of_limit": share,
        "share_by_rounds": by_rounds,
        "each_s": each_s,
    }


# ---- The ways ----


def _fp32(numel: int) -> dict[str, Way]:
    """One step of fp32 parameters, gradients and moments."""
    param, grad, first, second = _filled(numel, 4)
    second.abs_()
    stream, team = _stream().stream_f32, Team()

    def limit() -> None:
        addresses = [tensor.data_ptr() for tensor in (param, grad, first, second)]
        team.share(numel, lambda start, stop: stream(*addresses, start, stop))

    ways: dict[str, Way] = {"limit": limit}
    makers: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
        "zero_offload.CPUAdam": CPUAdam,
        "torch.optim.AdamW(fused=True)": lambda params: torch.optim.AdamW(params, fused=True),
        "torch.optim.AdamW(foreach=True)": lambda params: torch.optim.AdamW(params, foreach=True),
    }
    for name, make in makers.items():
        shared = nn.Parameter(param)
        shared.grad = grad
        optimizer = make([shared])
        _set_state(optimizer, shared, exp_avg=first, exp_avg_sq=second)
        ways[name] = optimizer.step
    return ways


def _bf16(numel: int) -> dict[str, Way]:
    """The same with bf16 gradient and parameter, fp32 master, unscaling and clipping."""
    master, first, second = _filled(numel, 3)
    second.abs_()
    param, grad = nn.Parameter(master.bfloat16()), master.bfloat16()
    stream, team = _stream().stream_16, Team()
    divisor = torch.tensor(1024.0 * 1.7)  # of the loss scale, and of clipping

    def limit() -> None:
        addresses = [tensor.data_ptr() for tensor in (master, grad, first, second, param)]
        team.share(numel, lambda start, stop: stream(*addresses, start, stop))

    ours = CPUAdam([param])
    param.grad = grad
    _set_state(ours, param, exp_avg=first, exp_avg_sq=second, master=master)
    ours.grad_scale = divisor

    bare = nn.Parameter(param.detach())
    bare.grad = grad
    without = CPUAdam.from_deepspeed([bare])
    _set_state(without, bare, exp_avg=first, exp_avg_sq=second)
    without.grad_scale = divisor

    wide = nn.Parameter(master)
    fused = torch.optim.AdamW([wide], fused=True)
    _set_state(fused, wide, exp_avg=first, exp_avg_sq=second)

    def separately() -> None:
        wide.grad = grad.float()
        wide.grad.mul_(1 / 1024.0)  # unscale
        wide.grad.mul_(1 / 1.7)  # clip, the norm not counted
        fused.step()
        param.data.copy_(wide.data)

    return {
        "limit": limit,
        "zero_offload.CPUAdam": ours.step,
        "zero_offload, no master": without.step,  # 22 bytes an element, as DeepSpeed's
        "torch fused, unscale, clip and cast": separately,
    }


def _small(numel: int) -> dict[str, Way]:
    """Many small tensors, new gradients each time: what a step costs besides arithmetic."""
    del numel
    ways: dict[str, Way] = {}
    for name, make in (
        ("zero_offload.CPUAdam", CPUAdam),
        ("torch.optim.AdamW(fused=True)", lambda p: torch.optim.AdamW(p, fused=True)),
        ("torch.optim.AdamW(foreach=True)", lambda p: torch.optim.AdamW(p, foreach=True)),
    ):
        params = [nn.Parameter(torch.zeros(SMALL_NUMEL)) for _ in range(MANY)]
        for p in params:
            p.grad = torch.ones_like(p)
        ways[name] = make(params).step
    return ways


def _filled(numel: int, count: int) -> list[Tensor]:
    """Small random numbers, the same pattern again and again: making them is not measured."""
    pattern = torch.randn(2**20, generator=torch.Generator().manual_seed(0)) * 1e-2
    repeats = -(-numel // pattern.numel())
    return [pattern.repeat(repeats)[:numel] for _ in range(count)]


def _set_state(optimizer: torch.optim.Optimizer, param: Tensor, **tensors: Tensor) -> None:
    """Have systems share memory: then all of them meet the same pages."""
    optimizer.state[param] = {"step": torch.tensor(100.0), **tensors}


def _stream() -> ctypes.CDLL:
    """Compile stream.cpp for this very processor, and load it."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "stream.so"
        flags = ["-O3", "-march=native", "-mprefer-vector-width=512", "-shared", "-fPIC"]
        command = [*find_compiler(os.environ), *flags, str(HERE / "stream.cpp"), "-o", str(library)]
        subprocess.run(command, check=True)
        loaded = ctypes.CDLL(str(library))
    for name, num_tensors in (("stream_f32", 4), ("stream_16", 5)):
        types = (*[ctypes.c_void_p] * num_tensors, ctypes.c_int64, ctypes.c_int64)
        getattr(loaded, name).argtypes = types
        getattr(loaded, name).restype = None
    return loaded


# ---- DeepSpeed, in its own environment ----

PROGRAM: Final = """
import json, sys, time, torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
numel, rounds, threads, dtype = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(threads)
param = torch.nn.Parameter((torch.randn(2**20) * 1e-2).repeat(-(-numel // 2**20))[:numel])
param.data = param.data.to(getattr(torch, dtype))
param.grad = param.data.clone()
optimizer = DeepSpeedCPUAdam([param])
seconds = []
for turn in range(rounds + 1):
    started = time.perf_counter()
    optimizer.step()
    seconds.append(time.perf_counter() - started)
print(json.dumps(seconds[1:]))
"""


def _deepspeed(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Its step on fp32 and on bf16 (no master, nothing unscaled), right after the limit's."""
    rows = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        for work, dtype, ways in (("fp32", "float32", _fp32), ("bf16", "bfloat16", _bf16)):
            if work not in args.work:
                continue
            limit = ways(args.numel)["limit"]
            best = []
            for _ in range(args.rounds + 1):
                started = time.perf_counter()
                limit()
                best.append(time.perf_counter() - started)
            del limit
            asked = [str(args.numel), str(args.rounds), str(threads), dtype]
            ran = subprocess.run(
                [args.deepspeed_python, "-W", "ignore", "-c", PROGRAM, *asked],
                env=_deepspeed_environment(args.deepspeed_python, threads),
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            each_s = json.loads(ran.stdout.splitlines()[-1])
            name = "deepspeed.DeepSpeedCPUAdam"
            rows.append(
                _row(work, threads, name, numel=args.numel, each_s=each_s, limit_s=min(best))
            )
    return rows


def _deepspeed_environment(python: str, threads: int) -> dict[str, str]:
    folder = str(Path(python).parent)
    changed = {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": str(threads),
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | changed


if __name__ == "__main__":
    raise SystemExit(main())
