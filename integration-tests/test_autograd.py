"""Every way into autograd gives plain torch's numbers, or an error that says what to do."""

from __future__ import annotations

from functools import partial
from typing import Any

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from torch.func import functional_call
from training import assert_trains_as_plain, train
from zero_comm import Group
from zero_comm.testing import equal
from zero_partition import StateError
from zero_partition.seams import find_sharded

WIDTH = 16


class _Chain(nn.Module):
    def __init__(self, num_blocks: int = 4, *, activation: Any = torch.tanh) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_blocks))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.activation(block(x))
        return x


def _x(step: int, *, requires_grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, WIDTH, generator=generator, requires_grad=requires_grad)


# ---- A gradient of gradients ----


def _penalise(model: nn.Module, step: int) -> Tensor:
    x = _x(step, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    other = model(_x(step + 50))  # another graph in between
    return model(x).square().mean() + (grad.norm(dim=1) - 1).square().mean() + other.mean()


@pytest.mark.parametrize("activation", [torch.tanh, torch.clone], ids=["tanh", "linear"])
def test_a_gradient_penalty_trains_as_in_plain_torch(group: Group, activation: Any) -> None:
    """Backward of a backward reads parameters at moments that no forward announced."""
    run = partial(train, loss_of=_penalise, num_steps=3)
    configs = [ZeroConfig(stage, window=4) for stage in parity.STAGES]
    assert_trains_as_plain(group, lambda: _Chain(activation=activation), run, *configs)


def test_a_gradient_penalty_that_would_read_other_units_is_refused(group: Group) -> None:
    """Units that take turns in one slot cannot be whole at once."""
    model = _Chain()
    optimizer = parity.adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)
    with pytest.raises(StateError, match=r"create_graph=True.*ZeroConfig\(window=4\), or stage 2"):
        _penalise(model, 0)
    optimizer.zero_grad()
    assert all(unit.state.name != "UNSHARDED" for unit in find_sharded(model).units)
    model(_x(0)).sum().backward()
    optimizer.step()


def test_units_stay_whole_for_a_graph_of_gradients(group: Group) -> None:
    """Its backward gathers nothing; and where buffers were given back it is refused."""
    model = _Chain()
    zero_engine.shard(model, parity.adamw(model), ZeroConfig(3, window=4), group=group)
    units = find_sharded(model).units
    x = _x(0, requires_grad=True)

    def gradient() -> Tensor:
        return torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0]

    grad = gradient()
    assert [unit.state.name for unit in units] == ["UNSHARDED"] * len(units)
    grad.square().sum().backward()
    assert "UNSHARDED" not in [unit.state.name for unit in units]

    grad = gradient()
    zero_engine.release_buffers(model)
    with pytest.raises(StateError, match=r"release_buffers\(\) was called between"):
        grad.square().sum().backward()


# ---- Gradients that the user takes into his own hands ----


@pytest.mark.parametrize("stage", parity.STAGES)
def test_autograd_grad_gives_this_ranks_gradients_and_reduces_nothing(
    group: Group, stage: int
) -> None:
    """As under DDP: `param.grad` and what the optimizer will read stay as they were."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        return model(_x(step)).square().mean()

    plain = parity.build(_Chain)
    expected = torch.autograd.grad(loss_of(plain, group.rank), list(plain.parameters()))
    model = parity.build(_Chain)
    optimizer = parity.adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)

    loss_of(model, 5).backward()
    held = [param.grad.clone() for param in parity._trained(optimizer)]
    grads = torch.autograd.grad(loss_of(model, group.rank), list(model.parameters()))
    after = [param.grad for param in parity._trained(optimizer)]

    assert all(equal(*pair) for pair in zip(grads, expected, strict=True))
    assert all(equal(*pair) for pair in zip(after, held, strict=True))
    if group.rank == 0 and stage < 3:  # where parameters are whole, no other rank need take part
        x = _x(0, requires_grad=True)
        torch.autograd.grad(model(x).sum(), x)
    if stage:
        assert type(model.blocks[0].weight.grad).__name__ == "GradientGuard"
    optimizer.step()


class _BackwardInside(torch.autograd.Function):
    """Runs a module again in backward, and a backward of its own, as recomputation does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:  # type: ignore[override]
        ctx.x, ctx.module = x.detach(), module
        return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            ctx.module(x).backward(grad)
        return x.grad, None


@pytest.mark.parametrize("stage", parity.STAGES)
def test_a_backward_inside_of_autograd_grad_trains(group: Group, stage: int) -> None:
    """The outer one gives gradients away, and the inner one leaves some in parameters."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        found = []
        for step in range(3):
            x = _x(step, requires_grad=True)
            y = _BackwardInside.apply(model.blocks[0](x), model.blocks[1])
            (grad,) = torch.autograd.grad(model.blocks[2](y).square().sum(), x)
            optimizer.step()
            optimizer.zero_grad()
            found.append(grad.sum().item())
        return found

    assert_trains_as_plain(group, _Chain, run, ZeroConfig(stage, min_unit_bytes=0))


# ---- torch.func ----


def _take_vjp(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vjp(model, x)[1](torch.ones(4, WIDTH))[0]


def _take_grad(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.grad(lambda x: model(x).sum())(x)


def _take_grad_per_sample(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(x)


def _take_jacrev(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.jacrev(model)(x[0])


def _take_jvp(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.jvp(model, (x,), (torch.ones(4, WIDTH),))[1]


def _take_jacfwd(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.jacfwd(model)(x[0])


def _take_vmap(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vmap(model)(x[:, None])


BY_BACKWARD = (_take_vjp, _take_grad, _take_grad_per_sample, _take_jacrev)
BY_FORWARD = (_take_jvp, _take_jacfwd, _take_vmap)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, in jvp
@pytest.mark.parametrize("stage", parity.STAGES)
def test_transforms_of_torch_func_give_plain_torchs_numbers_or_say_no(
    group: Group, stage: int
) -> None:
    """Their backward fires no hook of ours; a parameter at rest would make it NaN."""
    plain, model = parity.build(_Chain), parity.build(_Chain)
    optimizer = parity.adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
    for take in (*BY_BACKWARD, *BY_FORWARD):
        if stage == 3:
            with pytest.raises(StateError, match=r"transform of torch.func.*stage 2 or lower"):
                take(model, _x(0))
        else:
            assert equal(take(model, _x(0)), take(plain, _x(0))), take.__name__
    for take in BY_FORWARD:
        with torch.no_grad():
            assert equal(take(model, _x(0)), take(plain, _x(0))), take.__name__
    others = {name: param.detach() + 1 for name, param in plain.named_parameters()}
    with pytest.raises(StateError, match=r"functional_call\(\) put in its place"):
        functional_call(model, others, (_x(0),))
    _assert_trains_on(model, optimizer, plain)


def _assert_trains_on(model: nn.Module, optimizer: torch.optim.Optimizer, plain: nn.Module) -> None:
    """Nothing of what came before is left in the gradients."""
    run = partial(train, loss_of=_mean_square, num_steps=3)
    assert run(model, optimizer) == run(plain, parity.adamw(plain))


def _mean_square(model: nn.Module, step: int) -> Tensor:
    return model(_x(step)).square().mean()
