"""Whatever a unit returns, backward finds its way back into it before its parameters are read."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import types
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, Final, NamedTuple

import attrs
import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from torch.utils import _pytree
from training import assert_trains_as_plain, train
from zero_comm import Group, record_traffic

_DEPTH: Final = 6


# ---- Containers ----


class _Typed(NamedTuple):
    hidden: Tensor
    aside: Tensor


_Untyped = collections.namedtuple("_Untyped", "hidden aside")


@dataclasses.dataclass
class _Data:
    hidden: Tensor
    aside: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class _FrozenData:
    hidden: Tensor
    aside: Tensor


@attrs.frozen
class _Attrs:
    hidden: Tensor
    aside: Tensor


class _Registered:
    __slots__ = ("get",)  # nothing to find without asking how it is flattened

    def __init__(self, hidden: Tensor, aside: Tensor) -> None:
        self.get = lambda: (hidden, aside)


_pytree.register_pytree_node(
    _Registered, lambda value: (list(value.get()), None), lambda parts, _: _Registered(*parts)
)


class _Slotted:
    __slots__ = ("aside", "hidden", "never")

    def __init__(self, hidden: Tensor, aside: Tensor) -> None:
        self.hidden, self.aside = hidden, aside


class _Unregistered:
    def __init__(self, hidden: Tensor, aside: Tensor) -> None:
        self.layers = [types.SimpleNamespace(hidden=hidden), aside]


def _model_output(hidden: Tensor, aside: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=hidden, hidden_states=(aside,))


def _deep(wrap: Callable[..., Any]) -> Callable[[Tensor, Tensor], Any]:
    """Containers that say what is in them are followed as far as they go."""

    def build(hidden: Tensor, aside: Tensor) -> Any:
        value: Any = hidden
        for _ in range(_DEPTH):
            value = wrap(value, aside)
        return value

    return build


def _undo(get: Callable[[Any], Any]) -> Callable[[Any], Tensor]:
    return lambda value: reduce(lambda inner, _: get(inner), range(_DEPTH), value)


def _circular(hidden: Tensor, aside: Tensor) -> list[Any]:
    value: list[Any] = [hidden, aside]
    value.append(value)
    return value


# how a block returns its two tensors, and how its caller takes the first
CONTAINERS: Final[dict[str, tuple[Callable[..., Any], Callable[[Any], Tensor]]]] = {
    "tuple": (lambda h, a: (h, a), lambda v: v[0]),
    "list": (lambda h, a: [a, h], lambda v: v[1]),
    "dict": (lambda h, a: {"aside": a, "hidden": h}, lambda v: v["hidden"]),
    "user-dict": (lambda h, a: collections.UserDict(a=a, h=h), lambda v: v["h"]),
    "deque": (lambda h, a: collections.deque((h, a)), lambda v: v[0]),
    "typing-namedtuple": (_Typed, lambda v: v.hidden),
    "collections-namedtuple": (_Untyped, lambda v: v.hidden),
    "dataclass": (_Data, lambda v: v.hidden),
    "frozen-dataclass": (_FrozenData, lambda v: v.hidden),
    "attrs": (_Attrs, lambda v: v.hidden),
    "registered": (_Registered, lambda v: v.get()[0]),
    "unregistered": (_Unregistered, lambda v: v.layers[0].hidden),
    "model-output": (_model_output, lambda v: v.last_hidden_state),
    "nested": (
        lambda h, a: (None, 3, "s", [{"d": _Data((h,), a)}]),
        lambda v: v[3][0]["d"].hidden[0],
    ),
    "slotted": (_Slotted, lambda v: v.hidden),
    "deep-dataclasses": (_deep(_FrozenData), _undo(lambda v: v.hidden)),
    "deep-attrs": (_deep(_Attrs), _undo(lambda v: v.hidden)),
    "deep-mappings": (
        _deep(lambda h, a: collections.ChainMap({"a": a, "h": h})),
        _undo(lambda v: v["h"]),
    ),
    "circular": (_circular, lambda v: v[0]),
}


class _Wrapping(nn.Module):
    def __init__(self, wrap: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.wrap = nn.Linear(16, 16), wrap

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.linear(x))
        return self.wrap(hidden, hidden.detach())


class _Unwrapping(nn.Module):
    def __init__(self, wrap: Callable[..., Any], unwrap: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Wrapping(wrap) for _ in range(5))
        self.unwrap = unwrap

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = self.unwrap(block(x))
        return self.blocks[0].wrap(x, x.detach())


@pytest.mark.parametrize("container", CONTAINERS)
def test_tensors_are_found_in_every_container(group: Group, container: str) -> None:
    """One that is missed lets backward read whatever lies in the unit's slot by then."""
    wrap, unwrap = CONTAINERS[container]

    run = partial(train, loss_of=lambda m, step: unwrap(m(_x(step))).square().mean(), num_steps=3)
    configs = [ZeroConfig(stage, window=2) for stage in (2, 3)]
    assert_trains_as_plain(group, lambda: _Unwrapping(wrap, unwrap), run, *configs)


