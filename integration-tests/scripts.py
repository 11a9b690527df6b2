"""Users' scripts, run as they are: by torchrun, or on ranks that stand already, which is faster."""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Final
from unittest import mock

from zero_ckpt.testing import fresh_default
from zero_comm import Group
from zero_comm.testing import RankPool, without_default_device

WORLD_SIZE: Final = 2
Runner = Callable[[str, Sequence[str]], str]


def launch(script: str, arguments: Sequence[str]) -> str:
    """By torchrun; what all ranks print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(WORLD_SIZE), script, *arguments]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def on_ranks(ranks: Callable[[int], RankPool]) -> Runner:
    """On the ranks of the fixture, in what torchrun's environment says; what rank 0 prints."""

    def run(script: str, arguments: Sequence[str]) -> str:
        pool = ranks(WORLD_SIZE)
        return pool.run(_run, timeout_s=120, script=script, arguments=list(arguments))[0]

    return run


def _run(group: Group, script: str, arguments: list[str]) -> str:
    rank, size = str(group.rank), str(group.world_size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(OMP_NUM_THREADS="1")
    if group.device.type not in ("cpu", "cuda"):  # of a kind that Accelerate need not know
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(group.device)
    printed = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [script, *arguments]),
        redirect_stdout(printed),
        warnings.catch_warnings(),
        fresh_default(),  # the process runs other tests later, which must not split their inputs
        without_default_device(),
    ):
        warnings.simplefilter("default")
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()
