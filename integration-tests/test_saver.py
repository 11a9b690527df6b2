"""A save in the background is of the moment at which it was asked for, and its errors are heard."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from threading import Event
from typing import Any

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from zero_comm import Group
from zero_engine import FileError, Offload, Saver
from zero_engine.testing import FileSystem
from zero_offload import host_memory

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize("where", ["device", "host", "disk"])
def test_what_is_saved_is_what_was_there(ranks, tmp_path: Path, where: str) -> None:
    """Training changes every value while they are written."""
    ranks(2).run(_train_meanwhile, folder=tmp_path, where=where)


def _train_meanwhile(group: Group, folder: Path, where: str) -> None:
    path = folder if where == "disk" else None
    config = ZeroConfig(3, offload=Offload(optimizer=where, path=path, subgroup_bytes=2000))
    model, optimizer = parity.build_sharded(group, config)
    parity.run_steps(model, optimizer, range(2), rank=group.rank)
    may_write = Event()

    def write_later(file: int, view: Any) -> int:
        assert may_write.wait(20)
        return os.write(file, view)

    system = FileSystem(write=write_later)
    with Saver(folder / "saved", model, optimizer, keep=2, system=system) as saver:
        snapshot = saver.save(step=2, extra="two")
        expected = parity.run_steps(model, optimizer, range(2, 5), rank=group.rank)
        assert not (folder / "saved" / "latest").exists()
        may_write.set()
        report = saver.wait()
        assert report is not None and report.path == snapshot.path
        assert saver.wait() is None
        zero_engine.load(folder / "saved", model, optimizer)
        assert parity.run_steps(model, optimizer, range(2, 5), rank=group.rank) == expected
        for step in (5, 6, 7):
            saver.save(step=step)
    names = {path.name for path in (folder / "saved").iterdir()}
    assert names == {"step-6", "step-7", "latest"}


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_is_raised_on_every_rank_by_the_next_call(ranks, tmp_path, failing: int) -> None:
    """A job that saves nothing for a day must not learn of it at its end."""
    ranks(2).run(_fail_in_background, folder=tmp_path, failing=failing)


def _fail_in_background(group: Group, folder: Path, failing: int) -> None:
    model, optimizer = parity.build_sharded(group, ZeroConfig(3))
    is_full = Event()

    def write(file: int, view: Any) -> int:
        if is_full.is_set() and group.rank == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(file, view)

    saver = Saver(folder, model, optimizer, system=FileSystem(write=write))
    saver.save(step=1)
    saver.wait()
    for act in (lambda: saver.save(step=3), saver.close):
        is_full.set()
        saver.save(step=2)
        with pytest.raises(FileError):
            act()
        is_full.clear()
        assert zero_engine.load(folder, model, optimizer).step == 1
    saver.save(step=4)
    saver.close()
    assert zero_engine.load(folder, model, optimizer).step == 4
    assert not [path for path in folder.iterdir() if "partial" in path.name]


def test_a_copy_takes_the_memory_of_the_ranks_own_part(ranks, tmp_path: Path) -> None:
    """A job that fits when it trains should know what a save needs on top."""
    ranks(2).run(_measure, folder=tmp_path)


def _measure(group: Group, folder: Path) -> None:
    gc.collect()  # what a failed save of another test holds
    model = parity.Chain(4, 64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    with Saver(folder, model, optimizer) as saver:
        snapshot = saver.save(step=1)
        held = [host_memory()["copies of a checkpoint"]]
        saver.save(step=2)
        held.append(host_memory()["copies of a checkpoint"])

    assert held[0] == held[1] >= snapshot.num_bytes, "the memory of the first is that of the second"
    assert held[0] - snapshot.num_bytes < 2 * 4096, "a page for every small tensor is many pages"
    assert "copies of a checkpoint" not in host_memory()
    of_values = 12 * 4 * 64 * 64 // group.world_size
    assert of_values <= snapshot.num_bytes <= of_values + 30_000  # generators' states, and counts
    assert snapshot.seconds > 0
