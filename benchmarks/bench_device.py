"""A training step on a cluster of accelerators that is simulated: nothing computes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from harness import HERE, OptionError, Row, check_known, say, suite
from llama import SIZES

SIMULATED_DEVICE = HERE.parent / "simulated-device"
RECOMPUTES = ("none", "selective", "full")
SYSTEMS = (  # _hpz: a node keeps a copy; _host: the optimizer is there, FSDP2's parameters, too
    *("ddp", "fsdp2", "fsdp2_hpz", "fsdp2_host", "zero1", "zero2", "zero3"),
    *("zero3_hpz", "zero1_host", "zero2_host", "zero3_host"),
)
# Tokens per second and GPU of Llama 3 under FSDP2 without compilation, which torchtitan's team has
# published: benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, and before that
# docs/performance.md, of A100. The efficiency of products of matrices was fitted to the first row;
# nothing else was.
PUBLISHED = {  # cluster, size, batch, length, recomputes
    ("h100-hbm2ex8", "8b", 2, 8192, "selective"): 5762.0,
    ("h100-hbm2ex128", "8b", 2, 8192, "selective"): 5605.0,
    ("a100x64", "8b", 1, 8192, "selective"): 2973.0,
}
EFFICIENCY = 0.45


@suite(
    ("system", "system"),
    ("cluster", "cluster"),
    ("simulated ms", "seconds", ".1f", 1e3),
    ("simulated tokens/s", "tokens_s", ".0f"),
    ("/ published", "of_published", ".3f"),
    ("simulated exposed ms", "exposed_s", ".1f", 1e3),
    ("most of it", "exposed_most"),
    ("simulated peak GB", "peak_bytes", ".1f", 1e-9),
    ("of memory", "of_memory", ".2f"),
    systems=(["fsdp2", "zero3"], f"of {', '.join(SYSTEMS)}"),
    cluster=("h100-hbm2ex8", "kind of device, x, number of ranks"),
    size=("8b", f"of Llama 3: {', '.join(SIZES)}"),
    batch=(2, "sequences of each rank"),
    length=(8192, "tokens of a sequence"),
    recomputes=("selective", f"{', '.join(RECOMPUTES)}"),
    efficiency=(EFFICIENCY, "of products of matrices: what is reached of their rate"),
)
def device(options: Namespace) -> list[Row]:
    """One rank's training step on a simulated cluster, whose clock follows a device's rates.

    The program runs as it is, on a simulated device that computes nothing: each kernel, copy and
    collective takes as long as its bytes and operations do at the rates of a data sheet
    (simulated-device/simulated_device/rates.py), streams run beside each other, and the host takes
    its own time. All ranks are assumed to do the same at the same time, so one process is enough.
    Not simulated are waits for slower ranks, clocks that fall with heat, and shared links.
    """
    check_known("systems", options.systems, SYSTEMS)
    check_known("size", [options.size], SIZES)
    check_known("recomputes", [options.recomputes], RECOMPUTES)
    found = re.fullmatch(r"(.+)x(\d+)", options.cluster)
    if found is None:
        raise OptionError("--cluster: expected a kind of device and a number, like h100x8")
    kind, num_ranks = found[1], int(found[2])
    cluster = json.dumps([kind, num_ranks, options.efficiency])
    job = (options.size, options.batch, options.length, options.recomputes)
    published = PUBLISHED.get((options.cluster, *job))
    rows: list[Row] = []
    for system in options.systems:
        say(f"{system} on {options.cluster}")
        row: Row = {"system": system, "cluster": options.cluster}
        row |= _measured(system, cluster, json.dumps(job))
        if published and system == "fsdp2" and "tokens_s" in row:
            row["of_published"] = row["tokens_s"] / published
        rows.append(row)
    return rows


def _measured(system: str, cluster: str, job: str) -> Row:
    """In a process of its own: torch has one default group, and the clock one beginning."""
    paths = [str(SIMULATED_DEVICE), str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= {"SIM_GIB": "4096", "OMP_NUM_THREADS": "1"}  # addresses only
    script = [sys.executable, str(Path(HERE, "device_step.py")), system, cluster, job]
    ran = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        return {"error": f"{system}: {ran.stderr[-2000:]}"}
    return json.loads(ran.stdout.splitlines()[-1])
