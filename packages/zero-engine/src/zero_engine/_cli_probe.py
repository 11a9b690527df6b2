"""`zero probe`: how fast this machine is, from the shell."""

from __future__ import annotations

import argparse
import json
import os
from typing import Final

import attrs
import torch
import zero_comm
from tabulate import tabulate
from zero_comm import Levels

from ._cli_values import dtype_of
from ._probe import probe

_PER_S: Final = {
    "matmul_flops": ("matrix products", "GFLOP/s"),
    "device_bytes": ("memory of the device, read and written", "GB/s"),
    "host_bytes": ("memory of the host, read and written", "GB/s"),
    "transfer_bytes": ("between device and host", "GB/s"),
    "send_bytes": ("sent by a rank", "GB/s"),
    "send_across_bytes": ("sent by a rank to other nodes", "GB/s"),
    "disk_read_bytes": ("read from disk", "GB/s"),
    "disk_write_bytes": ("written to disk", "GB/s"),
}
_SECONDS: Final = {
    "layer_s": "forward and backward of the smallest layer",
    "launch_s": "the smallest collective",
}


def add_probe(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of `zero`."""
    parser = commands.add_parser(
        "probe",
        help="measure how fast this machine is",
        description="Measure for a few seconds how fast this machine computes, copies, sends and "
        "reads, which is what `zero plan --rates` takes to say how long a step is. Alone, or on "
        "all ranks: torchrun --nproc-per-node=N -m zero_engine probe.",
    )
    parser.add_argument("--path", help="a folder on the disk to measure")
    parser.add_argument("--dtype", type=dtype_of, default=torch.float32, help="of matrices")
    parser.add_argument("--size", type=float, default=1.0, help="of what is moved: 0.1 is quicker")
    parser.add_argument("--json", action="store_true", help="as `zero plan --rates` reads it")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    group = zero_comm.init()
    rates = probe(
        group,
        path=options.path,
        dtype=options.dtype,
        size=options.size,
        levels=Levels.of_nodes(group) if _has_nodes() else None,
    )
    if group.rank:
        return
    found = {name: value for name, value in attrs.asdict(rates).items() if value is not None}
    if options.json:
        print(json.dumps(found, indent=1))
        return
    per_s = ((words, found.get(name), unit) for name, (words, unit) in _PER_S.items())
    rows = [(words, value / 10**9, unit) for words, value, unit in per_s if value is not None]
    rows += [
        (words, found[name] * 10**6, "us") for name, words in _SECONDS.items() if name in found
    ]
    print(tabulate(rows, floatfmt=".2f", tablefmt="plain"))


def _has_nodes() -> bool:
    """Whether torchrun says that ranks are of several nodes."""
    local, whole = (os.environ.get(name, "1") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    return local != whole
