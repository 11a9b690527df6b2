"""Buffers that `state_dict()` has: rank 0's, and those of ranks that have others."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from zero_comm import Group, all_gather_json


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """By the first of its names, in `state_dict()`'s order. Local."""
    return dict(_walk(model))


def differing_buffers(
    buffers: dict[str, Tensor], *, group: Group, timeout_s: float | None = None
) -> dict[str, Tensor]:
    """Those whose values on this rank are not those of rank 0. Collective."""
    mine = {name: zlib.crc32(_bytes_of(tensor)) for name, tensor in buffers.items()}
    first = all_gather_json(mine, group=group, timeout_s=timeout_s)[0]
    return {name: buffers[name] for name in buffers if mine[name] != first.get(name)}


def _walk(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, tensor in module._buffers.items():
            if tensor is None or key in module._non_persistent_buffers_set or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield f"{prefix}.{key}" if prefix else key, tensor


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
