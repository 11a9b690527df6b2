"""A scheduler's warning ends in a checkpoint, and not in the loss of hours."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import parity
import pytest
import zero_engine
from parity import ZeroConfig
from zero_comm import Group
from zero_engine import ConfigError
from zero_engine.checkpoint import StopSignals

pytestmark = pytest.mark.xdist_group("ranks")


def test_all_ranks_save_at_the_step_at_which_one_was_told(ranks, tmp_path: Path) -> None:
    """Signals reach one host first, and a checkpoint needs every rank at the same step."""
    assert ranks(2).run(_train_until_told, folder=tmp_path) == [3, 3]


def _train_until_told(group: Group, folder: Path) -> int:
    model, optimizer = parity.build_sharded(group, ZeroConfig(3))
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)}
    with StopSignals(model) as stop:
        for step in range(9):
            if step == 2 and group.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            parity.run_steps(model, optimizer, [step], rank=group.rank)
            if name := stop.arrived():
                assert name == "SIGTERM"
                zero_engine.save(folder, model, optimizer, step=step + 1)
                break
    assert {each: signal.getsignal(each) for each in before} == before

    report = zero_engine.load(folder, model, optimizer)
    with StopSignals(model, [signal.SIGUSR1]) as stop:
        assert stop.arrived() is None
    with pytest.raises(ConfigError, match=r"signals: expected some of Python's"):
        StopSignals(model, [])
    assert report is not None
    return report.step
