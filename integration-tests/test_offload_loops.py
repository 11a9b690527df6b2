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
from attrs import define, field
from parity import ZeroConfig
from residences import (
    Blocks,
    Cell,
    Optimizers,
    adamax,
    assert_same,
    cpu_adam,
    momentum,
    parts_of,
    resting_as,
    train,
)
from safetensors.torch import save_file
from torch import Tensor, nn
from zero_comm import Group
from zero_engine import GatheredParameters, Precision
from zero_offload import CPUAdam

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
        self,
        make: Callable[[], nn.Module] = parity.Tiny,
        make_optimizer: Optimizers = cpu_adam,
        **settings: Any,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A new model, resting as the cell says."""
        model = parity.build(make)
        return self.shard_these(model, make_optimizer(model), **settings)

    def shard_these(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """These."""
        offload = None if self.cell is None else self.cell.offload(self.folder)
        config = ZeroConfig(self.stage, offload=offload, **settings)
        with resting_as(self.cell):
            return zero_engine.shard(model, optimizer, config, group=self.group)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        """Plain."""
        loss = parity.loss_of(model, parity.batch(number, 0, self.group.rank))
        self.seen[f"loss {number}"] = loss.item()
        parity.finish_step(loss, optimizer)

    def end(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Look at everything."""
        self.seen |= parts_of(model, optimizer)
        zero_engine.unshard(model, optimizer)


# ---- What is done ----


def _odd_steps(run: Run) -> None:
    """Schedulers from before and after, and numbers set by hand."""
    model = parity.build()
    optimizer = cpu_adam(model)
    before = parity.scheduler_for(optimizer)
    run.shard_these(model, optimizer)
    after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for number in range(4):
        if number == 2:
            optimizer.param_groups[0]["lr"] = 0.003
            optimizer.param_groups[1]["weight_decay"] = 0.2
        run.step(model, optimizer, number)
        (before if number < 2 else after).step()
    run.end(model, optimizer)


def _missing(run: Run) -> None:
    """Blocks that one step needs and the next does not."""
    model, optimizer = run.shard()
    for number in range(4):
        gates = list(model.gates)
        if number in (0, 2):
            model.gates = nn.ModuleList([nn.Identity(), nn.Identity()])
        try:
            run.step(model, optimizer, number)
        finally:
            model.gates = nn.ModuleList(gates)
    run.end(model, optimizer)


def _writes_gradients(run: Run) -> None:
    """Between backward and the norm: which must be that of what is there then."""
    model, optimizer = run.shard()
    for step in range(3):
        parity.loss_of(model, parity.batch(step, 0, run.group.rank)).backward()
        if step:  # else as they came
            with torch.no_grad():
                for shard in optimizer.param_groups[0]["params"][:step]:
                    shard.grad.mul_(3)
        run.seen[f"norm {step}"] = zero_engine.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    run.end(model, optimizer)


class _StopError(Exception):
    """Of a backward."""


