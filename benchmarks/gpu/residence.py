"""Training with optimizer state and parameters on host or disk, on one CUDA GPU.

    python benchmarks/gpu/residence.py largest --memory-gib 8 --path /on/the/disk
    python benchmarks/gpu/residence.py step --layers 24 --width 2048 --path /on/the/disk
    python benchmarks/gpu/residence.py overlap --layers 24 --width 2048 --path /on/the/disk
    python benchmarks/gpu/residence.py step --device cpu --path /tmp      # does it run at all?

`largest` looks for the deepest GPT of a width that trains within so much memory of the device: the
limit is set once the model is built and handed over, since every system starts from a whole model.
`step` times a step under every system that can be imported, in turns. `overlap` compares ours with
its lower bound, the slowest of three parts: forward and backward, the bytes over the bus, and the
step on the host, each by itself.

fp32 parameters under autocast to bf16, AdamW, in all systems, which are those of `systems.py`.
Every measurement has a process of its own, because a process that ran out of device memory is not
as it was.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # beside the other suites

from harness import DEEPSPEED, Row, check_known, device_name, run_suite, say, suite
from model import Shape, model_numel
from systems import SYSTEMS
from training import Entry, run_heat

OFFLOADED: Final = ("zero1_host", "zero1_disk", "zero3_host_all", "zero3_disk_all")
PEERS: Final = ("torchao", "fsdp2_host", "deepspeed2_host")
KNOWN: Final = ("zero1", *OFFLOADED, *PEERS)
PARTS: Final = ("compute", "transfer", "cpu_step")  # the slowest is the lower bound of a step
SMALL: Final = {"layers": 2, "width": 64, "sequence": 16, "threads": 1, "max_layers": 4}
# What a heat is told besides: each is of one system and one turn.
HEAT: Final = {"ranks": 1, "rounds": 1, "warmup": 2, "lr": 1e-4, "seed": 0, "window": None}

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
    "systems": ([*KNOWN], "which"),
    "memory_gib": {"type": float, "help": "of the device that may be used; else all of it"},
    "layers": (4, "of the GPT"),
    "width": (1024, "of a layer"),
    "sequence": (1024, "tokens"),
    "batch": (1, "sequences"),
    "steps": (5, "that count, of each turn; three more run before them"),
    "rounds": (3, "turns of each system"),
    "max_layers": (1024, "where `largest` stops to look"),
    "subgroup_mib": (64, "optimizer state that moves together"),
    "threads": (os.cpu_count() or 1, "of the step on the host"),
    "device": {"choices": ("cuda", "cpu"), "default": "cuda"},
    "deepspeed_python": DEEPSPEED,
    "timeout": (3600.0, "longest wait for a process, in seconds"),
}


@suite(*COLUMNS, **OPTIONS)
def largest(options: Namespace) -> list[Row]:
    """The deepest GPT of a width that trains within so much memory of the device."""
    rows = []
    for name in _systems(options):
        row: Row = {}
        low, high = 0, options.max_layers + 1  # as deep trains; as deep does not, or is too deep
        while high - low > 1:
            layers = min(max(1, 2 * low), (low + high) // 2)
            found = _measured(name, options, layers=layers)
            if "error" not in found:
                row, low = found, layers
            else:
                row, high = row or found, layers
        rows.append(row)
    return rows


@suite(*COLUMNS, **OPTIONS)
def step(options: Namespace) -> list[Row]:
    """A step under every system that can be imported, in turns."""
    turns: dict[str, list[Row]] = {name: [] for name in _systems(options)}
    for _ in range(options.rounds):
        for name, found in turns.items():
            found.append(_measured(name, options))
    rows = []
    for found in turns.values():
        row = next((turn for turn in found if "error" in turn), found[0])
        ms = {} if "error" in row else {"ms": statistics.median(turn["ms"] for turn in found)}
        rows.append({**row, **ms, "turns": found})
    return rows


@suite(("round", "round"), *COLUMNS, **OPTIONS)
def overlap(options: Namespace) -> list[Row]:
    """A step of ours over its lower bound: the longest of three parts, each by itself."""
    ours = [name for name in _systems(options) if name in OFFLOADED]
    rows: list[Row] = []
    for number in range(options.rounds):
        parts = {part: _measured(part, options) for part in PARTS}
        rows += [{"round": number, **found} for found in parts.values()]
        if any("error" in found for found in parts.values()):
            return rows
        bound = max(found["ms"] for found in parts.values())
        for name in ours:
            found = _measured(name, options)
            share = {"of_bound": found["ms"] / bound} if "ms" in found else {}
            rows.append({"round": number, **share, **found, **parts})
    return rows


SUITES: Final = {"largest": largest, "step": step, "overlap": overlap}


def _systems(options: Namespace) -> list[str]:
    """Return the systems that were asked for and can run."""
    check_known("systems", options.systems, KNOWN)
    options.device_name = device_name(options.device)
    if options.device == "cpu":  # a smoke test: figures mean nothing
        vars(options).update({**SMALL, "max_layers": min(options.max_layers, SMALL["max_layers"])})
    options.left_out = {}
    for name in PEERS:
        module, environment = SYSTEMS[name].imports[0], SYSTEMS[name].environment
        is_elsewhere = environment == "deepspeed" and options.deepspeed_python
        if not is_elsewhere and importlib.util.find_spec(module.partition(".")[0]) is None:
            options.left_out[name] = f"{module} cannot be imported"
    for name, why in options.left_out.items():
        say(f"{name}: left out, {why}")
    return [name for name in options.systems if name not in options.left_out]


def _measured(name: str, options: Namespace, *, layers: int | None = None) -> Row:
    """Return the figures of a process of its own, or its error."""
    shape = Shape(
        num_layers=layers or options.layers,
        width=options.width,
        num_heads=max(1, options.width // 64),
        sequence=options.sequence,
        batch=options.batch,
    )
    environment = {"OMP_NUM_THREADS": str(options.threads)}
    if options.device == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        environment |= {"CUDA_VISIBLE_DEVICES": visible, "DS_ACCELERATOR": "cuda"}
    arguments = {"device": options.device, "memory_gib": options.memory_gib}
    entry = Entry(SYSTEMS[name], environment=environment, arguments=arguments)
    pythons = {"own": "", "deepspeed": options.deepspeed_python}
    told = {"model": shape, "steps_per_round": options.steps, "pythons": pythons}
    run_heat([entry], Namespace(**{**vars(options), **HEAT, **told}))
    row: Row = {"system": name, "layers": shape.num_layers}
    if entry.error:
        return row | {"error": entry.error}
    ms, report = entry.figures()["ms"], entry.reports[0]
    numel, tokens = model_numel(shape), shape.sequence * shape.batch
    # Forward 2, backward 4 per parameter and token; attention 12 more per layer, width and token
    # that it looks at, of which a causal one looks at half.
    flops = 6 * numel * tokens + 6 * shape.num_layers * shape.width * shape.sequence * tokens
    return row | {
        "numel": numel,
        "ms": ms,
        "tflops": flops / ms / 1e9,
        "device_bytes": report["device_peak_bytes"],
        "host_bytes": report["resident_bytes"],
    }


def main(argv: list[str]) -> int:
    """Run the suite that was asked for."""
    what, *given = argv or [""]
    if what not in SUITES:
        print(f"usage: residence.py {{{','.join(SUITES)}}} [options]", file=sys.stderr)
        return 2
    return run_suite(f"gpu-residence-{what}", SUITES[what], given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
