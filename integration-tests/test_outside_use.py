"""Parameters used outside their unit: the numbers of plain torch, or an error that names them.

All ranks see the same batch, so that plain torch in the same process is the oracle.
"""

from __future__ import annotations

import copy
import io
import types
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import parity
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
from zero_comm.testing import equal
from zero_partition import ShardedParamError, StateError
from zero_partition.seams import find_sharded

WIDTH = 8


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


class _Weights(NamedTuple):
    first: Tensor
    second: Tensor


class _Joins(Blocks):
    """Torch takes any sequence of tensors."""

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat(_Weights(self.blocks[1].linear.weight, self.blocks[3].linear.weight))
        return super().forward(x) @ joined.T


class _ReadsFrozen(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.blocks[0].norm.weight


class _Owner(nn.Module):
    """Returns its parameter: itself, in an object nobody can look into, or as a view."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.wrap = wrap

    def forward(self) -> Any:
        return self.wrap(self.weight)


class _Returned(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.owners = nn.ModuleList(_Owner(wrap) for _ in range(4))
        self.unwrap = unwrap

    def forward(self, x: Tensor) -> Tensor:
        found = [owner() for owner in self.owners]  # all at once: slots go round meanwhile
        for weight in map(self.unwrap, found):
            x = torch.tanh(x @ weight) * weight[0]
        return x


def _itself(weight: Tensor) -> Tensor:
    return weight


def _x(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def _plain_loss(model: nn.Module, step: int) -> Tensor:
    return model(_x(step)).square().mean()


def _tied_loss(model: nn.Module, step: int) -> Tensor:
    """A projection computed by the user, after the model's forward."""
    return functional.linear(model(_x(step)), model.blocks[1].linear.weight).square().mean()


def _decayed_loss(model: nn.Module, step: int) -> Tensor:
    return _plain_loss(model, step) + 0.1 * _regulariser(model, step)


def _regulariser(model: nn.Module, _: int) -> Tensor:
    """No forward of the model at all."""
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "earlier": _ReadsEarlier,
    "later": _ReadsLater,
    "recomputed": _Recomputes,
    "frozen": _ReadsFrozen,
    "joined": _Joins,
    "returned-itself": lambda: _Returned(_itself, _itself),
    "returned-in-an-object": lambda: _Returned(lambda w: types.SimpleNamespace(w=w), lambda o: o.w),
    "returned-as-a-view": lambda: _Returned(torch.t, _itself),
}
LOSSES = {"tied": _tied_loss, "decayed": _decayed_loss, "regulariser": _regulariser}


def _build(make: Callable[[], nn.Module] = Blocks) -> tuple[nn.Module, nn.Module]:
    """A plain model, and the same to be sharded."""
    return parity.build(make), parity.build(make)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _trains_as_plain(
    group: Group,
    make: Callable[[], nn.Module],
    *configs: ZeroConfig,
    loss_of: Callable[[nn.Module, int], Tensor] = _plain_loss,
) -> None:
    def loss_and_evaluation(model: nn.Module, step: int) -> Tensor:
        with torch.no_grad():
            evaluated = _plain_loss(model, step)
        sharded = find_sharded(model)
        assert sharded is None or not sharded.outside.num_bytes, "only a graph keeps them"
        return loss_of(model, step) + evaluated

    run = partial(train, loss_of=loss_and_evaluation, num_steps=3)
    assert_trains_as_plain(group, make, run, *configs, make_optimizer=_adamw)


@pytest.mark.parametrize("make", MAKERS)
def test_a_use_outside_the_unit_has_the_numbers_of_plain_torch(group: Group, make: str) -> None:
    """Reading a child's weight is ordinary torch; at rest it is NaN."""
    configs = [ZeroConfig(stage) for stage in parity.STAGES]
    _trains_as_plain(group, MAKERS[make], *configs, ZeroConfig(3, window=1))


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_may_use_weights_after_the_forward(group: Group, loss: str) -> None:
    """Tied projections and regularisers are written outside the model."""
    _trains_as_plain(group, Blocks, ZeroConfig(3), loss_of=LOSSES[loss])


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
                ShardedParamError,
                match=r"(?s)parameter 'blocks\.1\.linear\.weight' .*full_param\(param\)",
            ):
                read()


WRITES_TO_DETACHED: dict[str, Callable[[Tensor], Any]] = {
    "in-place": lambda found: found.lerp_(torch.ones(WIDTH, WIDTH), 0.5),
    "view": lambda found: found[0].zero_(),
    "transposed": lambda found: found.T.zero_(),
    "data": lambda found: found.data.zero_(),
    "item": lambda found: found.__setitem__(0, 1.0),
    "init": nn.init.zeros_,
    "out": lambda found: torch.ones(WIDTH, WIDTH, out=found),
    "foreach": lambda found: torch._foreach_mul_([found], 2.0),
    "numpy": lambda found: found.numpy().fill(0),
}


