"""zero-offload alone: a small GPT in bf16 with AdamW's state on disk, next to one in memory.

    python examples/only_offload.py
    python examples/only_offload.py --path /local/nvme --steps 50

One process, a plain loop. The two losses of each line are equal to the last bit.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zero_offload import OffloadedOptimizer

NUM_SYMBOLS = 256  # one per byte: no tokenizer
CONTEXT, WIDTH, NUM_LAYERS, NUM_HEADS = 64, 128, 4, 4
SIZES = {"subgroup_bytes": 2**20, "small_bytes": 2**16}


class GPT(nn.Module):
    """Bytes in, a score for each possible next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_SYMBOLS, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, NUM_HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, NUM_LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, NUM_SYMBOLS)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, context) to (batch, context, symbols)."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]).to(self.head.weight)
        places = self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.blocks(self.embed(x) + places, mask=mask, is_causal=True))


def train(data: Tensor, steps: int, **where: Any) -> tuple[list[float], OffloadedOptimizer]:
    """Train from the same start on the same batches; return the losses and the optimizer."""
    torch.manual_seed(0)
    model = GPT().to(torch.bfloat16)
    # The only change to the loop. The sizes are needed because this model is tiny.
    optimizer = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, **SIZES, **where)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(data) - CONTEXT, (8, 1))
        batch = data[starts + torch.arange(CONTEXT + 1)].long()
        scores = model(batch[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses, optimizer


def main() -> None:
    """Train twice, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a folder on the disk")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files)[:2_000_000]
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    in_memory, _ = train(data, args.steps)
    on_disk, optimizer = train(data, args.steps, state="disk", path=args.path)

    for step, (left, right) in enumerate(zip(in_memory, on_disk, strict=True)):
        print(f"step {step:3}  in memory {left:.6f}  on disk {right:.6f}")
    held = optimizer.footprint
    print(f"state on disk {held.disk_bytes:,} bytes; host memory {held.host_bytes:,} bytes")
    optimizer.close()
    if in_memory != on_disk:
        raise SystemExit("the losses differ")


if __name__ == "__main__":
    main()
