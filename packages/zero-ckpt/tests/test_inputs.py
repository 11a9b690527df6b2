"""Inputs of every kind that torch has, through every kind of checkpointer: none is told from it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from same_numbers import Run, assert_equal, plainly
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from zero_ckpt import (
    Checkpointer,
    CheckpointError,
    PackedSaver,
    Verification,
    checkpoint,
)


def _everything(call: Any) -> bool:
    return True


CHECKPOINTERS: dict[str, Callable[[], Checkpointer]] = {
    "plain": Checkpointer,
    "to its end": lambda: Checkpointer(stops_early=False),
    "slots": lambda: Checkpointer(saver=PackedSaver(num_slots=2)),
    "host": lambda: Checkpointer(saver=PackedSaver(on_host=True)),
    "keeps": lambda: Checkpointer(keeps=_everything),
    "verifies": lambda: Checkpointer(verifies=Verification()),
    "all": lambda: Checkpointer(
        saver=PackedSaver(num_slots=2, on_host=True),
        keeps=_everything,
        verifies=Verification(),
        profiles=True,
    ),
}
every_checkpointer = pytest.mark.parametrize("kind", CHECKPOINTERS)


class Named(Tensor):
    """A subclass that Python alone knows of, with an attribute: an image and its source, say."""

    source: str


def _named(x: Tensor) -> Tensor:
    assert isinstance(x, Named), type(x)
    assert x.source == "one", vars(x)
    return (x @ x).sin()


def _make_named(x: Tensor) -> tuple[Tensor, ...]:
    named = (x * 1).as_subclass(Named)
    named.source = "one"  # type: ignore[attr-defined]
    return (named,)


def _complex(x: Tensor) -> Tensor:
    return torch.complex(x, x.cos())


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[Tensor], tuple[Any, ...]]]] = {
    "an operator in place": (lambda x: (x * 2).add_(1).relu_().exp(), lambda x: (x,)),
    "in place on views": (
        lambda x: (h := x * 2, h[0].mul_(3), h.view(-1)[:3].relu_(), h.exp())[-1],
        lambda x: (x,),
    ),
    "dropout in place": (
        lambda x: nn.functional.dropout(x * 2, 0.5, inplace=True).sin(),
        lambda x: (x,),
    ),
    "its inputs and views of them": (lambda x: (x, x.t(), x[0], x.sin(), x), lambda x: (x,)),
    "none": (lambda a, x, b: (None, x.exp(), b), lambda x: (None, x, None)),
    "integers and booleans": (
        lambda x, i, b: (x[i].masked_fill(b[i], 0).exp(), i + 1, ~b),
        lambda x: (x, torch.tensor([1, 2, 2]), torch.ones(4, 4, dtype=torch.bool).triu()),
    ),
    "complex": (lambda z: (z @ z).abs().sin(), lambda x: (_complex(x),)),
    "conjugate": (lambda z: (z @ z).abs().sin(), lambda x: (_complex(x).conj(),)),
    "negative": (lambda x: (x @ x).sin(), lambda x: (_complex(x).conj().imag,)),
    "sparse": (lambda s, x: torch.sparse.mm(s, x).sin(), lambda x: (torch.eye(4).to_sparse(), x)),
    "a subclass": (_named, _make_named),
}


@every_checkpointer
@pytest.mark.parametrize("function", FUNCTIONS)
def test_numbers_are_those_without(kind: str, function: str) -> None:
    """Whatever a saver or a mode does not know it must leave alone."""
    apply, make = FUNCTIONS[function]
    found = _numbers(CHECKPOINTERS[kind]().checkpoint, apply, make)

    assert_equal(found, _numbers(plainly, apply, make))


def _numbers(
    run: Run, function: Callable[..., Any], make: Callable[[Tensor], tuple[Any, ...]]
) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 4, requires_grad=True)
    found = run(function, *make(x))
    outputs = [t for t in (found if isinstance(found, tuple) else (found,)) if t is not None]
    torch.stack([t.sum() for t in outputs if t.requires_grad]).square().sum().backward()
    assert x.grad is not None
    flags = torch.tensor([output.requires_grad for output in outputs])
    return [x.grad, flags, torch.get_rng_state(), *(output.detach() for output in outputs)]


@every_checkpointer
@pytest.mark.parametrize("place", ["meta", "fake"])
def test_tensors_without_memory_go_through(kind: str, place: str) -> None:
    """Models are planned and measured so, before there is memory for them; in silence."""
    checkpointer = CHECKPOINTERS[kind]()
    mode = FakeTensorMode() if place == "fake" else torch.device("meta")

    with mode, warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.BatchNorm1d(3))
        x = torch.ones(2, 3, requires_grad=True)
        checkpointer.checkpoint(model, x).sum().backward()

    assert x.grad is not None
    assert x.grad.shape == x.shape


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@every_checkpointer
@pytest.mark.parametrize(
    "transform",
    [
        torch.func.grad,
        torch.func.vmap,
        torch.func.jacfwd,
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
    ],
    ids=["grad", "vmap", "jacfwd", "jvp"],
)
def test_inside_transforms_it_says_that_it_cannot_be(
    kind: str, transform: Callable[[Any], Any]
) -> None:
    """What torch would say is about setup_context, of a class that no user has seen."""
    run = CHECKPOINTERS[kind]().checkpoint

    with pytest.raises(CheckpointError, match=r"torch\.func.*call the function itself"):
        transform(lambda x: run(torch.sum, x.sin()))(torch.ones(3, requires_grad=True))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_dual_numbers_go_through() -> None:
    """Forward-mode gradients need no recomputation."""
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(3), torch.ones(3))
        tangent = torch.autograd.forward_ad.unpack_dual(checkpoint(torch.sin, dual)).tangent

    assert tangent is not None
    assert torch.equal(tangent, torch.ones(3).cos())
