"""Run one suite of benchmarks: `python benchmarks/run.py SUITE [options of the suite]`."""

from __future__ import annotations

import importlib
import sys
from typing import Final

from harness import run_suite

SUITES: Final = {  # and the module that has it
    "step": "bench_step",  # one training step: ours, DDP, FSDP, DeepSpeed
    "residence": "bench_step",  # a step with state on host or disk, against one without
    "wire": "bench_step",  # a step on two nodes with a slow network between them
    "redundancy": "bench_redundancy",  # ZeroRedundancyOptimizer against torch's
    "hooks": "bench_hooks",  # forward and backward on one rank, against the plain model
    "checkpoint": "bench_checkpoint",  # recomputation, against torch's and against none
    "adam": "bench_adam",  # the optimizer's step on the CPU, against the memory's limit
    "disk": "bench_disk",  # swapping a large tensor to disk, against what the disk can do
    "swap": "bench_disk",  # a pipelined step from disk, against the disk and the step alone
    "saving": "bench_saving",  # save and load, against torch.save, torch's checkpoints and the disk
    "codecs": "bench_comm",  # encoding and decoding, against a copy of the same memory
    "device": "bench_device",  # a step on a cluster of accelerators, simulated: ours, FSDP2, DDP
    "collectives": "bench_comm",  # compositions of collectives against the built-in ones
}


def main(argv: list[str]) -> int:
    """Run a suite with the arguments after its name. Returns the exit status."""
    if not argv or argv[0] not in SUITES:
        print(f"usage: run.py {{{','.join(SUITES)}}} [options]; run.py SUITE --help lists them")
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    name, *options = argv
    return run_suite(name, getattr(importlib.import_module(SUITES[name]), name), options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
