"""Two ranks of which one ends, or does not go on; each is a process that nobody else uses."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import parity
import torch
import torch.distributed as dist
from parity import ZeroConfig
from zero_comm import Group

TIMEOUT_S = 5.0
PATIENCE_S = 0.3
FATES = ("raises", "exits", "is killed", "sleeps")
_COMMON, _AFTER = 2, 3


def tell(device: str, folder: Path, stage: int, fate: str) -> tuple[str, float]:
    """What the rank that stays is told, and after how many seconds."""
    context = get_context("forkserver")
    ranks = [
        context.Process(target=_be_rank, args=(rank, device, folder, stage, fate), daemon=True)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    ranks[0].join(60)
    for rank in ranks:
        rank.kill()
        rank.join()
    told = folder / "told"
    assert told.exists(), f"rank 0 ended with {ranks[0].exitcode}, and told nothing"
    seconds, _, text = told.read_text().partition(" ")
    return text, float(seconds)


def _be_rank(rank: int, device: str, folder: Path, stage: int, fate: str) -> None:
    os.environ["ZERO_REPORT"] = "off"
    torch.set_num_threads(1)
    backend = "gloo"
    if device != "cpu":
        torch.set_default_device(torch.device(device, rank))
        torch.accelerator.set_device_index(rank)
        backend = f"cpu:gloo,{device}:{dist.Backend.default_device_backend_map[device]}"
    store, timeout = dist.FileStore(str(folder / "store"), 2), timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timeout)
    group = Group.from_process_group(patience_s=PATIENCE_S)
    model, optimizer = parity.shard_chain(group, ZeroConfig(stage), 2)
    began = time.monotonic()
    try:
        for step in range(_COMMON + _AFTER):
            if (rank, step) == (1, _COMMON):  # the other may be in the step before
                _end(fate)
            parity.step_chain(model, optimizer)
        group.compare_launches("reading", at_once=True)
    except RuntimeError as error:
        seconds = time.monotonic() - began
        (folder / "part").write_text(f"{seconds} {type(error).__name__}: {error}")
        (folder / "part").rename(folder / "told")
    os._exit(0)  # a device may still wait for the other rank


def _end(fate: str) -> None:
    if fate == "raises":
        raise ValueError("an error of the user's")
    if fate == "exits":
        raise SystemExit(0)
    if fate == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
