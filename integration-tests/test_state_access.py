"""Whole optimizer state under every cut: plain torch's, to read, to write and to go on with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parity
import pytest
import structured
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import equal
from zero_engine import full_optimizer_state, full_param, local_optimizer_state
from zero_partition import Cut, StateError, parameter_status

_IMPORT_S = 90.0  # the first step of some optimizers imports torch's compiler, on each rank


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Of whose arithmetic no bit depends on where memory starts; the fused one's does."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


# The optimizer, and the cut that is asked for; None where it asks itself.
CASES: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str | None]] = {
    **{name: (make, structured.CHOICES.get(name)) for name, make in structured.OPTIMIZERS.items()},
    **{f"adamw-{cut}": (_adamw, cut) for cut in ("flat", "row", "tensor", "block(16)")},
}


class Few(nn.Module):
    """A parameter of every kind: with more rows than ranks and fewer, of many dims and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.tall = nn.Parameter(torch.randn(11, 6))
        self.wide = nn.Parameter(torch.randn(2, 9))
        self.cube = nn.Parameter(torch.randn(4, 3, 2))
        self.bias = nn.Parameter(torch.randn(21))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5))

    def forward(self) -> Tensor:  # noqa: D102
        used = (self.tall, self.wide, self.cube, self.bias, self.scalar, self.frozen)
        return torch.stack([param.square().sum() for param in used]).sum()


def _step(model: Few, optimizer: torch.optim.Optimizer, step: int, *, is_ours: bool) -> None:
    """One step with gradients that do not depend on the number of ranks."""
    model().backward()
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        if not param.requires_grad or param is model.unused:
            continue
        grad = torch.randn(param.shape, generator=generator)
        if is_ours:
            zero_engine.set_full_grad(param, grad)
            assert equal(zero_engine.full_grad(param), grad)
            assert zero_engine.local_grad(param).dim() in {1, grad.dim()}
        else:
            param.grad = grad
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("world_size", "name"), [(3, name) for name in CASES] + [(1, "muon"), (1, "adamw-block(16)")]
)
def test_state_is_plain_torchs_under_every_cut(ranks, world_size: int, name: str) -> None:
    """Per element, row or block, or of no shape we know; on many ranks, on one, or on each."""
    ranks(world_size).run(_is_plain_torchs, name=name, timeout_s=_IMPORT_S)


def _is_plain_torchs(group: Group, name: str) -> None:
    make, cut = CASES[name]
    last = group.world_size - 1
    for stage, small in ((list(CASES).index(name) % 2, 0), (3, 20)):
        plain = parity.build(Few)
        theirs = make(plain)
        model = parity.build(Few)
        ours = make(model)
        config = ZeroConfig(stage, cut=cut, small_param_numel=small)
        zero_engine.shard(model, ours, config, group=group)
        for step in range(2):
            _step(plain, theirs, step, is_ours=False)
            _step(model, ours, step, is_ours=True)
        pairs = dict(zip(model.parameters(), plain.parameters(), strict=True))
        _assert_same_state(pairs, theirs, what=f"stage {stage}")

        for param, other in pairs.items():
            for key, value in theirs.state.get(other, {}).items():
                theirs.state[other][key] = _changed(value)
                given = _changed(value) if group.rank == last else "not looked at"
                zero_engine.set_full_optimizer_state(param, key, given, from_rank=last)
        _assert_same_state(pairs, theirs, what=f"stage {stage}, written")
        for param, other in pairs.items():
            for key, value in theirs.state.get(other, {}).items():
                if param is model.tall:
                    zero_engine.set_full_optimizer_state(param, key, value)
                if zero_engine.local_param(param).numel():
                    mine = local_optimizer_state(param, key)
                    zero_engine.set_local_optimizer_state(param, key, mine)
        _step(plain, theirs, 2, is_ours=False)
        _step(model, ours, 2, is_ours=True)
        for param, other in pairs.items():
            assert equal(full_param(param), other), f"stage {stage}"

        zero_engine.unshard(model, ours)
        for param, other in pairs.items():
            assert equal(param, other), f"stage {stage}"
            expected, state = theirs.state.get(other, {}), ours.state.get(param, {})
            assert state.keys() == expected.keys()
            for key, value in expected.items():
                _assert_same(state[key], value, what=f"stage {stage}, unsharded: {key}")
        _step(plain, theirs, 3, is_ours=False)
        _step(model, ours, 3, is_ours=False)
        assert all(equal(param, other) for param, other in pairs.items())


