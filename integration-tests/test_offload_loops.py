"""What users do around a step does the same wherever parameters and optimizer state rest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import parity
import pytest
import structured
import torch
import zero_engine
from attrs import define, field, frozen
from parity import ZeroConfig
from residences import (
    Blocks,
    Cell,
    Optimizers,
    assert_same,
    cpu_adam,
    host_adam,
    momentum,
    parts_of,
    resting_as,
    skipping_adam,
    train,
)
from safetensors.torch import save_file
from torch import Tensor, nn
from zero_comm import Group
from zero_engine import GatheredParameters, Precision

CELLS: Final = (
    Cell(1, "disk", "device", 1, "poisoned"),
    Cell(3, "disk", "disk", 0.3, "poisoned"),
    Cell(3, "device", "disk", 1, "poisoned"),
)


@define
class Run:
    """One training; `seen` is what it must have in common with others."""

    group: Group
    cell: Cell | None
    stage: int
    folder: Path
    seen: dict[str, Any] = field(factory=dict)

    def shard(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Resting as the cell says."""
        offload = None if self.cell is None else self.cell.offload(self.folder)
        config = ZeroConfig(self.stage, offload=offload, **settings)
        with resting_as(self.cell):
            return zero_engine.shard(model, optimizer, config, group=self.group)

    def loss(self, model: nn.Module, number: int) -> Tensor:
        """Of this rank's batch."""
        return parity.loss_of(model, parity.batch(number, 0, self.group.rank))

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        """Plain."""
        loss = self.loss(model, number)
        self.seen[f"loss {number}"] = loss.item()
        parity.finish_step(loss, optimizer)


Loop = Callable[[Run, nn.Module, torch.optim.Optimizer], None]


@frozen
class Case:
    """What is trained, and what is done around its steps."""

    loop: Loop
    make: Callable[[], nn.Module] = parity.Tiny
    make_optimizer: Optimizers = cpu_adam
    settings: dict[str, Any] = field(factory=dict)

    def run(self, run: Run) -> dict[str, Any]:
        """All that must be the same wherever things rest."""
        model = parity.build(self.make)
        optimizer = self.make_optimizer(model)
        run.shard(model, optimizer, **self.settings)
        self.loop(run, model, optimizer)
        run.seen |= parts_of(model, optimizer)
        zero_engine.unshard(model, optimizer)
        return run.seen


# ---- What is done ----


def _plain(run: Run, model: Any, optimizer: torch.optim.Optimizer) -> None:
    run.seen["losses"] = train(model, optimizer, run.group.rank, steps=range(3))


