"""Real text that every machine has: the source of Python's own standard library."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from model import Shape
    from torch import Tensor


def read_stdlib(limit_bytes: int) -> bytes:
    """Read the top-level modules in name order, end to end, up to `limit_bytes`."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"".join(module.read_bytes() for module in modules)[:limit_bytes]


def draw_batch(text: bytes, shape: Shape, *, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one step on one rank; the same ones in every system."""
    rng = random.Random(f"{step}/{rank}")
    length = shape.sequence + 1
    starts = [rng.randrange(len(text) - length) for _ in range(shape.batch)]
    rows = [torch.frombuffer(bytearray(text[i : i + length]), dtype=torch.uint8) for i in starts]
    tokens = torch.stack(rows).long()
    return tokens[:, :-1], tokens[:, 1:]
