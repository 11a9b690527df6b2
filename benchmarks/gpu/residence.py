"""Training with optimizer state and parameters on host or disk, on one CUDA GPU.

    python benchmarks/gpu/residence.py largest --memory-gib 8 --path /on/the/disk
    python benchmarks/gpu/residence.py step --layers 24 --width 2048 --path /on/the/disk
    python benchmarks/gpu/residence.py overlap --layers 24 --width 2048 --path /on/the/disk
    python benchmarks/gpu/residence.py step --device cpu --path /tmp      # does it run at all?

`largest` looks for the deepest GPT of a width that trains within so much memory of the device: the
limit is set once the model is built and handed over, since every system starts from a whole model.
`step` times a step under every system that can be imported, in turns. `overlap` compares ours with
what it cannot be faster than: forward and backward, the bytes over the bus, and the step on the
host, each by itself and at its best.

fp32 parameters under autocast to bf16, AdamW, in all systems. Every measurement has a process of
its own, because a process that ran out of device memory is not as it was.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # beside the other suites

import torch
from harness import MIB, OptionError, Row, check_known, run_suite, suite
from measure import resident_bytes
from model import BYTES, GPT, Shape
from torch import Tensor, nn

Step = Callable[[Tensor, Tensor], Any]
OURS: Final = {
    "zero1": (1, None),
    "zero1_host": (1, {"optimizer": "host"}),
    "zero1_disk": (1, {"optimizer": "disk"}),
    "zero3_host": (3, {"optimizer": "host", "params": "host"}),
    "zero3_disk": (3, {"optimizer": "disk", "params": "disk"}),
}
PEERS: Final = {  # with the module that each needs
    "torchao": "torchao",
    "fsdp2": "torch.distributed.fsdp",
    "deepspeed": "deepspeed",
}
COLUMNS: Final = (
    ("system", "system"),
    ("layers", "layers"),
    ("1e9 parameters", "numel", ".2f", 1e-9),
    ("ms", "ms", ".1f"),
    ("TFLOP/s", "tflops", ".1f"),
    ("device GB at most", "device_bytes", ".2f", 1e-9),
    ("host GB resident", "host_bytes", ".2f", 1e-9),
    ("of the bound", "of_bound", ".2f"),
)
OPTIONS: Final[dict[str, Any]] = {
    "path": (str, "a folder on the disk"),
    "systems": ([*OURS, *PEERS], "which"),
    "memory_gib": {"type": float, "help": "of the device that may be used; else all of it"},
    "layers": (4, "of the GPT"),
    "width": (1024, "of a layer"),
    "sequence": (1024, "tokens"),
    "batch": (1, "sequences"),
    "steps": (5, "that count, of each turn; two more run before them"),
    "rounds": (3, "turns of each system"),
    "max_layers": (1024, "where `largest` stops to look"),
    "subgroup_mib": (64, "optimizer state that moves together"),
    "threads": (os.cpu_count() or 1, "of the step on the host"),
    "device": {"choices": ("cuda", "cpu"), "default": "cuda"},
}


def main(argv: list[str]) -> int:
    """Run what was asked for; a child prints one line of JSON."""
    what, *given = argv or ["--help"]
    if what == "--one":
        print(json.dumps(_measure(Namespace(**json.loads(given[0])))), flush=True)
        return 0
    if what not in SUITES:
        print(f"usage: residence.py {{{','.join(SUITES)}}} [options]", file=sys.stderr)
        return 2
    return run_suite(f"gpu-residence-{what}", SUITES[what], given)


def _systems(options: Namespace) -> list[str]:
    """Those that were asked for and can take part."""
    check_known("systems", options.systems, (*OURS, *PEERS))
    options.device_name = "cpu"
    if options.device == "cpu":  # a smoke test: figures mean nothing
        options.layers, options.width, options.sequence, options.threads = 2, 64, 16, 1
        options.max_layers = min(options.max_layers, 4)
    elif not torch.cuda.is_available():
        raise OptionError("there is no CUDA device; --device cpu shows only whether this runs")
    else:
        options.device_name = torch.cuda.get_device_name(0)
    options.left_out = {}
    for name, module in PEERS.items():
        if importlib.util.find_spec(module.split(".", maxsplit=1)[0]) is None:
            options.left_out[name] = f"{module} cannot be imported"
        elif options.device == "cpu":
            options.left_out[name] = "it needs a CUDA device"
    for name, why in options.left_out.items():
        print(f"{name}: left out, {why}")
    return [name for name in options.systems if name not in options.left_out]


# ---- What is asked, of processes of their own ----


@suite(*COLUMNS, **OPTIONS)
def largest(options: Namespace) -> list[Row]:
    """The deepest GPT of a width that trains within so much memory of the device."""
    rows = []
    for name in _systems(options):
        fits: dict[int, Row] = {}
        low, high = 0, 1
        while low < high:  # deeper while it trains, then between the last two
            found = _child(name, options, layers=high)
            if "error" in found:
                break
            fits[high], low = found, high
            high = min(2 * high, options.max_layers)
        while high - low > 1:
            middle = (low + high) // 2
            found = _child(name, options, layers=middle)
            if "error" in found:
                high = middle
            else:
                fits[middle], low = found, middle
        row: Row = {"system": name, "layers": low}
        rows.append(row | fits.get(low, {"error": f"{name}: one layer does not fit"}))
    return rows


@suite(*COLUMNS, **OPTIONS)
def step(options: Namespace) -> list[Row]:
    """A step under every system that can be imported, in turns."""
    turns: dict[str, list[Row]] = {name: [] for name in _systems(options)}
    for _ in range(options.rounds):
        for name, found in turns.items():
            found.append(_child(name, options))
    rows = []
    for name, found in turns.items():
        row: Row = {"system": name, "layers": options.layers, "turns": found}
        errors = [turn["error"] for turn in found if "error" in turn]
        ms = {} if errors else {"ms": statistics.median(turn["ms"] for turn in found)}
        rows.append(row | ({"error": errors[0]} if errors else {**found[0], **ms}))
    return rows


@suite(("round", "round"), *COLUMNS, **OPTIONS)
def overlap(options: Namespace) -> list[Row]:
    """Ours over what it cannot be faster than: the longest of three parts, each by itself."""
    ours = [name for name in _systems(options) if name in OURS and OURS[name][1] is not None]
    rows: list[Row] = []
    for number in range(options.rounds):
        parts = {part: _child(part, options) for part in PARTS}
        failed = [f"{part}: {found['error']}" for part, found in parts.items() if "error" in found]
        if failed:
            return [{"system": "parts", "error": "\n".join(failed)}]
        bound = max(found["ms"] for found in parts.values())
        rows += [{"system": part, "round": number, **found} for part, found in parts.items()]
        for name in ours:
            found = _child(name, options)
            share = {"of_bound": found["ms"] / bound} if "ms" in found else {}
            rows.append({"system": name, "round": number, **share, **found, **parts})
    return rows


SUITES: Final = {"largest": largest, "step": step, "overlap": overlap}


def _child(name: str, options: Namespace, *, layers: int | None = None) -> Row:
    """What a process of its own found, or how it ended."""
    asked = {key: value for key, value in vars(options).items() if key != "folder"}
    asked |= {"one": name, "layers": layers or options.layers}
    command = [sys.executable, __file__, "--one", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    return {"error": f"{name}: {said[-1]}"}


# ---- One measurement ----


def _measure(options: Namespace) -> Row:
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    shape = Shape(
        num_layers=options.layers,
        width=options.width,
        num_heads=max(1, options.width // 64),
        sequence=options.sequence,
        batch=options.batch,
    )
    part = PARTS.get(options.one)
    model = GPT(shape) if options.one == "deepspeed" else GPT(shape).to(device)
    numel = sum(param.numel() for param in model.parameters())
    run = part(model, shape, device) if part else _training(model, shape, device, options)
    _limit(options, device)
    for _ in range(2):
        run()
    _wait(device)
    times = []
    for _ in range(options.steps):
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    tokens = shape.sequence * shape.batch
    # Forward 2, backward 4 per parameter and token; attention 12 more per layer, width and token
    # that it looks at, of which a causal one looks at half.
    flops = 6 * numel * tokens + 6 * shape.num_layers * shape.width * shape.sequence * tokens
    return {
        "numel": numel,
        "ms": 1000 * seconds,
        "tflops": flops / seconds / 1e12,
        "device_bytes": 0 if device.type == "cpu" else torch.cuda.max_memory_allocated(),
        "host_bytes": resident_bytes(),
    }


def _limit(options: Namespace, device: torch.device) -> None:
    """From now on, no more of the device than was asked for."""
    if device.type == "cpu":
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if options.memory_gib is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.memory_gib * 2**30 / total))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _autocast(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def _batch(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(BYTES, (shape.batch, shape.sequence + 1), device=device)
    return tokens[:, :-1], tokens[:, 1:]


def _training(
    model: GPT, shape: Shape, device: torch.device, options: Namespace
) -> Callable[[], Any]:
    tokens, targets = _batch(shape, device)
    if options.one in OURS:
        step = _ours(model, device, options)
    else:
        train = {"torchao": _torchao, "fsdp2": _fsdp2, "deepspeed": _deepspeed}[options.one]
        step = train(model, device, options)
    return partial(step, tokens, targets)


def _plain(model: nn.Module, optimizer: Any, device: torch.device) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> None:
        with _autocast(device):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# ---- The systems ----


def _ours(model: GPT, device: torch.device, options: Namespace) -> Step:
    import zero_comm  # noqa: PLC0415 - a system imports what it is made of
    import zero_engine  # noqa: PLC0415

    stage, where = OURS[options.one]
    offload = None
    if where is not None:
        arguments: dict[str, Any] = {**where, "subgroup_bytes": options.subgroup_mib * MIB}
        if "disk" in where.values():
            arguments["path"] = options.path
        offload = zero_engine.Offload(**arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    config = zero_engine.ZeroConfig(stage, offload=offload)
    group = zero_comm.Group.solo(device.type)
    sharded, sharded_optimizer = zero_engine.shard(model, optimizer, config, group=group)
    return _plain(sharded, sharded_optimizer, device)


def _torchao(model: GPT, device: torch.device, options: Namespace) -> Step:
    del options
    from torchao.optim import (  # noqa: PLC0415  # pyrefly: ignore[missing-import]
        CPUOffloadOptimizer,
    )

    optimizer = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=1e-4, fused=True
    )
    return _plain(model, optimizer, device)


def _fsdp2(model: GPT, device: torch.device, options: Namespace) -> Step:
    del options
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard  # noqa: PLC0415

    _alone()
    dist.init_process_group("cpu:gloo,cuda:nccl")
    policy = CPUOffloadPolicy()
    for block in model.blocks:
        fully_shard(block, offload_policy=policy)
    fully_shard(model, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return _plain(model, optimizer, device)


def _deepspeed(model: GPT, device: torch.device, options: Namespace) -> Step:
    import deepspeed  # noqa: PLC0415  # pyrefly: ignore[missing-import]
    from deepspeed.ops.adam import (  # noqa: PLC0415  # pyrefly: ignore[missing-import]
        DeepSpeedCPUAdam,
    )

    _alone()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=DeepSpeedCPUAdam(model.parameters(), lr=1e-4, weight_decay=0.01),
        config={
            "train_micro_batch_size_per_gpu": options.batch,
            "gradient_clipping": 0.0,
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "overlap_comm": True,
            },
            "steps_per_print": 10**9,
        },
    )

    def step(tokens: Tensor, targets: Tensor) -> None:
        with _autocast(device):
            loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()

    return step


def _alone() -> None:
    """What torchrun would set for a job of one."""
    for name, value in (
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29531"),
    ):
        os.environ.setdefault(name, value)


# ---- What no step can be faster than ----


def _compute(model: GPT, shape: Shape, device: torch.device) -> Callable[[], Any]:
    """Forward and backward, with everything on the device."""
    tokens, targets = _batch(shape, device)

    def run() -> None:
        with _autocast(device):
            loss = model(tokens, targets)
        loss.backward()
        model.zero_grad()

    return run


def _transfer(model: GPT, shape: Shape, device: torch.device) -> Callable[[], Any]:
    """Gradients to the host and parameters back, both ways at once, page-locked."""
    del shape
    numel = sum(param.numel() for param in model.parameters())
    model.to("meta")
    pinned = device.type == "cuda"
    here = [torch.empty(numel, device=device) for _ in range(2)]
    there = [torch.empty(numel, pin_memory=pinned) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)] if pinned else []

    def run() -> None:
        for k, (target, source) in enumerate(((there[0], here[0]), (here[1], there[1]))):
            with torch.cuda.stream(streams[k]) if pinned else nullcontext():
                target.copy_(source, non_blocking=True)

    return run


def _cpu_step(model: GPT, shape: Shape, device: torch.device) -> Callable[[], Any]:
    """The native step on the host, over as many elements."""
    del shape, device
    from zero_offload import CPUAdam  # noqa: PLC0415

    numel = sum(param.numel() for param in model.parameters())
    model.to("meta")
    param = nn.Parameter(torch.randn(numel))
    param.grad = torch.randn(numel)
    return CPUAdam([param], lr=1e-4).step


# What `overlap` measures by itself.
PARTS: Final = {"compute": _compute, "transfer": _transfer, "cpu_step": _cpu_step}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