def _odd_steps(run: Run, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """A scheduler, and numbers set by hand."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for number in range(4):
        if number == 2:
            optimizer.param_groups[0]["lr"] = 0.003
            optimizer.param_groups[1]["weight_decay"] = 0.2
        run.step(model, optimizer, number)
        scheduler.step()


def _missing(run: Run, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Blocks that one step needs and the next does not."""
    gates = model.gates
    for number in range(4):
        model.gates = nn.ModuleList() if number in (0, 2) else gates
        run.step(model, optimizer, number)
        model.gates = gates


def _writes_gradients(run: Run, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Between backward and the norm: which must be that of what is there then."""
    for step in range(3):
        run.loss(model, step).backward()
        if step:  # else as they came
            with torch.no_grad():
                for shard in optimizer.param_groups[0]["params"][:step]:
                    shard.grad.mul_(3)
        run.seen[f"norm {step}"] = zero_engine.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()


def _fails_in_backward(run: Run, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """What was on its way then is nobody's: the next backward begins anew."""

    def fail_later(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda _: 1 / 0)

    for step in range(3):
        embedded = model.embed.register_forward_hook(fail_later)
        with pytest.raises(ZeroDivisionError):
            run.loss(model, step).backward()
        embedded.remove()
        optimizer.zero_grad()
        run.step(model, optimizer, step)


def _closures(run: Run, model: Any, optimizer: torch.optim.Optimizer) -> None:
    def evaluate(number: int) -> Tensor:
        optimizer.zero_grad()
        loss = run.loss(model, number)
        loss.backward()
        return loss

    for number in range(3):
        run.seen[f"loss {number}"] = optimizer.step(partial(evaluate, number)).item()
    optimizer.zero_grad()


def _grad_scaler(run: Run, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Of torch: scales, unscales, and skips the step whose gradients overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for number in range(4):
        loss = run.loss(model, number)
        scaler.scale(loss * (float("inf") if number == 1 else 1.0)).backward()
        if number != 2:
            scaler.unscale_(optimizer)
            zero_engine.clip_grad_norm_(model, 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.seen[f"scale {number}"] = scaler.get_scale()


def _clips_in_step(run: Run, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """As the engine does: unscaled, clipped and skipped by the optimizer's kernel."""
    for number in range(4):
        (run.loss(model, number) * (float("inf") if number == 2 else 48.0)).backward()
        report = zero_engine.unscale_and_clip_(model, scale=48.0, max_norm=0.3, in_step=True)
        run.seen[f"norm {number}"] = report.norm.item() if report.is_finite else None
        optimizer.step()
        optimizer.zero_grad()


def _between_steps(run: Run, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Accumulation without reduction, evaluation, everything whole, some of it whole and edited."""
    chosen = [model.blocks[1].up.weight, model.gates[0].factor, model.adapter.weight]
    for number in range(3):
        with zero_engine.no_sync(model):
            run.loss(model, 10 + number).backward()
        run.step(model, optimizer, number)
        with torch.no_grad():
            run.seen[f"evaluated {number}"] = run.loss(model, 9).item()
            with zero_engine.unsharded(model):
                whole = run.loss(model, 8).item()
                run.seen[f"whole {number}"] = whole, model.head.weight.clone()
        with GatheredParameters(chosen, modifier_rank=0), torch.no_grad():
            if run.group.rank == 0:
                for param in chosen:
                    param.mul_(1.5).add_(number)
    run.seen["state dict"] = zero_engine.full_state_dict(model)


def _access(run: Run, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Values and moments, by parameter: read, written, and trained with."""
    run.step(model, optimizer, 0)
    up, bias = model.blocks[0].up.weight, model.blocks[2].down.bias
    for key in ("exp_avg", "exp_avg_sq", "step"):
        run.seen[key] = zero_engine.full_optimizer_state(up, key)
    zero_engine.set_full_param(up, zero_engine.full_param(up) * 2)
    zero_engine.set_full_param(model.frozen, torch.full((6,), 0.25))
    zero_engine.set_full_optimizer_state(up, "exp_avg", run.seen["exp_avg"] * 3)
    zero_engine.set_full_optimizer_state(bias, "step", torch.tensor(5.0))
    part = zero_engine.local_optimizer_state(bias, "exp_avg_sq")
    zero_engine.set_local_optimizer_state(bias, "exp_avg_sq", part + 1)
    if run.stage == 3 and run.group.world_size > 1:
        for param in (bias, model.lift.weight):
            zero_engine.set_local_param(param, zero_engine.local_param(param) - 1)
    for number in (1, 2):
        run.step(model, optimizer, number)
    for name, param in model.named_parameters():
        run.seen[f"whole {name}"] = zero_engine.full_param(param)


def _rewind(run: Run, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """A checkpoint, loaded in the middle, in both orders; then the state of before the start."""
    blank = zero_engine.full_optimizer_state_dict(model)
    run.step(model, optimizer, 0)
    weights = {n: zero_engine.full_param(p) for n, p in model.named_parameters()}
    saved = zero_engine.full_optimizer_state_dict(model)
    run.seen["saved"] = copy.deepcopy(saved)
    run.step(model, optimizer, 1)
    zero_engine.load_full_optimizer_state_dict(model, saved)
    model.load_state_dict(weights, strict=False)
    run.step(model, optimizer, 2)
    model.load_state_dict(weights, strict=False)
    zero_engine.load_full_optimizer_state_dict(model, saved)
    run.step(model, optimizer, 3)
    zero_engine.load_full_optimizer_state_dict(model, blank)
    run.seen["states"] = len(optimizer.state)
    for number in (4, 5):
        run.step(model, optimizer, number)


def _load_files(run: Run, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Weights from files, in the middle of a run."""
    run.step(model, optimizer, 0)
    other = parity.build(parity.tiny_float32, seed=3).state_dict()
    del other["head.weight"]
    path = Path(run.folder, f"weights-{run.group.rank}.safetensors")
    save_file({name: value.clone() for name, value in other.items()}, path)
    zero_engine.load_pretrained(model, str(path), group=run.group)
    path.unlink()
    for number in (1, 2):
        run.step(model, optimizer, number)


def _unshards(run: Run, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Plain objects with their state, which train on alone; and are sharded again."""
    given = optimizer.param_groups[0]["params"][0]
    run.step(model, optimizer, 0)
    zero_engine.unshard(model, optimizer)
    whole = optimizer.param_groups[0]["params"][0]
    assert whole is not given and whole is next(p for p in model.parameters() if p.dim() > 1)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    for number in (1, 2):  # every rank the same data: there is nobody to reduce with
        parity.finish_step(parity.loss_of(model, parity.batch(number, 0, 0)), optimizer)
    run.seen["weights"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    state = copy.deepcopy(optimizer.state_dict()["state"])
    run.seen["state"] = {f"{k}.{name}": v for k, s in state.items() for name, v in s.items()}
    run.shard(model, optimizer)  # with state from the beginning
    run.seen["states"] = len(optimizer.state)
    for number in (3, 4):
        run.step(model, optimizer, number)


def _some_groups(model: nn.Module) -> torch.optim.Optimizer:
    """The embedding, the gates and half of the biases are in no param group."""
    chosen = [p for n, p in model.named_parameters() if "blocks" in n and "up.bias" not in n]
    return host_adam([*chosen, model.scale])


def _everything(model: nn.Module) -> torch.optim.Optimizer:
    """Also what is frozen, as `model.parameters()` gives it."""
    return host_adam(model.parameters())


class _Adagrad(torch.optim.Adagrad):
    """State in its constructor, of frozen parameters too; a class of its own has no kernel."""


def _adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return _Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)


_BF16: Final = {"precision": Precision(params=torch.bfloat16)}
CASES: Final = {
    "odd steps": Case(_odd_steps),
    "missing gradients": Case(_missing),
    "gradients written to": Case(_writes_gradients),
    "a backward that failed": Case(_fails_in_backward),
    "closures": Case(_closures),
    "grad scaler": Case(_grad_scaler),
    "clipped in the step": Case(
        _clips_in_step, make_optimizer=lambda model: skipping_adam(parity.param_groups(model))
    ),
    "between steps": Case(_between_steps, parity.tiny_float32),
    "access": Case(_access, parity.tiny_float32),
    "rewound": Case(_rewind, parity.tiny_float32),
    "files": Case(_load_files, parity.tiny_float32),
    "unsharded": Case(_unshards),
    "some in no group": Case(_plain, make_optimizer=_some_groups),
    "frozen in a group": Case(_plain, make_optimizer=_everything),
    "small ones rest whole": Case(_plain, settings={"small_param_numel": 13}),
    "momentum of bf16": Case(_plain, Blocks, momentum, _BF16),
    "momentum without masters": Case(_plain, make_optimizer=momentum),
    "adagrad": Case(_plain, make_optimizer=_adagrad),
    "by rows": Case(_plain, parity.tiny_float32, structured.OPTIMIZERS["rows"]),
    "muon": Case(_plain, parity.tiny_float32, structured.OPTIMIZERS["muon"]),
    "adafactor": Case(_plain, parity.tiny_float32, structured.OPTIMIZERS["adafactor"]),
    "cut by rows": Case(_plain, Blocks, settings={"cut": "row", **_BF16}),
}


# One cell for each, by turns. Those that one rank and three run too are all on the disk there.
@pytest.mark.parametrize(("turn", "name"), list(enumerate(CASES)))
@pytest.mark.ranks(timeout_s=60)
def test_a_loop_does_the_same_wherever_things_rest(
    group: Group, tmp_path: Path, turn: int, name: str
) -> None:
    """Users do not know where their state rests, and write the loop that they always wrote."""
    _same(group, tmp_path, name, CELLS[turn % 3])


@pytest.mark.parametrize("name", ["access", "rewound", "unsharded"])
@pytest.mark.ranks(1, 3, timeout_s=60)
def test_any_number_of_ranks_does_the_same(group: Group, tmp_path: Path, name: str) -> None:
    """One rank keeps all of it, and three divide nothing evenly."""
    _same(group, tmp_path, name, CELLS[1])


@pytest.mark.ranks(1, 2, 3, timeout_s=60)
def test_a_model_that_was_never_whole_does_the_same(group: Group, tmp_path: Path) -> None:
    """It is built in parts, which go to where they rest."""

    def build() -> nn.Module:
        with zero_engine.Init(group=group, config=ZeroConfig(3)):
            return parity.Tiny()

    runs = [Run(group, cell, 3, tmp_path) for cell in (None, CELLS[1])]
    expected, found = (Case(_plain, build).run(run) for run in runs)
    assert_same(found, expected, "built in parts")


def _same(group: Group, folder: Path, name: str, cell: Cell) -> None:
    expected = CASES[name].run(Run(group, None, cell.stage, folder))
    assert_same(CASES[name].run(Run(group, cell, cell.stage, folder)), expected, f"{cell}")
