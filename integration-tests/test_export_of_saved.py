"""From save() to from_pretrained(): what was trained in shards is a model like any other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import zero_engine
import zero_engine.checkpoint
import zoo
from high_water import needs_high_water
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group
from zero_engine import FileError
from zero_partition import Precision


def _read(folder: Path) -> dict[str, Tensor]:
    readers = zero_engine.checkpoint.open_weights(folder)
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


_EXPORT_AND_MEASURE = """
import sys
sys.path.insert(0, sys.argv[1])
from high_water import HighWater
from zero_engine import export

mark = HighWater()
report = export(*sys.argv[2:], max_shard_bytes=10**8)
print(report.num_bytes, mark.rise_bytes())
"""


@needs_high_water
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """The machine that publishes a model is not the one that trained it."""
    _save_alone(nn.ModuleList(nn.Linear(2**12, 2560, bias=False) for _ in range(3)), tmp_path)

    done = subprocess.run(
        [
            *(sys.executable, "-c", _EXPORT_AND_MEASURE, Path(__file__).parent),
            *(tmp_path, tmp_path / "out"),
        ],
        check=True,
        capture_output=True,
        text=True,
    )

    written, rise = map(int, done.stdout.split())
    assert written > 120 * 2**20
    assert rise < 32 * 2**20


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_from_pretrained_loads_what_was_exported(tmp_path: Path, name: str) -> None:
    """With embeddings tied (GPT-2) and not, in several files, the names being its own."""
    transformers = pytest.importorskip("transformers")
    model = zoo.ZOO[name].make()
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    _save_alone(model, tmp_path / "saved")
    out = tmp_path / "out"

    zero_engine.export(tmp_path / "saved", out, max_shard_bytes=8000)

    assert (out / "model.safetensors.index.json").exists()
    model.config.save_pretrained(out)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, local_files_only=True
    )
    assert not any(report.values())
    parity.assert_same_weights(dict(loaded.state_dict()), expected, what=name)


def _save_alone(model: nn.Module, folder: Path) -> None:
    zero_engine.shard(model, None, ZeroConfig(3), group=Group.solo())
    zero_engine.save(folder, model, step=0)
