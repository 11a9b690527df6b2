"""One call of a checkpointed function: saved tensors are dropped, and recomputed in backward."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import RLock, get_ident
from typing import Any, Final, NamedTuple, final

import torch
from attrs import define, field
from torch import Tensor, nn

from zero_ckpt.inputs.savers import AbstractKept

from .call import Call
from .errors import CheckpointError, NondeterminismError
from .rng import RngSnapshot
from .torch_private import (
    accelerator,
    current_backward,
    is_plain,
    next_sequence_number,
    version_of,
    without_modes,
)
from .verify import Witness

# NOTE(frame): autograd passes each tensor that it saves to `_pack`, and saves the _Placeholder that
# `_pack` returns: a number. When backward asks for one of them, the function runs again, under
# hooks that count in the same order and keep the tensors of these numbers. No segment runs a
# backward of its own, so it does not matter which inputs require gradients, hooks fire once, and
# autograd.grad() works.

# NOTE(stop): the second run may end as soon as the last tensor is saved. But a node saves inputs
# before its kernel runs, and some kernels fill one of them without a new version (RReLU fills its
# noise). So the second run does not end early where the last node saves a tensor that a kernel may
# fill: floating-point memory that needs no gradient and was not written yet.


class AbstractCompanion(ABC):
    """Extra work around both runs of one call: measuring, comparing, keeping. One per call."""

    @abstractmethod
    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of the function's first run."""

    @abstractmethod
    def recompute(self) -> AbstractContextManager[Any]:
        """Return the context of each later run; left by `_Stop` once nothing more is needed."""


class AutocastState(NamedTuple):
    """Autocast of one type of device, by the arguments of `torch.autocast`."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool

    @classmethod
    def capture(cls) -> tuple[AutocastState, ...]:
        """Return the current states of the CPU and of the accelerator. Local."""
        device = accelerator()
        cache = torch.is_autocast_cache_enabled()
        return tuple(
            cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cache)
            for kind in (("cpu",) if device is None else ("cpu", device.type))
        )


@final
@define(eq=False)
class RecomputeLock:
    """Lock of the thread that recomputes: one thread at a time, as generators are shared."""

    _lock: RLock = field(factory=RLock, init=False)
    # Id of the thread that has the lock, once per nested entry; empty if no thread has it.
    _holders: list[int] = field(factory=list, init=False)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._holders.append(get_ident())

    def __exit__(self, *exception: object) -> None:
        self._holders.pop()
        self._lock.release()

    @property
    def is_mine(self) -> bool:
        """Return whether this thread is inside a recomputation."""
        return get_ident() in self._holders


class _Stop(BaseException):
    """Signal that backward's tensors are all computed; no `except Exception` catches it."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame


class _Facts(NamedTuple):
    """Properties of a tensor that autograd saves; both runs must agree on the first three."""

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
class _Placeholder:
    """Placeholder that an autograd node saves instead of a tensor that is not kept."""

    frame: Frame
    index: int


