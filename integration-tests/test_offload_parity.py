"""Where things rest changes no bit of what is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from residences import Blocks, Cell, assert_same, cells, parts_of, sharded, train
from zero_comm import Group
from zero_engine import Precision

PRECISIONS: Final = {
    "fp32": None,
    "bf16": Precision(params=torch.bfloat16),
    "fp16": Precision(params=torch.float16),
}


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
