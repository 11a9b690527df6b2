"""A save may copy while the next forward and backward run; whoever writes next waits for it."""

from __future__ import annotations

from pathlib import Path
from threading import Timer
from typing import Any

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from residences import Blocks, Cell
from torch import nn
from zero_comm import Group
from zero_engine import FileError, GatheredParameters, Precision, Saver, full_state_dict
from zero_engine.testing import held_copies

pytestmark = pytest.mark.xdist_group("ranks")

CONFIGS = {
    "stage 0": ZeroConfig(0),
    "stage 1": ZeroConfig(1),
    "stage 2, masters": ZeroConfig(2, precision=Precision(params=torch.bfloat16)),
    "stage 3": ZeroConfig(3),
    "stage 3, masters": ZeroConfig(3, precision=Precision(params=torch.bfloat16)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_waits_for_the_copy(ranks, tmp_path: Path, name: str) -> None:
    """A checkpoint of two moments is of none."""
    ranks(2).run(_step_meanwhile, folder=tmp_path, config=CONFIGS[name])


def _step_meanwhile(group: Group, folder: Path, config: ZeroConfig) -> None:
    model, optimizer = parity.build_sharded(group, config, make=Blocks)
    parity.run_steps(model, optimizer, range(2), rank=group.rank)
    saver = Saver(folder, model, optimizer, overlap=True)
    for start in (2, 5):
        with held_copies() as may_copy:
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
        zero_engine.load(folder, model, optimizer)
        again = parity.run_steps(model, optimizer, range(start, start + 3), rank=group.rank)
        assert again == [first.item(), *after]
    saver.close()


@pytest.mark.parametrize("how", ["gathered", "load_state_dict", "load", "parked", "unsharded"])
def test_every_write_of_ours_waits_for_the_copy(ranks, tmp_path: Path, how: str) -> None:
    """A step is only the most frequent one."""
    ranks(2).run(_write_meanwhile, folder=tmp_path, how=how)


def _write_meanwhile(group: Group, folder: Path, how: str) -> None:
    model, optimizer = parity.build_sharded(group, ZeroConfig(3), make=Blocks)
    parity.run_steps(model, optimizer, range(2), rank=group.rank)
    zero_engine.save(folder / "other", model, optimizer, step=1)
    expected = full_state_dict(model)
    with held_copies() as may_copy, Saver(folder / "it", model, optimizer, overlap=True) as saver:
        saver.save(step=2)
        Timer(0.1, may_copy.set).start()
        _write(how, model, optimizer, folder)
        assert may_copy.is_set(), "it has not waited"
        saver.wait()

    other, its_optimizer = parity.build_sharded(group, ZeroConfig(3), make=Blocks)
    zero_engine.load(folder / "it", other, its_optimizer)
    found = full_state_dict(other)
    if group.rank == 0:
        parity.assert_same_weights(found, expected, what=how)


def _write(how: str, model: nn.Module, optimizer: Any, folder: Path) -> None:
    if how == "gathered":
        with GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
    elif how == "load_state_dict":
        with torch.no_grad():
            model.load_state_dict(parity.build(Blocks).state_dict())
    elif how == "load":
        zero_engine.load(folder / "other", model, optimizer)
    elif how == "parked":
        zero_engine.offload_states(model)
        zero_engine.reload_states(model)
    else:
        zero_engine.unshard(model)


def test_what_rests_elsewhere_is_copied_at_once(ranks, tmp_path: Path) -> None:
    """It is read through memory that the next backward needs."""
    ranks(2).run(_train_elsewhere, folder=tmp_path)


def _train_elsewhere(group: Group, folder: Path) -> None:
    (swap := folder / f"swap-{group.rank}").mkdir()
    cells = Cell(3, "host"), Cell(3, "device", "host"), Cell(3, "disk", "disk"), Cell(2, "disk")
    for number, cell in enumerate(cells):
        config = ZeroConfig(cell.stage, offload=cell.offload(str(swap)))
        model, optimizer = parity.build_sharded(group, config)
        parity.run_steps(model, optimizer, range(2), rank=group.rank)
        place = folder / str(number)
        with Saver(place, model, optimizer, overlap=True) as saver:
            saver.save(step=2)
            expected = parity.run_steps(model, optimizer, range(2, 4), rank=group.rank)
        zero_engine.load(place, model, optimizer)
        assert parity.run_steps(model, optimizer, range(2, 4), rank=group.rank) == expected


def test_a_write_that_waits_for_nothing_is_noticed(ranks, tmp_path: Path) -> None:
    """Weights that are swapped for their average, say: no file may hold some of each."""
    for stage in (0, 1, 2):
        ranks(2).run(_swap_meanwhile, folder=tmp_path / str(stage), stage=stage)


def _swap_meanwhile(group: Group, folder: Path, stage: int) -> None:
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
    parity.run_steps(model, optimizer, range(2), rank=group.rank)
    with Saver(folder, model, optimizer, overlap=True) as saver:
        saver.save(step=1)
        saver.wait()
        with held_copies() as may_copy:
            saver.save(step=2)
            with torch.no_grad():
                next(model.parameters()).mul_(2)
            may_copy.set()
            with pytest.raises(FileError, match=r"written to while it was copied.*overlap=True"):
                saver.wait()
        report = zero_engine.load(folder, model, optimizer)
        assert report is not None
        assert report.step == 1
