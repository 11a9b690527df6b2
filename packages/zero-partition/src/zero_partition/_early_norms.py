"""Norms of gradients that leave the device, taken while they are still there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field
from torch import Tensor

from ._torch_compat import foreach_norm

_ON_ITS_WAY = -1  # in the place of a version


@define(eq=False)
class EarlyNorms:
    """Of order 2, of the parts of one gradient shard, by position.

    A norm holds as long as nobody else has the gradient's elements, and we do not write to it,
    which its version tells; and is void with a further backward, which adds to it.
    """

    _found: dict[int, tuple[Tensor, int]] = field(factory=dict, init=False)  # and the version

    def clear(self) -> None:
        """Gradients become others."""
        self._found.clear()

    def take(self, received: Sequence[Tensor]) -> None:
        """Measure what a reduction has left on the device: in float32 what has 16 bits."""
        full = {position: part for position, part in enumerate(received) if part.numel()}
        if not full:
            return
        dtype = received[0].dtype
        wide = torch.float32 if dtype.itemsize < torch.float32.itemsize else None
        norms = foreach_norm(list(full.values()), 2.0, dtype=wide)
        self._found = {p: (norm, _ON_ITS_WAY) for p, norm in zip(full, norms, strict=True)}

    def settle(self, parts: Sequence[Tensor]) -> None:
        """All of it is where it was to go: from now on a write makes a norm void."""
        for position, (norm, version) in self._found.items():
            if version == _ON_ITS_WAY:
                self._found[position] = (norm, parts[position]._version)
                parts[position].is_touched = False  # type: ignore[attr-defined]

    def of(self, position: int, part: Tensor) -> Tensor | None:
        """Of this part, if it is as it came."""
        norm, version = self._found.get(position, (None, _ON_ITS_WAY))
        is_as_it_came = part._version == version and not getattr(part, "is_touched", False)
        return norm if is_as_it_came else None
