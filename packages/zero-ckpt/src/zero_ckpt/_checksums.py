"""Sums over the bits of tensors, made where the tensors are: equal bits, equal sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import torch
from attrs import define, field, frozen
from torch import Tensor

from ._torch_compat import inner_tensors, is_plain, without_modes

_CHUNK_NUMEL: Final = 1 << 19  # words of 8 bytes that are mixed at a time, in 4 MiB
_ODD: Final = (-0x61C8864680B583EB, -0x3B314601E57A13AD)  # they spread bits, and are invertible


@frozen
class Seen:
    """How a tensor was when a run saw it."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    order: tuple[int, ...]  # of its dimensions in memory; a later sum follows the same
    number: int | None  # of its sum in the run; None where values are not looked at

    def looks_like(self, other: Seen) -> bool:
        """All but the values."""
        mine, its = (self.shape, self.dtype, self.device), (other.shape, other.dtype, other.device)
        return mine == its

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype} on {self.device}"


@final
@define(eq=False)
class Checksums:
    """Makes sums, with tables that are kept for the next."""

    _weights: dict[torch.device, Tensor] = field(factory=dict, init=False)

    def of(self, tensor: Tensor, order: Sequence[int]) -> Tensor | None:
        """A sum over the bits of a tensor, which depends on where each bit is. Waits for nothing.

        Args:
            tensor: Of any shape and dtype. Read only.
            order: What `order_of` gave, for this or for the tensor to compare with.

        Returns:
            int64, of no dimensions, on the tensor's device. None for what has no bits to look at:
            meta tensors, and layouts other than strided (sparse).
        """
        with without_modes(), torch.no_grad():
            parts = inner_tensors(tensor)
            if parts is not None:
                sums = [self.of(part, order_of(part)) for part in parts]
                present = [one for one in sums if one is not None]
                return self._mixed(torch.stack(present)) if present else None
            if not is_plain(tensor):
                return None
            return self._mixed(_words(_dense(tensor, order)))

    def _mixed(self, words: Tensor) -> Tensor:
        weights = self._weights_on(words.device)
        # A flip of the highest bit alone would vanish with the next such flip: it is spread first.
        sums = [
            (chunk.bitwise_xor(chunk >> 32).mul_(weights[: chunk.numel()])).sum()
            for chunk in words.split(_CHUNK_NUMEL)
        ]
        return sums[0] if len(sums) == 1 else self._mixed(torch.stack(sums))

    def _weights_on(self, device: torch.device) -> Tensor:
        if device not in self._weights:
            weights = torch.arange(1, _CHUNK_NUMEL + 1, device=device)
            for factor in _ODD:
                weights.mul_(factor)
                weights.bitwise_xor_(weights >> 31)
            self._weights[device] = weights.bitwise_or_(1)
        return self._weights[device]


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions along which memory moves, the slowest first."""
    if not is_plain(tensor):
        return ()
    strides = tensor.stride()
    moving = [i for i, size in enumerate(tensor.shape) if size != 1 and strides[i] != 0]
    return tuple(sorted(moving, key=lambda i: -strides[i]))


def read(sums: Sequence[Tensor]) -> list[int]:
    """All of them on the host, with one wait for each device."""
    values = [0] * len(sums)
    by_device: dict[torch.device, list[int]] = {}
    for index, one in enumerate(sums):
        by_device.setdefault(one.device, []).append(index)
    with without_modes():
        for indexes in by_device.values():
            found = torch.stack([sums[index] for index in indexes]).tolist()
            for index, value in zip(indexes, found, strict=True):
                values[index] = value
    return values


def _dense(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Its elements as one dimension; a copy only where memory has gaps."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return tensor.reshape(-1)
    rest = [i for i in range(tensor.dim()) if i not in order]
    for dim in rest:  # of size 1, or all along it is the same memory
        tensor = tensor.narrow(dim, 0, 1)
    tensor = tensor.permute((*rest, *order)).contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))  # a lone element may have any stride


def _words(flat: Tensor) -> Tensor:
    """The same bits as int64; zeros are added where they end within a word."""
    itemsize = flat.element_size()
    if flat.nbytes % 8 == 0 and flat.storage_offset() * itemsize % 8 == 0:
        return flat.view(torch.int64)
    whole = flat.new_zeros(-(-max(flat.nbytes, 1) // 8), dtype=torch.int64)
    whole.view(torch.uint8)[: flat.nbytes].copy_(flat.view(torch.uint8))
    return whole
