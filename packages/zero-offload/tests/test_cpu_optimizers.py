"""CPUAdam, CPUAdagrad and CPULion against torch's optimizers, over the same gradients."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from zero_comm.testing import equal
from zero_offload import (
    CPUAdagrad,
    CPUAdam,
    CPULion,
    UnsupportedTensorError,
)
from zero_offload.testing import native

SHAPES: Final = ((7, 9), (1,), (), (0,), (1003,), (8, 8))
Make = Callable[[Any], Optimizer]

# Ours, and torch's with the same meaning.
PAIRS: Final[dict[str, tuple[Make, Make]]] = {
    "adamw": (
        lambda params: CPUAdam(params, weight_decay=0.1),
        lambda params: torch.optim.AdamW(params, weight_decay=0.1),
    ),
    "adam": (
        lambda params: CPUAdam(params, 1e-2, (0.8, 0.95), 1e-6, 0.1, decoupled_weight_decay=False),
        lambda params: torch.optim.Adam(params, 1e-2, (0.8, 0.95), 1e-6, 0.1),
    ),
    "amsgrad": (
        lambda params: CPUAdam(params, amsgrad=True, maximize=True),
        lambda params: torch.optim.AdamW(params, weight_decay=0, amsgrad=True, maximize=True),
    ),
    "adagrad": (
        lambda params: CPUAdagrad(params, 1e-2, 0.01, 0.1, 0.5),
        lambda params: torch.optim.Adagrad(params, 1e-2, 0.01, 0.1, 0.5),
    ),
}


@pytest.fixture(params=["native", "torch"])
def _path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Once with compiled kernels and once as where there is no compiler."""
    if request.param == "native":
        request.getfixturevalue("compiled")
        yield
        return
    with native(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        CPUAdam([torch.zeros(1)])  # who is told once is not told again
        yield


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("pair", PAIRS)
def test_many_steps_are_torchs(pair: str) -> None:
    """Who changes the optimizer must not change the training, its groups, rates and closures."""
    found = []
    for make in PAIRS[pair]:
        params = _params()
        optimizer = make([{"params": params[:2], "lr": 3e-3}, {"params": params[2:]}])
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
        losses = []
        for turn in range(40):
            losses.append(optimizer.step(partial(_set_grads, params, turn)))
            scheduler.step()
        found.append((params, losses))

    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("_path")
def test_lion_is_its_formula() -> None:
    """There is none in torch to compare with: sign of a mix, then the mean (arXiv 2302.06675)."""
    ours, plain = _params(), _params()
    means = [torch.zeros_like(p) for p in plain]
    _train(CPULion(ours, 1e-3, (0.9, 0.95), 0.1), ours, range(40))
    for turn in range(40):
        _set_grads(plain, turn)
        with torch.no_grad():
            for p, mean in zip(plain, means, strict=True):
                way = (0.9 * mean + 0.1 * p.grad).sign()
                p.sub_(1e-3 * (way + 0.1 * p))
                mean.mul_(0.95).add_(p.grad, alpha=0.05)

    # where the mix is within a rounding of 0, the sign may differ: not so with these seeds
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pair", PAIRS)
def test_state_dicts_are_torchs_both_ways(pair: str) -> None:
    """A run started with torch's optimizer goes on with ours, and the other way round."""
    make_ours, make_torchs = PAIRS[pair]
    for first, second in ((make_ours, make_torchs), (make_torchs, make_ours)):
        params, expected = _params(), _params()
        before, all_along = first(params), first(expected)
        _train(before, params, range(3))
        _train(all_along, expected, range(6))
        after = second(params)
        after.load_state_dict(copy.deepcopy(before.state_dict()))
        _train(after, params, range(3, 6))

        torch.testing.assert_close(params, expected, rtol=1e-6, atol=1e-6)
        saved, theirs = after.state_dict(), all_along.state_dict()
        assert saved["state"].keys() == theirs["state"].keys()
        assert saved["state"][0].keys() == theirs["state"][0].keys()


def test_moments_of_16_bit_parameters_load_into_fp32() -> None:
    """Loading in torch casts state to the parameter's dtype, which would round masters away."""
    for make in (CPUAdam, torch.optim.AdamW):  # torch's moments have the parameter's dtype
        params = _params(torch.bfloat16)
        before = make(params)
        _train(before, params, range(2))
        saved = copy.deepcopy(before.state_dict())
        after = CPUAdam(params)
        after.load_state_dict(saved)
        for number, entries in saved["state"].items():
            for name, value in entries.items():
                assert torch.equal(after.state[params[number]][name], value.float())
        _train(after, params, range(2, 4))

        entries = after.state[params[0]]
        names = ("step", "exp_avg", "exp_avg_sq", "master")
        found = {name: value.dtype for name, value in entries.items()}
        assert found == dict.fromkeys(names, torch.float32)
        assert entries["step"].item() == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_parameter_is_its_rounded_master(dtype: torch.dtype) -> None:
    """The master is what an fp32 parameter with the same gradients would be."""
    params, masters = _params(dtype), [p.detach().float() for p in _params(dtype)]
    optimizer, plain = CPUAdam(params), CPUAdam(masters)
    for turn in range(20):
        _set_grads(params, turn)
        for p, master in zip(params, masters, strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        plain.step()

    for p, master in zip(params, masters, strict=True):
        assert torch.equal(optimizer.state[p]["master"], master)
        assert torch.equal(p.detach(), master.to(dtype))


def test_without_masters_stochastic_rounding_keeps_small_steps() -> None:
    """A step below half the distance of neighbours is lost by rounding to nearest, always."""
    moved = {}
    for rounding in ("nearest", "stochastic"):
        param = nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16))
        optimizer = CPUAdam([param], lr=1e-4, masters=False, rounding=rounding)
        for _ in range(20):
            param.grad = torch.ones_like(param)
            optimizer.step()
        assert "master" not in optimizer.state[param]
        moved[rounding] = 1 - param.detach().double().mean().item()

    assert moved["nearest"] == 0
    assert moved["stochastic"] == pytest.approx(20 * 1e-4, rel=0.1)


