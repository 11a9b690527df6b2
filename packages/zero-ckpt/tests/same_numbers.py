"""Models with everything that recomputation gets wrong, and the law that they must keep."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zero_ckpt import RngTracker
from zero_comm.testing import equal

Run = Callable[..., Any]  # calls a function on arguments: directly, or checkpointed


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The oracle: no checkpoint."""
    return function(*args, **kwargs)


def nested(run: Run) -> Run:
    """A checkpoint in a checkpoint."""
    return lambda function, *args, **kwargs: run(partial(run, function), *args, **kwargs)


def closure(function: Callable[..., Any]) -> Callable[..., Any]:
    """As Megatron calls a chunk of layers, and torchvision's DenseNet its norms."""
    layers = [function]

    def forward(*args: Any, **kwargs: Any) -> Any:
        return layers[0](*args, **kwargs)

    return forward


def everything(call: Any) -> bool:
    """A policy over operators."""
    return True


def changing(*functions: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function that is another one in each run."""
    rest = iter(functions)

    def function(x: Tensor) -> Tensor:
        return next(rest)(x)

    return function


@contextmanager
def no_collector() -> Iterator[None]:
    """Cycles stay: memory of a GPU is full before the garbage collector comes."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def slope(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The gradient of the sum of what a function returns."""
    return torch.autograd.grad(function(x).sum(), x)[0]


class Block(nn.Module):
    """A transformer block with dropout in three places, one in the tracker's rng."""

    def __init__(self, dim: int, tracker: RngTracker | None = None) -> None:
        super().__init__()
        self.tracker = tracker
        self.attention = nn.MultiheadAttention(dim, 2, dropout=0.2, batch_first=True)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.norm, self.drop = nn.LayerNorm(dim), nn.Dropout(0.3)
        self.statistics = nn.BatchNorm1d(4)  # of the length

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        """Of shape (batch, length, dim), as x is."""
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        hidden = self.up(self.norm(x)).relu()
        if self.tracker is None:
            hidden = self.drop(hidden)
        else:
            with self.tracker.fork("model-parallel-rng"):
                hidden = self.drop(hidden)
        return self.statistics(x + scale * self.drop(self.down(hidden)))


class Stack(nn.Module):
    """Blocks, each of them called by `run`."""

    def __init__(self, depth: int = 3, dim: int = 8, tracker: RngTracker | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim, tracker) for _ in range(depth))

    def forward(self, x: Tensor, run: Run) -> Tensor:
        """Likewise."""
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        for block in self.blocks:
            x = run(block, x, mask, scale=0.5)
        return x


def linears(count: int = 2, *, bias: bool = True) -> nn.Sequential:
    """Each calls `addmm` in forward (`mm` without a bias), and only `mm` in backward."""
    torch.manual_seed(0)
    layers = [layer for _ in range(count) for layer in (nn.Linear(8, 8, bias=bias), nn.GELU())]
    return nn.Sequential(*layers)


class Random(nn.Module):
    """Draws in operators that return new tensors, attention and one that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, run: Run) -> Tensor:
        """Likewise."""
        return run(self._layers, x)

    def _layers(self, x: Tensor) -> Tensor:
        x = torch.native_dropout(self.linear(x), 0.3, True)[0]
        x = x * torch.rand_like(x) + _noise(x.detach())
        x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.4)[:, 0]
        return torch.native_dropout(self.linear(x).relu(), 0.3, True)[0] + torch.randn(8)


@torch.library.custom_op("zero_ckpt_tests::noise", mutates_args=())
def _noise(x: Tensor) -> Tensor:
    return torch.rand(x.shape).to(x.dtype)


def train(
    run: Run,
    make: Callable[[], nn.Module],
    *,
    dtype: torch.dtype = torch.float32,
    tracker: RngTracker | None = None,
    steps: int = 2,
) -> list[Tensor]:
    """Every number of a short training: outputs, gradients, weights, buffers, generators."""
    torch.manual_seed(0)
    if tracker is not None:
        tracker.reset()
        tracker.add("model-parallel-rng", 7)
    model = make().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 4, 8, dtype=dtype, requires_grad=True)
    numbers: list[Tensor] = []
    for _ in range(steps):
        output = model(x, run)
        output.float().square().sum().backward()
        assert x.grad is not None
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        numbers += [value.detach().clone() for value in (output, x.grad, *grads)]
        optimizer.step()
        optimizer.zero_grad()
        numbers += [torch.get_rng_state(), *(tracker.get_states().values() if tracker else ())]
    return numbers + [value.detach().clone() for value in model.state_dict().values()]


def assert_equal(found: list[Tensor], expected: list[Tensor], what: object = "") -> None:
    """To the bit."""
    assert len(found) == len(expected), what
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert equal(one, other), (what, index)
