"""One call of a checkpointed function: what it saved is dropped, and computed again when asked."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final, NamedTuple, final

import torch
from attrs import define, field
from torch import Tensor

from zero_ckpt.inputs.savers import AbstractKept

from .call import Call
from .errors import CheckpointError, NondeterminismError
from .rng import RngSnapshot, RngTracker
from .surroundings import Ambient, Turn
from .torch_private import current_backward, is_plain, version_of
from .verify import Witness

# NOTE(frame): autograd hands what it wants to save to `_pack`, which gives it a _Saved instead: a
# number. When backward asks for one of them, the function runs again, under hooks that count in the
# same order and keep what the numbers stand for. Nothing depends on which inputs require gradients,
# hooks fire once, and autograd.grad() works: unlike in a backward of its own for each segment.


class AbstractCompanion(ABC):
    """What goes along with both runs of one call: measures, compares, keeps more. One per call."""

    @abstractmethod
    def forward(self) -> AbstractContextManager[Any]:
        """Around the function's first run."""

    @abstractmethod
    def recompute(self) -> AbstractContextManager[Any]:
        """Around each later one; left by an exception of ours when nothing more is needed."""


class _Stop(BaseException):
    """Everything that backward needs has been computed. No `except Exception` stops it."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame


class _Facts(NamedTuple):
    """Of a tensor that autograd saves; both runs must agree on the first three."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    address: int
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Facts:
        address = tensor.data_ptr() if is_plain(tensor) else 0
        return cls(tensor.shape, tensor.dtype, tensor.device, address, version_of(tensor))

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype} on {self.device}"


@define(eq=False)
class _Saved:
    """What stands in a node for a tensor that is not kept."""

    frame: Frame
    index: int


class _Found(NamedTuple):
    """A tensor that was computed again, and how often its memory had been written to then."""

    tensor: Tensor
    version: int


@define(eq=False)
class Frame:
    """One call. Lives as long as anything that it saved may be asked for."""

    layer: str  # for messages
    call: Call
    kept: AbstractKept
    rng: RngSnapshot
    ambient: Ambient
    tracker: RngTracker
    turn: Turn
    companions: tuple[AbstractCompanion, ...] = ()
    witness: Witness | None = None
    stops_early: bool = True
    _saved: list[weakref.ref[_Saved]] = field(factory=list, init=False)
    _facts: list[_Facts] = field(factory=list, init=False)
    _found: dict[int, _Found] = field(factory=dict, init=False)  # not yet asked for
    _backward: int = field(default=-1, init=False)  # for which that was

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the first run."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        is_alone = not self.companions and self.witness is None
        beside = nullcontext() if is_alone else self._accompanied()
        with self.tracker.restored(), beside, hooks:
            yield

    @contextmanager
    def _accompanied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for companion in self.companions:
                stack.enter_context(companion.forward())
            if self.witness is not None:  # the innermost: it sees what the function does
                stack.enter_context(self.witness.forward())
            yield

    @property
    def num_saved(self) -> int:
        """Tensors that autograd wanted to save so far."""
        return len(self._saved)

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(self, len(self._saved))
        self._saved.append(weakref.ref(saved))
        self._facts.append(_Facts.of(tensor))
        if self.witness is not None:
            self.witness.note(tensor)
        return saved

    def find(self, saved: _Saved) -> Tensor:
        """The tensor that it stands for. Collective where the inputs were split over ranks."""
        with self.turn:
            backward = current_backward()
            if backward == -1 or backward != self._backward:
                self._found.clear()
            self._backward = backward
            if saved.index not in self._found:  # also where autograd asks twice
                self._recompute()
            tensor, version = self._found.pop(saved.index)
            if version_of(tensor) != version:
                raise CheckpointError(
                    f"{self.layer}: saved tensor {saved.index} of {len(self._saved)} "
                    f"({self._facts[saved.index]}) was written in place by the function itself, "
                    "after autograd had saved it, so that no gradient can be computed from it, "
                    "with or without a checkpoint; write to a clone"
                )
            return tensor

    def _recompute(self) -> None:
        inputs = self.kept.restore()
        count = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count
            self._compare(count, tensor)
            tensor = tensor.detach()  # an output would hold its node, and its node the output
            saved = self._saved[count]() if count < len(self._saved) else None
            if saved is not None:
                self._verify(count, tensor)
                self._found[saved.index] = _Found(tensor, version_of(tensor))
            count += 1
            if self.stops_early and count == len(self._saved):
                raise _Stop(self)
            return tensor

        try:
            with ExitStack() as stack:
                stack.enter_context(self.rng.drawn_again(self.tracker))
                stack.enter_context(self.ambient.again())
                for companion in self.companions:
                    stack.enter_context(companion.recompute())
                if self.witness is not None:
                    stack.enter_context(self.witness.recompute(inputs))
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, _as_it_is))
                self.call.again(inputs)
        except _Stop as stop:
            if stop.frame is not self:
                raise
        except BaseException:
            self._found.clear()
            raise
        if count != len(self._saved):
            self._found.clear()
            raise NondeterminismError(
                f"{self.layer}: autograd saved {len(self._saved)} tensors in forward and {count} "
                f"when it was computed again. {self._why()}"
            )

    def _compare(self, index: int, tensor: Tensor) -> None:
        new = _Facts.of(tensor)
        if index >= len(self._facts):
            return  # counted at the end
        old = self._facts[index]
        if new[:3] != old[:3]:
            raise NondeterminismError(
                f"{self.layer}: saved tensor {index} of {len(self._saved)} was {old} in forward, "
                f"and is {new} when it is computed again. {self._why(index, tensor)}"
            )
        if new.address == old.address and new.version != old.version and new.address:
            raise CheckpointError(
                f"{self.layer}: saved tensor {index} of {len(self._saved)} ({old}) was written in "
                "place between forward and backward (a weight, by an optimizer's step?), so it "
                "cannot be computed again; run backward first, or write to a clone."
                + ("" if self.witness is None else f" {self._why(index, tensor)}")
            )

    def _verify(self, index: int, tensor: Tensor) -> None:
        if self.witness is not None:
            address = _Facts.of(tensor).address
            is_same_memory = address == self._facts[index].address != 0
            self.witness.compare(index, tensor, is_same_memory)

    def _why(self, index: int | None = None, tensor: Tensor | None = None) -> str:
        return _WHY if self.witness is None else self.witness.why(index, tensor)


_WHY: Final = (
    "What it computes must depend on its arguments, its modules and tracked randomness alone (a "
    "counter, a cache, an iterator that is used up, numpy's or Python's random?), and training "
    "mode and requires_grad be as in forward. Checkpointer(verifies=Verification()) names the "
    "first operator that differs"
)


def _unpack(saved: _Saved) -> Tensor:
    return saved.frame.find(saved)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


# ---- The edges of a checkpoint, at which a device may be waited for ----


@final
class Synchronized(AbstractCompanion):
    """Waits for the current accelerator before and after both runs; for nothing on the CPU."""

    def forward(self) -> AbstractContextManager[Any]:
        """Around the first run."""
        return _synchronized()

    def recompute(self) -> AbstractContextManager[Any]:
        """Around the second."""
        return _synchronized()


@contextmanager
def _synchronized() -> Iterator[None]:
    _wait()
    try:
        yield
    finally:
        _wait()


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
