"""A checkpointed program computes what it does without: every program, by every checkpointer.

Training with dropout, in every combination of choices, is in `test_combinations.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from same_numbers import (
    Random,
    Run,
    Stack,
    assert_equal,
    closure,
    everything,
    linears,
    nested,
    plainly,
    train,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from zero_ckpt import (
    MATMULS,
    Checkpointer,
    CheckpointError,
    PackedSaver,
    Verification,
    by_operator,
)
from zero_ckpt.testing import late

Program = Callable[[Run], list[Tensor]]

DRAWS = by_operator("native_dropout", "rand", "zero_ckpt_tests::noise")


def _on_host(**options: Any) -> Run:
    saver = PackedSaver(on_host=True)
    late(saver)
    return Checkpointer(saver=saver, **options).checkpoint


def _in_closure(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return Checkpointer(stops_early=False).checkpoint(partial(closure(function)), *args, **kwargs)


def _called(*args: Any, called: Callable[..., Any], **kwargs: Any) -> Any:
    return called(*args, **kwargs)


def _in_partial(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return Checkpointer().checkpoint(partial(_called, called=function, **kwargs), *args)


def _in_argument(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return Checkpointer().checkpoint(_called, *args, called=function, **kwargs)


RUNS: dict[str, Run] = {
    "plain": Checkpointer().checkpoint,
    "nested": nested(Checkpointer().checkpoint),
    "in a closure": _in_closure,
    "in a partial": _in_partial,
    "in an argument": _in_argument,
    "on the host": _on_host(),
    "without a device": Checkpointer(saver=PackedSaver(on_host=True)).checkpoint,
    "keeps matmuls": Checkpointer(keeps=MATMULS).checkpoint,
    "keeps everything": Checkpointer(keeps=everything).checkpoint,
    # The next dropout would get the numbers of one that did not run.
    "keeps what draws": Checkpointer(keeps=DRAWS).checkpoint,
    "keeps, nested": nested(Checkpointer(keeps=everything).checkpoint),
    "verifies": Checkpointer(verifies=Verification()).checkpoint,
    "all": _on_host(keeps=everything, verifies=Verification(), profiles=True),
}

PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    """One more row."""
    PROGRAMS[function.__name__] = function
    return function


# ---- Training ----


class _Whole(Stack):
    def forward(self, x: Tensor, run: Run) -> Tensor:
        return run(super().forward, x, run)


class _Normed(nn.Module):
    """Writes statistics that gradients depend on or do not, some behind the version's back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(4, momentum=None)
        self.register_buffer("calls", torch.zeros(3, 10_000))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, run: Run) -> Tensor:
        return run(self._layers, x)

    def _layers(self, x: Tensor) -> Tensor:
        self.calls.add_(1)  # larger than what is put back without asking
        self.seen.copy_(self.seen + x.detach().mean())  # the sum is no buffer, and differs
        return self.norm(self.linear(x)).tanh()


class _Adapted(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down = nn.ParameterList(torch.randn(8, 2) for _ in self.blocks)
        self.up = nn.ParameterList(torch.zeros(2, 8) for _ in self.blocks)

    def forward(self, x: Tensor, run: Run) -> Tensor:
        for block, down, up in zip(self.blocks, self.down, self.up, strict=True):
            x = run(lambda x, block=block, down=down, up=up: block(x) + x @ down @ up, x)
        return x


class _InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, run: Run) -> Tensor:
        y = run(self._layers, x)
        return y.mul_(2).add_(1)  # and outside

    def _layers(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.up(x), inplace=True).mul(2).add_(1)
        x = F.dropout(self.up(x).view(-1, 8), 0.4, inplace=True)
        return self.down(x.view(2, 4, 8))


def _cast(run: Run) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return train(run, Stack)