def _fails_in_backward(run: Run) -> None:
    """What was on its way then is nobody's: the next backward begins anew."""
    model, optimizer = run.shard()

    def fail(grad: Tensor) -> None:
        raise _StopError

    def fail_later(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(fail)

    for step in range(3):
        batch = parity.batch(step, 0, run.group.rank)
        embedded = model.embed.register_forward_hook(fail_later)
        with pytest.raises(_StopError):
            parity.loss_of(model, batch).backward()
        embedded.remove()
        optimizer.zero_grad()
        parity.loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.end(model, optimizer)


def _closures(run: Run) -> None:
    model, optimizer = run.shard()

    def evaluate(number: int) -> Tensor:
        optimizer.zero_grad()
        loss = parity.loss_of(model, parity.batch(number, 0, run.group.rank))
        loss.backward()
        return loss

    for number in range(3):
        run.seen[f"loss {number}"] = optimizer.step(partial(evaluate, number)).item()
    optimizer.zero_grad()
    run.end(model, optimizer)


def _grad_scaler(run: Run) -> None:
    """Of torch: scales, unscales, and skips the step whose gradients overflow."""
    model, optimizer = run.shard()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for number in range(4):
        loss = parity.loss_of(model, parity.batch(number, 0, run.group.rank))
        scaler.scale(loss * (float("inf") if number == 1 else 1.0)).backward()
        if number != 2:
            scaler.unscale_(optimizer)
            zero_engine.clip_grad_norm_(model, 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.seen[f"scale {number}"] = scaler.get_scale()
    run.end(model, optimizer)


def _clips_in_step(run: Run) -> None:
    """As the engine does: unscaled, clipped and skipped by the optimizer's kernel."""
    model, optimizer = run.shard()
    for number in range(4):
        loss = parity.loss_of(model, parity.batch(number, 0, run.group.rank))
        (loss * (float("inf") if number == 2 else 48.0)).backward()
        report = zero_engine.unscale_and_clip_(model, scale=48.0, max_norm=0.3, in_step=True)
        run.seen[f"norm {number}"] = report.norm.item() if report.is_finite else None
        optimizer.step()
        optimizer.zero_grad()
    run.end(model, optimizer)


def _between_steps(run: Run) -> None:
    """Accumulation without reduction, evaluation, everything whole, some of it whole and edited."""
    model, optimizer = run.shard(parity.tiny_float32)
    rank = run.group.rank
    for number in range(3):
        with zero_engine.no_sync(model):
            parity.loss_of(model, parity.batch(number, 1, rank)).backward()
        run.step(model, optimizer, number)
        model.eval()
        with torch.no_grad():
            run.seen[f"evaluated {number}"] = parity.loss_of(model, parity.batch(9, 0, rank)).item()
            with zero_engine.unsharded(model):
                whole = parity.loss_of(model, parity.batch(8, 0, rank)).item()
                run.seen[f"whole {number}"] = whole, model.head.weight.clone()
        model.train()
        chosen = [model.blocks[1].up.weight, model.gates[0].factor, model.adapter.weight]
        with GatheredParameters(chosen, modifier_rank=0), torch.no_grad():
            if rank == 0:
                for param in chosen:
                    param.mul_(1.5).add_(number)
    run.seen["state dict"] = zero_engine.full_state_dict(model)
    run.end(model, optimizer)


def _access(run: Run) -> None:
    """Values and moments, by parameter: read, written, and trained with."""
    model, optimizer = run.shard(parity.tiny_float32)
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
        zero_engine.set_local_param(bias, zero_engine.local_param(bias) - 1)
        zero_engine.set_local_param(
            model.lift.weight, zero_engine.local_param(model.lift.weight) - 1
        )
    for number in (1, 2):
        run.step(model, optimizer, number)
    for name, param in model.named_parameters():
        run.seen[f"whole {name}"] = zero_engine.full_param(param)
    run.end(model, optimizer)


def _rewind(run: Run) -> None:
    """A checkpoint, loaded in the middle; optimizer and model in both orders."""
    model, optimizer = run.shard(parity.tiny_float32)
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
    for number in (3, 4):
        run.step(model, optimizer, number)
    run.end(model, optimizer)


def _fresh_state(run: Run) -> None:
    """An optimizer's state of before its first step: what has been trained is forgotten."""
    model, optimizer = run.shard()
    blank = zero_engine.full_optimizer_state_dict(model)
    run.step(model, optimizer, 0)
    zero_engine.load_full_optimizer_state_dict(model, blank)
    run.seen["states"] = len(optimizer.state)
    for number in (1, 2):
        run.step(model, optimizer, number)
    run.end(model, optimizer)


def _load_files(run: Run) -> None:
    """Weights from files, in the middle of a run."""
    model, optimizer = run.shard(parity.tiny_float32)
    run.step(model, optimizer, 0)
    other = parity.build(parity.tiny_float32, seed=3).state_dict()
    del other["head.weight"]
    path = Path(run.folder, f"weights-{run.group.rank}.safetensors")
    save_file({name: value.clone() for name, value in other.items()}, path)
    zero_engine.load_pretrained(model, str(path), group=run.group)
    path.unlink()
    for number in (1, 2):
        run.step(model, optimizer, number)
    run.end(model, optimizer)


def _unshards(run: Run) -> None:
    """Plain objects again, with their state, which train on; and are sharded again."""
    model = parity.build()
    optimizer = cpu_adam(model)
    given = optimizer.param_groups[0]["params"][0]
    for _ in range(2):
        run.shard_these(model, optimizer)
        for number in range(2):
            run.step(model, optimizer, number)
        zero_engine.unshard(model, optimizer)
        assert optimizer.param_groups[0]["params"][0] is given
    for p in model.parameters():
        assert p.untyped_storage().nbytes() == p.nbytes
    for number in range(2):  # every rank the same data: there is nobody to reduce with
        parity.finish_step(parity.loss_of(model, parity.batch(number, 0, 0)), optimizer)
    run.seen["weights"] = {n: p.detach() for n, p in model.named_parameters()}
    state = optimizer.state_dict()["state"]
    run.seen["state"] = {f"{k}.{name}": v for k, s in state.items() for name, v in s.items()}


def _init(run: Run) -> None:
    """Built in parts, and never whole."""
    model = parity.build(partial(_built_in_parts, run.group, run.stage))
    optimizer = cpu_adam(model)
    run.shard_these(model, optimizer)
    for number in range(3):
        run.step(model, optimizer, number)
    run.end(model, optimizer)


def _built_in_parts(group: Group, stage: int) -> nn.Module:
    with zero_engine.Init(group=group, config=ZeroConfig(stage)):
        return parity.Tiny()


def _with(run: Run, **settings: Any) -> None:
    model, optimizer = run.shard(**settings)
    run.seen["losses"] = train(model, optimizer, run.group.rank, steps=range(3))
    run.end(model, optimizer)


def _started_before(run: Run) -> None:
    """An optimizer that has state already, of a plain training."""
    model = parity.build()
    optimizer = cpu_adam(model)
    for number in range(2):
        parity.finish_step(parity.loss_of(model, parity.batch(number, 0, 0)), optimizer)
    run.shard_these(model, optimizer)
    run.seen["states"] = len(optimizer.state)
    for number in (2, 3):
        run.step(model, optimizer, number)
    run.end(model, optimizer)


def _some_groups(model: nn.Module) -> torch.optim.Optimizer:
    """The embedding, the gates and half of the biases are in no param group."""
    chosen = [p for n, p in model.named_parameters() if "blocks" in n and "up.bias" not in n]
    return CPUAdam([*chosen, model.scale], lr=1e-2)


def _everything(model: nn.Module) -> torch.optim.Optimizer:
    """Also what is frozen, as `model.parameters()` gives it."""
    return CPUAdam(model.parameters(), lr=1e-2)


class _Adagrad(torch.optim.Adagrad):
    """State in its constructor, of frozen parameters too; a class of its own has no kernel."""


def _adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return _Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)


def _row_wise(model: nn.Module) -> torch.optim.Optimizer:
    return structured.OPTIMIZERS["rows"](model)


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    return structured.OPTIMIZERS["muon"](model)


def _adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return structured.OPTIMIZERS["adafactor"](model)


def _lion(model: nn.Module) -> torch.optim.Optimizer:
    return parity.Lion(parity.param_groups(model), lr=1e-3, weight_decay=0.1)


_BF16: Final = Precision(params=torch.bfloat16)
LOOPS: Final[dict[str, Callable[[Run], None]]] = {
    "odd steps": _odd_steps,
    "missing gradients": _missing,
    "gradients written to": _writes_gradients,
    "a backward that failed": _fails_in_backward,
    "closures": _closures,
    "grad scaler": _grad_scaler,
    "clipped in the step": _clips_in_step,
    "between steps": _between_steps,
    "access": _access,
    "rewound": _rewind,
    "state forgotten": _fresh_state,
    "files": _load_files,
    "unsharded": _unshards,
    "built in parts": _init,
    "started before": _started_before,
    "some in no group": partial(_with, make_optimizer=_some_groups),
    "frozen in a group": partial(_with, make_optimizer=_everything),
    "small ones rest whole": partial(_with, small_param_numel=13),
    "momentum of bf16": partial(_with, make=Blocks, make_optimizer=momentum, precision=_BF16),
    "momentum without masters": partial(_with, make_optimizer=momentum),
    "adamax": partial(_with, make=parity.tiny_float32, make_optimizer=adamax),
    "adagrad": partial(_with, make_optimizer=_adagrad),
    "a user's own": partial(_with, make=parity.tiny_float32, make_optimizer=_lion),
    "by rows": partial(_with, make=parity.tiny_float32, make_optimizer=_row_wise),
    "muon": partial(_with, make=parity.tiny_float32, make_optimizer=_muon),
    "adafactor": partial(_with, make=parity.tiny_float32, make_optimizer=_adafactor),
    "cut by rows": partial(_with, make=Blocks, cut="row", precision=_BF16),
}


# One cell for each, by turns. Those that one rank and three run too are all on the disk there.
@pytest.mark.parametrize(("turn", "loop"), list(enumerate(LOOPS)))
@pytest.mark.ranks(timeout_s=60)
def test_a_loop_does_the_same_wherever_things_rest(
    group: Group, tmp_path: Path, turn: int, loop: str
) -> None:
    """Users do not know where their state rests, and write the loop that they always wrote."""
    _same(group, tmp_path, loop, CELLS[turn % 3])


@pytest.mark.parametrize("loop", ["access", "rewound", "unsharded", "built in parts"])
@pytest.mark.ranks(1, 3, timeout_s=60)
def test_any_number_of_ranks_does_the_same(group: Group, tmp_path: Path, loop: str) -> None:
    """One rank keeps all of it, and three divide nothing evenly."""
    _same(group, tmp_path, loop, CELLS[1])


def _same(group: Group, folder: Path, loop: str, cell: Cell) -> None:
    plain, run = (Run(group, each, cell.stage, folder) for each in (None, cell))
    LOOPS[loop](plain)
    LOOPS[loop](run)
    assert_same(run.seen, plain.seen, f"{cell}")