# ---- What else callers do with outputs ----


class _Block(nn.Module):
    def __init__(self, output: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.output = nn.Linear(16, 16), output

    def forward(self, x: Tensor) -> Any:
        return self.output(torch.tanh(self.linear(x)), x)


class _Scale(nn.Module):
    """Its output is a view of what its first operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight)[:]


class _Caller(nn.Module):
    def __init__(
        self,
        output: Callable[..., Any],
        call: Callable[..., Tensor],
        make: Callable[..., nn.Module] = _Block,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make(output) for _ in range(5))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


def _scaled_in_place(block: nn.Module, x: Tensor) -> Tensor:
    return block(x).mul_(2)


def _written_into(block: nn.Module, x: Tensor) -> Tensor:
    y = block(x)
    y[:, 0] += 1
    return y


def _second(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)[1]


def _both(block: nn.Module, x: Tensor) -> Tensor:
    first, second = block(x)
    return first + second


USES: Final[dict[str, tuple[Any, ...]]] = {
    "in-place": (lambda h, x: h * 3, _scaled_in_place),
    "in-place-on-a-view": (lambda h, x: (h * 3).view(2, 2, 16).view(4, 16), _scaled_in_place),
    "in-place-on-a-view-of-the-first": (None, _scaled_in_place, lambda _: _Scale()),
    "written-into-a-view": (lambda h, x: (h * 3).unsqueeze(0)[0], _written_into),
    "view-of-the-input": (lambda h, x: (h, x.view(2, 2, 16)), lambda b, x: _sum(*b(x))),
    "the-input-itself": (lambda h, x: (h, x), _both),
    "a-view-only": (lambda h, x: h.t().t()[:, :], lambda b, x: b(x)),
    "many-outputs": (lambda h, x: h.unbind(0), lambda b, x: torch.stack(b(x))),
    "one-of-two": (lambda h, x: (h * 2, h * 3), _second),
    "chunks": (lambda h, x: h.chunk(2), lambda b, x: torch.cat(b(x))),
}


def _sum(first: Tensor, second: Tensor) -> Tensor:
    return first + second.view(4, 16)


@pytest.mark.parametrize(("use", "window"), [*zip(USES, itertools.cycle((1, 3)))])
def test_callers_may_use_an_output_as_any_tensor(group: Group, use: str, window: int) -> None:
    """Writing to a view gives it another autograd node; the input may come out again."""
    run = partial(train, loss_of=lambda m, step: m(_x(step)).square().mean(), num_steps=3)
    configs = [ZeroConfig(stage, window=window) for stage in (2, 3)]
    assert_trains_as_plain(group, lambda: _Caller(*USES[use]), run, *configs)


def test_a_backward_round_a_unit_gathers_nothing(group: Group) -> None:
    """Its output is a view of what it was given: what ends there is none of its computation."""
    model = parity.build(partial(_Caller, *USES["view-of-the-input"]))
    zero_engine.shard(model, parity.adamw(model), ZeroConfig(3, window=1), group=group)
    x = _x(0).requires_grad_() * 2
    model(x)
    with record_traffic(group) as traffic:
        x.sum().backward()
    assert not traffic.payload_numel("all_gather")


def _x(step: int) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
