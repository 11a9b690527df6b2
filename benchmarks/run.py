"""Run one suite of benchmarks: `python benchmarks/run.py SUITE [options of the suite]`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Final

SUITES: Final = {
    "step": "bench_step",  # one training step: ours, DDP, FSDP, DeepSpeed
    "autograd": "bench_autograd",  # what hooks cost, and the ways of collecting gradients
    "hooks": "bench_hooks",  # forward and backward on one rank, against the plain model
    "checkpoint": "bench_checkpoint",  # recomputation, against torch's and against none
    "adam": "bench_adam",  # the optimizer's step on the CPU, against the memory's limit
    "disk": "bench_disk",  # swapping a large tensor to disk, against what the disk can do
    "redundancy": "bench_redundancy",  # ZeroRedundancyOptimizer against torch's
    "swap": "bench_swap",  # a pipelined step from disk, against the disk and the step alone
    "plan": "bench_plan",  # a step against how long it was estimated to take
    "residence": "bench_residence",  # a step with state on host or disk, against one without
    "delayed": "bench_delayed",  # the loss curve of delayed updates beside the exact one
    "saving": "bench_saving",  # save and load, against torch.save, torch's checkpoints and the disk
    "wire": "bench_wire",  # a step on two nodes with a slow network between them
    "codecs": "bench_codecs",  # encoding and decoding, against a copy of the same memory
    "collectives": "bench_collectives",  # compositions of collectives against the built-in ones
}


def main(argv: list[str]) -> int:
    """Hand what follows the suite's name to that suite. Returns the exit status."""
    usage = f"usage: run.py {{{','.join(SUITES)}}} [options]; run.py SUITE --help lists them"
    if not argv or argv[0] not in SUITES:
        is_help = argv[:1] in (["-h"], ["--help"])
        print(usage, file=sys.stdout if is_help else sys.stderr)
        return 0 if is_help else 2
    suite, *options = argv
    if importlib.util.find_spec(SUITES[suite]) is None:
        print(f"{suite}: there is no {SUITES[suite]}.py beside run.py", file=sys.stderr)
        return 2
    return importlib.import_module(SUITES[suite]).main(options) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
