"""Helpers for tests of checkpointing: late copies, a given clock, a new default Checkpointer."""

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
    """Replacement for a `PinnedHost` that copies as late as is allowed, and CPU tensors too.

    The target of a copy is NaN until its `wait` is called, which shows reads that are too early.
    """

    # Events in order: "away", "away is over", "back" or "back is over", and the tensor's number.
    log: list[tuple[str, int]] = field(factory=list)
    # Addresses of the sources of copies to the host, in order.
    read_from: list[int] = field(factory=list)
    num_allocations: int = 0
    # Address on the host -> number of the tensor that was copied there last.
    _numbers: dict[int, int] = field(factory=dict)

    def takes(self, tensor: Tensor) -> bool:
        """Return True: tensors of any device are copied."""
        return True

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return new memory of the CPU, and count the allocation."""
        self.num_allocations += 1
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def to_host(self, source: Tensor, target: Tensor) -> Copy:
        """Begin a copy to `target`; `source` is not read before `Copy.wait`."""
        self.read_from.append(source.data_ptr())
        self._numbers[target.data_ptr()] = sum(what == "away" for what, _ in self.log)
        return self._begin("away", source, target, self._numbers[target.data_ptr()])

    def to_device(self, copy: Copy) -> Copy:
        """Begin a copy of `copy.target` to new memory; not read before `Copy.wait`."""
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
    """Make a saver copy to a `LateHost`, and return that host. Local."""
    host = LateHost()
    saver._host = host  # type: ignore[assignment]
    return host


def clocked(checkpointer: Checkpointer, now_s: Callable[[], float]) -> Checkpointer:
    """Make a checkpointer measure times with this clock from now on, and return it. Local."""
    checkpointer._profile = Profile(now_s)
    return checkpointer


def choices_of(checkpointer: Checkpointer) -> dict[str, Any]:
    """Return the current settings of a checkpointer, by the argument of `configure`. Local."""
    return asdict(checkpointer._configuration)


@contextmanager
def fresh_default() -> Iterator[Checkpointer]:
    """Make `checkpoint`, `configure` and the like use a new Checkpointer inside. Local."""
    before = _default._DEFAULT
    _default._DEFAULT = Checkpointer()  # type: ignore[misc]
    try:
        yield _default._DEFAULT
    finally:
        _default._DEFAULT = before  # type: ignore[misc]
