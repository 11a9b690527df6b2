"""What fused optimizers do in their own kernels, and an engine whose host learns of it late."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import parity
import pytest
import torch
import zero_engine
from engines import assert_weights, build_engine, engine_config, run_micro_batch, weights_of
from packaging.version import Version
from torch import Tensor
from zero_comm import Group
from zero_comm.testing import assert_close, equal
from zero_engine import Engine, LossScaleError, ZeroConfig
from zero_engine.engine import DynamicLossScale
from zero_partition import StateError, unscale_and_clip_
from zero_partition.seams import GradientReport

pytestmark = pytest.mark.xdist_group("ranks")

_SCALE = 2.0**10
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "sgd": partial(torch.optim.SGD, lr=1e-2),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
}


class _Loop:
    """A plain loop over one sharded model; `in_step` asks the optimizer to do the work."""

    def __init__(self, group: Group, stage: int, name: str, *, in_step: bool) -> None:
        self.group, self.in_step = group, in_step
        self.model = parity.build(parity.tiny_float32)
        self.optimizer = _OPTIMIZERS[name](self.model.parameters(), fused=True)
        zero_engine.shard(self.model, self.optimizer, ZeroConfig(stage), group=group)

    def step(
        self, number: int, *, factor: float = 1.0, max_norm: float | None = None
    ) -> GradientReport:
        loss = parity.loss_of(self.model, parity.batch(number, 0, self.group.rank))
        (loss * (_SCALE * factor)).backward()
        report = unscale_and_clip_(
            self.model, scale=_SCALE, max_norm=max_norm, in_step=self.in_step
        )
        if report.is_in_step or report.is_finite:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return report

    def snapshot(self) -> tuple[dict[str, Tensor], list[Any]]:
        state = self.optimizer.state
        tensors = [t.clone() for one in state.values() for t in one.values() if t is not None]
        return zero_engine.full_state_dict(self.model), tensors


@pytest.mark.parametrize(("stage", "name"), [*enumerate(_OPTIMIZERS), (3, "adamw")])
def test_a_fused_step_unscales_and_clips_as_a_pass_of_its_own_does(
    group: Group, stage: int, name: str
) -> None:
    """One pass over all gradients is saved; no more may change than how a factor is rounded.

    On inf of one rank nothing changes: the host calls step() without knowing.
    """
    takes_scales = name != "adagrad" or Version(torch.__version__) >= Version("2.12")
    fused = _Loop(group, stage, name, in_step=True)
    bad = math.inf if group.rank == 1 else 1.0
    assert not fused.step(0, factor=bad).is_in_step  # skipped by the host
    apart = _Loop(group, stage, name, in_step=False)
    for number, max_norm in enumerate((None, None, 1e-3, 1e3)):
        found = fused.step(number, max_norm=max_norm)
        expected = apart.step(number, max_norm=max_norm)

        # The first step creates the state.
        assert found.is_in_step == (takes_scales and number > 0)
        assert not expected.is_in_step
        assert_close(found.norm, expected.norm)
        weights, state = fused.snapshot()
        if max_norm is None:  # a power of two alone: to the bit
            parity.assert_same_weights(weights, apart.snapshot()[0], what=name)
        assert_close(weights, apart.snapshot()[0])
        assert_close(state, apart.snapshot()[1])

    weights, state = fused.snapshot()
    report = fused.step(4, factor=bad)
    assert report.is_in_step == takes_scales and not report.is_finite
    after, state_after = fused.snapshot()
    parity.assert_same_weights(after, weights, what=name)
    assert all(equal(a, b) for a, b in zip(state_after, state, strict=True))


@pytest.mark.ranks(1)
def test_what_is_left_to_the_step_is_left_to_one_step(group: Group) -> None:
    """A second step without a backward has the same gradients, and divides them by nothing."""
    loops = [_Loop(group, 2, "adamw", in_step=in_step) for in_step in (True, False)]
    for loop in loops:
        loop.step(0)
        (parity.loss_of(loop.model, parity.batch(1, 0, 0)) * _SCALE).backward()
        report = unscale_and_clip_(loop.model, scale=_SCALE, in_step=loop.in_step)
        assert report.is_in_step == loop.in_step
        for _ in range(2):
            loop.optimizer.step()

    weights, expected = (loop.snapshot()[0] for loop in loops)
    parity.assert_same_weights(weights, expected, what="two steps")


@pytest.mark.ranks(1)
def test_gradients_that_are_dropped_take_along_what_was_left_to_the_step(group: Group) -> None:
    """Else the next step, of other gradients, would be divided by a scale that they never had."""
    loop, other = (_Loop(group, 2, "adamw", in_step=True) for _ in range(2))
    for each in (loop, other):
        each.step(0)
    parity.loss_of(loop.model, parity.batch(1, 0, 0)).backward()
    assert unscale_and_clip_(loop.model, scale=_SCALE, in_step=True).is_in_step
    loop.optimizer.zero_grad()

    for each in (loop, other):
        parity.loss_of(each.model, parity.batch(2, 0, 0)).backward()
        each.optimizer.step()

    parity.assert_same_weights(loop.snapshot()[0], other.snapshot()[0], what="dropped")


# ---- The engine ----


def _engine(group: Group, *, is_late: bool, stage: int = 2, **options: Any) -> Engine:
    config = engine_config(group, stage, **options)
    engine = build_engine(group, config, optimizer_of=parity.adamw)
    engine._is_late = is_late  # as on CUDA
    return engine


@pytest.mark.parametrize(("stage", "accumulation_steps"), [(0, 2), (1, 1), (2, 2), (3, 1)])
def test_a_host_that_learns_late_trains_as_one_that_knows_at_once(
    group: Group, stage: int, accumulation_steps: int
) -> None:
    """Scale, schedule and weights depend on each verdict, whenever it is read."""
    scale = DynamicLossScale(initial_power=4, window=2, hysteresis=1)
    options = {"loss_scale": scale, "stage": stage, "accumulation_steps": accumulation_steps}
    late, prompt = (_engine(group, is_late=is_late, **options) for is_late in (True, False))
    scheduler = late.lr_scheduler
    bad = [1, 4, 5, 9]
    for step in range(10):
        factor = math.inf if step in bad and group.rank == 1 else 1.0
        for micro in range(accumulation_steps):
            for engine in (late, prompt):
                run_micro_batch(engine, step, micro, factor)
        if step % 3 == 0:  # else nobody asks: the verdict waits for the next step
            assert late.cur_scale == prompt.cur_scale
            assert late.get_lr() == prompt.get_lr()
            assert late.was_step_applied() == prompt.was_step_applied() == (step not in bad)
        elif step not in bad:
            assert scheduler.get_last_lr() == prompt.lr_scheduler.get_last_lr()

    assert late.skipped_steps == prompt.skipped_steps == len(bad)
    assert scheduler.state_dict() == prompt.lr_scheduler.state_dict()
    assert late.loss_scaler is not None and prompt.loss_scaler is not None
    assert late.loss_scaler.state_dict() == prompt.loss_scaler.state_dict()
    assert_weights(late, weights_of(prompt))


@pytest.mark.ranks(1)
def test_a_verdict_is_not_waited_for_within_its_step(group: Group) -> None:
    """That the host launches on is what it is for."""
    engine = _engine(group, is_late=True, loss_scale=DynamicLossScale(initial_power=4))
    run_micro_batch(engine, 0)
    assert engine._verdict is None  # the first step, which creates the state
    for step in (1, 2, 3):
        run_micro_batch(engine, step)
        assert engine._verdict is not None

    assert engine.was_step_applied() and engine._verdict is None


@pytest.mark.ranks(1)
def test_the_smallest_scale_raises_with_every_step_counted(group: Group) -> None:
    """Whoever catches the error and goes on must find the counters where training is.

    And destroying the engine must not hide the error that it follows, nor stop half-way.
    """
    scale = DynamicLossScale(initial_power=0, hysteresis=1, raises_at_minimum=True)
    for is_late, asks in ((True, True), (False, True), (True, False)):
        engine = _engine(group, is_late=is_late, loss_scale=scale)
        scheduler = engine.lr_scheduler
        run_micro_batch(engine, 0)
        before = scheduler.state_dict()
        if asks:
            with pytest.raises(LossScaleError, match="training has diverged"):
                run_micro_batch(engine, 1, factor=math.inf)
                engine.was_step_applied()
        else:
            run_micro_batch(engine, 1, factor=math.inf)
            assert scheduler.state_dict() != before  # the host does not know yet
            engine.destroy()
            with pytest.raises(StateError, match="after destroy"):
                engine.step()
        assert scheduler.state_dict() == before
        assert (engine.global_steps, engine.skipped_steps) == (2, 1)
        assert not engine.was_step_applied()


class _Count:
    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1


@pytest.mark.ranks(1)
def test_a_scheduler_that_cannot_go_back_makes_the_host_wait(group: Group) -> None:
    """A step that was not may not advance it, whatever it is."""
    config, count = engine_config(group, 2, loss_scale=DynamicLossScale(initial_power=4)), _Count()
    engine = build_engine(group, config, optimizer_of=parity.adamw, lr_scheduler=count)
    engine._is_late = True
    for step, factor in enumerate((1.0, 1.0, math.inf)):
        run_micro_batch(engine, step, factor=factor)

    assert count.steps == 2
