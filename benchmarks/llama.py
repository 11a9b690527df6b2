"""Llama 3's architecture (arXiv 2407.21783), in the sizes that reports of training measure."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Size(NamedTuple):
    """Of a model; the feed-forward's width is given, not derived."""

    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    inner: int
    vocabulary: int = 128256


SIZES: Final = {
    "1b": Size(2048, 16, 32, 8, 8192),
    "8b": Size(4096, 32, 32, 8, 14336),
    "70b": Size(8192, 80, 64, 8, 28672),
    "405b": Size(16384, 126, 128, 8, 53248),
}


class Block(nn.Module):
    """Attention with rotated positions, and a gated feed-forward, each after an RMS norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size, self.head = size, size.width // size.num_heads
        self.attention_norm, self.norm = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.wq = nn.Linear(size.width, size.width, bias=False)
        self.wk = nn.Linear(size.width, size.num_kv_heads * self.head, bias=False)
        self.wv = nn.Linear(size.width, size.num_kv_heads * self.head, bias=False)
        self.wo = nn.Linear(size.width, size.width, bias=False)
        self.w1 = nn.Linear(size.width, size.inner, bias=False)
        self.w2 = nn.Linear(size.inner, size.width, bias=False)
        self.w3 = nn.Linear(size.width, size.inner, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Return what the next block gets: (batch, length, width)."""
        x = x + self._attend(self.attention_norm(x), turns)
        y = self.norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))

    def _attend(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            w(x).view(batch, length, -1, self.head) for w in (self.wq, self.wk, self.wv)
        )
        query, key = _rotated(query, turns), _rotated(key, turns)
        times = self.size.num_heads // self.size.num_kv_heads
        key, value = (t.repeat_interleave(times, dim=2) for t in (key, value))
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


def _rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate pairs of elements (arXiv 2104.09864)."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[None, : x.shape[1], None]).flatten(-2).type_as(x)


class Llama(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, size: Size, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        halves = torch.arange(0, size.width // size.num_heads, 2).float()
        angles = torch.outer(
            torch.arange(length).float(), 500000.0 ** (-halves / (size.width // size.num_heads))
        )
        self.register_buffer(
            "turns", torch.polar(torch.ones_like(angles), angles), persistent=False
        )

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.turns)
        return self.head(self.norm(x))
