"""From save() to from_pretrained(): what was trained in shards is a model like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor
from zero_comm import Group
from zero_engine import FileError
from zero_partition import Precision


def _read(folder: Path) -> dict[str, Tensor]:
    readers = zero_engine.open_weights(folder)
    return {n: r.read(0, r.shape.numel()).view(r.shape).clone() for n, r in readers.items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_what_was_saved_in_shards_is_exported_whole(ranks, tmp_path: Path, stage: int) -> None:
    """Tied, frozen, odd and one-element parameters, and a buffer; from pieces of two ranks."""
    (expected, _) = ranks(2).run(_save, folder=str(tmp_path / "saved"), stage=stage)

    zero_engine.export(tmp_path / "saved", tmp_path / "out", max_shard_bytes=500)

    del expected["head.weight"]
    found = _read(tmp_path / "out")
    assert found.keys() == expected.keys()
    parity.assert_same_weights({n: found[n] for n in expected}, expected, what="exported")


def test_masters_are_exported_and_round_to_what_was_computed_with(ranks, tmp_path: Path) -> None:
    """Those who go on training want the masters; those who publish, the dtype of the model."""
    (expected, _) = ranks(2).run(_save, folder=str(tmp_path / "saved"), stage=3, is_half=True)

    zero_engine.export(tmp_path / "saved", tmp_path / "whole")
    zero_engine.export(tmp_path / "saved", tmp_path / "half", dtype=torch.bfloat16)

    masters, halves = _read(tmp_path / "whole"), _read(tmp_path / "half")
    assert masters["scale"].dtype == torch.float32
    for name, value in halves.items():
        assert value.dtype == torch.bfloat16, name
        assert torch.equal(value, expected[name].bfloat16()), name
        assert torch.equal(value, masters[name].bfloat16()), name
    assert any(not torch.equal(masters[n].bfloat16().float(), masters[n]) for n in masters)


def _save(group: Group, folder: str, stage: int, **options: Any) -> dict[str, Tensor]:
    is_half = options.pop("is_half", False)
    precision = Precision(params=torch.bfloat16) if is_half else None
    make = parity.tiny_float32 if is_half else parity.Tiny
    model = parity.build(make)
    optimizer = parity.OPTIMIZERS["adamw"](parity.param_groups(model))
    zero_engine.shard(model, optimizer, ZeroConfig(stage, precision=precision), group=group)
    if not is_half:
        parity.run_steps(model, optimizer, range(2), rank=group.rank)
    zero_engine.save(folder, model, optimizer, step=2, **options)
    return dict(zero_engine.full_state_dict(model))


def test_a_part_of_a_model_is_not_exported_as_one(ranks, tmp_path: Path) -> None:
    """from_pretrained would make up the rest."""
    ranks(2).run(_save, folder=str(tmp_path), stage=3, exclude_frozen=True)

    with pytest.raises(FileError, match="exclude_frozen"):
        zero_engine.export(tmp_path, tmp_path / "out")
