"""A model whose parameters share a dtype, whichever it is: for tests of precision and of delay."""

from __future__ import annotations

import parity
import torch
from torch import Tensor, nn


class OneDtype(nn.Module):
    """Blocks, a tie, a frozen parameter and an unused one; all of it computes in one dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(parity.VOCABULARY, parity.WIDTH)
        self.blocks = nn.ModuleList(parity.Block() for _ in range(2))
        self.frozen = nn.Parameter(torch.randn(parity.WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5))
        self.head = nn.Linear(parity.WIDTH, parity.VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        x = self.embed(tokens) + self.frozen
        for block in self.blocks:
            x = block(x)
        return self.head(x).float()
