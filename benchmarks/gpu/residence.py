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

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # beside the other suites

import torch
from model import BYTES, GPT, Shape
from results import write_results
from torch import Tensor, nn

MIB: Final = 2**20
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
PARTS: Final = ("compute", "transfer", "cpu_step")  # what `overlap` measures by itself


def main() -> int:
    """Run what was asked for; a child prints one line of JSON."""
    options = _parse()
    if options.one:
        print(json.dumps(_measure(options)), flush=True)
        return 0
    missing = {name: why for name in options.systems if (why := _missing(name, options))}
    for name, why in missing.items():
        print(f"{name}: left out, {why}")
    names = [name for name in options.systems if name not in missing]
    rows = {"largest": _largest, "step": _steps, "overlap": _overlap}[options.what](names, options)
    settings = {k: v for k, v in vars(options).items() if k not in {"path", "folder", "one"}}
    path = write_results(
        f"gpu-residence-{options.what}",
        rows,
        folder=options.folder,
        settings=settings | {"device_name": _device_name(options), "left_out": missing},
    )
    print(f"written to {path}")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("what", choices=("largest", "step", "overlap"))
    add("--path", required=True, help="a folder on the disk")
    add("--systems", default=",".join((*OURS, *PEERS)), help="comma-separated")
    add("--memory-gib", type=float, help="of the device that may be used; all of it when left out")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=1024)
    add("--sequence", type=int, default=1024, help="tokens")
    add("--batch", type=int, default=1, help="sequences")
    add("--steps", type=int, default=5, help="that count, of each turn; two more run before them")
    add("--rounds", type=int, default=3, help="turns of each system")
    add("--max-layers", type=int, default=1024, help="where `largest` stops to look")
    add("--subgroup-mib", type=int, default=64, help="optimizer state that moves together")
    add("--threads", type=int, default=os.cpu_count() or 1, help="of the step on the host")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--folder", type=Path, default=Path(__file__).parent.parent / "results")
    add("--one", default="", help=argparse.SUPPRESS)  # what this process, a child, measures
    options = parser.parse_args()
    options.systems = [name for name in options.systems.split(",") if name]
    unknown = set(options.systems) - {*OURS, *PEERS}
    if unknown:
        parser.error(f"no system {', '.join(sorted(unknown))}; there are {', '.join(OURS)}, ...")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu shows only whether this script runs")
    if options.device == "cpu":  # a smoke test: figures mean nothing
        options.layers, options.width, options.sequence = 2, 64, 16
        options.max_layers = min(options.max_layers, 4)
    return options


def _missing(name: str, options: argparse.Namespace) -> str:
    """Why a system cannot take part; empty if it can."""
    if name in OURS:
        return ""
    if importlib.util.find_spec(PEERS[name].split(".", maxsplit=1)[0]) is None:
        return f"{PEERS[name]} cannot be imported"
    return "it needs a CUDA device" if options.device == "cpu" else ""


def _device_name(options: argparse.Namespace) -> str:
    return "cpu" if options.device == "cpu" else torch.cuda.get_device_name(0)


# ---- What is asked, of processes of their own ----


