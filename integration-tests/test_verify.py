"""verify(): what DistributedDataParallel does too is said to be equal, and nothing else is."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Final

import parity
import pytest
import torch
import zero_engine
import zoo
from parity import ZeroConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zero_comm import Group
from zero_comm.testing import equal
from zero_engine import ConfigError, Offload, Precision, Wire
from zero_partition import ShardedParamError

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")  # peft's own


class _Net(nn.Module):
    """Three blocks, a norm with statistics and dropout; returns its loss, or what `run` does."""

    def __init__(self, run: Callable[[_Net, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.run = run or _Net.loss

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)

    def loss(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.drop(self.norm(x)).square().mean()

    @property
    def weight(self) -> Tensor:
        return self.layers[1].weight

    @property
    def is_plain(self) -> bool:
        return type(self.weight) is nn.Parameter


def _net(run: Callable[[_Net, Tensor], Any]) -> Callable[[], nn.Module]:
    return lambda: _Net(run)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(group: Group) -> Iterator[Tensor]:
    """Without an end, as loaders nearly are."""
    for step in count():
        yield torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + group.rank))


def _verify(
    group: Group, model: Any = _Net, optimizer: Any = sgd, stage: int = 3, **more: Any
) -> Any:
    config = ZeroConfig(stage, **more)
    return zero_engine.verify(model, optimizer, batches(group), config, group=group)


# ---- Equal ----


@pytest.mark.slow
@pytest.mark.parametrize("name", [*zoo.ZOO][::8])  # test_zoo has all beside DDP
@pytest.mark.ranks(timeout_s=90)
def test_architectures_are_equal(group: Group, name: str) -> None:
    """A false alarm would send somebody to look for a bug that is not there."""
    specimen = zoo.ZOO[name]

    found = zero_engine.verify(
        specimen.make,
        parity.adamw,
        (specimen.batch(step, 0, group.rank) for step in count()),
        ZeroConfig(3),
        loss=zoo.loss_of,
        num_steps=2,
        group=group,
    )

    assert found.is_equal, str(found)


EQUAL: Final[dict[str, Any]] = {
    "plain": _Net,
    "input-changed-in-place": _net(lambda net, x: net.loss(x.mul_(2))),
    "loss-among-others": _net(lambda net, x: {"loss": net.loss(x)}),
    "used-outside-its-module": _net(lambda net, x: net.loss(x) + net.weight.square().sum()),
}


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.ranks(1, 2)
def test_what_is_equal_leaves_no_trace(group: Group, name: str) -> None:
    """Who verifies before training trains as who does not."""
    states = torch.get_rng_state(), random.getstate()

    for stage in parity.STAGES if EQUAL[name] is _Net else (3,):
        found = _verify(group, EQUAL[name], stage=stage)
        assert found.is_equal, str(found)
        assert "equal in every bit" in str(found)

    assert equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


# ---- Broken on purpose ----


NUMBERS: Final = count()
GENERATOR: Final = torch.Generator()


def _unseeded() -> nn.Module:
    net = _Net()
    nn.init.normal_(net.weight, generator=torch.Generator().manual_seed(next(NUMBERS)))
    return net


def _ignored() -> nn.Module:
    net = _Net()
    net._ddp_params_and_buffers_to_ignore = ["layers.1.weight"]
    return net


def _draws(net: _Net, x: Tensor) -> Tensor:
    if net.is_plain:
        torch.rand(1)
    return net.loss(x)


_doubles = _net(lambda net, x: net.loss(x) * (1 if net.is_plain else 2))


class _ReadsGrad(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen = False
        self.layers[1].register_full_backward_hook(self.look)

    def look(self, *_: object) -> None:
        self.seen = self.weight.grad is not None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self.seen else 1)


class _Peak(torch.optim.SGD):
    """Looks at whole tensors, and only after a step in which it does not."""

    needs_cut = "flat"
    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for param in self.param_groups[0]["params"] if self.steps > 1 else ():
            param.mul_(1 - 0.01 * param.detach().abs().sum())
        return super().step(closure)


def peak(model: nn.Module) -> torch.optim.Optimizer:
    return _Peak(model.parameters(), lr=0.1)


WEIGHT, FIRST = "layers.1.weight", "layers.0.weight"
AGAIN: Final = r"another run of DistributedDataParallel has another "

# Step, kind and parameter of the first difference, and what its cause says.
BROKEN: Final[dict[str, tuple[Any, Any, int, str, str, str]]] = {
    "built-unseeded": (_unseeded, sgd, 0, "initial weight", WEIGHT, AGAIN + "initial weight"),
    "state-outside": (
        _net(lambda net, x: net.loss(x) * next(NUMBERS)),
        *(sgd, 0, "loss", "", AGAIN + "loss"),
    ),
    "own-random-numbers": (
        _net(lambda net, x: net.loss(x + torch.rand(1, generator=GENERATOR))),
        *(sgd, 0, "loss", "", AGAIN + "loss"),
    ),
    "buffers-by-rank": (
        _net(lambda net, x: net.loss(x) * (1 + net.norm.running_mean.square().sum())),
        *(sgd, 1, "loss", "", "takes rank 0's"),
    ),
    "ignored-by-ddp": (_ignored, sgd, 0, "gradient", WEIGHT, "does not reduce it"),
    "other-dropout": (
        _net(_draws),
        *(sgd, 0, "random numbers", "", "draws others.*Equal at stage 2"),
    ),
    "asks-for-class": (
        _doubles,
        *(sgd, 0, "loss", "", "class, shape.*Equal at stage 2; .*code outside reads"),
    ),
    "asks-for-grad": (
        _ReadsGrad,
        *(sgd, 1, "loss", "", "Equal at stage 0; at 1 .*grad is read before"),
    ),
    "asks-for-memory": (
        _net(lambda net, x: net.loss(x) * net.weight.untyped_storage().nbytes()),
        *(sgd, 0, "loss", "", "class, shape or grad"),
    ),
    "steps-whole-tensors": (_Net, peak, 1, "weight", FIRST, "Equal at stage 0; .*single elements"),
}


@pytest.mark.parametrize(("turn", "name"), list(enumerate(BROKEN)))
def test_the_first_difference_and_its_cause_are_named(ranks, turn: int, name: str) -> None:
    """That something differs, one sees without us; what to look at is the question."""
    ranks(2 + turn % 2).run(_is_named, name=name)  # of three ranks the order of sums differs too


def _is_named(group: Group, name: str) -> None:
    model, optimizer, *expected, cause = BROKEN[name]

    found = _verify(group, model, optimizer)

    first = found.differences[0]
    assert [first.step, first.kind, first.name] == expected, str(found)
    assert first.unit == first.name.removesuffix(".weight")
    assert not found.is_equal
    assert not found.is_chosen
    assert re.search(cause, found.cause), str(found)
    assert str(first) in str(found)
    if model is _doubles:
        assert first.relative == 1.0


# ---- Chosen ----

CHOSEN: Final[dict[str, tuple[dict[str, Any], float]]] = {
    "wire": ({"wire": Wire(params="int8")}, 0.1),
    "precision": ({"precision": Precision(params=torch.bfloat16)}, 0.5),
    "offload": ({"offload": Offload(optimizer="host", delayed_update=True)}, 2.0),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_what_was_chosen_is_not_called_wrong(group: Group, name: str) -> None:
    """How much it costs is what one asks then."""
    config, most = CHOSEN[name]

    found = _verify(group, **config)

    assert found.is_chosen
    assert not found.is_equal
    assert re.fullmatch(rf".*\(ZeroConfig\.{name}\)", found.cause), str(found)
    weights = [d for d in found.differences if (d.step, d.kind) == (2, "weight")]
    assert 0 < max(weights, key=lambda d: d.relative).relative < most
    both = _verify(group, _doubles, **config)
    assert not both.is_chosen, "it hides what is wrong besides"


@pytest.mark.ranks(3)
def test_another_order_of_adding_is_not_called_wrong(group: Group) -> None:
    """Sums of three depend on it, and gloo's depends on where in a bucket an element is."""
    found = _verify(group)

    assert found.is_chosen
    assert found.cause.startswith("order of sums")
    assert max(each.relative for each in found.differences) < 1e-3


