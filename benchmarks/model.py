"""The byte-level GPT that every system trains, its sizes, and real text that every machine has."""

from __future__ import annotations

import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BYTES: Final = 256


@dataclass(frozen=True)  # and no attrs: a system's own environment need not have it
class Shape:
    """A model, and the size of one rank's batch."""

    num_layers: int
    width: int
    num_heads: int
    sequence: int  # tokens
    batch: int  # sequences per rank


SHAPES: Final = {
    "tiny": Shape(num_layers=2, width=64, num_heads=2, sequence=16, batch=2),
    "25m": Shape(num_layers=8, width=512, num_heads=8, sequence=128, batch=4),
    "119m": Shape(num_layers=6, width=1280, num_heads=20, sequence=32, batch=1),
    "1b": Shape(num_layers=20, width=2048, num_heads=16, sequence=32, batch=1),
}


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each after its norm."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, sequence, width) to the same shape."""
        x = x + self._attend(self.attention_norm(x))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))

    def _attend(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).flatten(-2))


class GPT(nn.Module):
    """Bytes in, loss out. The loss is inside, so that every wrapper sees one forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, shape.width)
        self.positions = nn.Parameter(0.02 * torch.randn(shape.sequence, shape.width))
        self.blocks = nn.ModuleList(
            Block(shape.width, shape.num_heads) for _ in range(shape.num_layers)
        )
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of predicting `targets`, both (batch, sequence) of int64."""
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def build_model(shape: Shape, *, seed: int) -> GPT:
    """Build the model, with the same numbers on every rank and in every system."""
    torch.manual_seed(seed)
    return GPT(shape)


def model_numel(shape: Shape) -> int:
    """Count the parameters without allocating them."""
    with torch.device("meta"):
        return sum(param.numel() for param in GPT(shape).parameters())


def read_stdlib(limit_bytes: int) -> bytes:
    """Read the top-level modules of Python's own library in name order, up to `limit_bytes`."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"".join(module.read_bytes() for module in modules)[:limit_bytes]


def draw_batch(text: bytes, shape: Shape, *, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of one step on one rank; the same ones in every system."""
    rng = random.Random(f"{step}/{rank}")
    length = shape.sequence + 1
    starts = [rng.randrange(len(text) - length) for _ in range(shape.batch)]
    rows = [torch.frombuffer(bytearray(text[i : i + length]), dtype=torch.uint8) for i in starts]
    tokens = torch.stack(rows).long()
    return tokens[:, :-1], tokens[:, 1:]