PROGRAMS |= {
    "dropout": lambda run: train(run, Stack),
    "a checkpoint of everything, with checkpoints of blocks in it": lambda run: train(run, _Whole),
    "statistics, which are written once": lambda run: train(run, _Normed),
    "frozen weights and adapters": lambda run: train(run, _Adapted),  # an input may need no grad
    "writes in place and to the output": lambda run: train(run, _InPlace),  # relu_, applied twice
    "operators that draw": lambda run: train(run, Random),  # generators move past the kept ones
    "autocast around all": _cast,  # casts of weights are cached in one run and made in another
}


# ---- More than one backward, more than one call ----


@program
def autocast_of_forward_only(run: Run) -> list[Tensor]:
    """Backward runs outside of it, and fp32 would give other numbers. No input has a gradient."""
    model, x = linears(), torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    with torch.autocast("cpu", torch.bfloat16):
        y = run(model, x).float()  # whose casts of weights the next call need not make
        loss = run(lambda x: model(model(x).float() + 1), y).float().square().sum()
    loss.backward()
    return [loss, *(param.grad for param in model.parameters())]  # type: ignore[misc]


@program
def autocast_of_backward_only(run: Run) -> list[Tensor]:
    """Who calls backward inside autocast has run forward outside of it, in fp32."""
    model = linears()
    loss = run(model, torch.ones(4, 8)).square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        return list(torch.autograd.grad(loss, list(model.parameters())))


@program
def gradients_of_gradients(run: Run) -> list[Tensor]:
    """autograd.grad() runs no backward of parameters, and gradient penalties call it twice."""
    model, x = linears(), torch.ones(4, 8, requires_grad=True)
    (slope,) = torch.autograd.grad(run(model, x).sum(), x, create_graph=True)
    return [
        slope,
        *torch.autograd.grad(slope.square().sum(), [x, *model.parameters()], allow_unused=True)[:2],
    ]


@program
def a_gradient_taken_inside(run: Run) -> list[Tensor]:
    """Forces are gradients of energies. In forward it makes the function run within itself."""
    layer, x = linears(), torch.ones(2, 8, requires_grad=True)

    def force(x: Tensor) -> Tensor:
        return torch.autograd.grad(layer(x).tanh().square().sum(), x, create_graph=True)[0]

    return list(torch.autograd.grad(run(force, x).square().sum(), [x, layer[0].weight]))


def _partly(guard: Callable[[], Any], run: Run) -> list[Tensor]:
    model = linears()

    def function(x: Tensor) -> Tensor:
        with guard():
            factor = model(x).mean() + torch.rand(())
        return model(x) * factor.clone()

    x = torch.ones(4, 8, requires_grad=True)
    return [*torch.autograd.grad(run(function, x).sum(), x), torch.get_rng_state()]


PROGRAMS["targets without gradients"] = partial(_partly, torch.no_grad)
PROGRAMS["inference tensors, which count no writes"] = partial(_partly, torch.inference_mode)


@program
def views_of_one_another(run: Run) -> list[Tensor]:
    """Heads are slices of one projection, transposed, and a bias is expanded."""

    def attend(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
        return (q.flatten(1) @ k.flatten(1).mT + bias).softmax(-1)

    leaf = torch.arange(24.0).reshape(2, 3, 4).div(24).requires_grad_()
    bias = torch.ones(1, requires_grad=True)
    both = leaf * 2
    out = run(attend, both[:, 0:2].mT, both[:, 1:3].mT, bias.expand(2, 2))
    return list(torch.autograd.grad(out[0].square().sum(), [leaf, bias]))


@program
def an_output_that_the_caller_writes_to(run: Run) -> list[Tensor]:
    """Long after the function has returned; what was kept of it is another value by then."""
    layer, x = linears()[0], torch.ones(4, 8, requires_grad=True)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = layer(x)
        return y, (y + 1).sin()

    y, z = run(function, x)
    y.mul_(2)
    return list(torch.autograd.grad((y + z).sum(), x))


@program
def a_subclass_made_of_parts(run: Run) -> list[Tensor]:
    """Distributed and quantized tensors are made of others."""
    torch.manual_seed(0)
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)
    loss = run(lambda x: (x @ weight).sin().sum(), TwoTensor(x, 2 * x))
    loss.backward(torch.ones_like(loss))
    assert weight.grad is not None
    return [weight.grad.a, weight.grad.b]  # type: ignore[attr-defined]


