"""A host that copies at the last moment that is allowed, and so shows who reads too early."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field
from torch import Tensor
from zero_ckpt import PackedSaver
from zero_ckpt._host import AbstractHost, Copy


@define(eq=False)
class LateHost(AbstractHost):
    """What it is to write is NaN until somebody settles the copy."""

    log: list[tuple[str, int]] = field(factory=list)  # what happened to the how-manieth
    _numbers: dict[int, int] = field(factory=dict)  # by address on the host

    def takes(self, tensor: Tensor) -> bool:
        """All."""
        return True

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Of this one host."""
        return torch.empty(tuple(shape), dtype=dtype)

    def away(self, source: Tensor, target: Tensor) -> Copy:
        """Nothing has been read yet when it returns."""
        self._numbers[target.data_ptr()] = sum(what == "away" for what, _ in self.log)
        return self._begin("away", source, target, self._numbers[target.data_ptr()])

    def back(self, copy: Copy) -> Copy:
        """Likewise."""
        assert copy.source is None, "asked back before it had gone"
        number = self._numbers[copy.target.data_ptr()]
        return self._begin("back", copy.target, torch.empty_like(copy.target), number)

    def _begin(self, what: str, source: Tensor, target: Tensor, number: int) -> Copy:
        self.log.append((what, number))
        target.data.fill_(torch.nan)
        sources = [source]

        def wait() -> None:
            self.log.append((f"{what} is over", number))
            target.data.copy_(sources.pop())

        return Copy(target, source, wait)


def late(saver: PackedSaver) -> LateHost:
    """Make a saver use such a host."""
    host = LateHost()
    saver._host = host
    return host
