"""Only zero-ckpt: a model with dropout, with and without checkpoints. Same numbers, less memory.

python examples/only_ckpt.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import zero_ckpt
from torch import Tensor, nn

WIDTH, DEPTH, BATCH = 256, 12, 512


class Block(nn.Module):
    """A feed-forward layer with dropout, after its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width) to the same shape."""
        return x + self.drop(self.narrow(nn.functional.gelu(self.widen(self.norm(x)))))


def train(call: Callable[..., Any], steps: int = 3) -> tuple[list[float], int]:
    """Losses, and the bytes that autograd keeps between forward and backward."""
    torch.manual_seed(0)
    model = nn.ModuleList(Block() for _ in range(DEPTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    weights = {param.data_ptr() for param in model.parameters()}
    losses: list[float] = []
    kept: dict[int, int] = {}
    num_bytes = 0

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    for _ in range(steps):
        x = torch.randn(BATCH, WIDTH)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            for block in model:
                x = call(block, x)
            loss = x.square().mean()
        num_bytes = sum(kept.values())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, num_bytes


def main() -> None:
    """Train twice, and compare."""
    plain, plain_bytes = train(lambda block, x: block(x))
    recomputed, recomputed_bytes = train(zero_ckpt.checkpoint)
    print(f"losses without checkpoints: {plain}, activations {plain_bytes / 1e6:.0f} MB")
    print(f"losses with checkpoints:    {recomputed}, activations {recomputed_bytes / 1e6:.0f} MB")
    assert recomputed == plain


if __name__ == "__main__":
    main()
