"""Overflow, loss scales and sixteen bits in the engine's loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import attrs
import parity
import pytest
import torch
import zero_engine
from engines import assert_weights, build_engine, engine_config, run_micro_batch, weights_of
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import equal
from zero_engine.engine import DynamicLossScale, StaticLossScale
from zero_partition import StateError

pytestmark = pytest.mark.xdist_group("ranks")


# ---- Overflow ----


@pytest.mark.parametrize(
    ("stage", "scale"),
    [
        (0, DynamicLossScale(initial_power=4, hysteresis=1)),
        (1, StaticLossScale(128.0)),
        (2, DynamicLossScale(initial_power=4, hysteresis=1)),
        (3, StaticLossScale(128.0)),
        (3, DynamicLossScale(initial_power=4, hysteresis=1)),
    ],
    ids=["0", "1-static", "2", "3-static", "3"],
)
@pytest.mark.ranks(3)
def test_inf_on_one_rank_skips_the_step_on_all(group: Group, stage: int, scale: Any) -> None:
    """Otherwise ranks part, or inf is averaged into every weight; a fixed scale stays fixed."""
    engine = build_engine(group, engine_config(group, stage, loss_scale=scale, max_norm=0.5))
    steady = build_engine(group, engine_config(group, stage, max_norm=0.5))  # sees no bad batch
    run_micro_batch(engine, 0)
    run_micro_batch(steady, 0)
    before, lr, first_scale = weights_of(engine), engine.get_lr(), engine.cur_scale

    run_micro_batch(engine, 99, factor=float("inf") if group.rank == 1 else 1.0)

    assert not engine.was_step_applied()
    assert (engine.global_steps, engine.skipped_steps) == (2, 1)
    assert engine.cur_scale == (first_scale if isinstance(scale, StaticLossScale) else 8.0)
    assert engine.get_lr() == lr
    assert_weights(engine, before)
    for step in (1, 2):
        run_micro_batch(engine, step)
        run_micro_batch(steady, step)
        assert engine.was_step_applied()
        assert engine.get_global_grad_norm() == steady.get_global_grad_norm()
    # Powers of two change no bit of what they multiply and divide.
    assert_weights(engine, weights_of(steady))


@pytest.mark.ranks(1)
def test_an_engine_told_not_to_look_steps_as_plain_torch_does(group: Group) -> None:
    """`check_grad_overflow: false` is a wish, and the weights show what came of it."""
    unchecked = attrs.evolve(engine_config(group, 2), checks_overflow=False)
    engine = build_engine(group, unchecked)

    run_micro_batch(engine, 0, factor=float("nan"))

    assert engine.was_step_applied()
    assert weights_of(engine)["scale"].isnan().all()


DYNAMIC: Final = DynamicLossScale(initial_power=8)


@pytest.mark.parametrize(
    ("stage", "scale"),
    [(1, DYNAMIC), (3, DYNAMIC), (0, StaticLossScale(256.0))],
    ids=["1", "3", "0-static"],
)
def test_a_loss_that_nobody_scaled_is_refused_at_its_backward(
    group: Group, stage: int, scale: Any
) -> None:
    """Its gradients would be divided by the scale, and training would stand still in silence."""
    engine = build_engine(group, engine_config(group, stage, loss_scale=scale))
    data = parity.batch(0, 0, group.rank)
    scaled = engine.scale(parity.loss_of(engine, data))  # that is another loss
    for factor in (1.0, 256.0):  # nobody can tell a loss that was multiplied by hand
        with pytest.raises(
            RuntimeError, match=r"engine\.backward\(loss\).*engine\.scale\(loss\)\.b"
        ):
            (parity.loss_of(engine, data) * factor).backward()
    del scaled
    engine.zero_grad()

    engine.scale(parity.loss_of(engine, data)).backward()
    engine.step()

    assert engine.was_step_applied()
    other = build_engine(group, engine_config(group, stage))
    run_micro_batch(other, 0)
    assert_weights(engine, weights_of(other))


@pytest.mark.ranks(1)
def test_a_static_scale_is_taken_on_trust(group: Group) -> None:
    """Whoever knows the number may multiply by it; who forgets is told, and trains as there."""
    by_hand, forgotten, expected = (
        build_engine(group, engine_config(group, 2, loss_scale=scale))
        for scale in (StaticLossScale(256.0), StaticLossScale(256.0), None)
    )
    data = parity.batch(0, 0, group.rank)
    (parity.loss_of(by_hand, data) * 256).backward()
    parity.loss_of(forgotten, data).backward()
    run_micro_batch(expected, 0)
    with pytest.warns(UserWarning, match="divided by the loss scale 256"):
        by_hand.step()
    with pytest.warns(UserWarning, match="engine.backward"):
        forgotten.step()

    norm = expected.get_global_grad_norm()
    assert norm is not None
    assert by_hand.get_global_grad_norm() == norm
    assert forgotten.get_global_grad_norm() == norm / 256


@pytest.mark.parametrize("how", ["scale", "module"])
def test_losses_of_several_engines_with_scales_train(group: Group, how: str) -> None:
    """As DeepSpeed's own test of several models has it: through `module`, nobody looks."""
    engines = [build_engine(group, engine_config(group, 2, loss_scale=DYNAMIC)) for _ in range(2)]
    data, before = parity.batch(0, 0, group.rank), weights_of(engines[0])
    if how == "scale":
        loss = sum(engine.scale(parity.loss_of(engine, data)) for engine in engines)
    else:
        loss = sum(parity.loss_of(engine.module, data) for engine in engines)
    loss.backward()
    for engine in engines:
        is_told = how == "module" and group.rank == 0
        with pytest.warns(UserWarning, match="multiplied no") if is_told else nullcontext():
            engine.step()
        assert engine.was_step_applied()
    assert_weights(engines[0], weights_of(engines[1]))
    after = weights_of(engines[0])
    assert group.rank or not equal(after["scale"], before["scale"])
    if how == "scale":  # and the one of one engine is not that of another
        loss = sum(parity.loss_of(engine, data) for engine in engines)
        with pytest.raises(StateError, match="losses of several engines are scaled by their own"):
            engines[0].backward(loss)


