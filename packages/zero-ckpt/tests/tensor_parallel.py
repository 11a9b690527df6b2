"""A transformer layer that is split over ranks as Megatron splits it, written for these tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional
from zero_ckpt import RngTracker
from zero_comm import Group


def _sum_over(group: Group, tensor: Tensor) -> Tensor:
    if group.world_size == 1:
        return tensor
    total = tensor.clone()
    dist.all_reduce(total, group=group.process_group)
    return total


class _Enter(torch.autograd.Function):
    """f: what all ranks have enters a region that is split; its gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _sum_over(ctx.group, grads[0]), None


class _Leave(torch.autograd.Function):
    """g, the other way round: parts of a sum leave it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _sum_over(group, x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


@frozen
class Whole:
    """The weights of a layer before it is split, equal on all ranks."""

    qkv: Tensor  # (3, heads, head_dim, dim)
    out: Tensor  # (dim, heads, head_dim)
    up: Tensor  # (4 * dim, dim)
    down: Tensor  # (dim, 4 * dim)

    @classmethod
    def draw(cls, dim: int, heads: int) -> Whole:
        """From the default rng."""
        shapes = (3, heads, dim // heads, dim), (dim, heads, dim // heads), (4 * dim, dim)
        return cls(*(0.2 * torch.randn(shape) for shape in (*shapes, (dim, 4 * dim))))


class ParallelLayer(nn.Module):
    """Attention and an MLP, pre-norm; heads and hidden units are split, the rest is replicated.

    Dropout of what is split draws from the model-parallel rng, that of the rest from the default.
    """

    def __init__(self, whole: Whole, group: Group, tracker: RngTracker, dropout: float) -> None:
        super().__init__()
        self.group, self.tracker, self.dropout = group, tracker, dropout
        self.dim = whole.up.shape[1]

        def part(value: Tensor, dim: int) -> nn.Parameter:
            return nn.Parameter(value.chunk(group.world_size, dim=dim)[group.rank].clone())

        self.qkv, self.out = part(whole.qkv, 1), part(whole.out, 1)
        self.up, self.down = part(whole.up, 0), part(whole.down, 1)
        self.up_bias = part(torch.zeros(4 * self.dim), 0)
        self.out_bias = nn.Parameter(torch.zeros(self.dim))
        self.down_bias = nn.Parameter(torch.zeros(self.dim))
        self.norms = nn.ModuleList(nn.LayerNorm(self.dim) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Of shape (batch, length, dim), as x is; `mask` is bool, (length, length)."""
        x = x + self._dropped(self._attend(self.norms[0](x), mask) + self.out_bias)
        return x + self._dropped(self._think(self.norms[1](x)) + self.down_bias)

    def _attend(self, x: Tensor, mask: Tensor) -> Tensor:
        x = _Enter.apply(x, self.group)
        query, key, value = torch.einsum("bld,thed->tbhle", x, self.qkv)
        scores = (query @ key.transpose(-1, -2)) / query.shape[-1] ** 0.5
        odds = scores.masked_fill(mask, float("-inf")).softmax(-1)
        with self.tracker.fork():
            odds = self._dropped(odds)
        return _Leave.apply(torch.einsum("bhle,dhe->bld", odds @ value, self.out), self.group)

    def _think(self, x: Tensor) -> Tensor:
        x = _Enter.apply(x, self.group)
        hidden = functional.gelu(functional.linear(x, self.up, self.up_bias))
        with self.tracker.fork():
            hidden = self._dropped(hidden)
        return _Leave.apply(functional.linear(hidden, self.down), self.group)

    def _dropped(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout)
