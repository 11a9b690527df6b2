"""Calls of an engine in any order: after each, it is where its documentation says.

A walk draws calls that scripts make, and makes each on an engine and on `_Plain`, which does in
plain torch what the docstrings of `Engine` promise. All ranks see one batch, so that the mean of
their gradients is any of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import parity
import pytest
import torch
import zero_engine
from attrs import define, field
from torch import Tensor, nn
from training import Interrupt
from walks import assert_same, calls_of, saves_at_any_time, walk
from zero_comm import Group
from zero_engine import ConfigError, Offload, ZeroConfig
from zero_engine.engine import DynamicLossScale, EngineConfig, StaticLossScale
from zero_partition import StateError

WIDTH: Final = 8


class _Net(nn.Module):
    """Returns its output and, beside it, what a loss may add."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self.seen += 1
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x * self.gain + self.frozen, (self.gain - 2).square().mean()


@define(eq=False)
class _Plain:
    """What `Engine` promises, for one process and without a loss scale in the numbers."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: Any
    config: EngineConfig
    world_size: int
    global_steps: int = 0
    micro_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0
    cur_scale: float = 1.0
    num_micro_batches: int = 1
    micro_batch_size: int = 1
    boundary: bool | None = None
    num_pending: int = 0
    num_backwards: int = 0
    num_clean: int = 0
    hysteresis: int = 1
    norm: float | None = None
    was_applied: bool = False
    was_skipped: bool = False
    is_running: bool = False
    is_inside: bool = False
    saved: dict[str, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.num_micro_batches = self.config.accumulation_steps
        self.micro_batch_size = self.config.micro_batch_size
        scale = self.config.loss_scale
        if isinstance(scale, StaticLossScale):
            self.cur_scale = scale.scale
        elif scale is not None:
            self.cur_scale, self.hysteresis = 2.0**scale.initial_power, scale.hysteresis

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.module(x)
        # "divided where they enter the engine's outputs"
        views = tuple(output.view_as(output) for output in outputs)
        for view in views:
            if view.requires_grad:
                view.register_hook(
                    lambda grad: None if self.is_running else grad / self.num_micro_batches
                )
        return views

    def backward(
        self,
        loss: Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        gradient: Tensor | None = None,
    ) -> Tensor:
        if scale_wrt_gas:
            loss = loss / self.num_micro_batches
        self.num_backwards += 1
        self.is_running = True
        loss.backward(gradient, retain_graph=retain_graph)
        self.is_running = False
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def is_gradient_accumulation_boundary(self) -> bool:
        if not self.config.manages_accumulation:
            return True
        if self.boundary is not None:
            return self.boundary
        return self.num_pending + 1 >= self.num_micro_batches

    def step(self) -> None:
        if self.is_inside:
            raise StateError("inside")
        is_boundary = self.is_gradient_accumulation_boundary()
        self.was_applied = False
        if is_boundary:
            self._take_step()
        self.micro_steps += 1
        self.num_pending = 0 if is_boundary else self.num_pending + 1

    def _take_step(self) -> None:
        params = [param for param in self.module.parameters() if param.grad is not None]
        norm = nn.utils.clip_grad_norm_(params, self.config.max_norm or math.inf)
        self.norm = norm.item()
        self.global_steps += 1
        if self.config.manages_accumulation:
            self.global_samples += self.train_batch_size()
        else:
            self.global_samples += self.num_backwards * self.micro_batch_size * self.world_size
        self.num_backwards = 0
        self.was_applied = math.isfinite(self.norm)
        self.was_skipped = not self.was_applied
        if self.was_applied:
            self.optimizer.step()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self.skipped_steps += self.was_skipped
        self.module.zero_grad()
        self._adjust_scale()

    def _adjust_scale(self) -> None:
        rule = self.config.loss_scale
        if not isinstance(rule, DynamicLossScale):
            return
        if self.was_skipped:
            if self.hysteresis > 1:
                self.hysteresis -= 1
            else:
                self.cur_scale = max(self.cur_scale / 2, rule.minimum)
            self.num_clean = 0
            return
        doubles = self.num_clean > 0 and self.num_clean % rule.window == 0
        self.num_clean += 1
        if doubles:
            self.cur_scale *= 2
        if doubles or rule.consecutive_hysteresis:
            self.hysteresis = rule.hysteresis

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.is_inside = True
        yield
        self.is_inside = False

    coalesce_grad_reduction = no_sync

    def zero_grad(self) -> None:
        self.module.zero_grad()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        if not self.config.manages_accumulation:
            raise ConfigError("unmanaged")
        self.boundary = is_boundary

    def set_gradient_accumulation_steps(self, count: int) -> None:
        self._check_at_boundary()
        self.num_micro_batches = count

    def set_train_batch_size(self, size: int) -> None:
        if size % (self.micro_batch_size * self.world_size):
            raise ConfigError("no multiple")
        self.set_gradient_accumulation_steps(size // (self.micro_batch_size * self.world_size))

    def set_train_micro_batch_size(self, size: int) -> None:
        self._check_at_boundary()
        self.micro_batch_size = size

    def _check_at_boundary(self) -> None:
        if self.num_pending:
            raise StateError("pending")

    def train_batch_size(self) -> int:
        return self.micro_batch_size * self.world_size * self.num_micro_batches

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.micro_batch_size

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def was_step_applied(self) -> bool:
        return self.was_applied

    def was_step_skipped(self) -> bool:
        return self.was_skipped

    def get_global_grad_norm(self) -> float | None:
        return self.norm

    COUNTERS = ("global_steps", "micro_steps", "global_samples", "skipped_steps")
    SCALER = ("cur_scale", "num_clean", "hysteresis")

    def save_checkpoint(self, _: Any, tag: str, client_state: Any) -> bool:
        scheduler = self.lr_scheduler
        self.saved[tag] = copy.deepcopy(
            {
                "module": self.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": None if scheduler is None else scheduler.state_dict(),
                "counters": {name: getattr(self, name) for name in self.COUNTERS},
                "scaler": {name: getattr(self, name) for name in self.SCALER},
                "client_state": client_state,
            }
        )
        return True

    def load_checkpoint(
        self,
        _: Any,
        tag: str,
        *,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str, Any]:
        saved = copy.deepcopy(self.saved[tag])
        self.module.load_state_dict(saved["module"])
        if not load_module_only:
            if load_optimizer_states:
                self.optimizer.load_state_dict(saved["optimizer"])
                if isinstance(self.config.loss_scale, DynamicLossScale):
                    vars_of(self, saved["scaler"])
            if load_lr_scheduler_states and self.lr_scheduler is not None:
                self.lr_scheduler.load_state_dict(saved["scheduler"])
            vars_of(self, saved["counters"])
        self.module.zero_grad()
        self.num_pending = self.num_backwards = 0
        self.was_applied = False
        return "", saved["client_state"]


def vars_of(owner: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


@define(eq=False)
class _Run:
    """An engine, or what it promises; `group` is None for the latter."""

    group: Group | None
    world_size: int
    folder: Path
    config: EngineConfig
    options: dict[str, Any]
    engine: Any = field(init=False)
    number: int = 0  # of the call
    tags: list[str] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        model = parity.build(_Net).double()
        # Ours on the host has no float64.
        make = torch.optim.AdamW if self.config.zero.offload is None else torch.optim.NAdam
        fused = {"fused": True} if "fused" in self.options else {}
        trained = [param for param in model.parameters() if param.requires_grad]
        groups = [{"params": trained[:3]}, {"params": trained[3:], "lr": 3e-3}]
        optimizer, scheduler = make(groups, lr=1e-2, **fused), None
        if "scheduler" in self.options:
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
        self.start(model, optimizer, scheduler)

    def start(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        if self.group is None:
            self.engine = _Plain(model, optimizer, scheduler, self.config, self.world_size)
            return
        self.engine, *_ = zero_engine.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            config=self.config,
            group=self.group,
        )

    def x(self, more: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(9 * self.number + more)
        return torch.randn(2, WIDTH, generator=generator).double()

    def loss(self, more: int = 0, model: Any = None) -> Tensor:
        output, beside = (self.engine if model is None else model)(self.x(more))
        return output.square().mean() + beside

    def factor(self) -> float:
        """Inf on one of the ranks."""
        if self.group is None or self.group.rank == self.number % self.world_size:
            return math.inf
        return 1.0

    @property
    def chosen(self) -> nn.Parameter:
        params = [param for param in self.engine.module.parameters() if param.requires_grad]
        return params[self.number % len(params)]


def _error_of(call: Callable[[], Any]) -> type[Exception] | None:
    try:
        call()
    except (StateError, ConfigError) as error:
        return type(error)
    return None


# ---- Calls ----


def _train(run: _Run) -> Any:
    loss = run.engine.backward(run.loss())
    run.engine.step()
    return loss


def _train_directly(run: _Run) -> Any:
    """No backward of the engine: it counts as none where backwards are counted."""
    run.engine.scale(run.loss()).backward()
    run.engine.step()


def _train_to_a_boundary(run: _Run) -> Any:
    for more in range(8):
        is_boundary = run.engine.is_gradient_accumulation_boundary()
        run.engine.backward(run.loss(more))
        run.engine.step()
        if is_boundary:
            break


def _overflow(run: _Run) -> Any:
    run.engine.backward(run.loss() * run.factor())
    run.engine.step()


def _overflow_directly(run: _Run) -> Any:
    run.engine.scale(run.loss() * run.factor()).backward()
    run.engine.step()


def _keep_gradients(run: _Run) -> Any:
    """They are there in the next call, whatever that is."""
    run.engine.backward(run.loss())


def _step(run: _Run) -> Any:
    """With what gradients there are."""
    run.engine.scale(torch.ones(()))
    run.engine.step()


def _zero(run: _Run) -> Any:
    run.engine.zero_grad()


def _two_forwards(run: _Run) -> Any:
    run.engine.backward(run.loss(1) + run.loss(2))
    run.engine.step()


def _retain(run: _Run) -> Any:
    loss = run.loss()
    run.engine.backward(loss, retain_graph=True)
    run.engine.backward(loss)
    run.engine.step()


def _undivided(run: _Run) -> Any:
    loss = run.engine.backward(run.loss(), scale_wrt_gas=False)
    run.engine.step()
    return loss


def _with_gradient(run: _Run) -> Any:
    output, _ = run.engine(run.x())
    gradient = torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output) / 8
    run.engine.backward(output, gradient=gradient.double())
    run.engine.step()


def _through_the_module(run: _Run) -> Any:
    run.engine.backward(run.loss(model=run.engine.module))
    run.engine.step()


def _no_sync(run: _Run) -> Any:
    with run.engine.no_sync():
        run.engine.backward(run.loss(1))
        error = _error_of(run.engine.step)
        run.engine.backward(run.loss(2))
    run.engine.backward(run.loss(3))
    run.engine.step()
    return error


def _end_in_no_sync(run: _Run) -> Any:
    with run.engine.no_sync():
        run.engine.backward(run.loss())


def _coalesce(run: _Run) -> Any:
    with run.engine.coalesce_grad_reduction():
        run.engine.backward(run.loss(1))
        run.engine.backward(run.loss(2))
        error = _error_of(run.engine.step)
    run.engine.step()
    return error


def _set_boundary(run: _Run) -> Any:
    is_boundary = (True, False, None)[run.number % 3]
    return _error_of(lambda: run.engine.set_gradient_accumulation_boundary(is_boundary))


def _set_steps(run: _Run) -> Any:
    count = 1 + run.number % 3
    return _error_of(lambda: run.engine.set_gradient_accumulation_steps(count))


def _set_batch_size(run: _Run) -> Any:
    size = (1 + run.number % 3) * run.engine.train_micro_batch_size_per_gpu() * run.world_size
    size += run.number % 2 * (run.number % 5 == 0)
    return _error_of(lambda: run.engine.set_train_batch_size(size))


def _set_micro_batch_size(run: _Run) -> Any:
    size = 1 + run.number % 3
    return _error_of(lambda: run.engine.set_train_micro_batch_size(size))


def _evaluate(run: _Run) -> Any:
    run.engine.module.eval()
    with torch.inference_mode() if run.number % 2 else torch.no_grad():
        output, _ = run.engine(run.x())
    run.engine.module.train()
    return output.clone()


def _take_gradients(run: _Run) -> Any:
    """By autograd.grad, which accumulates nowhere."""
    x = run.x().requires_grad_()
    output, _ = run.engine.module(x)
    return torch.autograd.grad(output.square().mean(), x)[0]


def _fail_in_forward(run: _Run) -> Any:
    def fail(*_: Any) -> None:
        raise KeyError("interrupted")

    hook = run.engine.module.blocks[run.number % 3].register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="interrupted"):
        run.loss()
    hook.remove()


def _fail_in_backward(run: _Run) -> Any:
    """Its gradients are dropped; micro-batches before it are still counted."""

    def fail(_: Any, args: Any) -> Any:
        return (Interrupt.apply(args[0]),)

    hook = run.engine.module.blocks[1 + run.number % 2].register_forward_pre_hook(fail)
    with suppress(KeyError):  # none, where the blocks before it are frozen
        run.engine.scale(run.loss()).backward()
    hook.remove()
    run.engine.zero_grad()


def _freeze(run: _Run) -> Any:
    """What is frozen keeps its state, and is thawed by the next such call of it."""
    run.engine.zero_grad()
    block = run.engine.module.blocks[run.number % 3]
    block.requires_grad_(not block.weight.requires_grad)


def _read_state(run: _Run) -> Any:
    if run.group is None:
        state = run.engine.optimizer.state.get(run.chosen, {})
        return state["exp_avg"].clone() if "exp_avg" in state else None
    with suppress(StateError):  # no step has had a gradient for it yet
        return zero_engine.full_optimizer_state(run.chosen, "exp_avg")
    return None


def _park(run: _Run) -> Any:
    if run.group is not None:
        run.engine.offload_states()
        run.engine.reload_states()


def _train_parked(run: _Run) -> Any:
    if run.group is not None:
        run.engine.offload_states(["optim_states"])
    run.engine.backward(run.loss())
    if run.group is not None:
        run.engine.reload_states()
    run.engine.step()


def _release(run: _Run) -> Any:
    if run.group is not None:
        run.engine.empty_partition_cache()


def _write(run: _Run) -> Any:
    if run.group is None:
        run.chosen.data.mul_(0.5)
    else:
        zero_engine.set_full_param(run.chosen, zero_engine.full_param(run.chosen) * 0.5)


def _edit_gradients(run: _Run) -> Any:
    """Where they are the gradients of all ranks, which they are not before a boundary."""
    if run.config.loss_scale is not None or not run.engine.is_gradient_accumulation_boundary():
        return
    run.engine.backward(run.loss())
    if run.group is None:
        for param in run.engine.module.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)
    else:
        zero_engine.update_full_grads(
            run.engine.module.parameters(), lambda _, grad: grad.mul_(0.5)
        )


def _change_lr(run: _Run) -> Any:
    for group in run.engine.optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5 if group["lr"] > 1e-3 else 5e-3


def _save(run: _Run) -> Any:
    tag = f"tag{run.number % 2}"
    run.tags.append(tag)
    with saves_at_any_time():
        return run.engine.save_checkpoint(run.folder, tag, {"call": run.number})


def _load(run: _Run, **options: bool) -> Any:
    if not run.tags:
        return None
    return run.engine.load_checkpoint(run.folder, run.tags[run.number % len(run.tags)], **options)[
        1
    ]["call"]


def _load_without_optimizer(run: _Run) -> Any:
    return _load(run, load_optimizer_states=False)


def _load_without_scheduler(run: _Run) -> Any:
    return _load(run, load_lr_scheduler_states=False)


def _load_module(run: _Run) -> Any:
    return _load(run, load_module_only=True)


def _save_weights(run: _Run) -> Any:
    if run.group is None:
        return copy.deepcopy(run.engine.module.state_dict())
    run.engine.save_16bit_model(run.folder, "weights.bin")
    if run.group.rank:
        return None
    return torch.load(run.folder / "weights.bin", map_location="cpu", weights_only=True)


def _start_anew(run: _Run) -> Any:
    """Another engine, for the same model, optimizer and scheduler."""
    engine = run.engine
    model, optimizer, scheduler = engine.module, engine.optimizer, engine.lr_scheduler
    if run.group is None:
        model.zero_grad()
    else:
        engine.destroy()
        assert _error_of(engine.step) is StateError
        zero_engine.unshard(model, optimizer)
    if run.number % 2:
        output, _ = model(run.x())
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = getattr(engine, "saved", None)
    run.start(model, optimizer, scheduler)
    if run.group is None:
        run.engine.saved = saved


def _read_all(run: _Run) -> Any:
    if run.group is None:
        return copy.deepcopy(run.engine.module.state_dict())
    found = zero_engine.full_state_dict(run.engine.module)
    return found if run.group.rank == 0 else None


CALLS: Final = calls_of(globals())
FACTS: Final = (
    *("global_steps", "micro_steps", "global_samples", "skipped_steps", "cur_scale"),
    *("was_step_applied", "was_step_skipped", "get_lr", "get_global_grad_norm"),
    *("is_gradient_accumulation_boundary", "train_batch_size"),
)


def _facts_of(engine: Any) -> dict[str, Any]:
    values = {name: getattr(engine, name) for name in FACTS}
    return {name: value() if callable(value) else value for name, value in values.items()}


SCALE: Final = {
    "static": StaticLossScale(8.0),
    "dynamic": DynamicLossScale(initial_power=4, window=2, hysteresis=2, minimum=2),
    "in a row": DynamicLossScale(
        initial_power=3, window=3, hysteresis=2, consecutive_hysteresis=True
    ),
}


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (0, "static accumulate scheduler"),
        (0, "dynamic clip"),
        (1, "accumulate clip"),
        (1, "dynamic accumulate fused scheduler"),
        (2, "dynamic accumulate clip scheduler"),
        (2, "unmanaged accumulate host"),
        (3, "accumulate clip scheduler"),
        (3, "in-a-row fused accumulate scheduler"),
        (3, "static unmanaged accumulate"),
        (3, "dynamic host accumulate scheduler"),
    ],
)
@pytest.mark.drawn(2)
def test_calls_in_any_order_do_what_the_engine_promises(
    group: Group, tmp_path: Path, stage: int, options: str
) -> None:
    """Other tests make each call by itself. Here it meets what the calls before it left behind."""
    chosen = options.split()
    scale = next((SCALE[key] for key in SCALE if key.replace(" ", "-") in chosen), None)
    count = 2 if "accumulate" in chosen else 1
    config = EngineConfig(
        zero=ZeroConfig(
            stage,
            min_unit_bytes=0,
            window=2,
            offload=Offload(optimizer="host") if "host" in chosen else None,
        ),
        loss_scale=scale,
        max_norm=0.5 if "clip" in chosen else 0.0,
        train_batch_size=2 * count * group.world_size,
        micro_batch_size=2,
        accumulation_steps=count,
        manages_accumulation="unmanaged" not in chosen,
        checks_overflow=True,
    )
    plain, run = (
        _Run(of, group.world_size, tmp_path / "run", config, dict.fromkeys(chosen))
        for of in (None, group)
    )
    for number, _, what in walk(CALLS, plain, run, 60):
        # Not after each: on a device, a fact waits for the outcome of the last step.
        if number % 4 == 3:
            assert_same(_facts_of(run.engine), _facts_of(plain.engine), what)
        if number % 10 == 9:
            assert_same(_read_all(run), _read_all(plain), f"{what}: weights")
