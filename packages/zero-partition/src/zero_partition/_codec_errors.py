"""What codecs lose of parameters and gradients that travel, unit by unit, for who asks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from attrs import define, field
from torch import Tensor
from zero_comm import AbstractCodec


@define(eq=False)
class LossByUnit:
    """Sums of squares, by unit: of what was to be sent, and of what was lost of it."""

    _sums: dict[str, Tensor] = field(factory=dict, init=False)  # of shape (2,), float64

    @torch.no_grad()
    def note(self, unit: str, codec: AbstractCodec, parts: Iterable[Tensor]) -> None:
        """Add these, each of which is encoded apart. Encodes and decodes them once more."""
        for part in parts:
            exact = part.float()
            lost = codec.decode(codec.encode(part), torch.empty_like(exact)).sub_(exact)
            sums = torch.stack([lost.double().square().sum(), exact.double().square().sum()])
            self._sums[unit] = self._sums[unit] + sums if unit in self._sums else sums

    def relative(self) -> dict[str, float]:
        """The norm of what was lost by that of what was to be sent; 0 of zeros. Waits for it."""
        return {
            unit: 0.0 if sums[1] == 0 else (sums[0] / sums[1]).sqrt().item()
            for unit, sums in self._sums.items()
        }


@define(eq=False)
class CodecErrors:
    """What `record_codec_errors()` finds: on this rank, by name of the unit."""

    params: LossByUnit = field(factory=LossByUnit)  # of its shards, in gathers
    gradients: LossByUnit = field(factory=LossByUnit)  # of its own ones, in their first hop