def _largest(names: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        fits: dict[int, dict[str, Any]] = {}
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
        found = fits.get(low, {"error": "one layer does not fit"})
        row: dict[str, Any] = {"system": name, "layers": low, **found}
        size = f"{row.get('numel', 0) / 1e9:.2f}e9 parameters"
        print(f"{name:12} {low:4} layers, {size}, {_figures(row)}", flush=True)
        rows.append(row)
    return rows


def _steps(names: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            turns[name].append(_child(name, options))
    rows = []
    for name, found in turns.items():
        errors = [turn["error"] for turn in found if "error" in turn]
        row = (
            {"error": errors[0]}
            if errors
            else {**found[0], "ms": statistics.median(turn["ms"] for turn in found)}
        )
        row = {"system": name, **row, "turns": found}
        print(f"{name:12} {_figures(row)}", flush=True)
        rows.append(row)
    return rows


def _overlap(names: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The bound, and each of ours over it."""
    ours = [name for name in names if name in OURS and OURS[name][1] is not None]
    rows: list[dict[str, Any]] = []
    for number in range(options.rounds):
        parts = {part: _child(part, options) for part in PARTS}
        failed = [f"{part}: {found['error']}" for part, found in parts.items() if "error" in found]
        if failed:
            raise SystemExit("\n".join(failed))
        bound = max(found["ms"] for found in parts.values())
        print(", ".join(f"{part} {found['ms']:.1f} ms" for part, found in parts.items()))
        for name in ours:
            found = _child(name, options)
            of_bound = found["ms"] / bound if "ms" in found else None
            share = f"{of_bound:.2f} of the bound" if of_bound else ""
            print(f"{name:12} {_figures(found)} {share}", flush=True)
            rows.append({"system": name, "round": number, "of_bound": of_bound, **found, **parts})
    return rows


def _child(name: str, options: argparse.Namespace, *, layers: int | None = None) -> dict[str, Any]:
    """What a process of its own found, or how it ended."""
    passed = ["--path", options.path, "--device", options.device, "--one", name]
    for key in ("width", "sequence", "batch", "steps", "subgroup_mib", "threads"):
        passed += [f"--{key.replace('_', '-')}", str(getattr(options, key))]
    passed += ["--layers", str(layers or options.layers)]
    if options.memory_gib is not None:
        passed += ["--memory-gib", str(options.memory_gib)]
    done = subprocess.run(
        [sys.executable, __file__, options.what, *passed],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    return {"error": said[-1]}


def _figures(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"failed: {row['error']}"
    return (
        f"{row['ms']:.1f} ms, {row['tflops']:.1f} TFLOP/s, device {row['device_bytes'] / 1e9:.2f} "
        f"GB at most, host {row['host_bytes'] / 1e9:.2f} GB resident"
    )


# ---- One measurement ----


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if options.device == "cpu":  # children of a smoke test are given its sizes
        torch.set_num_threads(1)
    shape = Shape(
        num_layers=options.layers,
        width=options.width,
        num_heads=max(1, options.width // 64),
        sequence=options.sequence,
        batch=options.batch,
    )
    part = {"compute": _compute, "transfer": _transfer, "cpu_step": _cpu_step}.get(options.one)
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
        "host_bytes": _resident_bytes(),
    }


def _limit(options: argparse.Namespace, device: torch.device) -> None:
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


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _autocast(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def _batch(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(BYTES, (shape.batch, shape.sequence + 1), device=device)
    return tokens[:, :-1], tokens[:, 1:]


def _training(
    model: GPT, shape: Shape, device: torch.device, options: argparse.Namespace
) -> Callable[[], Any]:
    tokens, targets = _batch(shape, device)
    if options.one in OURS:
        step = _ours(model, device, options)
    else:
        step = {"torchao": _torchao, "fsdp2": _fsdp2, "deepspeed": _deepspeed}[options.one](
            model, device, options
        )
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


def _ours(model: GPT, device: torch.device, options: argparse.Namespace) -> Step:
    import zero_comm  # noqa: PLC0415 - a system imports what it is made of
    import zero_engine  # noqa: PLC0415

    stage, where = OURS[options.one]
    offload = None
    if where is not None:
        kind: dict[str, Any] = {**where, "subgroup_bytes": options.subgroup_mib * MIB}
        if "disk" in where.values():
            kind["path"] = options.path
        offload = zero_engine.Offload(**kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    config = zero_engine.ZeroConfig(stage, offload=offload)
    group = zero_comm.Group.solo(device.type)
    sharded, sharded_optimizer = zero_engine.shard(model, optimizer, config, group=group)
    return _plain(sharded, sharded_optimizer, device)


def _torchao(model: GPT, device: torch.device, options: argparse.Namespace) -> Step:
    del options
    from torchao.optim import (  # noqa: PLC0415  # pyrefly: ignore[missing-import]
        CPUOffloadOptimizer,
    )

    optimizer = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=1e-4, fused=True
    )
    return _plain(model, optimizer, device)


def _fsdp2(model: GPT, device: torch.device, options: argparse.Namespace) -> Step:
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


def _deepspeed(model: GPT, device: torch.device, options: argparse.Namespace) -> Step:
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


if __name__ == "__main__":
    sys.exit(main())