# ---- Sixteen bits ----


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def _square_of(model: nn.Module, step: int, rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(4, 8, generator=generator).to(dtype)).float().square().sum()


@pytest.mark.parametrize(
    ("stage", "section"), [(0, "fp16"), (1, "bf16"), (2, "fp16"), (3, "fp16"), (3, "bf16")]
)
def test_sixteen_bits_follow_masters_in_plain_torch(group: Group, stage: int, section: str) -> None:
    """The file says `fp16`, and weights, skipped steps and loss scale are those of the recipe."""
    is_scaled = section == "fp16"
    options = {"initial_scale_power": 17, "loss_scale_window": 2, "hysteresis": 1}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        section: {"enabled": True} | (options if is_scaled else {}),
    }
    model, plain = parity.build(_mlp), parity.build(_mlp)
    make = partial(torch.optim.AdamW, lr=1e-2, foreach=False)
    engine, *_ = zero_engine.initialize(model=model, optimizer=make, config=config, group=group)
    dtype = torch.float16 if is_scaled else torch.bfloat16
    assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == (is_scaled, not is_scaled)
    scales, skipped = [], []
    for step in range(10):
        scales.append(engine.cur_scale)
        engine.backward(_square_of(engine, step, group.rank, dtype))
        engine.step()
        if not engine.was_step_applied():
            skipped.append(step)

    expected_scales, expected_skipped = _train_masters(plain, make, dtype, group.world_size)
    assert (scales, skipped) == (expected_scales, expected_skipped)
    assert (len(set(scales)) > 2 and bool(skipped)) == is_scaled, f"{scales}, {skipped}: no change"
    for param, master in zip(model.parameters(), plain.parameters(), strict=True):
        assert equal(zero_engine.full_param(param), master)


def _train_masters(
    masters: nn.Module, make: Callable[..., Any], dtype: torch.dtype, world_size: int
) -> tuple[list[float], list[int]]:
    """One process, both ranks' batches in turn: the loss scale of each step, and steps skipped."""
    optimizer = make(masters.parameters())
    scale, clean, scales, skipped = 2.0**17 if dtype is torch.float16 else 1.0, 0, [], []
    for step in range(10):
        scales.append(scale)
        model = _mlp().to(dtype)
        model.load_state_dict(masters.state_dict())
        sums: list[Tensor] = []
        for rank in range(world_size):
            (_square_of(model, step, rank, dtype) * scale).backward()
            grads = [param.grad.clone() for param in model.parameters()]
            sums = [a + b for a, b in zip(sums, grads, strict=True)] if sums else grads
            model.zero_grad()
        means = [(total / world_size).float() for total in sums]
        if all(grad.isfinite().all() for grad in means):
            for master, grad in zip(masters.parameters(), means, strict=True):
                master.grad = grad / scale
            optimizer.step()
            if clean and clean % 2 == 0 and dtype is torch.float16:
                scale *= 2
            clean += 1
        else:
            skipped.append(step)
            scale, clean = scale / 2, 0
    return scales, skipped
