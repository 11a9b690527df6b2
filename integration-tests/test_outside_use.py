"""Parameters used outside their unit: the numbers of plain torch, or an error that names them.

All ranks see the same batch, so that plain torch in the same process is the oracle.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import pytest
import torch
import zero_engine
import zero_partition
from parity import ZeroConfig
from residual import Blocks
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from training import assert_trains_as_plain, train
from zero_comm import Group
from zero_partition import AtRestError, StateError
from zero_partition.seams import find_sharded

WIDTH = 8
STAGES = [0, 1, 2, 3]


class _ReadsEarlier(Blocks):
    """By an operation that saves the Parameter itself, and by one that saves a view of it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x)) * self.blocks[0].norm.weight
        return x @ self.blocks[3].linear.weight.t() + self.blocks[2].linear.bias[None]


class _ReadsLater(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        later = self.blocks[3]
        x = functional.linear(x, later.linear.weight, later.linear.bias)
        x = functional.layer_norm(x, (WIDTH,), later.norm.weight, later.norm.bias)
        return super().forward(x) + later.norm.bias


class _Recomputes(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        def segment(x: Tensor) -> Tensor:
            return self.blocks[1](x) * self.blocks[2].norm.weight

        return self.blocks[2](checkpoint(segment, self.blocks[0](x), use_reentrant=False))


class _ReadsFrozen(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.blocks[0].norm.weight


class _Owner(nn.Module):
    """Returns its parameter: itself, in an object nobody can look into, as a view."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.how = how

    def forward(self) -> Any:
        match self.how:
            case "itself":
                return self.weight
            case "object":
                return _Opaque(self.weight)
            case "tuple":
                return (None, {"weight": self.weight})
            case _:
                return self.weight.t()


class _Opaque:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


class _Returned(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.owners = nn.ModuleList(_Owner(how) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        found = [owner() for owner in self.owners]  # all at once: slots go round meanwhile
        for value in found:
            weight = value
            if isinstance(value, _Opaque):
                weight = value.weight
            elif isinstance(value, tuple):
                weight = value[1]["weight"]
            x = torch.tanh(x @ weight) * weight[0]
        return x


def _x(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def _plain_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _plain_loss_of_step(model: nn.Module, step: int) -> Tensor:
    return _plain_loss(model, _x(step))


def _tied_loss(model: nn.Module, x: Tensor) -> Tensor:
    """A projection computed by the user, after the model's forward."""
    return functional.linear(model(x), model.blocks[1].linear.weight).square().mean()


def _decayed_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() + 0.1 * sum(p.square().sum() for p in model.parameters())


def _regulariser(model: nn.Module, x: Tensor) -> Tensor:
    """No forward of the model at all."""
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "earlier": _ReadsEarlier,
    "later": _ReadsLater,
    "recomputed": _Recomputes,
    "frozen": _ReadsFrozen,
    "returned itself": lambda: _Returned("itself"),
    "returned in an object": lambda: _Returned("object"),
    "returned in a tuple": lambda: _Returned("tuple"),
    "returned as a view": lambda: _Returned("view"),
    "blocks": Blocks,
}
LOSSES = {
    "plain": _plain_loss,
    "tied": _tied_loss,
    "decayed": _decayed_loss,
    "regulariser": _regulariser,
}


def _trains_as_plain(group: Group, make: str, *configs: ZeroConfig, loss: str = "plain") -> None:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        with torch.no_grad():
            evaluated = _plain_loss(model, _x(step))
        return LOSSES[loss](model, _x(step)) + evaluated

    run = partial(train, loss_of=loss_of, num_steps=3)
    assert_trains_as_plain(group, MAKERS[make], run, *configs)


@pytest.mark.parametrize("make", [key for key in MAKERS if key != "blocks"])
def test_a_use_outside_the_unit_has_the_numbers_of_plain_torch(group: Group, make: str) -> None:
    """Reading a child's weight is ordinary torch; at rest it is NaN."""
    _trains_as_plain(group, make, *(ZeroConfig(3, window=window) for window in (1, 3)))


@pytest.mark.parametrize("make", ["earlier", "returned as a view"])
@pytest.mark.ranks(1, 2)
def test_it_does_so_at_every_stage_and_world_size(group: Group, make: str) -> None:
    """A model must not have to know how it is trained."""
    _trains_as_plain(group, make, *map(ZeroConfig, STAGES))


@pytest.mark.parametrize("loss", ["tied", "decayed", "regulariser"])
def test_the_loss_may_use_weights_after_the_forward(group: Group, loss: str) -> None:
    """Tied projections and regularisers are written outside the model."""
    _trains_as_plain(group, "blocks", ZeroConfig(3), loss=loss)


def test_a_read_that_only_one_rank_may_do_is_named_and_not_gathered(group: Group) -> None:
    """Logging on rank 0 must neither hang nor print NaN."""
    model = Blocks()
    zero_engine.shard(model, None, ZeroConfig(3), group=group)
    weight = model.blocks[1].linear.weight
    with torch.no_grad():
        for read in (
            weight.norm,
            weight.data.norm,
            lambda: weight.detach().numpy(),
            lambda: torch.zeros(WIDTH, WIDTH).lerp_(weight, 0.1),
            lambda: torch.cat([weight, weight]),
            lambda: functional.linear(torch.ones(WIDTH), weight.T),
            lambda: torch.allclose(weight, weight),
            weight.tolist,
        ):
            with pytest.raises(
                AtRestError, match=r"parameter 'blocks\.1\.linear\.weight' .*full_param\(param\)"
            ):
                read()


class _Pair(nn.Module):
    """Two towers, as in CLIP: each may be asked alone, and neither's forward is the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = _ReadsEarlier(), _ReadsLater()
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) * self.scale + self.right(x)


@pytest.mark.parametrize("by_messages", [False, True])
def test_a_part_that_is_called_by_hand_gathers_what_it_uses(
    group: Group, by_messages: bool
) -> None:
    """Encoders, towers and the models inside adapters are called so, by generate() and others."""
    group = attrs.evolve(group, peers=None) if by_messages else group
    torch.manual_seed(0)
    plain = _Pair()
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)
    x = torch.randn(3, WIDTH)

    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for part in ("left", "right", "left.head", "right.blocks.1.norm"):
                expected = plain.get_submodule(part)(x)
                assert torch.equal(model.get_submodule(part)(x), expected), part
            assert torch.equal(model(x), plain(x))
            with pytest.raises(AtRestError, match="a call of the model or of a module in it"):
                _Scaled(model.scale)(x)  # no part of it: one rank's own affair, for all we know
    assert not find_sharded(model).outside.num_bytes
    with pytest.raises(AtRestError, match=r"To convert or move a model, do it before shard\(\)"):
        model.half()

    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for module, chosen in ((plain, theirs), (model, optimizer)):
        module(x).square().mean().backward()
        chosen.step()
        chosen.zero_grad()
    assert torch.equal(model(x), plain(x))


class _Scaled(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale = [scale]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale[0]


def test_looking_at_a_parameter_at_rest_gathers_nothing(group: Group) -> None:
    """Counters, optimizers and printers look at shapes; so may one rank alone."""
    plain = Blocks()
    model = copy.deepcopy(plain)
    zero_engine.shard(model, None, ZeroConfig(3), group=group)
    sharded = find_sharded(model)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(param, nn.Parameter)
        assert type(param).__name__ == type(other).__name__
        assert (param.shape, param.dtype, param.device) == (other.shape, other.dtype, other.device)
        assert (param.numel(), param.dim(), len(param)) == (other.numel(), other.dim(), len(other))
        assert param.is_leaf
        assert param.requires_grad
        assert param.to(torch.float32) is param
        assert torch.zeros_like(param).shape == other.shape
        assert param in set(model.parameters())
        assert "nan" in str(param)
    assert sharded.outside.num_gathers == 0
    types = []
    model.blocks[0].register_forward_hook(lambda m, *_: types.append(type(m.linear.weight)))
    model.blocks[0].linear.register_forward_hook(lambda m, *_: types.append(type(m.weight)))
    model(torch.ones(1, WIDTH))
    assert types[0] is nn.Parameter  # while it is in use it is what its author made


class _Special(nn.Parameter):
    """A user's own kind of parameter."""

    note = "mine"


@pytest.mark.ranks(1)
def test_a_parameter_of_the_users_own_class_stays_one(group: Group) -> None:
    """Quantised and marked parameters are classes of their own."""
    model = nn.Linear(4, 4)
    model.weight = _Special(model.weight.data)
    weight = model.weight
    zero_engine.shard(model, None, ZeroConfig(3), group=group)
    assert isinstance(weight, _Special)
    assert weight.note == "mine"
    seen = []
    model.register_forward_hook(lambda m, *_: seen.append(type(m.weight)))
    model(torch.ones(1, 4))
    assert model.weight is weight
    assert isinstance(weight, _Special)


def test_a_graph_made_before_the_step_is_refused_after_it(group: Group) -> None:
    """Plain torch refuses it too: the weights it was made with are gone."""
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)
    _plain_loss(model, torch.ones(1, WIDTH)).backward()
    old = model.blocks[0].linear.weight.square().sum()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(StateError, match=r"'blocks\.0\.linear\.weight'.*run the forward again"):
        old.backward()
    optimizer.zero_grad()
    _plain_loss(model, torch.ones(1, WIDTH)).backward()


def test_autograd_grad_takes_parameters_at_rest(group: Group) -> None:
    """They are places in a graph there, not values."""
    torch.manual_seed(0)
    plain = Blocks()
    model = copy.deepcopy(plain)
    zero_engine.shard(model, None, ZeroConfig(3), group=group)
    x = torch.ones(2, WIDTH)
    theirs = torch.autograd.grad(_plain_loss(plain, x), list(plain.parameters()))
    ours = torch.autograd.grad(_plain_loss(model, x), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# ---- Registered ----


def test_what_is_registered_is_used_and_leaves_no_hook(group: Group) -> None:
    """Saying it buys time; it must not change a number."""
    torch.manual_seed(0)
    plain = _ReadsEarlier()
    model = copy.deepcopy(plain)
    its = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    losses = train(plain, its, _plain_loss_of_step, num_steps=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)
    hooks = len(model._forward_pre_hooks)
    params = [model.blocks[0].norm.weight, model.blocks[3].linear.weight]
    for param in (*params, *params):
        zero_partition.register_external_parameter(model, param)
    with pytest.raises(StateError, match="expected a Parameter of a sharded model"):
        zero_partition.register_external_parameter(model, torch.ones(3))
    assert train(model, optimizer, _plain_loss_of_step, num_steps=3) == losses
    for param in params:
        zero_partition.unregister_external_parameter(model, param)
    assert len(model._forward_pre_hooks) == hooks
    with pytest.raises(StateError, match="is not registered"):
        zero_partition.unregister_external_parameter(model, params[0])


def test_what_is_registered_is_gathered_ahead_and_once(group: Group) -> None:
    """It travels while the modules before its use compute."""
    model = _ReadsEarlier()
    zero_engine.shard(model, None, ZeroConfig(3), group=group)
    outside = find_sharded(model).outside
    started: list[int] = []
    model.blocks[0].register_forward_pre_hook(lambda *_: started.append(outside.num_gathers))
    model(torch.ones(1, WIDTH))
    zero_partition.register_external_parameter(model, model.blocks[3].linear.weight)
    model(torch.ones(1, WIDTH))

    unsaid, said = started[0], started[1] - 3  # three parameters of other units are used
    assert (unsaid, said) == (0, 1)
    assert outside.num_gathers == 2 * 3


# ---- Attached late ----


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["new", "deep", "replaced"])
def test_a_parameter_attached_after_sharding_is_named(group: Group, stage: int, how: str) -> None:
    """Each rank would train its own."""
    model = Blocks()
    zero_engine.shard(model, None, ZeroConfig(stage), group=group)
    x = torch.ones(1, WIDTH)
    model.act = nn.ReLU()  # has no parameters
    model.alias = model.head  # nor new ones
    model(x)
    match how:
        case "new":
            model.late, name = nn.Linear(2, 2), r"late\.weight"
        case "deep":
            model.blocks[2].norm.late, name = nn.Linear(2, 2), r"blocks\.2\.norm\.late\.weight"
        case _:
            model.head, name = nn.Linear(WIDTH, WIDTH), r"head\.weight"
    with pytest.raises(StateError, match=rf"parameter '{name}'.*attached after shard\(\)"):
        model(x)
