"""Errors of encoding gradients in checkpoints: of one layout and wire, and fed back there only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import nn
from zero_comm import Blockwise, Group, Loco
from zero_engine import FileError, Wire
from zero_engine.testing import MANIFEST, unsealed
from zero_partition.seams import find_sharded, loco_state

pytestmark = pytest.mark.drawn(2)

LOCO = Loco(reset_T=5)  # they are forgotten after the fifth step
WIRE: dict[str, Any] = {"gradients": "int4", "levels": 2, "loco": LOCO}


def _build(group: Group, stage: int = 3, **wire: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    config = ZeroConfig(stage, wire=Wire(**(WIRE | wire)))
    return parity.build_sharded(group, config, make=parity.tiny_float32)


# ---- The same run ----


@pytest.mark.parametrize(("stage", "kept"), [(1, None), (3, Blockwise(bits=8))], ids=str)
@pytest.mark.ranks(4)
def test_a_run_goes_on_from_a_file_with_the_same_bits(
    group: Group, stage: int, kept: Any, tmp_path: Path
) -> None:
    """What a reduction has lost comes with the next one, whoever ended the job between them."""
    model, optimizer = _build(group, stage, loco=Loco(reset_T=5, kept=kept))
    parity.run_steps(model, optimizer, range(3), rank=group.rank)
    zero_engine.save(tmp_path / "one", model, optimizer, step=3)
    with zero_engine.Saver(tmp_path / "two", model, optimizer) as saver:
        saver.save(step=3)  # a copy: the next steps change the errors
        expected = parity.run_steps(model, optimizer, range(3, 7), rank=group.rank)
    weights = zero_engine.full_state_dict(model)
    for name in ("one", "two"):
        again, stepper = _build(group, stage, loco=Loco(reset_T=5, kept=kept))
        report = zero_engine.load(tmp_path / name, again, stepper)
        assert report.begins_anew == ()
        found = parity.run_steps(again, stepper, range(3, 7), rank=group.rank)
        assert found == expected
        full = zero_engine.full_state_dict(again)  # rank 0's; empty on the others
        parity.assert_same_weights(full, weights, what=name)


@pytest.mark.ranks(4)
def test_what_a_run_has_lost_since_is_not_fed_back(group: Group, tmp_path: Path) -> None:
    """Who goes back to an earlier checkpoint has other weights than those that lost it."""
    model, optimizer = _build(group, loco=None)
    parity.run_steps(model, optimizer, range(1), rank=group.rank)
    zero_engine.save(tmp_path, model, optimizer, step=1)

    curves = []
    for used in (False, True):
        model, optimizer = _build(group)
        if used:
            parity.run_steps(model, optimizer, range(2), rank=group.rank)
        report = zero_engine.load(tmp_path, model, optimizer)
        assert "LoCo), of which none were saved" in report.begins_anew[0]
        assert str(report).endswith(report.begins_anew[0])
        curves.append(parity.run_steps(model, optimizer, range(1, 4), rank=group.rank))
    assert curves[0] == curves[1]


# ---- Another run ----

OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "nodes": ({"levels": 4}, "ranks of a node was 2 when they were saved, is 4"),
    "codec": ({"gradients": "int8"}, "codec of gradients was int4"),
    "loco": ({"loco": Loco(err_beta=0.5)}, r"Loco was Loco\(err_beta=0.8"),
}


def test_where_they_mean_nothing_the_report_says_so(ranks, tmp_path: Path) -> None:
    """Fed back to other elements, or twice, errors would be noise; a run must not begin so."""
    ranks(4).run(_save_and_load_otherwise, folder=tmp_path)
    ranks(2).run(_load, folder=tmp_path, wire={}, says="number of ranks was 4 .* is 2")
    ranks(1).run(_load, folder=tmp_path, wire={"levels": 1}, says="number of ranks was 4 .* is 1")


def _save(group: Group, folder: Path) -> None:
    model, optimizer = _build(group)
    parity.run_steps(model, optimizer, range(2), rank=group.rank)
    zero_engine.save(folder, model, optimizer, step=2)


def _save_and_load_otherwise(group: Group, folder: Path) -> None:
    _save(group, folder)
    for wire, says in OTHERS.values():
        _load(group, folder, wire, says)
    model = parity.tiny_float32()
    optimizer = parity.OPTIMIZERS["adamw"](parity.param_groups(model))
    config = ZeroConfig(3, wire=Wire(**WIRE), units=["blocks.0"])
    zero_engine.shard(model, optimizer, config, group=group)
    (said,) = zero_engine.load(folder, model, optimizer).begins_anew
    assert "LoCo): layout of" in said
    model, optimizer = _build(group, loco=None)  # keeps none, and lacks none
    assert zero_engine.load(folder, model, optimizer).begins_anew == ()


def _load(group: Group, folder: Path, wire: dict[str, Any], says: str) -> None:
    model, optimizer = _build(group, **wire)
    report = zero_engine.load(folder, model, optimizer)
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(*report.begins_anew)
    assert not loco_state(find_sharded(model))
    losses = parity.run_steps(model, optimizer, range(2, 4), rank=group.rank)
    assert all(torch.tensor(losses).isfinite())


# ---- Files ----


def test_a_byte_of_them_that_is_damaged_is_found(group: Group, tmp_path: Path) -> None:
    """Nobody would see it in a loss. With weights alone they are not saved, as moments are not."""
    _save(group, tmp_path)
    manifest = unsealed(tmp_path / "step-2" / MANIFEST)
    tensors = [tensor for of_rank in manifest["loco"].values() for tensor in of_rank.values()]
    (piece,) = tensors[-1]["pieces"]
    path = tmp_path / "step-2" / piece["file"]
    content = path.read_bytes()  # they are written last
    parity.by_rank_0(group, lambda: path.write_bytes(content[:-1] + bytes([content[-1] ^ 1])))
    model, optimizer = _build(group)
    with pytest.raises(FileError, match=f"{path.name}.*damaged"):
        zero_engine.load(tmp_path, model, optimizer)

    zero_engine.save(tmp_path, model, step=3)
    assert unsealed(tmp_path / "step-3" / MANIFEST)["loco"] == {}
