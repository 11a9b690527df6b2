"""What constructors do: each function builds a model that does one of these things.

Called once plainly, as the oracle, and once inside `Init`.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any, Final

import parity
import torch
import zero_engine
from torch import Tensor, nn
from training import assert_weights_of
from zero_comm import Group

W: Final = 8


class Mlp(nn.Module):
    """Something with children."""

    def __init__(self, width: int = W) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x + self.down(torch.relu(self.up(x)))


def _memory_of(tensor: Tensor) -> Any:
    """As an array, whose writes torch does not see; only the host's can be one."""
    return tensor.detach().numpy() if tensor.is_cpu else tensor.detach()


class _Built(nn.Module):
    """Does in its constructor what a function says."""

    def __init__(self, fill: Callable[[nn.Module], None]) -> None:
        super().__init__()
        fill(self)


def _in_constructor(fill: Callable[[nn.Module], None]) -> Callable[[], nn.Module]:
    return functools.update_wrapper(lambda: _Built(fill), fill)


@_in_constructor
def applies(self: nn.Module) -> None:
    """The usual weight init: the parent's constructor calls `self.apply(fn)`."""
    self.blocks = nn.ModuleList(Mlp() for _ in range(3))
    self.norm = nn.LayerNorm(W)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
            module.weight.data.mul_(3.0)

    self.apply(init)


@_in_constructor
def writes_to_children(self: nn.Module) -> None:
    """Initialisers called on a child's parameters, each in another way."""
    self.children_ = nn.ModuleList(nn.Linear(W, W) for _ in range(12))
    weights = [child.weight for child in self.children_]
    nn.init.normal_(weights[0])
    nn.init.xavier_uniform_(weights[1])
    nn.init.orthogonal_(weights[2])
    nn.init.trunc_normal_(weights[3])
    weights[4].data.normal_()
    weights[5].data = torch.randn(W, W)
    with torch.no_grad():
        weights[6][2:4] = 7.0
        weights[7].add_(weights[6]).mul_(0.5)
        weights[8].copy_(weights[0] @ weights[1].t())
        torch._foreach_mul_([weights[9], weights[10]], 2.0)
    _memory_of(weights[11])[0] = 3.0


@_in_constructor
def keeps_a_view_for_a_while(self: nn.Module) -> None:
    """A view is taken, other things are built, and then the view is written through."""
    self.first = nn.Linear(W, W)
    view = self.first.weight.data[1:3]
    array = _memory_of(self.first.bias)
    self.second = Mlp()
    view.fill_(5.0)
    array[:] = 6.0
    self.third = Mlp()


@_in_constructor
def parameters_around_children(self: nn.Module) -> None:
    """A parameter of the parent's own, made before its children and initialised after them."""
    self.table = nn.Parameter(torch.empty(W, W))
    self.tables = nn.ParameterList(torch.randn(3) for _ in range(2))
    self.block = Mlp()
    nn.init.normal_(self.table)
    with torch.no_grad():
        self.tables[0].mul_(2.0)


class _Base(nn.Module):
    """First of three levels."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(W, W)
        nn.init.normal_(self.base.weight)


class _Middle(_Base):
    """Second."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(W, W)
        nn.init.normal_(self.base.weight)


def several_levels() -> nn.Module:
    """Subclasses that call super().__init__() first, last and in between; defined inside."""

    class Top(_Middle):
        def __init__(self) -> None:
            super().__init__()
            self.top = nn.Linear(W, W)
            self.own = nn.Parameter(torch.randn(W))
            with torch.no_grad():
                self.own.mul_(self.middle.weight[0])

    class Unchanged(Top):
        pass

    return nn.Sequential(Top(), Unchanged())


def skips_init() -> nn.Module:
    """Built on meta, moved by to_empty(), then filled."""
    linear = nn.utils.skip_init(nn.Linear, W, W, device=torch.get_default_device())
    nn.init.normal_(linear.weight)
    nn.init.ones_(linear.bias)
    return nn.Sequential(linear, Mlp())


def copies() -> nn.Module:
    """nn.TransformerEncoder copies its layer; others copy a bare Linear, or a used one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(W, 2, 2 * W), 3)
    linear = nn.Linear(W, W)
    twins = nn.ModuleList(copy.deepcopy(linear) for _ in range(3))
    with torch.no_grad():
        twins[1].weight.add_(1.0)
    late = copy.deepcopy(twins)
    return nn.ModuleList([encoder, linear, twins, late])


@_in_constructor
def ties(self: nn.Module) -> None:
    """Weights shared by assignment in a parent's constructor."""
    self.embed = nn.Embedding(11, W, padding_idx=0)
    self.block = Mlp()
    self.head = nn.Linear(W, 11, bias=False)
    self.head.weight = self.embed.weight
    nn.init.normal_(self.head.weight)


@_in_constructor
def runs_a_forward(self: nn.Module) -> None:
    """A constructor that learns a size from a forward, and a table from a child's weights."""
    self.conv = nn.Conv2d(3, 4, 3)
    numel = self.conv(torch.zeros(1, 3, 8, 8)).numel()
    self.head = nn.Linear(numel, 5)
    self.register_buffer("table", self.head.weight.detach().sum(0))


def torchs_own() -> nn.Module:
    """Modules of torch whose constructors and utilities do more than assign."""
    table = torch.randn(5, W)
    return nn.ModuleList(
        [
            nn.LSTM(W, W, num_layers=2),
            nn.MultiheadAttention(W, 2),
            nn.Embedding.from_pretrained(table, freeze=True),
            nn.BatchNorm1d(W),
            nn.utils.parametrizations.weight_norm(nn.Linear(W, W)),
            nn.utils.spectral_norm(nn.Linear(W, W)),
            nn.utils.parametrizations.orthogonal(nn.Linear(W, W)),
        ]
    )


def converts() -> nn.Module:
    """Casts, loads and freezes after construction."""
    model = nn.Sequential(Mlp(), Mlp(), nn.Linear(W, W, bias=False))
    model[0].to(torch.bfloat16)
    model[1].load_state_dict({key: value + 1 for key, value in Mlp().state_dict().items()})
    model[2].requires_grad_(False)
    model[2].half()
    return model


CONSTRUCTORS: Final[dict[str, Callable[[], nn.Module]]] = {
    make.__name__: make
    for make in (
        *(parity.Tiny, applies, writes_to_children, keeps_a_view_for_a_while),
        *(parameters_around_children, several_levels, skips_init, copies, ties, runs_a_forward),
        *(torchs_own, converts),
    )
}


def assert_built_as(model: nn.Module, plain: nn.Module, *, group: Group) -> None:
    """What was built in parts has a plain model's values, and no rank holds more than its part.

    Shards the model. Collective.
    """
    for name, param in model.named_parameters():
        assert param.untyped_storage().nbytes() == param.element_size(), name
    zero_engine.shard(model, None, parity.ZeroConfig(3), group=group)
    assert_weights_of(model, plain, group=group, what="built")