def _changed(value: Any) -> Any:
    return value + 1 if isinstance(value, int | float) else (value.float() / 2 + 1).to(value.dtype)


def _assert_same_state(
    pairs: dict[nn.Parameter, nn.Parameter], theirs: torch.optim.Optimizer, what: str
) -> None:
    for param, other in pairs.items():
        for key, value in theirs.state.get(other, {}).items():
            _assert_same(full_optimizer_state(param, key), value, what=f"{what}: {key}")
        if not theirs.state.get(other):
            with pytest.raises(StateError, match="no state for parameter"):
                full_optimizer_state(param, "step")


def _assert_same(ours: Any, theirs: Any, *, what: str) -> None:
    assert type(ours) is type(theirs), what
    if isinstance(theirs, Tensor):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), f"{what} {ours.shape}"
        assert equal(ours, theirs), what
    else:
        assert ours == theirs, what


# ---- What has no whole ----


class Columns(structured.PerParameter):
    """Says that rows are enough for it, and keeps a sum over them."""

    needs_cut = Cut.ROW

    def update(self, param: Tensor, grad: Tensor, state: dict, group: dict) -> None:  # noqa: D102
        state["columns"] = state.get("columns", 0) + grad.sum(0, keepdim=True)
        state["notes"] = ["of my own"]
        param.sub_(group["lr"] * grad)


@pytest.mark.ranks(3)
def test_state_that_nobody_can_lay_out_is_refused_on_every_rank(group: Group) -> None:
    """A guess would be somebody's wrong checkpoint; an error on one rank, the others' hang."""
    model = parity.build()
    weight = model.blocks[0].up.weight
    optimizer = Columns([weight], lr=0.1)
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)
    parity.run_steps(model, optimizer, range(1), rank=group.rank)
    held = parameter_status(weight).part

    message = r"'blocks\.0\.up\.weight'.*'columns' has no whole under the cut 'row': rank 0 has"
    with pytest.raises(StateError, match=rf"{message}.*local_optimizer_state"):
        full_optimizer_state(weight, "columns")
    with pytest.raises(StateError, match=message):
        zero_engine.set_full_optimizer_state(weight, "columns", torch.zeros(1, parity.WIDTH))
    with pytest.raises(StateError, match=r"expected one of \['columns', 'notes'\], got 'rows'"):
        full_optimizer_state(weight, "rows")
    with pytest.raises(StateError, match="has no whole"):
        zero_engine.unshard(model, optimizer)
    if held.numel:
        assert local_optimizer_state(weight, "columns").shape == (1, parity.WIDTH)
    else:
        with pytest.raises(StateError, match="keeps no part of parameter"):
            local_optimizer_state(weight, "columns")
    parity.run_steps(model, optimizer, range(2), rank=group.rank)


def test_a_wrong_value_is_named_on_every_rank(group: Group) -> None:
    """Only one rank looks at it; all of them would go on with it."""
    model = parity.build()
    optimizer = structured.OPTIMIZERS["muon"](model)
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)
    parity.run_steps(model, optimizer, range(1), rank=group.rank)

    for value, got in ((torch.zeros(2), r"shape \(2,\) on rank 1"), (None, r"None on rank 1")):
        with pytest.raises(StateError, match=rf"expected a tensor of shape \(11, 6\), got {got}"):
            zero_engine.set_full_optimizer_state(
                model.embed.weight, "momentum_buffer", value, from_rank=1
            )
    with pytest.raises(StateError, match=r"expected from_rank in 0\.\.1, got 2"):
        zero_engine.set_full_optimizer_state(
            model.embed.weight, "momentum_buffer", None, from_rank=2
        )
