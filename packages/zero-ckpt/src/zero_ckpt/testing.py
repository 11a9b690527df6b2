"""For tests of checkpointing: copies that come late, a clock of one's own, a default made anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import asdict, define, field
from torch import Tensor

from zero_ckpt import megatron as _default
from zero_ckpt.inputs.packed import Copy, PackedSaver

from .checkpointer import Checkpointer
from .profile import Profile


@define(eq=False)
class LateHost:
    """In place of a `PinnedHost`: copies at the last moment that is allowed, of CPU tensors too.

    What it is to write is NaN until somebody settles the copy: shows who reads too early.
    """

    log: list[tuple[str, int]] = field(factory=list)  # what happened to the how-manieth
    read_from: list[int] = field(factory=list)  # addresses of what was copied away
    num_allocations: int = 0
    _numbers: dict[int, int] = field(factory=dict)  # by address on the host

    def takes(self, tensor: Tensor) -> bool:
        """All."""
        return True

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Of this one host."""
        self.num_allocations += 1
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def away(self, source: Tensor, target: Tensor) -> Copy:
        """Nothing has been read yet when it returns."""
        self.read_from.append(source.data_ptr())
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
    """Have a saver copy to such a host, which is returned. Local."""
    host = LateHost()
    saver._host = host  # type: ignore[assignment]
    return host


def clocked(checkpointer: Checkpointer, now_s: Callable[[], float]) -> Checkpointer:
    """The same checkpointer, which from now on measures times with this clock. Local."""
    checkpointer._profile = Profile(now_s)
    return checkpointer


def choices_of(checkpointer: Checkpointer) -> dict[str, Any]:
    """What it was told last, by the argument of `configure`. Local."""
    return asdict(checkpointer._configuration)


@contextmanager
def fresh_default() -> Iterator[Checkpointer]:
    """Inside, `checkpoint`, `configure` and their like are those of a new Checkpointer. Local."""
    before = _default._DEFAULT
    _default._DEFAULT = Checkpointer()  # type: ignore[misc]
    try:
        yield _default._DEFAULT
    finally:
        _default._DEFAULT = before  # type: ignore[misc]