@pytest.mark.parametrize("keeps", ["grads", "strides", "params", "options", "state"])
def test_a_kept_plan_notices_what_changed(keeps: str) -> None:
    """Steps reuse what the last one found; a stale address would be silent corruption."""
    ours, torchs = _params(), _params()
    mine = CPUAdam(ours, betas=(0.5, 0.9), amsgrad=True)
    theirs = torch.optim.AdamW(torchs, betas=(0.5, 0.9), weight_decay=0, amsgrad=True)
    for turn in range(8):
        for params, optimizer in ((ours, mine), (torchs, theirs)):
            _set_grads(params, turn)
            if keeps == "grads":
                params[turn % 6].grad = None
            elif keeps == "strides":
                params[turn % 2 * 5].grad = params[turn % 2 * 5].grad.t().contiguous().t()
            elif keeps == "params":
                params[0].data = params[0].data.clone()
                params[4].data = params[4].data.flip(0).contiguous()
            elif keeps == "options":
                for param in params:
                    param.grad.mul_(0.5**turn)  # else the largest moments are those of now
                changes = ({}, {"amsgrad": False}, {"maximize": True}, {"amsgrad": True})
                optimizer.param_groups[0].update(changes[turn % 4])
            elif turn % 2:
                optimizer.state[params[5]]["step"].fill_(turn % 3)
            elif turn:
                entries = optimizer.state[params[0]]
                entries["exp_avg"] = torch.zeros_like(entries["exp_avg"])
                optimizer.state[params[4]] = {
                    name: value.clone() for name, value in optimizer.state[params[4]].items()
                }
            optimizer.step()

    torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_change_nothing(dtype: torch.dtype) -> None:
    """Kernels see memory as a row; a transposed gradient must still meet its own weight."""
    plain = nn.Parameter(torch.arange(24.0).reshape(4, 6).to(dtype))
    base = torch.zeros(12, 8, dtype=dtype)
    strided = nn.Parameter(base.t()[::2, ::2][:, :6].detach()[:4])
    strided.data.copy_(plain.data)
    last = nn.Parameter(torch.empty(1, 4, 3, 2, dtype=dtype).to(memory_format=torch.channels_last))
    last.data.copy_(plain.data.view(1, 4, 3, 2))
    optimizer = CPUAdam([plain, strided, last])
    for turn in range(3):
        grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(turn)).to(dtype)
        plain.grad = grad
        strided.grad = grad.t().contiguous().t()
        last.grad = grad.view(1, 4, 3, 2).contiguous(memory_format=torch.channels_last)
        optimizer.step()

    assert not strided.is_contiguous()
    assert not last.is_contiguous()
    assert torch.equal(strided, plain)
    assert torch.equal(last.reshape(4, 6), plain)


