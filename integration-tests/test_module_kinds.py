"""Modules of every kind that torch has and people write: the numbers of plain torch.

All ranks see one batch, so that the mean of two gradients is either, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import parity
import pytest
import torch
from parity import ZeroConfig
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from training import assert_trains_as_plain
from zero_comm import Group

WIDTH = 16


class _Blocks(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], num: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Tanh(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


def _linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


# ---- Weights that are computed ----


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).t()


class _Scaled(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH, 1))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.gain


def _parametrized() -> nn.Module:
    linear = _linear()
    for parametrization in (_Symmetric(), _Scaled(), _Scaled()):
        parametrize.register_parametrization(linear, "weight", parametrization)
    return linear


class _Hypernetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.makers = nn.ModuleList(nn.Linear(4, WIDTH * WIDTH) for _ in range(3))
        self.codes = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        for maker, code in zip(self.makers, self.codes, strict=True):
            x = torch.tanh(functional.linear(x, maker(code).view(WIDTH, WIDTH)))
        return x


class _Transposed(nn.Module):
    """A decoder that is the encoder turned round, and so reads weights of other units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_linear() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        for layer in reversed(self.layers):
            x = torch.tanh(functional.linear(x, layer.weight.t()))
        return x


# ---- Torch's own of unusual structure ----


class _Recurrent(nn.Module):
    """Keeps its parameters in a list of its own as well."""

    def __init__(self, kind: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x[None])[0][0]


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x[None], x[None], x[None])[0][0]


class _Encoder(nn.Module):
    """In evaluation torch's fast path reads the weights of children, and nests the batch."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(2, 2, WIDTH).repeat(1, 2, 1)
        mask = torch.zeros(2, 4, dtype=torch.bool)
        mask[0, 2:] = True
        return self.encoder(x, src_key_padding_mask=mask).masked_fill(mask[..., None], 0)


class _Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(10, WIDTH, mode="sum")
        self.table = nn.Embedding(10, WIDTH, padding_idx=0)
        self.linear = _linear()

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[:, :3].abs() * 3).long().clamp(max=9)
        return self.linear(self.bag(ids) + self.table(ids).sum(1))


class _Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList([torch.randn(WIDTH) for _ in range(5)])
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH), "b": torch.randn(WIDTH, WIDTH)})
        self.nested = nn.ModuleList(nn.ParameterList([torch.randn(WIDTH)]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for gain in self.gains:
            x = x * gain
        for inner in self.nested:
            x = x + inner[0]
        return torch.tanh(x @ self.named["b"]) + self.named["a"]


# ---- Dtypes and shapes ----


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 4)
        self.bias = nn.Parameter(torch.randn(7, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs() + self.bias.abs().sum().float()


class _Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH)


class _Quantised(nn.Module):
    """Frozen bytes, eight-bit floats and a zero point under trained scales."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = _frozen(torch.randint(0, 255, (WIDTH, WIDTH), dtype=torch.uint8))
        self.small = _frozen(torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn))
        self.wide = _frozen(torch.randint(0, 999, (5,)).to(torch.uint16))
        self.zero = _frozen(torch.tensor(7, dtype=torch.int32))
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("table", torch.randn(4).to(torch.float8_e5m2))

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.codes.float() - self.zero) / 255 + self.small.float()
        return torch.tanh(x @ weight * self.scale) * self.table.float().sum() + self.wide.float()[0]


def _frozen(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


class _Experts(nn.Module):
    """All experts in one parameter, of which views are taken in forward; and one of no dim."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        first, second, *_ = self.weights.unbind(0)
        return torch.tanh(x @ first + x @ second + x @ self.weights[3]) * self.temperature.exp()


class _Huge(nn.Module):
    """One parameter larger than all others together, and very many of a few elements."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5000, WIDTH)
        self.tiny = nn.ParameterList([torch.rand(1 + index % 3) for index in range(100)])

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table((x[:, 0].abs() * 1000).long())
        return torch.tanh(x + rows) * torch.cat(list(self.tiny)).mean()


# ---- Forwards of unusual kind ----


class _Generates(nn.Module):
    """Returns before it has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _linear(), _linear()

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        yield torch.tanh(self.first(x))
        yield torch.tanh(self.second(x) * self.first.weight.sum())


class _Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Generates() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.stack(list(block(x))).sum(0)
        return x


class _OwnCall(nn.Module):
    """Goes past torch's way from a call to a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = _linear()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError(x)


class _CallsForward(_Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x


class _Multiply(torch.autograd.Function):
    """Keeps the weight where autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad @ ctx.weight.t(), x.t() @ grad


class _OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(_Multiply.apply(x, self.weight))


class _Remembers(nn.Module):
    """Keeps its parameters in a list of its own, and its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = _linear()
        self.mine = [self.linear.weight]
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.mine[0]) + self.linear.bias
        y = y if self.last is None else y + self.last
        self.last = y.detach()
        return y


def _stack(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: _Blocks(lambda: _Tanh(make()))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "weight-norm": _stack(lambda: parametrizations.weight_norm(_linear())),
    "spectral-norm": _stack(lambda: parametrizations.spectral_norm(_linear())),
    "orthogonal": _stack(lambda: parametrizations.orthogonal(_linear())),
    "parametrized": _stack(_parametrized),
    "pruned": _stack(lambda: prune.random_unstructured(_linear(), "weight", 0.3)),
    "hypernetwork": _Hypernetwork,
    "transposed-ties": _Transposed,
    "lstm": lambda: _Blocks(lambda: _Recurrent(nn.LSTM)),
    "gru": lambda: _Blocks(lambda: _Recurrent(nn.GRU)),
    "attention": lambda: _Blocks(_Attention),
    "encoder": _Encoder,
    "embedding-bags": lambda: _Blocks(_Bags),
    "parameter-lists": lambda: _Blocks(_Lists),
    "complex": lambda: _Blocks(_Complex),
    "fourier": lambda: _Blocks(_Fourier),
    "quantised": lambda: _Blocks(_Quantised),
    "stacked-experts": lambda: _Blocks(_Experts),
    "one-huge-many-tiny": lambda: _Blocks(_Huge, 2),
    "generators": _Summed,
    "own-call": lambda: _Blocks(_OwnCall),
    "forward-called-by-hand": lambda: _CallsForward(lambda: _Tanh(_linear())),
    "own-autograd-function": lambda: _Blocks(_OwnFunction),
    "remembers": lambda: _Blocks(_Remembers),
}
# In evaluation torch takes its fused kernel for plain parameters only.
_ROUNDED = {"encoder"}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("turn", "kind"), list(enumerate(KINDS)))
def test_modules_of_every_kind_train_as_in_plain_torch(group: Group, turn: int, kind: str) -> None:
    """What a module does between its call and its return is its author's business."""
    configs = [ZeroConfig(stage, window=2) for stage in (turn % 2 * 2, 3)]
    how: Any = {"make_optimizer": _adamw, "tolerance": 1e-5 if kind in _ROUNDED else 0.0}
    assert_trains_as_plain(group, KINDS[kind], _train, *configs, **how)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Losses, and what it gives in evaluation."""
    found: list[float] = []
    for step in range(3):
        loss = model(_x(step)).square().mean()
        found.append(loss.item())
        parity.finish_step(loss, optimizer)
        model.eval()
        with torch.no_grad() if step % 2 else torch.inference_mode():
            found += model(_x(50)).flatten().tolist()
        model.train()
    return found


def _x(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