def test_what_detach_gives_is_read_and_not_written(group: Group) -> None:
    """Outside a forward it is gathered, and not the parameter's memory: a write was lost."""
    plain, model = _build(Blocks)
    zero_engine.shard(model, None, ZeroConfig(3), group=group)
    weight, expected = model.blocks[1].linear.weight, plain.blocks[1].linear.weight.detach()
    found = weight.detach()

    for name, write in WRITES_TO_DETACHED.items():
        error = ValueError if name == "numpy" else ShardedParamError
        if name == "numpy" and found.device.type != "cpu":
            continue
        with pytest.raises(error, match=r"read-only|'blocks\.1\.linear\.weight' .* would be lost"):
            write(found)
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    for copied in (found, copy.deepcopy(found), torch.load(file), found.clone(), found[:]):
        assert equal(copied, expected)
    assert {type(each) for each in (copy.deepcopy(found), found + 1, found.clone())} == {Tensor}
    assert repr(found) == repr(found.clone())
    x, bias = torch.ones(2, WIDTH), model.blocks[2].linear.bias
    assert equal(
        functional.linear(x, found, bias),
        functional.linear(x, expected, plain.blocks[2].linear.bias),
    )
    assert functional.linear(x, found.requires_grad_(), bias).requires_grad
    with zero_partition.GatheredParameters(weight, modifier_rank=0):
        weight.detach().fill_(2.0)
    assert equal(zero_engine.full_param(weight), torch.full((WIDTH, WIDTH), 2.0))


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
    group = group.by_messages("this test asks for it") if by_messages else group
    plain, model = _build(_Pair)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)
    x = torch.randn(3, WIDTH)

    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for part in ("left", "right", "left.head", "right.blocks.1.norm"):
                expected = plain.get_submodule(part)(x)
                assert equal(model.get_submodule(part)(x), expected), part
            assert equal(model(x), plain(x))
            with pytest.raises(ShardedParamError, match="calls of the model or of a module in it"):
                _Scaled(model.scale)(x)  # no part of it: one rank's own affair, for all we know
    assert not find_sharded(model).outside.num_bytes
    with pytest.raises(
        ShardedParamError, match=r"To convert or move a model, do it before shard\(\)"
    ):
        model.half()

    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for module, chosen in ((plain, theirs), (model, optimizer)):
        module(x).square().mean().backward()
        chosen.step()
        chosen.zero_grad()
    assert equal(model(x), plain(x))


class _Scaled(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale = [scale]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale[0]


def test_looking_at_a_parameter_at_rest_gathers_nothing(group: Group) -> None:
    """Its dtype and shape are known on each rank; asking for them needs no other."""
    plain, model = _build()
    zero_engine.shard(model, None, ZeroConfig(3), group=group)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert type(param).__name__ == type(other).__name__
        assert (len(param), param.type()) == (len(other), other.type())
        assert param.to(torch.float32) is param.float() is param
        assert torch.zeros_like(param).shape == other.shape
        assert param in set(model.parameters())
        with torch.no_grad(), pytest.raises(ShardedParamError, match="double"):
            param.double()
    ours, theirs = model.blocks[0].linear.weight, plain.blocks[0].linear.weight
    x = torch.arange(WIDTH * WIDTH, dtype=torch.float64)
    for ask in (x.to, x.type_as, x.view_as, lambda w: x.reshape_as(other=w), x[:WIDTH].expand_as):
        got, expected = ask(ours), ask(theirs)
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert equal(got, expected)
    assert find_sharded(model).outside.num_gathers == 0
    types_seen = []
    model.blocks[0].register_forward_hook(lambda m, *_: types_seen.append(type(m.linear.weight)))
    model(torch.ones(1, WIDTH))
    assert types_seen == [nn.Parameter]  # while it is in use it is what its author made


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
    _plain_loss(model, 0).backward()
    old = model.blocks[0].linear.weight.square().sum()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(StateError, match=r"'blocks\.0\.linear\.weight'.*run the forward again"):
        old.backward()
    optimizer.zero_grad()
    _plain_loss(model, 0).backward()


# ---- Registered ----


def test_what_is_registered_is_gathered_ahead_and_leaves_no_hook(group: Group) -> None:
    """Saying it buys time, while the modules before its use compute; no number changes."""
    plain, model = _build(_ReadsEarlier)
    expected = train(plain, _adamw(plain), _plain_loss, num_steps=3)
    optimizer = _adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)
    outside, hooks = find_sharded(model).outside, len(model._forward_pre_hooks)
    started: list[int] = []
    watch = model.blocks[0].register_forward_pre_hook(
        lambda *_: started.append(outside.num_gathers)
    )
    params = [model.blocks[0].norm.weight, model.blocks[3].linear.weight]
    with pytest.raises(StateError, match="expected a Parameter of a sharded model"):
        zero_partition.register_external_parameter(model, torch.ones(3))
    for registers in (False, True):
        for param in (*params, *params) if registers else ():
            zero_partition.register_external_parameter(model, param)
        before = outside.num_gathers
        model(torch.ones(1, WIDTH))
        assert started.pop() - before == (2 if registers else 0)
        assert outside.num_gathers - before == 3, "once each of the three of other units"
    watch.remove()
    assert train(model, optimizer, _plain_loss, num_steps=3) == expected
    for param in params:
        zero_partition.unregister_external_parameter(model, param)
    assert len(model._forward_pre_hooks) == hooks
    with pytest.raises(StateError, match="is not registered"):
        zero_partition.unregister_external_parameter(model, params[0])


# ---- Attached late ----


@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_attached_after_sharding_is_named(group: Group, stage: int) -> None:
    """Each rank would train its own."""
    for owner, name in (("", "late"), ("blocks.2.norm", "late"), ("", "head")):
        model = Blocks()
        zero_engine.shard(model, None, ZeroConfig(stage), group=group)
        x = torch.ones(1, WIDTH)
        model.act = nn.ReLU()  # has no parameters
        model.alias = model.head  # nor new ones
        model(x)
        setattr(model.get_submodule(owner), name, nn.Linear(WIDTH, WIDTH))
        path = f"{owner}.{name}.weight".lstrip(".").replace(".", r"\.")
        with pytest.raises(StateError, match=rf"parameter '{path}'.*attached after shard\(\)"):
            model(x)