REFUSED: Final[dict[str, Callable[[], object]]] = {
    "got one of shape (3,) on meta": lambda: _step_of(torch.zeros(3, device="meta")),
    "use sparse=False": lambda: _step_of(torch.zeros(3, 2), torch.zeros(3, 2).to_sparse()),
    "float64": lambda: CPUAdam([torch.zeros(3, dtype=torch.float64)]),
    "complex64": lambda: CPUAdam([torch.zeros(3)]).add_param_group(
        {"params": torch.zeros(3, dtype=torch.complex64)}
    ),
    "stochastic rounding": lambda: CPUAdam(
        [torch.zeros(2, dtype=torch.float16)], rounding="stochastic"
    ),
    "betas": lambda: CPUAdam([torch.zeros(3)], betas=(0.9, 1.0)),
    "lr=-1": lambda: CPULion([torch.zeros(3)], lr=-1),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_stepped_is_refused_by_name(words: str) -> None:
    """A kernel given a device pointer would end the process."""
    with pytest.raises((UnsupportedTensorError, ValueError), match=re.escape(words)):
        REFUSED[words]()


def _step_of(param: Tensor, grad: Tensor | None = None) -> None:
    optimizer = CPUAdam([param])  # which may be planned with
    param.grad = torch.zeros_like(param) if grad is None else grad
    optimizer.step()


def test_unscaling_in_the_step_is_unscaling_before_it() -> None:
    """GradScaler and zero_partition's clipping leave it to the step; a skipped one is no step."""
    ours, plain = _params(), _params()
    mine, theirs = CPUAdam(ours), CPUAdam(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for turn in range(4):
        is_skipped = turn == 2
        scale = scaler.get_scale()
        _set_grads(ours, turn)
        for p in ours:
            p.grad.mul_(scaler.scale(torch.ones(())).item())
        if is_skipped:
            ours[0].grad[0, 0] = float("inf")
        else:
            _train(theirs, plain, [turn])
        scaler.step(mine)
        scaler.update()
        assert scaler.get_scale() == (scale / 2 if is_skipped else scale)

    assert all(map(equal, ours, plain))
    assert {mine.state[p]["step"].item() for p in ours} == {3}


def test_a_copy_steps_like_the_original() -> None:
    """Optimizers are deep-copied with models; threads and plans must not be."""
    params = _params(torch.bfloat16)
    optimizer = CPUAdam(params, state_dtype=torch.bfloat16)
    _train(optimizer, params, range(2))
    other, copies = copy.deepcopy((optimizer, params))
    _train(optimizer, params, [2])
    _train(other, copies, [2])

    torch.testing.assert_close(copies, params, rtol=0, atol=0)
    assert other.state[copies[0]]["exp_avg"].dtype is torch.bfloat16


def test_gradients_are_let_go() -> None:
    """A kept plan that held them would double the memory of gradients between steps."""
    import weakref

    params = _params()
    optimizer = CPUAdam(params)
    _train(optimizer, params, [0])
    grads = [weakref.ref(p.grad) for p in params]
    optimizer.zero_grad()

    assert not any(grad() is not None for grad in grads)


def test_autograd_notices_a_step() -> None:
    """Kernels write behind its back; a backward through the old value must raise, not lie."""
    param = nn.Parameter(torch.ones(3))
    optimizer = CPUAdam([param])
    loss = (param * param).sum()
    param.grad = torch.ones(3)
    optimizer.step()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_masters_follow_parameters_when_asked() -> None:
    """Weights loaded after the first step would be overwritten by the next one otherwise."""
    params = _params(torch.bfloat16)
    optimizer = CPUAdam(params, lr=0.0)
    _train(optimizer, params, [0])
    with torch.no_grad():
        params[0].fill_(3.0)
    optimizer.refresh_masters()
    _train(optimizer, params, [1])

    assert params[0].unique().tolist() == [3.0]


def _params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def _set_grads(params: list[Any], turn: int) -> int:
    generator = torch.Generator().manual_seed(turn + 1)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    return turn


def _train(optimizer: Optimizer, params: list[Any], turns: Any) -> None:
    for turn in turns:
        _set_grads(params, turn)
        optimizer.step()


@pytest.mark.parametrize("kind", [CPUAdam, CPUAdagrad, CPULion])
def test_an_unknown_argument_is_told_with_the_known_ones(kind: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{kind.__name__}\(\): .* lr, .*masters, .* got lrr"):
        kind([torch.zeros(1)], lrr=1e-3)