# ---- What cannot be compared ----


def _in_place(net: _Net, x: Tensor) -> Tensor:
    net.weight.data.mul_(0.9)
    return net.loss(x)


def _only_alone(net: _Net, x: Tensor) -> Tensor:
    assert not net.is_plain, "not as it was written"
    return net.loss(x)


def test_an_error_says_in_which_run_it_was(group: Group) -> None:
    """Most of what we cannot do is refused with a remedy, which one has to see."""
    for model, error, run in (
        (_in_place, ShardedParamError, "the configuration"),
        (_only_alone, AssertionError, "DistributedDataParallel"),
    ):
        with pytest.raises(error) as raised:
            _verify(group, _net(model))
        (note,) = raised.value.__notes__
        assert note.startswith(f"verify(): in step 0 under {run}")
        assert ("verify in one process" in note) == (run == "DistributedDataParallel")


def _recomputes(net: _Net, x: Tensor) -> Tensor:
    """Blocks' gradients arrive in a backward within the backward, each twice."""
    for layer in (*net.layers, *net.layers):
        x = checkpoint(layer, x.requires_grad_(), use_reentrant=True).tanh()
    return net.drop(net.norm(x)).square().mean()


def test_a_model_that_ddp_refuses_is_verified_in_one_process(group: Group) -> None:
    """The standard is the plain model there; the error of DDP must not pass for ours."""
    with pytest.raises(RuntimeError, match="ready only once") as raised:
        _verify(group, _net(_recomputes))
    assert "itself cannot run this model, verify in one process" in raised.value.__notes__[0]

    assert _verify(Group.solo(group.device), _net(_recomputes)).is_equal


def test_what_cannot_be_run_is_named(group: Group) -> None:
    """Else it ends as a TypeError of torch, or ranks wait for each other."""
    one = _Net()
    with pytest.raises(ConfigError, match=r"build a new model at each call"):
        _verify(group, lambda: one)
    with pytest.raises(ConfigError, match=r"expected a loss, .* got a tuple"):
        zero_engine.verify(_Net, sgd, batches(group), loss=lambda *both: both, group=group)
    with pytest.raises(ConfigError, match=r"one element, got a Tensor of shape .*pass loss="):
        zero_engine.verify(lambda: nn.Linear(4, 4), sgd, [torch.ones(2, 4)], group=group)
    with pytest.raises(ConfigError, match=r"as many batches on every rank, got \[1, 2\]"):
        zero_engine.verify(_Net, sgd, [None] * (group.rank + 1), group=group)
