"""Adam's step on the CPU against the limit that memory sets."""

from __future__ import annotations

import ctypes
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import torch
from harness import DEEPSPEED, Row, check_known, compiled, ratio, suite, take_turns, timed
from team import Team
from torch import Tensor, nn
from torch.optim import AdamW
from zero_offload import CPUAdam, native_status
from zero_offload.adam.parallel import Team as Threads

BYTES_PER_ELEMENT: Final = 28  # of either dtype: see stream.cpp
MANY: Final = 2_000  # small tensors
SMALL_NUMEL: Final = 256
DEEPSPEED_DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16"}

Way = Callable[[], Any]
MAKERS: Final[dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]] = {
    "zero_offload.CPUAdam": CPUAdam,
    "torch.optim.AdamW(fused=True)": lambda params: AdamW(params, fused=True),
    "torch.optim.AdamW(foreach=True)": lambda params: AdamW(params, foreach=True),
}


@suite(
    ("work", "work"),
    ("threads", "threads"),
    ("way", "way"),
    ("ms", "best_s", ".2f", 1000),
    ("GB/s", "gb_per_s", ".1f"),
    ("of limit", "share_of_limit", ".3f"),
    ("by rounds", "share_by_rounds", ".3f"),
    numel=(1e8, "elements"),
    threads=([1, 2], "of the step"),
    rounds=(9, "turns of each way"),
    work=(["fp32", "bf16", "small"], "bf16 with unscaling and clipping; small: many tensors"),
    deepspeed_python=DEEPSPEED,
)
def adam(options: Namespace) -> list[Row]:
    """Adam's step on the CPU against the limit that memory sets.

    The limit is a loop in C with the same reads and writes and next to no arithmetic, over the same
    tensors, divided among the same threads. All ways take turns. `of limit` compares their fastest
    turns, since other programs only make a turn slower. `by rounds` is the median of the same
    ratio within each round, for machines on which no turn is undisturbed.
    """
    makers = {"fp32": _fp32, "bf16": _bf16, "small": _small}
    check_known("work", options.work, makers)
    options.kernels = native_status().isa
    rows = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for work in options.work:
            numel = MANY * SMALL_NUMEL if work == "small" else int(options.numel)
            with ExitStack() as stack:
                ways = {name: timed(way) for name, way in makers[work](numel).items()}
                if options.deepspeed_python and work in DEEPSPEED_DTYPES:
                    team = stack.enter_context(
                        Team(
                            "foreign:adam",
                            python=options.deepspeed_python,
                            environment={"OMP_NUM_THREADS": str(threads)},
                            numel=numel,
                            dtype=DEEPSPEED_DTYPES[work],
                        )
                    )
                    ways["deepspeed.DeepSpeedCPUAdam"] = lambda team=team: team.ask("step")[0]
                seconds = take_turns(ways, options.rounds)
            for way, each_s in seconds.items():
                row: Row = {"work": work, "threads": threads, "way": way, "numel": numel}
                row |= {"best_s": min(each_s), "each_s": each_s}
                row["gb_per_s"] = numel * BYTES_PER_ELEMENT / min(each_s) / 1e9
                if limits := seconds.get("limit"):
                    row["share_of_limit"] = min(limits) / min(each_s)
                    row |= ratio(limits, each_s, "share_by_rounds")
                rows.append(row)
    return rows


# ---- The ways ----


def _fp32(numel: int) -> dict[str, Way]:
    """One step of fp32 parameters, gradients and moments."""
    param, grad, *moments = _filled(numel, 4)
    ways: dict[str, Way] = {"limit": _limit("stream_f32", param, grad, *moments)}
    for name, make in MAKERS.items():
        ways[name] = _sharing(make, param, grad, *moments).step
    return ways


def _bf16(numel: int) -> dict[str, Way]:
    """The same with bf16 gradient and parameter, fp32 master, unscaling and clipping."""
    master, *moments = _filled(numel, 3)
    param, grad = master.bfloat16(), master.bfloat16()
    divisor = torch.tensor(1024.0 * 1.7)  # of the loss scale, and of clipping
    ours = _sharing(CPUAdam, param, grad, *moments, master=master)
    without = _sharing(
        partial(CPUAdam, masters=False, state_dtype=torch.float32), param, grad, *moments
    )
    ours.grad_scale = without.grad_scale = divisor
    fused = _sharing(partial(AdamW, fused=True), master, None, *moments)
    (wide,) = fused.param_groups[0]["params"]

    def separately() -> None:
        wide.grad = grad.float()
        wide.grad.mul_(1 / 1024.0)  # unscale
        wide.grad.mul_(1 / 1.7)  # clip, the norm not counted
        fused.step()
        param.copy_(wide.data)

    return {
        "limit": _limit("stream_16", master, grad, *moments, param),
        "zero_offload.CPUAdam": ours.step,
        "zero_offload, no master": without.step,  # 22 bytes an element, as DeepSpeed's
        "torch fused, unscale, clip and cast": separately,
    }


def _small(numel: int) -> dict[str, Way]:
    """Step many small tensors, with new gradients each time: the time besides arithmetic."""
    ways: dict[str, Way] = {}
    for name, make in MAKERS.items():
        params = [nn.Parameter(torch.zeros(numel // MANY)) for _ in range(MANY)]
        for p in params:
            p.grad = torch.ones_like(p)
        ways[name] = make(params).step
    return ways


def _filled(numel: int, count: int) -> list[Tensor]:
    """Return small random numbers, one pattern repeated: making them is not measured.

    The last, a second moment, has none below zero.
    """
    pattern = torch.randn(2**20, generator=torch.Generator().manual_seed(0)) * 1e-2
    repeats = -(-numel // pattern.numel())
    tensors = [pattern.repeat(repeats)[:numel] for _ in range(count)]
    tensors[-1].abs_()
    return tensors


def _sharing(
    make: Callable[[list[nn.Parameter]], Any],
    values: Tensor,
    grad: Tensor | None,
    first: Tensor,
    second: Tensor,
    **further: Tensor,
) -> Any:
    """An optimizer over these very tensors: all ways meet the same pages."""
    param = nn.Parameter(values)
    param.grad = grad
    optimizer = make([param])
    moments = {"exp_avg": first, "exp_avg_sq": second}
    optimizer.state[param] = {"step": torch.tensor(100.0), **moments, **further}
    return optimizer


def _limit(name: str, *tensors: Tensor) -> Way:
    """A loop of stream.cpp over the tensors, compiled for this very processor."""
    loop = getattr(compiled("stream.cpp", "-march=native", "-mprefer-vector-width=512"), name)
    loop.argtypes = (*[ctypes.c_void_p] * len(tensors), ctypes.c_int64, ctypes.c_int64)
    loop.restype = None
    threads = Threads()

    def limit() -> None:
        addresses = [tensor.data_ptr() for tensor in tensors]
        threads.share(len(tensors[0]), lambda start, stop: loop(*addresses, start, stop))

    return limit
