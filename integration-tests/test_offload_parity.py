"""Where things rest changes no bit of what is trained."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from residences import Blocks, Cell, assert_same, parts_of, sharded, train
from zero_comm import Group
from zero_engine import Precision

PRECISIONS: Final = {
    "fp32": None,
    "bf16": Precision(params=torch.bfloat16),
    "fp16": Precision(params=torch.float16),
}


def cells(stage: int) -> Iterator[Cell]:
    """All of a stage, but for those in which nothing rests elsewhere, or poison rests nowhere."""
    places = ("device", "host", "disk") if stage == 3 else ("device",)
    for params, optimizer in itertools.product(places, ("device", "host", "disk")):
        for fraction in (0, 0.3, 1) if optimizer != "device" else (1,):
            if (params, optimizer) != ("device", "device"):
                yield Cell(stage, optimizer, params, fraction)
            if "disk" in (optimizer, params) and fraction:
                yield Cell(stage, optimizer, params, fraction, "poisoned")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_residence_trains_the_same_bits(
    ranks, tmp_path: Path, stage: int, precision: str
) -> None:
    """Offload is chosen by memory alone, and a run must not be another one for it."""
    ranks(2).run(_same_bits, folder=str(tmp_path), stage=stage, precision=precision, timeout_s=120)

    assert not list(tmp_path.iterdir()), "files are left"


def _same_bits(group: Group, folder: str, stage: int, precision: str) -> None:
    def run(cell: Cell | None) -> dict[str, Any]:
        settings = {"stage": stage, "precision": PRECISIONS[precision]}
        with sharded(group, cell, folder, make=Blocks, **settings) as (model, optimizer):
            losses = train(model, optimizer, group.rank)
            return parts_of(model, optimizer) | {"losses": losses}

    expected = run(None)
    for cell in cells(stage):
        assert_same(run(cell), expected, f"{cell}")
