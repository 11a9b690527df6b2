"""A save in the background is of the moment at which it was asked for: who writes next waits."""

from __future__ import annotations

import errno
import gc
import os
import signal
from pathlib import Path
from threading import Event, Timer
from typing import Any

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from residences import Blocks, Cell
from torch import nn
from zero_comm import Group
from zero_engine import (
    ConfigError,
    FileError,
    GatheredParameters,
    Precision,
    Saver,
    full_state_dict,
)
from zero_engine.checkpoint import StopSignals
from zero_engine.testing import FileSystem, blocked_copies
from zero_offload import host_memory


def test_what_is_saved_is_what_was_there(group: Group, tmp_path: Path) -> None:
    """Training changes every value while they are written."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(3))
    parity.run_steps(model, optimizer, range(2), rank=group.rank)
    may_write = Event()

    def write_later(file: int, view: Any) -> int:
        assert may_write.wait(20)
        return os.write(file, view)

    with Saver(tmp_path, model, optimizer, keep=2, system=FileSystem(write=write_later)) as saver:
        snapshot = saver.save(step=2, extra="two")
        expected = parity.run_steps(model, optimizer, range(2, 5), rank=group.rank)
        assert not (tmp_path / "latest").exists()
        may_write.set()
        report = saver.wait()
        assert report is not None and report.path == snapshot.path
        assert saver.wait() is None
        zero_engine.load(tmp_path, model, optimizer)
        assert parity.run_steps(model, optimizer, range(2, 5), rank=group.rank) == expected
        for step in (5, 6, 7):
            saver.save(step=step)
    assert {path.name for path in tmp_path.iterdir()} == {"step-6", "step-7", "latest"}


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_is_raised_on_every_rank_by_the_next_call(
    group: Group, tmp_path: Path, failing: int
) -> None:
    """A job that saves nothing for a day must not learn of it at its end."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(3))
    is_full = Event()

    def write(file: int, view: Any) -> int:
        if is_full.is_set() and group.rank == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(file, view)

    saver = Saver(tmp_path, model, optimizer, system=FileSystem(write=write))
    saver.save(step=1)
    saver.wait()
    for act in (lambda: saver.save(step=3), saver.close):
        is_full.set()
        saver.save(step=2)
        with pytest.raises(FileError):
            act()
        if group.rank == 0:  # who removes it
            assert not [path for path in tmp_path.iterdir() if "partial" in path.name]
        is_full.clear()
        assert zero_engine.load(tmp_path, model, optimizer).step == 1
    saver.save(step=4)
    saver.close()
    assert zero_engine.load(tmp_path, model, optimizer).step == 4
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def test_a_copy_takes_the_memory_of_the_ranks_own_part(group: Group, tmp_path: Path) -> None:
    """A job that fits when it trains should know what a save needs on top."""
    gc.collect()  # what a failed save of another test holds
    model, optimizer = parity.shard_chain(group, ZeroConfig(3), num_blocks=4)
    parity.step_chain(model, optimizer)
    with Saver(tmp_path, model, optimizer) as saver:
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


# ---- Copies beside the next forward and backward ----