# ---- Inputs and operators of every kind ----


class _AskTwice(torch.autograd.Function):
    """Custom functions save what they save, and unpack it, where and as often as they please."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x, same), (again, _) = ctx.saved_tensors, ctx.saved_tensors
        assert torch.equal(x, again) and torch.equal(x, same)
        return 2 * x * grad


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


def _alone(x: Tensor) -> tuple[Tensor]:
    return (x,)


_Make = Callable[[Tensor], tuple[Any, ...]]

FUNCTIONS: dict[str, tuple[Callable[..., Any], _Make]] = {  # of what is made of a leaf
    "in place on views": (
        lambda x: (h := x * 2, h[0].mul_(3), h.view(-1)[:3].relu_(), h.exp())[-1],
        _alone,
    ),
    "its inputs and views of them": (lambda x: (x, x.t(), x[0], x.sin(), x), _alone),
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
    "saved and asked for twice": (lambda x: _AskTwice.apply(x.sin()), _alone),
    "nothing that a gradient is asked of": (lambda x: x[:0].exp().sum() + x.sum(), _alone),
    "expanded": (lambda x: x.expand(5, 4, 4).exp().transpose(0, 2)[1:].sin(), _alone),
    "half": (lambda x: torch.where(x > 0, x, x.half().float()).sin(), _alone),
    "recurrent": (  # whose kernels save workspaces that are blank in part
        lambda layer, x: layer(x[None])[0],
        lambda x: (nn.LSTM(4, 4, batch_first=True, dropout=0.3, num_layers=2), x),
    ),
}


def _apply(function: Callable[..., Any], make: _Make, run: Run) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 4, requires_grad=True)
    found = run(function, *make(x))
    outputs = [t for t in (found if isinstance(found, tuple) else (found,)) if t is not None]
    torch.stack([t.sum() for t in outputs if t.requires_grad]).square().sum().backward()
    assert x.grad is not None
    flags = torch.tensor([output.requires_grad for output in outputs])
    return [x.grad, flags, torch.get_rng_state(), *(output.detach() for output in outputs)]


PROGRAMS |= {name: partial(_apply, *row) for name, row in FUNCTIONS.items()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_those_without(name: str) -> None:
    """Whatever a saver or a mode does not know it must leave alone."""
    expected = PROGRAMS[name](plainly)

    for how, run in RUNS.items():
        assert_equal(PROGRAMS[name](run), expected, how)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_tensors_without_memory_go_through(run: Run) -> None:
    """Models are planned and measured so, before there is memory for them; in silence."""
    for place in (FakeTensorMode(), torch.device("meta")):
        with place, warnings.catch_warnings():
            warnings.simplefilter("error")
            model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.BatchNorm1d(3))
            x = torch.ones(2, 3, requires_grad=True)
            run(model, x).sum().backward()

        assert x.grad is not None
        assert x.grad.shape == x.shape


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_inside_transforms_it_says_that_it_cannot_be() -> None:
    """What torch would say is about setup_context, of a class that no user has seen."""

    def jvp(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
        return lambda x: torch.func.jvp(function, (x,), (x,))

    for transform in (torch.func.grad, torch.func.vmap, torch.func.jacfwd, jvp):
        function = transform(lambda x: Checkpointer().checkpoint(torch.sum, x.sin()))
        with pytest.raises(CheckpointError, match=r"torch\.func.*call the function itself"):
            function(torch.ones(3, requires_grad=True))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_dual_numbers_go_through() -> None:
    """Forward-mode gradients need no recomputation."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        tangent = forward_ad.unpack_dual(Checkpointer().checkpoint(torch.sin, dual)).tangent

    assert tangent is not None
    assert torch.equal(tangent, torch.ones(3).cos())
