"""Backwards that the engine does not run by itself, or runs in another way."""

from __future__ import annotations

from contextlib import nullcontext

import parity
import pytest
from engines import assert_weights, build_engine, engine_config, run_micro_batch, weights_of
from torch import nn
from zero_comm import Group
from zero_engine import ConfigError, DynamicLossScale
from zero_partition import StateError

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize("how", ["first.backward", "loss.backward"])
@pytest.mark.parametrize("stage", parity.STAGES)
def test_losses_of_two_engines_go_through_one_backward(ranks, stage: int, how: str) -> None:
    """A student and a critic, say: each engine finds its own gradients."""
    ranks(2).run(_combine_losses, stage=stage, how=how)


def _combine_losses(group: Group, stage: int, how: str) -> None:
    together = [build_engine(group, engine_config(group, stage, max_norm=0.5)) for _ in range(2)]
    apart = [build_engine(group, engine_config(group, stage, max_norm=0.5)) for _ in range(2)]
    for step in range(2):
        data = [parity.batch(step, index, group.rank) for index in range(2)]
        loss = sum(parity.loss_of(engine, of) for engine, of in zip(together, data, strict=True))
        if how == "first.backward":
            together[0].backward(loss)
        else:
            loss.backward()
        for engine in together:
            engine.step()
        for engine, of in zip(apart, data, strict=True):
            engine.backward(parity.loss_of(engine, of))
            engine.step()

    for engine, expected in zip(together, apart, strict=True):
        assert_weights(engine, weights_of(expected))


@pytest.mark.parametrize("how", ["engine.backward", "outputs.backward"])
def test_a_gradient_by_hand_counts_as_the_loss_it_comes_from(ranks, how: str) -> None:
    """Pipelines and custom losses start backward in the middle."""
    ranks(2).run(_backward_from_outputs, how=how)


def _backward_from_outputs(group: Group, how: str) -> None:
    scale = DynamicLossScale(initial_power=3)
    engine, expected = (
        build_engine(group, engine_config(group, 3, loss_scale=scale)),
        build_engine(group, engine_config(group, 3)),
    )
    tokens, targets = parity.batch(0, 0, group.rank)
    outputs = engine(tokens)
    leaf = outputs.detach().requires_grad_()
    nn.functional.cross_entropy(leaf.flatten(0, 1), targets.flatten()).backward()
    if how == "engine.backward":
        engine.backward(outputs, gradient=leaf.grad)
    else:
        engine.scale(outputs).backward(leaf.grad)
    engine.step()
    run_micro_batch(expected, 0)

    assert_weights(engine, weights_of(expected))


@pytest.mark.parametrize("stage", parity.STAGES)
def test_backwards_before_one_step_are_the_micro_batches_of_a_step(ranks, stage: int) -> None:
    """Who does not know how many there will be runs them all, and steps once."""
    ranks(2).run(_accumulate_by_hand, stage=stage)


def _accumulate_by_hand(group: Group, stage: int) -> None:
    counted = build_engine(group, engine_config(group, stage, accumulation_steps=3))
    by_hand = build_engine(group, engine_config(group, stage))
    for step in range(2):
        with nullcontext() if stage >= 2 else by_hand.coalesce_grad_reduction():
            for micro in range(3):
                run_micro_batch(counted, step, micro)
                loss = parity.loss_of(by_hand, parity.batch(step, micro, group.rank))
                by_hand.backward(loss / 3)
        by_hand.step()

    assert by_hand.global_steps == counted.global_steps == 2
    assert by_hand.get_global_grad_norm() == counted.get_global_grad_norm()
    assert_weights(by_hand, weights_of(counted))


def test_a_loss_that_has_no_backward_is_named(ranks) -> None:
    """A loss without reduction, or from an evaluation loop, is a mistake made every day."""
    ranks(1).run(_backward_of_nothing)


def _backward_of_nothing(group: Group) -> None:
    engine = build_engine(group, engine_config(group, 3))
    tokens, _ = parity.batch(0, 0, group.rank)
    outputs = engine(tokens)
    with pytest.raises(ConfigError, match=r"expected a scalar, got a loss of shape .*gradient="):
        engine.backward(outputs)
    with pytest.raises(ConfigError, match=r"expected a tensor, got 1\.0"):
        engine.backward(1.0)
    with pytest.raises(StateError, match=r"depends on no trainable parameter .* no_grad"):
        engine.backward(outputs.detach().sum())


@pytest.mark.parametrize("stage", parity.STAGES)
def test_backwards_of_one_micro_batch_can_share_a_reduction(ranks, stage: int) -> None:
    """Contrastive losses run backward in pieces; each piece need not travel by itself."""
    ranks(2).run(_coalesce, stage=stage)


def _coalesce(group: Group, stage: int) -> None:
    engine, expected = (
        build_engine(group, engine_config(group, stage, accumulation_steps=2)) for _ in range(2)
    )
    for step in range(2):
        losses = [parity.loss_of(engine, parity.batch(step, part, group.rank)) for part in range(2)]
        with engine.coalesce_grad_reduction():
            for loss in losses:
                engine.backward(loss)
            with pytest.raises(StateError, match=r"coalesce_grad_reduction\(\)"):
                engine.step()
        engine.step()
        for part in range(2):
            loss = parity.loss_of(expected, parity.batch(step, part, group.rank))
            with nullcontext() if part else expected.no_sync():
                expected.backward(loss)
        expected.step()

    assert engine.global_steps == 1
    assert_weights(engine, weights_of(expected))