CONFIGS = {
    "stage 0": ZeroConfig(0),
    "stage 2, masters": ZeroConfig(2, precision=Precision(params=torch.bfloat16)),
    "stage 3, masters": ZeroConfig(3, precision=Precision(params=torch.bfloat16)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_waits_for_the_copy(group: Group, tmp_path: Path, name: str) -> None:
    """A checkpoint of two moments is of none."""
    model, optimizer = parity.build_sharded(group, CONFIGS[name], make=Blocks)
    parity.run_steps(model, optimizer, range(2), rank=group.rank)
    saver = Saver(tmp_path, model, optimizer, overlap=True)
    for start in (2, 5):
        with blocked_copies() as may_copy:
            saver.save(step=start)
            first = parity.loss_of(model, parity.batch(start, 0, group.rank))
            first.backward()
            assert not may_copy.is_set()
            Timer(0.1, may_copy.set).start()
            optimizer.step()
            assert may_copy.is_set(), "the step has not waited"
        optimizer.zero_grad()
        after = parity.run_steps(model, optimizer, range(start + 1, start + 3), rank=group.rank)
        saver.wait()
        zero_engine.load(tmp_path, model, optimizer)
        again = parity.run_steps(model, optimizer, range(start, start + 3), rank=group.rank)
        assert again == [first.item(), *after]
    saver.close()


def _double(model: nn.Module, *_: Any) -> None:
    with GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
        for param in model.parameters():
            param.mul_(2)


def _park(model: nn.Module, *_: Any) -> None:
    zero_engine.offload_states(model)
    zero_engine.reload_states(model)


WRITES: Any = (
    _double,
    _park,
    lambda model, *_: model.load_state_dict(parity.build(Blocks).state_dict()),
    lambda model, optimizer, folder: zero_engine.load(folder / "other", model, optimizer),
    lambda model, *_: zero_engine.unshard(model),  # the last one: of a plain model
)


def test_every_write_of_ours_waits_for_the_copy(group: Group, tmp_path: Path) -> None:
    """A step is only the most frequent one."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(3), make=Blocks)
    parity.run_steps(model, optimizer, range(2), rank=group.rank)
    zero_engine.save(tmp_path / "other", model, optimizer, step=1)
    other, its = parity.build_sharded(group, ZeroConfig(3), make=Blocks)
    for index, write in enumerate(WRITES):
        expected = full_state_dict(model)
        folder = tmp_path / str(index)
        with blocked_copies() as may_copy, Saver(folder, model, optimizer, overlap=True) as saver:
            saver.save(step=2)
            Timer(0.1, may_copy.set).start()
            write(model, optimizer, tmp_path)
            assert may_copy.is_set(), f"write {index} has not waited"
            saver.wait()

        zero_engine.load(folder, other, its)
        found = full_state_dict(other)
        if group.rank == 0:
            parity.assert_same_weights(found, expected, what=f"write {index}")


def test_what_rests_elsewhere_is_copied_at_once(group: Group, tmp_path: Path) -> None:
    """It is read through memory that the next backward needs."""
    (swap := tmp_path / f"swap-{group.rank}").mkdir()
    cells = Cell(3, "host"), Cell(3, "device", "host"), Cell(3, "disk", "disk"), Cell(2, "disk")
    for number, cell in enumerate(cells):
        config = ZeroConfig(cell.stage, offload=cell.offload(str(swap)))
        model, optimizer = parity.build_sharded(group, config)
        parity.run_steps(model, optimizer, range(2), rank=group.rank)
        place = tmp_path / str(number)
        with Saver(place, model, optimizer, overlap=True) as saver:
            saver.save(step=2)
            expected = parity.run_steps(model, optimizer, range(2, 4), rank=group.rank)
        zero_engine.load(place, model, optimizer)
        assert parity.run_steps(model, optimizer, range(2, 4), rank=group.rank) == expected


@pytest.mark.cpu_only("a simulated device says so itself")
@pytest.mark.parametrize("what", ["weight", "state"])
def test_a_write_that_waits_for_nothing_is_noticed(group: Group, tmp_path: Path, what: str) -> None:
    """Weights that are swapped for their average, say: no file may hold some of each."""
    for stage in (0, 1, 2):
        folder = tmp_path / str(stage)
        model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
        parity.run_steps(model, optimizer, range(1), rank=group.rank)
        written = next(model.parameters())
        if what == "state":
            param = next(p for p in optimizer.state if optimizer.state[p]["exp_avg"].numel())
            written = optimizer.state[param]["exp_avg"]
        with Saver(folder, model, optimizer, overlap=True) as saver:
            saver.save(step=1)
            saver.wait()
            with blocked_copies() as may_copy:
                saver.save(step=2)
                with torch.no_grad():
                    written.mul_(2)
                may_copy.set()
                with pytest.raises(FileError, match=r"while it was copied.*overlap=True"):
                    saver.wait()
            report = zero_engine.load(folder, model, optimizer)
            assert report is not None and report.step == 1


# ---- A scheduler's warning ----


def test_all_ranks_save_at_the_step_at_which_one_was_told(group: Group, tmp_path: Path) -> None:
    """Signals reach one host first, and a checkpoint needs every rank at the same step."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(3))
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)}
    with StopSignals(model) as stop:
        for step in range(9):
            if step == 2 and group.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            parity.run_steps(model, optimizer, [step], rank=group.rank)
            if name := stop.arrived():
                assert name == "SIGTERM"
                zero_engine.save(tmp_path, model, optimizer, step=step + 1)
                break
    assert {each: signal.getsignal(each) for each in before} == before

    report = zero_engine.load(tmp_path, model, optimizer)
    assert report is not None and report.step == 3
    with StopSignals(model, [signal.SIGUSR1]) as stop:
        assert stop.arrived() is None
    with pytest.raises(ConfigError, match=r"signals: expected some of Python's"):
        StopSignals(model, [])
