"""Save loops of a model whose every value is its step, so that what is loaded can be told.

Run as a script, it saves to a folder while its processes are killed, and says how that went.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zero_engine
from torch import nn
from zero_comm import CommError, Group
from zero_engine.testing import FileSystem, save

REAL = FileSystem()
NUM_KILLS = 10


def make(group: Group) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Trained, and frozen, and with a momentum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 7), nn.Linear(7, 5))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, 0.9)
    zero_engine.shard(model, optimizer, zero_engine.ZeroConfig(3, min_unit_bytes=0), group=group)
    model(torch.ones(2, 9)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def save_step(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    *,
    system: FileSystem = REAL,
    tag: str | None = None,
    keep: int | None = 2,
) -> None:
    """Every value that is trained is the step; all others are 1. Collective."""
    for param in model.parameters():
        value = torch.full(param.shape, float(step) if param.requires_grad else 1.0)
        zero_engine.set_full_param(param, value)
        if param.requires_grad:
            zero_engine.set_full_optimizer_state(param, "momentum_buffer", value)
    save(folder, model, optimizer, step=step, system=system, extra=step, tag=tag, keep=keep)


@functools.cache
def _reader() -> tuple[nn.Module, torch.optim.Optimizer]:
    return make(Group.solo())


def check_newest(folder: Path) -> int:
    """The step of the newest checkpoint, which is whole and as it was saved; 0 if there is none."""
    model, optimizer = _reader()
    report = zero_engine.load(folder, model, optimizer, missing_ok=True)
    if report is None:
        return 0
    assert (report.num_tensors, report.extra) == (4 + 3, report.step)
    for name, param in model.named_parameters():
        expected = float(report.step) if param.requires_grad else 1.0
        values = [zero_engine.full_param(param)]
        if param.requires_grad:
            values.append(zero_engine.full_optimizer_state(param, "momentum_buffer"))
        assert all((value == expected).all() for value in values), name
    return report.step


def _kill_loops(folder: Path) -> None:
    """Fork a save loop, kill it at a random instant, look; and again."""
    model, optimizer = make(Group.solo())
    draw, last = random.Random(0), 0
    for _ in range(NUM_KILLS):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            for step in range(last + 1, 1_000_000):
                save_step(folder, model, optimizer, step, tag="same" if step % 3 == 0 else None)
                os.write(writing, b"x")
        os.read(reading, 1)  # it has saved once
        time.sleep(draw.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
        found = check_newest(folder)
        assert found > last, (found, last)
        last = found
        hidden = [path for path in folder.iterdir() if path.name.startswith(".")]
        assert len(hidden) <= 4, hidden  # the next save removes what this one has left
    print(f"{NUM_KILLS} killed, at step {last}", flush=True)


def _kill_rank(folder: Path) -> None:
    """Two ranks, of which one dies while it writes; the other prints what it learns."""
    rank = int(os.fork() == 0)
    meeting = f"file://{folder}.meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    group = Group.from_process_group(patience_s=0.2)
    model, optimizer = make(group)
    save_step(folder, model, optimizer, 1)

    def die(*args: Any) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    system = FileSystem(write=die) if rank else REAL
    try:
        save_step(folder, model, optimizer, 2, system=system)
    except CommError as error:
        print(error, flush=True)
    os._exit(0)


if __name__ == "__main__":
    _kill_loops(Path(sys.argv[1]))
    _kill_rank(Path(sys.argv[2]))