@define(eq=False)
class Frame:
    """One call; lives as long as autograd may ask for any of its saved tensors."""

    layer: str
    call: Call
    kept: AbstractKept
    rng: RngSnapshot
    lock: RecomputeLock
    companions: list[AbstractCompanion]
    witness: Witness | None
    stops_early: bool
    # Makes a context for the restoring of inputs; it measures this if calls are profiled.
    copying: Callable[[], AbstractContextManager[Any]]
    autocast: tuple[AutocastState, ...] = field(factory=AutocastState.capture, init=False)
    _saved: list[weakref.ref[_Placeholder]] = field(factory=list, init=False)
    _facts: list[_Facts] = field(factory=list, init=False)
    # Index of a saved tensor -> the tensor computed again, and its version at that time. `find`
    # takes a tensor out.
    _found: dict[int, tuple[Tensor, int]] = field(factory=dict, init=False)
    # Number of the backward for which `_found` was computed; -1 outside of any.
    _backward: int = field(default=-1, init=False)
    # Whether the first run has ended.
    _is_over: bool = field(default=False, init=False)
    # Sequence number of the autograd node that saved the last tensor in the first run.
    _last_node: int = field(default=-1, init=False)
    # Whether the second run may end right after it saves the last tensor; see NOTE(stop).
    _may_stop: bool = field(default=True, init=False)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the function for the first time."""
        with ExitStack() as stack:
            stack.enter_context(self.rng.tracker.restored())
            for companion in self.companions:
                stack.enter_context(companion.forward())
            # The witness is the innermost mode, so it sees every operator that the function calls.
            if self.witness is not None:
                stack.enter_context(self.witness)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack))
            outputs = self.call.function(*args, **kwargs)
        self._is_over = True
        return outputs

    def _pack(self, tensor: Tensor) -> _Placeholder:
        saved = _Placeholder(self, len(self._saved))
        self._saved.append(weakref.ref(saved))
        facts, node = _Facts.of(tensor), next_sequence_number()
        self._facts.append(facts)
        is_new = not facts.version and not tensor.requires_grad and tensor.is_floating_point()
        is_filled = not is_new or isinstance(tensor, nn.Parameter)
        self._may_stop = is_filled and (self._may_stop or node != self._last_node)
        self._last_node = node
        if self.witness is not None:
            self.witness.note(tensor, facts.address)
        return saved

    def find(self, saved: _Placeholder) -> Tensor:
        """Return a placeholder's tensor. Collective where the inputs were split over ranks."""
        with self.lock:
            backward = current_backward()
            if backward == -1 or backward != self._backward:
                self._found.clear()
            self._backward = backward
            # This recomputes too where autograd asks twice for one tensor.
            if saved.index not in self._found:
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
        self.call.check_params(self.layer, "after it was called")
        # In a backward within the first run, modes that record that run must not see the restoring.
        with self.copying() if self._is_over else without_modes():
            inputs = self.kept.restore()
        count = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count
            facts = self._compare(count, tensor) if count < len(self._saved) else None
            # Without `detach`, an output would refer to its node, and the node to the output.
            tensor = tensor.detach()
            if facts is not None and self._saved[count]() is not None:
                if self.witness is not None:
                    self.witness.compare(count, tensor, facts.address, str(facts))
                self._found[count] = tensor, version_of(tensor)
            count += 1
            # A backward within the first run stops here in any case: the function, if it went on,
            # would call that backward again.
            may_stop = self._may_stop or not self._is_over
            if self.stops_early and may_stop and count == len(self._saved):
                raise _Stop(self)
            return tensor

        try:
            with ExitStack() as stack:
                stack.enter_context(self.rng.drawn_again())
                stack.enter_context(torch.enable_grad())
                # Leaving an autocast empties its cache, which takes as long as a small operator, so
                # the present state is not entered anew if it is right.
                states = self.autocast
                if any(state.enabled for state in states) or states != AutocastState.capture():
                    for state in states:
                        stack.enter_context(torch.autocast(**state._asdict()))
                for companion in self.companions:
                    stack.enter_context(companion.recompute())
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, _as_it_is))
                self.call.again(inputs)
        except _Stop as stop:
            if stop.frame is not self:
                raise
        except BaseException:
            self._found.clear()
            raise
        if count < len(self._saved) or (self._is_over and count != len(self._saved)):
            self._found.clear()
            raise NondeterminismError(
                f"{self.layer}: autograd saved {len(self._saved)} tensors in forward and {count} "
                f"when it was computed again. {_WHY}"
            )

    def _compare(self, index: int, tensor: Tensor) -> _Facts:
        old, new = self._facts[index], _Facts.of(tensor)
        if new[:3] != old[:3]:
            raise NondeterminismError(
                f"{self.layer}: saved tensor {index} of {len(self._saved)} was {old} in forward, "
                f"and is {new} when it is computed again. {_WHY}"
            )
        is_written = new.address == old.address and new.version != old.version and new.address
        # The memory may have been freed and given to a tensor with another version counter.
        if is_written and (self.witness is None or self.witness.is_same(index, tensor)):
            raise CheckpointError(
                f"{self.layer}: saved tensor {index} of {len(self._saved)} ({old}) was written in "
                "place between forward and backward (a weight, by an optimizer's step?), so it "
                "cannot be computed again; run backward first, or write to a clone."
            )
        return new


_WHY: Final = (
    "What it computes must depend on its arguments, its modules and tracked randomness alone (a "
    "counter, a cache, an iterator that is used up, numpy's or Python's random?), and training "
    "mode and requires_grad be as in forward. Checkpointer(verifies=Verification()) names the "
    "first saved tensor that has other values"
)


def _unpack(saved: _Placeholder) -> Tensor:
    return saved.frame.find(saved)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@final
class Synchronized(AbstractCompanion):
    """Waits for the current accelerator before and after both runs; for nothing on the CPU."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Wait before and after either run."""
        _wait()
        try:
            yield
        finally:
            _wait()

    recompute = forward


def _wait() -> None:
    if accelerator() is not None:
        torch.accelerator.synchronize()
