"""What does not fit trains, and goes on as long as it likes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import capped_training
import parity
import pytest
import torch
import zero_engine
from residences import Cell, sharded
from torch import nn
from zero_comm import Group

STATE_BYTES: Final = 16 * capped_training.NUM_PARAMS  # values, gradients, two moments, of fp32

needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")


@needs_proc
def test_a_model_of_three_times_the_memory_trains(tmp_path: Path) -> None:
    """The reason for all of this; and without offload the same memory does not do."""
    trained = _train(str(tmp_path))
    plain = _train("")

    assert trained.returncode == 0, trained.stderr[-3000:]
    assert "trained" in trained.stdout
    assert not list(tmp_path.iterdir())
    assert plain.returncode != 0, "the cap is no cap"
    assert "allocate memory" in plain.stderr or "MemoryError" in plain.stderr, plain.stderr[-3000:]


def _train(folder: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, capped_training.__file__, folder, str(STATE_BYTES // 3)],
        env={**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@needs_proc
def test_hundreds_of_steps_take_no_more_than_a_few(ranks, tmp_path: Path) -> None:
    """A leak of a descriptor or of a page a step ends a run in its second week."""
    ranks(1).run(_soak, folder=str(tmp_path), timeout_s=120)


def _small() -> nn.Module:
    return parity.Chain(2, 16)


def _soak(group: Group, folder: str) -> None:
    with sharded(group, Cell(3, "disk", "disk"), folder, make=_small, stage=3) as both:
        model, optimizer = both
        held = []
        for step in range(300):
            model(torch.ones(1, 16)).square().mean().backward()
            zero_engine.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step in (99, 299):
                held.append(_held(folder))
    (rss, descriptors, files), (rss_after, descriptors_after, files_after) = held
    assert descriptors_after == descriptors
    assert files_after == files
    assert rss_after - rss < 2**20, f"{rss_after - rss} bytes more in 200 steps"


def _held(folder: str) -> tuple[int, int, list[tuple[str, int]]]:
    """Resident bytes, open descriptors, and files with their sizes."""
    status = Path("/proc/self/status").read_text().splitlines()
    rss = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))
    files = [(str(path), path.stat().st_size) for path in Path(folder).rglob("*")]
    return rss, len(list(Path("/proc/self/fd").iterdir())), sorted(files)
