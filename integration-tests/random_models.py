"""Models and loops that nobody chose: drawn by a number, to meet what no table has."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import parity
import torch
import zero_ckpt
from parity import VOCABULARY, WIDTH, ZeroConfig
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

# ---- Parts: from (2, 4, WIDTH) to the same ----


class _Part(nn.Module):
    """A function of a module and its input."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **children: Any) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class _Returns(nn.Module):
    """What it computes lies in a dict, beside what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, *, hidden: Tensor) -> dict[str, Any]:
        first, second = self.linear(hidden).chunk(2, dim=-1)
        return {"first": first, "others": [second, None, 3]}


def _returned(of: Any, x: Tensor) -> Tensor:
    found = of.part(hidden=x)
    return x + found["first"] * found["others"][0].sigmoid()


def _in_place(of: Any, x: Tensor) -> Tensor:
    y = of.part(x) * 1
    y += x
    return y


def _listed(of: Any, x: Tensor) -> Tensor:
    return (x + sum(of.part)) @ of.other["key"]


def _attended(of: Any, x: Tensor) -> Tensor:
    return x + of.part(x, x, x, need_weights=False)[0]


def _vectors() -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(2))


def _nested(draw: random.Random) -> nn.Module:
    inside = nn.Sequential(*(_part(draw) for _ in range(draw.randint(1, 3))))
    scale = nn.Parameter(torch.ones(1))
    return _Part(lambda of, x: of.part(x) * of.scale, part=inside, scale=scale)


def _attention() -> nn.Module:
    return nn.MultiheadAttention(WIDTH, 2, batch_first=True)


_PARTS: Final[dict[str, Callable[[random.Random], nn.Module]]] = {
    "block": lambda _: parity.Block(),
    "linear": lambda draw: nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.5),
    "scalar": lambda _: _Part(lambda of, x: x * of.part, part=nn.Parameter(torch.randn(()))),
    "lists": lambda _: _Part(
        _listed,
        part=_vectors(),
        other=nn.ParameterDict({"key": nn.Parameter(torch.randn(WIDTH, WIDTH))}),
    ),
    "attention": lambda _: _Part(_attended, part=_attention()),
    "recurrent": lambda _: _Part(
        lambda of, x: x + of.part(x)[0], part=nn.GRU(WIDTH, WIDTH, batch_first=True)
    ),
    "buffers": lambda _: _Part(
        lambda of, x: of.part(x.transpose(1, 2)).transpose(1, 2), part=nn.BatchNorm1d(WIDTH)
    ),
    "random": lambda _: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)),
    "parametrized": lambda _: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "dict": lambda _: _Part(_returned, part=_Returns()),
    "in place": lambda _: _Part(_in_place, part=nn.Linear(WIDTH, WIDTH)),
    "view": lambda _: _Part(lambda of, x: of.part(x)[:, :, :], part=nn.Linear(WIDTH, WIDTH)),
}


def _part(draw: random.Random) -> nn.Module:
    return _PARTS[draw.choice(list(_PARTS))](draw)


class RandomModel(nn.Module):
    """Tied, frozen and repeated, recomputed in part: a language model of tokens.

    Args:
        seed: By which it is drawn.
        is_plain: Nothing is recomputed, and no part comes twice.
    """

    def __init__(self, seed: int, *, is_plain: bool = False) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        parts = [
            _nested(draw) if draw.random() < 0.2 else _part(draw) for _ in range(draw.randint(2, 6))
        ]
        if draw.random() < 0.3 and not is_plain:
            parts.append(parts[0])
        self.parts = nn.ModuleList(parts)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if draw.random() < 0.4:
            self.head.weight = self.embed.weight
        for param in self.parameters() if draw.random() < 0.5 else ():
            param.requires_grad_(draw.random() < 0.7)
        self.embed.requires_grad_(True)
        ways = [None] if is_plain else [None, None, zero_ckpt.checkpoint, _keeping, _as_torch]
        self.ways = [draw.choice(ways) for _ in parts]

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        x = self.embed(tokens)
        for part, way in zip(self.parts, self.ways, strict=True):
            x = part(x) if way is None else way(part, x)
        return self.head(x)


def _keeping(part: nn.Module, x: Tensor) -> Tensor:
    return zero_ckpt.Checkpointer(keeps=zero_ckpt.MATMULS).checkpoint(part, x)


def _as_torch(part: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(part, x, use_reentrant=False)


# ---- Loops ----


def _part_alone(model: Any, tokens: Tensor, draw: random.Random) -> Tensor:
    part = draw.choice(list(model.parts))
    return part(torch.randn(*tokens.shape, WIDTH)).square().mean()


def _penalty(model: Any, tokens: Tensor, draw: random.Random) -> Tensor:
    params = [param for param in model.parameters() if param.requires_grad]
    chosen = draw.sample(params, draw.randint(1, len(params)))
    return sum(p.square().sum() + p.abs().sum() for p in chosen) / 100  # type: ignore[return-value]


# What a loss is made of besides a call of the model.
_WAYS: Final[tuple[Callable[[Any, Tensor, random.Random], Tensor], ...]] = (
    lambda model, tokens, _: model.forward(tokens).square().mean(),
    lambda model, tokens, _: model.head(model.embed(tokens)).square().mean(),
    lambda model, tokens, _: nn.functional.linear(model.embed(tokens), model.head.weight).mean(),
    _part_alone,
    _penalty,
)
_DROPS: Final[tuple[Callable[[Any, torch.optim.Optimizer, bool, random.Random], None], ...]] = (
    lambda _, optimizer, to_none, __: optimizer.zero_grad(set_to_none=to_none),
    lambda model, _, to_none, __: model.zero_grad(set_to_none=to_none),
    lambda model, _, to_none, draw: draw.choice(list(model.parts)).zero_grad(to_none),
)


def _drop(model: nn.Module, optimizer: torch.optim.Optimizer, draw: random.Random) -> None:
    draw.choice(_DROPS)(model, optimizer, draw.random() < 0.7, draw)


@torch.no_grad()
def _write(optimizer: torch.optim.Optimizer, draw: random.Random) -> None:
    """What scripts do to the optimizer's parameters by hand: decay, a clamp."""
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if draw.random() < 0.5:
            param.clamp_(-1, 1)
        else:
            param.data.mul_(0.99)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, seed: int) -> list[float]:
    """A loop of plain torch. Returns what it computes."""
    draw, found = random.Random(seed), list[float]()
    torch.manual_seed(seed)
    for step in range(draw.randint(2, 4)):
        for micro in range(draw.randint(1, 3)):
            tokens = parity.batch(step, 5, 0)[0]
            if draw.random() < 0.7:
                loss = parity.loss_of(model, parity.batch(step, micro, 0))
                if draw.random() < 0.2:
                    loss = loss + model(tokens).square().mean()
                if draw.random() < 0.3:
                    loss = loss + draw.choice(_WAYS)(model, tokens, draw)
            else:
                loss = draw.choice(_WAYS)(model, tokens, draw)
            if draw.random() < 0.15:
                _drop(model, optimizer, draw)
            if loss.requires_grad:  # else all of it is frozen
                loss.backward()
            found.append(loss.item())
            if draw.random() < 0.2:
                model.eval()
                with torch.inference_mode() if draw.random() < 0.5 else torch.no_grad():
                    found.append(model(parity.batch(step, 6, 0)[0]).sum().item())
                model.train()
        if draw.random() < 0.9:
            optimizer.step()
        if draw.random() < 0.2:
            _write(optimizer, draw)
        _drop(model, optimizer, draw)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    return found


def random_config(seed: int) -> Any:
    """Of what changes layout and schedule and no number."""
    draw = random.Random(seed)
    return ZeroConfig(
        draw.choice([1, 2, 3, 3]),
        window=draw.choice([1, 2, 3, 6]),
        min_unit_bytes=draw.choice([0, 0, 0, 300]),
        max_unit_bytes=draw.choice([2**29, 500, 2000]),
        prefetch_numel=draw.choice([None, 0, 50, 1000]),
        max_live_numel=draw.choice([None, None, 400, 1000]),
        small_param_numel=draw.choice([0, 0, 9, 40]),
        cut=draw.choice([None, None, "row", "tensor"]),
    )
