"""A training that was saved goes on as if nothing had happened, however it is distributed now."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any, Final

import parity
import pytest
import torch
import zero_engine
from one_dtype import OneDtype
from parity import ZeroConfig
from residences import Cell, host_adam
from torch import Tensor, nn
from zero_comm import Group
from zero_engine import Precision

pytestmark = pytest.mark.drawn(2)

SAVED_AT, MORE = 2, 3
PLACES = ("device", "host", "disk")
SHORT: Final = (Cell(1, "host"), Cell(2), Cell(3, "device", "disk"), Cell(3, "disk", "host"))


class _Model(parity.Tiny):
    """As Tiny, with dropout and statistics that move."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__(torch.float32)
        self.drop, self.norm = nn.Dropout(p), nn.BatchNorm1d(parity.WIDTH, affine=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = (self.embed(tokens) + self.positions + self.frozen).float()
        x = self.norm(x.transpose(1, 2)).transpose(1, 2).to(self.embed.weight.dtype)
        for block in self.blocks:
            x = self.drop(block(x))
        for gate in self.gates:
            x = gate(x)
        x = x + self.lift(self.adapter(x.to(self.lift.weight.dtype))).to(x.dtype)
        return self.head(x) * self.scale


def _build(
    group: Group,
    config: Any,
    *,
    seed: int,
    p: float = 0.0,
    make: Any = torch.optim.AdamW,
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = parity.build(partial(_Model, p), seed=seed)
    optimizer = make(parity.param_groups(model), lr=1e-2)
    zero_engine.shard(model, optimizer, config, group=group)
    return model, optimizer, parity.scheduler_for(optimizer)


def _run(
    model: nn.Module, optimizer: Any, scheduler: Any, steps: range, *, rank: int
) -> list[float]:
    losses = []
    for step in steps:
        losses += parity.run_steps(model, optimizer, [step], rank=rank)
        scheduler.step()
    return losses


def _cells(*, is_bf16: bool, is_short: bool) -> list[Cell]:
    """Every stage and residence, half for each precision; or, if short, every stage and place."""
    cells = [Cell(stage, place) for stage in (1, 2) for place in PLACES]
    cells += [Cell(3, *places) for places in itertools.product(PLACES, repeat=2)]
    chosen = SHORT if is_short else cells[is_bf16::2]
    return [*([] if is_bf16 else [Cell(0)]), *chosen]


def _save(group: Group, folder: Path, p: float, bf16: bool, own: bool) -> list[float]:
    """Train, save, and go on: what the others are to equal."""
    precision = Precision(params=torch.bfloat16) if bf16 else None
    make = host_adam if own else torch.optim.AdamW
    place = "device" if not own else "disk" if bf16 else "host"
    config = ZeroConfig(3, precision=precision, offload=Cell(3, place, place).offload(folder))
    model, optimizer, scheduler = _build(group, config, seed=0, p=p, make=make)
    torch.manual_seed(100 + group.rank)
    rank = group.rank if p else 0
    _run(model, optimizer, scheduler, range(SAVED_AT), rank=rank)
    report = zero_engine.save(
        folder / "saved",
        model,
        optimizer,
        step=SAVED_AT,
        scheduler=scheduler,
        extra={"position": (3, 4.5)},
    )
    assert report.path == folder / "saved" / f"step-{SAVED_AT}"
    return _run(model, optimizer, scheduler, range(SAVED_AT, SAVED_AT + MORE), rank=rank)


def _resume(group: Group, folder: Path, p: float, bf16: bool, own: bool) -> dict[Cell, list[float]]:
    found = {}
    make = host_adam if own else torch.optim.AdamW
    precision = Precision(params=torch.bfloat16) if bf16 else None
    # What is read from a file has a dtype and a place, but knows no number of ranks.
    for cell in _cells(is_bf16=bf16, is_short=group.world_size != 2):
        config = ZeroConfig(cell.stage, offload=cell.offload(folder), precision=precision)
        model, optimizer, scheduler = _build(group, config, seed=7, p=p, make=make)
        torch.manual_seed(999)
        report = zero_engine.load(folder / "saved", model, optimizer, scheduler=scheduler)
        assert report is not None
        assert (report.step, report.extra) == (SAVED_AT, {"position": (3, 4.5)})
        assert report.num_tensors == report.num_tensors_saved > 80
        steps = range(report.step, report.step + MORE)
        found[cell] = _run(model, optimizer, scheduler, steps, rank=group.rank if p else 0)
        zero_engine.unshard(model, optimizer)
    return found


@pytest.mark.parametrize(("bf16", "own"), [(False, False), (True, True)], ids=["adamw", "cpu-adam"])
def test_the_next_steps_are_those_of_the_run_that_went_on(ranks, tmp_path, bf16, own) -> None:
    """Weights, moments, masters, rates, statistics and dropout: all of it, in every cell."""
    arguments = {"folder": tmp_path, "p": 0.3, "bf16": bf16, "own": own}
    tolerance = 0.05 if bf16 else 1e-5  # torch's kernel and ours, on the host, round apart
    expected = ranks(2).run(_save, **arguments)
    for rank, found in enumerate(ranks(2).run(_resume, **arguments)):
        near = pytest.approx(expected[rank], abs=tolerance)
        for cell, losses in found.items():
            rounds_alike = own or cell.optimizer == "device"
            assert losses == (expected[rank] if rounds_alike else near), f"rank {rank}, {cell}"


ON_THE_HOST: Final = {"p": 0.0, "bf16": False, "own": True}


@pytest.fixture(scope="module")
def saved_by_four(ranks, tmp_path_factory) -> tuple[Path, list[float]]:
    """At stage 3, on the host; and the losses of the run that went on."""
    folder = tmp_path_factory.mktemp("four")
    return folder, ranks(4).run(_save, folder=folder, **ON_THE_HOST)[0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_another_world_size_goes_on_within_rounding(ranks, saved_by_four, world_size) -> None:
    """Machines come and go; every rank sees the same batch, so that only sums differ."""
    folder, expected = saved_by_four
    for rank, found in enumerate(ranks(world_size).run(_resume, folder=folder, **ON_THE_HOST)):
        for cell, losses in found.items():
            assert losses == pytest.approx(expected, abs=1e-5), f"rank {rank}, {cell}"


# ---- Masters that the optimizer keeps ----


@pytest.mark.parametrize("stage", [0, 3])
def test_masters_that_an_optimizer_keeps_of_its_own_are_saved(
    group: Group, tmp_path: Path, stage: int
) -> None:
    """A 16-bit model without a `Precision`: what CPUAdam steps is none of the model's tensors."""

    def build(place: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = parity.build(lambda: OneDtype().bfloat16(), seed=seed)
        optimizer = host_adam(parity.param_groups(model))
        config = ZeroConfig(stage, offload=Cell(3, place, place).offload(tmp_path))
        return zero_engine.shard(model, optimizer, config, group=group)

    places = ("device", "disk") if stage else ("device",)
    for saved in places:
        model, optimizer = build(saved, seed=0)
        parity.run_steps(model, optimizer, range(2), rank=group.rank)
        zero_engine.save(tmp_path / saved, model, optimizer, step=2)
        expected = parity.run_steps(model, optimizer, range(2, 6), rank=group.rank)
        for place in places:
            other = build(place, seed=7)
            report = zero_engine.load(tmp_path / saved, *other)
            assert report is not None and report.num_tensors == report.num_tensors_saved
            losses = parity.run_steps(*other, range(2, 6), rank=group.rank)
            assert losses == expected, f"saved on {saved}, resumed on {place}"
            zero_engine.unshard(*other)
        zero_engine.unshard(model, optimizer)
