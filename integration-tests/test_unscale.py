"""Unscaling and clipping of gradients that lie in shards, and what a rank's overflow does."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import zero_engine
from residences import Cell, assert_same, cpu_adam, is_same, sharded
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import assert_close, equal
from zero_partition import StateError, unscale_and_clip_

SCALE = 2.0**10


def _build(group: Group, stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    return parity.build_sharded(group, parity.ZeroConfig(stage), make=parity.tiny_float32)


def _scaled_backward(model: nn.Module, rank: int, scale: float = SCALE) -> None:
    (parity.loss_of(model, parity.batch(0, 0, rank)) * scale).backward()


def _of_plain_torch(world_size: int, max_norm: float | None) -> tuple[Tensor, list[Tensor]]:
    """The norm and the gradients of one process that has every rank's batch."""
    model, optimizer = parity.build_with_optimizer(make=parity.tiny_float32)
    for rank in range(world_size):
        loss = parity.loss_of(model, parity.batch(0, 0, rank)) / world_size
        (loss * SCALE).backward()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads = [param.grad for param in params if param.grad is not None]
    for grad in grads:
        grad.div_(SCALE)
    norm = nn.utils.clip_grad_norm_(params, math.inf if max_norm is None else max_norm)
    return norm, [grad.flatten() for grad in grads]


@pytest.mark.parametrize("stage", parity.STAGES)
@pytest.mark.ranks(1, 3)
def test_unscaling_and_clipping_are_those_of_plain_torch(group: Group, stage: int) -> None:
    """One factor must do what torch does in two passes, with parts of the norm on every rank."""
    free, _ = _of_plain_torch(group.world_size, None)
    for max_norm in (None, 0.5 * free.item(), 2 * free.item()):
        expected_norm, expected = _of_plain_torch(group.world_size, max_norm)
        model, optimizer = _build(group, stage)
        _scaled_backward(model, group.rank)
        report = unscale_and_clip_(model, scale=SCALE, max_norm=max_norm)

        assert report.is_finite
        assert report.norm.dtype == torch.float32
        assert_close(report.norm, expected_norm)
        assert_close(_found(model, optimizer, group), expected)
        if max_norm is not None:
            model, optimizer = _build(group, stage)
            _scaled_backward(model, group.rank, 1.0)
            norm = zero_engine.clip_grad_norm_(
                model, max_norm, error_if_nonfinite=True, foreach=True
            )
            assert_close(norm, expected_norm)
            assert_close(_found(model, optimizer, group), expected)


def _found(model: nn.Module, optimizer: torch.optim.Optimizer, group: Group) -> list[Tensor]:
    grads = parity.whole_gradients(model, optimizer, group)
    return [grad for grad in grads if grad is not None and grad.numel()]


@pytest.mark.parametrize("stage", parity.STAGES)
def test_without_scale_and_bound_gradients_are_only_looked_at(group: Group, stage: int) -> None:
    """A run in bf16 asks for the norm and for overflow alone; that must round nothing."""
    model, optimizer = _build(group, stage)
    _scaled_backward(model, group.rank, 1.0)
    by_model = unscale_and_clip_(model)
    before = parity.whole_gradients(model, optimizer, group)
    by_optimizer = unscale_and_clip_(optimizer)

    assert equal(by_model.norm, by_optimizer.norm)
    assert equal(by_model.norm, zero_engine.clip_grad_norm_(model, math.inf))
    _assert_same(parity.whole_gradients(model, optimizer, group), before)


@pytest.mark.parametrize("stage", parity.STAGES)
@pytest.mark.ranks(3)
def test_an_overflow_on_one_rank_is_known_to_all_and_touches_no_gradient(
    group: Group, stage: int
) -> None:
    """Ranks that disagree about a step hold different models from there on."""
    broken = nn.Parameter(torch.zeros(1))
    broken.grad = torch.full((1,), math.inf)
    for culprit, bad in enumerate((math.inf, -math.inf, math.nan)):
        model, optimizer = _build(group, stage)
        if group.rank == culprit:
            _poison_one_gradient(model, bad)
        _scaled_backward(model, group.rank)
        assert not unscale_and_clip_(model).is_finite  # stage 1 reduces here
        before = parity.whole_gradients(model, optimizer, group)
        report = unscale_and_clip_(model, scale=SCALE, max_norm=1e-3)

        assert report.is_finite is False
        assert not report.norm.isfinite()
        norm_type = 2.0 if culprit else math.inf
        with pytest.raises(RuntimeError) as theirs:
            nn.utils.clip_grad_norm_([broken], 1.0, norm_type, error_if_nonfinite=True)
        with pytest.raises(RuntimeError) as ours:
            zero_engine.clip_grad_norm_(model, 1.0, norm_type, True, False)
        assert str(ours.value) == str(theirs.value)
        _assert_same(parity.whole_gradients(model, optimizer, group), before)


