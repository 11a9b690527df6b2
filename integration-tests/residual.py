"""A small model of residual blocks, which tests change as they need."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Tanh of a linear layer, added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x + torch.tanh(self.linear(self.norm(x)))


class Blocks(nn.Module):
    """Four blocks that become units, and a head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        for block in self.blocks:
            x = block(x)
        return self.head(x)
