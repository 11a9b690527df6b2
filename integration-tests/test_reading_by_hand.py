"""The script of docs/guides/reading.md reads what zero loads, with numpy and without torch."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from split_models import build_split, mesh_of, train_split
from torch import Tensor, nn
from zero_comm import Group
from zero_engine import Precision

ROOT: Final = Path(__file__).parents[1]
MASTERS: Final = {"precision": Precision(params=torch.bfloat16)}
BY_ROW: Final = {"cut": "row", "min_unit_bytes": 0}
KINDS: Final[dict[str, tuple[int, torch.dtype, dict[str, Any]]]] = {
    "stage 0": (0, torch.float32, {}),
    "stage 1, masters": (1, torch.float32, MASTERS),
    "stage 2, float64": (2, torch.float64, {}),
    "stage 3": (3, torch.float32, {}),
    "stage 3, bfloat16": (3, torch.bfloat16, {}),
    "stage 3, rows": (3, torch.float32, BY_ROW),
}


class _Model(nn.Module):
    """Tied, frozen and one-element parameters, and buffers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.hidden = nn.Linear(6, 6)
        self.frozen = nn.Parameter(torch.randn(3, 6), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.hidden(self.norm(self.embed(tokens))) + self.frozen.sum(0)
        return self.head(hidden * self.scale)


def _script(folder: Path) -> Path:
    """The block of the page that is a script."""
    page = (ROOT / "docs/guides/reading.md").read_text()
    [block] = re.findall(r'^```python\n("""Read.*?)^```', page, re.M | re.S)
    path = folder / "read_checkpoint.py"
    path.write_text(block)
    return path


def _reader(folder: Path) -> Callable[[Path], tuple[Any, Any, Any]]:
    """The function of the script, in this process."""
    with mock.patch.object(sys, "argv", ["read_checkpoint.py"]):
        return runpy.run_path(str(_script(folder)))["read_checkpoint"]


def _check(model: nn.Module, params: Any, buffers: Any, state: Mapping[str, Any]) -> None:
    """Compare all that was read with what a model and its optimizer have. Collective."""
    expected = {name: zero_engine.full_param(p) for name, p in model.named_parameters()}
    assert params.keys() == expected.keys()
    for name, value in expected.items():
        _check_equal(params[name], value)
    assert buffers.keys() == dict(model.named_buffers()).keys()
    for name, value in model.named_buffers():
        _check_equal(buffers[name], value)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert state.keys() == trained.keys()
    for name, param in trained.items():
        assert state[name].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for entry, found in state[name].items():
            _check_equal(found, torch.as_tensor(zero_engine.full_optimizer_state(param, entry)))


def _check_equal(found: np.ndarray, value: Tensor) -> None:
    """In shape and every bit; numpy has bfloat16 as float32."""
    value = value.detach().cpu()
    expected = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


def _build(stage: int, dtype: torch.dtype, group: Group, **options: Any) -> tuple[nn.Module, Any]:
    model = _Model().to(group.device, dtype)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    if dtype is torch.bfloat16:  # masters would be what is saved
        options = {"precision": Precision(masters=None)}
    zero_engine.shard(model, optimizer, ZeroConfig(stage, **options), group=group)
    return model, optimizer


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_by_hand_is_what_load_reads(group: Group, kind: str, tmp_path: Path) -> None:
    """Whatever the stage and dtype: the guide promises that no library is needed."""
    stage, dtype, options = KINDS[kind]
    model, optimizer = _build(stage, dtype, group, **options)
    for _ in range(2):
        model(torch.randint(5, (8,)).to(group.device)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    path = zero_engine.save(tmp_path / "run", model, optimizer, step=2).path

    loaded = _build(3, dtype, group)
    zero_engine.load(tmp_path / "run", *loaded)

    _check(loaded[0], *_reader(_own(tmp_path, group))(path))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("plan", ["tensor", "sequence"])
def test_parts_of_a_dtensor_are_put_together(group: Group, plan: str, tmp_path: Path) -> None:
    """Elements of a tensor that torch has split are counted part after part."""
    mesh = mesh_of(group)
    model, optimizer = build_split(plan, mesh)
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=mesh["data"])
    train_split(model, optimizer, mesh)
    path = zero_engine.save(tmp_path / "run", model, optimizer, step=3).path

    _check(model, *_reader(_own(tmp_path, group))(path))


def test_the_script_needs_no_torch_and_sees_a_flipped_byte(group: Group, tmp_path: Path) -> None:
    """It is for machines that have neither torch nor zero."""
    model, optimizer = _build(3, torch.float32, group)
    path = zero_engine.save(tmp_path / "run", model, optimizer, step=0).path
    expected = zero_engine.full_state_dict(model)
    if group.rank:
        return
    hidden = "import sys; sys.modules.update(dict.fromkeys(['torch', 'safetensors', 'zero_comm']))"
    script = _script(tmp_path)
    script.write_text(f"{hidden}\n{script.read_text()}")
    command = [sys.executable, script, path, tmp_path / "weights.npz"]

    subprocess.run(command, check=True)

    arrays = np.load(tmp_path / "weights.npz")
    assert {*arrays} == {*expected} - {"head.weight"}  # tied
    for name in arrays:
        _check_equal(arrays[name], expected[name])
    file = path / "rank-00000-00.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    failed = subprocess.run(command, check=False, capture_output=True, text=True)
    assert f"{file}: the bytes are not those that were saved" in failed.stderr


def _own(folder: Path, group: Group) -> Path:
    """A folder of this rank."""
    own = folder / f"rank-{group.rank}"
    own.mkdir()
    return own
