"""Backwards that the engine does not run by itself, or runs in another way."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import parity
import pytest
import torch
import zero_engine
from engines import (
    assert_near,
    assert_weights,
    build_engine,
    engine_config,
    run_micro_batch,
    weights_of,
)
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import assert_close
from zero_engine import ConfigError
from zero_engine.engine import DynamicLossScale
from zero_partition import StateError

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize("stage", [1, 3])
def test_losses_of_two_engines_go_through_one_backward(group: Group, stage: int) -> None:
    """A student and a critic, say: each engine finds its own gradients, divided once.

    By whichever engine runs the backward, and by all of them where none does.
    """
    settings = engine_config(group, stage, accumulation_steps=2, max_norm=0.5)
    found = []
    for how in ("apart", "first.backward", "loss.backward"):
        engines = [build_engine(group, settings) for _ in range(2)]
        for step, micro in ((0, 0), (0, 1), (1, 0), (1, 1)):
            data = [parity.batch(step, 10 * micro + index, group.rank) for index in range(2)]
            losses = [parity.loss_of(engine, of) for engine, of in zip(engines, data, strict=True)]
            if how == "apart":
                for engine, loss in zip(engines, losses, strict=True):
                    engine.backward(loss)
            elif how == "first.backward":
                engines[0].backward(sum(losses))
            else:
                sum(losses).backward()
            for engine in engines:
                engine.step()
        norms = [engine.get_global_grad_norm() for engine in engines]
        found.append((norms, [weights_of(engine) for engine in engines]))

    (norms, weights), *others = found
    for its_norms, its_weights in others:
        assert its_norms == norms
        for ours, expected in zip(its_weights, weights, strict=True):
            if group.rank == 0:
                parity.assert_same_weights(ours, expected, what="one backward")


class _Several(nn.Module):
    """As models of transformers: a loss, and what it was computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 5)
        self.heads = nn.ModuleList([nn.Linear(5, 4), nn.Linear(5, 1)])

    def forward(self, x: Tensor) -> dict[str, Any]:
        logits, value = (head(self.up(x).tanh()) for head in self.heads)
        return {"loss": logits.logsumexp(-1).mean(), "heads": [logits, (value, logits)]}


def _loss_of(outputs: dict[str, Any], kind: str) -> Tensor:
    logits, (value, _) = outputs["heads"]
    others = value.square().mean() + logits.mul(2).square().mean()
    return outputs["loss"] + others if kind == "all-outputs" else outputs["loss"]


@pytest.mark.parametrize(("stage", "kind"), [(0, "loss"), (1, "all-outputs"), (3, "all-outputs")])
def test_a_direct_backward_is_divided_by_the_micro_batches(
    group: Group, stage: int, kind: str
) -> None:
    """DeepSpeed divides `loss.backward()` too: a script must not learn at another rate here.

    Each gradient once, though an output may be computed from another one.
    """
    count = 3
    model, plain = parity.build(_Several), parity.build(_Several)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": count,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = zero_engine.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        config=config,
        group=group,
    )
    optimizer, ddp = torch.optim.SGD(plain.parameters(), lr=0.5), parity.as_ddp(plain, group)
    for step in range(2):
        for micro in range(count):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + group.rank)
            x = torch.randn(2, 3, generator=generator)
            loss = _loss_of(engine(x), kind)
            if micro == 1:  # the two may take turns
                engine.backward(loss)
            else:
                loss.backward()
            engine.step()
            with ddp.no_sync() if micro + 1 < count else nullcontext():
                (_loss_of(ddp(x), kind) / count).backward()
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in plain.parameters() if p.grad is not None]
        )
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    assert_near(engine, plain)


@pytest.mark.parametrize("how", ["engine.backward", "outputs.backward"])
def test_a_gradient_by_hand_counts_as_the_loss_it_comes_from(group: Group, how: str) -> None:
    """Pipelines and custom losses start backward in the middle."""
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


@pytest.mark.parametrize(("stage", "shares"), [(1, True), (3, True), (3, False)])
def test_backwards_before_one_step_are_the_micro_batches_of_a_step(
    group: Group, stage: int, shares: bool
) -> None:
    """Who does not know how many there will be runs them all, and steps once.

    Pieces of a contrastive loss need not travel each by itself: they share a reduction.
    """
    counted = build_engine(group, engine_config(group, stage, accumulation_steps=3))
    by_hand = build_engine(group, engine_config(group, stage))
    for step in range(2):
        with by_hand.coalesce_grad_reduction() if shares else nullcontext():
            for micro in range(3):
                with counted.no_sync() if shares and micro < 2 else nullcontext():
                    loss = parity.loss_of(counted, parity.batch(step, micro, group.rank))
                    counted.backward(loss)
                if micro < 2:
                    counted.step()
                by_hand.backward(parity.loss_of(by_hand, parity.batch(step, micro, group.rank)) / 3)
            if shares:
                with pytest.raises(StateError, match=r"coalesce_grad_reduction\(\)"):
                    by_hand.step()
        counted.step()
        by_hand.step()

    assert by_hand.global_steps == counted.global_steps == 2
    assert by_hand.get_global_grad_norm() == counted.get_global_grad_norm()
    assert_weights(by_hand, weights_of(counted))


@pytest.mark.ranks(1)
def test_a_loss_that_has_no_backward_is_named(group: Group) -> None:
    """A loss without reduction, or from an evaluation loop, is a mistake made every day."""
    engine = build_engine(group, engine_config(group, 3))
    tokens, _ = parity.batch(0, 0, group.rank)
    outputs = engine(tokens)
    with pytest.raises(ConfigError, match=r"expected a scalar, got a loss of shape .*gradient="):
        engine.backward(outputs)
    with pytest.raises(ConfigError, match=r"expected a tensor, got 1\.0"):
        engine.backward(1.0)
    with pytest.raises(StateError, match=r"depends on no trainable parameter .* no_grad"):
        engine.backward(outputs.detach().sum())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_transform_of_an_engine_is_no_micro_batch(group: Group, stage: int) -> None:
    """Its gradient belongs to whoever takes it, and was divided by the number of micro-batches."""
    engine = build_engine(group, engine_config(group, stage, accumulation_steps=4), parity.Block)
    plain, x = parity.build(parity.Block), torch.ones(2, parity.WIDTH)

    def energy(call: nn.Module, x: Tensor) -> Tensor:
        return call(x).square().sum()

    expected = torch.func.grad(energy, argnums=1)(plain, x)
    found = torch.func.grad(energy, argnums=1)(engine, x)

    assert_close(found, expected)