def _poison_one_gradient(model: nn.Module, bad: float) -> None:
    """The gradient of one block's input is `bad` in one element, as after an overflow."""

    def poison(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[0] = bad
        return grad

    def watch(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(poison)

    model.get_submodule("blocks.1").register_forward_hook(watch)


@pytest.mark.parametrize("stage", parity.STAGES)
@pytest.mark.ranks(3)
def test_a_run_goes_on_after_a_skipped_step(group: Group, stage: int) -> None:
    """The gradients of the overflow must be gone, and the step after be as if nothing was."""
    expected_norm, expected = _of_plain_torch(group.world_size, None)
    model, optimizer = _build(group, stage)
    scale = math.inf if group.rank == 1 else SCALE
    _scaled_backward(model, group.rank, scale)

    assert not unscale_and_clip_(model, scale=SCALE).is_finite
    optimizer.zero_grad()
    _scaled_backward(model, group.rank)
    report = unscale_and_clip_(model, scale=SCALE)
    assert report.is_finite
    assert_close(report.norm, expected_norm)
    assert_close(_found(model, optimizer, group), expected)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_cannot_be_divided_by_is_refused(scale: float) -> None:
    """Before any gradient is touched."""
    model, optimizer = _build(Group.solo("cpu"), 2)
    _scaled_backward(model, 0)
    before = parity.whole_gradients(model, optimizer, Group.solo("cpu"))

    with pytest.raises(StateError, match=r"unscale_and_clip_\(\): expected a finite scale above 0"):
        unscale_and_clip_(model, scale=scale)
    _assert_same(parity.whole_gradients(model, optimizer, Group.solo("cpu")), before)


@pytest.mark.ranks(timeout_s=90.0)
def test_clip_grad_value_is_torchs_under_ddp_wherever_gradients_rest(
    group: Group, tmp_path: Path
) -> None:
    """Elementwise, so bit for bit: on the device, on the host, and left behind by no_sync."""

    def train(
        model: nn.Module, optimizer: torch.optim.Optimizer, called: nn.Module, *, is_ours: bool
    ) -> tuple[list[float], list[Tensor]]:
        clips: Any = zero_engine if is_ours else nn.utils
        losses, norms = [], []
        for step in range(3):
            for micro in range(2):
                waits = zero_engine.no_sync(model) if is_ours else called.no_sync()
                with waits if micro == 0 else nullcontext():
                    loss = parity.loss_of(called, parity.batch(step, micro, group.rank))
                    loss.backward()
                losses.append(loss.item())
            given = (model, optimizer)[step % 2] if is_ours else model.parameters()
            assert clips.clip_grad_value_(given, 2e-2, foreach=step == 2) is None
            given = model if is_ours else model.parameters()
            norms.append(clips.clip_grad_norm_(given, math.inf))
            optimizer.step()
            optimizer.zero_grad()
        return losses, norms

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = parity.build(parity.tiny_float32)
        return model, cpu_adam(model)

    plain, optimizer = build()
    losses, norms = train(plain, optimizer, parity.as_ddp(plain, group), is_ours=False)
    unclipped, optimizer = build()
    parity.run_steps(parity.as_ddp(unclipped, group), optimizer, range(3), rank=group.rank)
    assert not equal(unclipped.scale, plain.scale), "the bound bites"
    cells = [Cell(stage) for stage in parity.STAGES]
    cells += [Cell(1, "host"), Cell(2, "disk"), Cell(3, "host", "disk", 0.3)]
    for cell in cells:
        how = {"make": parity.tiny_float32, "stage": cell.stage}
        with sharded(group, cell, tmp_path, **how) as (model, optimizer):
            found = train(model, optimizer, model, is_ours=True)
            assert is_same(found[0], losses), cell
            assert_close(found[1], norms)
            weights = zero_engine.full_state_dict(model)
            if group.rank == 0:
                assert_same(weights, plain.state_dict(), str(cell))


def _assert_same(found: list[Tensor | None], before: list[Tensor | None]) -> None:
    """Bit for bit, also where these are no numbers."""
    assert any(grad is not None for grad in found)
    for one, other in zip(found, before, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert equal(one.view(torch.int32), other.view(torch.int32))
