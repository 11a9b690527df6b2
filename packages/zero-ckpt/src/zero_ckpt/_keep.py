"""Outputs of operators that are kept, and stand in for the operators in the second run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any, Final

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ._errors import NondeterminismError
from ._frame import Companion
from ._nested import replace_in
from ._policy import OperatorCall, OperatorPolicy
from ._rng import devices_of, get_state, set_state
from ._torch_compat import (
    alias_of,
    can_be_kept,
    current_backward,
    keeps_graph,
    may_draw,
    storages_of,
    untraced,
    version_of,
    writes_unseen,
)

# NOTE(keep): both runs pass through a dispatch mode, which sees operators below autograd: nodes are
# recorded as ever, only kernels need not run. To run an operator after all is always right, as its
# arguments are there; so whatever is in doubt (memory that was written to since, a second backward
# over a graph that was not retained) is not kept, or not used.


@define(eq=False)
class Ledger:
    """How many bytes a checkpointer keeps: each piece of memory once, however many keep it."""

    _lock: Lock = field(factory=Lock, init=False)
    _holders: dict[int, int] = field(factory=dict, init=False)  # by address
    _num_bytes: int = field(default=0, init=False)
    # Memory is given up in finalizers, which may run anywhere, also inside our lock.
    _given_up: deque[Mapping[int, int]] = field(factory=deque, init=False)

    @property
    def num_bytes(self) -> int:
        """Now."""
        with self._lock:
            self._settle()
            return self._num_bytes

    def enter(self, storages: Mapping[int, int]) -> None:
        """Someone keeps these: sizes in bytes, by address."""
        with self._lock:
            self._settle()
            for address, num_bytes in storages.items():
                holders = self._holders.get(address, 0)
                self._holders[address] = holders + 1
                self._num_bytes += 0 if holders else num_bytes

    def give_up(self, storages: Mapping[int, int]) -> None:
        """He keeps them no more. Takes no lock."""
        self._given_up.append(storages)

    def _settle(self) -> None:
        while self._given_up:
            for address, num_bytes in self._given_up.popleft().items():
                self._holders[address] -= 1
                if not self._holders[address]:
                    del self._holders[address]
                    self._num_bytes -= num_bytes


@define(eq=False)
class _Kept:
    """What one call of an operator returned; counted for as long as it lives."""

    arguments: tuple[Any, ...]  # shapes and dtypes
    _output: Any  # aliases: the tensors themselves lead to their graph, which leads to us
    _versions: Sequence[int]
    _generators: Mapping[torch.device, Tensor]  # where they were afterwards, if it may draw
    _storages: Mapping[int, int]
    _ledger: Ledger

    def __attrs_post_init__(self) -> None:
        self._ledger.enter(self._storages)

    def __del__(self) -> None:
        self._ledger.give_up(self._storages)

    @property
    def is_written(self) -> bool:
        """Whether it is no longer what the operator returned."""
        return [version_of(tensor) for tensor in _tensors_in(self._output)] != self._versions

    def lies_in(self, addresses: Set[int]) -> bool:
        """Whether any of its memory is among these."""
        return any(address in addresses for address in self._storages)

    def stand_in(self) -> Any:
        """What the operator would return, and do to generators."""
        for device, state in self._generators.items():
            set_state(device, state)
        return replace_in(self._output, Tensor, alias_of)


@frozen(eq=False)
class _Step:
    """A call of an operator in the first run."""

    operator: OpOverload
    kept: _Kept | None


@define(eq=False)
class Keeping(Companion):
    """Keeps what a policy decides to, in the first run; hands it out in each later one."""

    layer: str  # for messages
    policy: OperatorPolicy
    ledger: Ledger
    steps: list[_Step] = field(factory=list, init=False)

    def forward(self) -> AbstractContextManager[Any]:
        """Ask the policy about each call."""
        return self._deciding()

    def recompute(self) -> AbstractContextManager[Any]:
        """Call only what is not kept. Unless the graph is retained, nothing is kept afterwards."""
        return self._standing_in()

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        try:
            with _First(self):
                yield
        finally:
            steps = [
                _Step(step.operator, None) if step.kept and step.kept.is_written else step
                for step in self.steps
            ]
            operators = {step.operator for step in steps if step.kept}
            self.steps = [step for step in steps if step.operator in operators]

    @contextmanager
    def _standing_in(self) -> Iterator[None]:
        if not self.steps:
            yield
            return
        try:
            with _Again(self):
                yield
        finally:
            if current_backward() != -1 and not keeps_graph():
                self.steps = []

    def give_up(self, tensors: Sequence[Tensor]) -> None:
        """These have been written to, perhaps."""
        written = {address for tensor in tensors for address in storages_of(tensor) or ()}
        self.steps = [
            _Step(step.operator, None) if step.kept and step.kept.lies_in(written) else step
            for step in self.steps
        ]

    def keep(self, operator: OpOverload, args: Any, kwargs: Any, output: Any) -> _Kept | None:
        """If it can be kept, and the policy says so."""
        tensors = _tensors_in(output)
        storages = _storages_of(tensors)
        if not tensors or storages is None or any(tensor.is_inference() for tensor in tensors):
            return None
        given = [storages_of(tensor) or {} for tensor in _tensors_in((args, kwargs))]
        if any(address in theirs for theirs in given for address in storages):
            return None  # an alias that does not say so
        num_bytes = sum(storages.values())
        call = OperatorCall(operator, args, kwargs, output, num_bytes, self.ledger.num_bytes)
        if not self.policy(call):
            return None
        devices = (_CPU, *devices_of(tensors)) if may_draw(operator) else ()
        return _Kept(
            _facts_of(args, kwargs),
            replace_in(output, Tensor, alias_of),
            [version_of(tensor) for tensor in tensors],
            {device: get_state(device) for device in devices},
            storages,
            self.ledger,
        )


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, keeping: Keeping) -> None:
        super().__init__()
        self.keeping = keeping

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code stays compiled

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's way is to put a function around, which imports the compiler


class _First(_Mode):
    @untraced
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if writes_unseen(func):
            self.keeping.give_up(_tensors_in((args, kwargs)))
        if can_be_kept(func):
            kept = self.keeping.keep(func, args, kwargs, output)
            self.keeping.steps.append(_Step(func, kept))
        return output


class _Again(_Mode):
    def __init__(self, keeping: Keeping) -> None:
        super().__init__(keeping)
        self.steps = iter(keeping.steps)
        self.operators = {step.operator for step in keeping.steps}

    @untraced
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self.operators:
            return func(*args, **kwargs)
        step = next(self.steps, None)
        if step is None or step.operator is not func:
            raise NondeterminismError(
                f"{self.keeping.layer}: {func} was called when it was computed again, where in "
                f"forward {'nothing more' if step is None else step.operator} was, of the "
                f"operators that are kept; {_WHY}"
            )
        kept = step.kept
        if kept is None or kept.is_written:
            return func(*args, **kwargs)
        if (arguments := _facts_of(args, kwargs)) != kept.arguments:
            raise NondeterminismError(
                f"{self.keeping.layer}: {func}, whose output is kept, was given "
                f"{_shown(kept.arguments)} in forward, and {_shown(arguments)} when it was "
                f"computed again; {_WHY}"
            )
        return kept.stand_in()


_CPU: Final = torch.device("cpu")
_WHY: Final = (
    "what a function computes must depend on its arguments, its modules and tracked randomness "
    "alone (a counter, a cache, numpy's or Python's random?)"
)


def _tensors_in(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def find(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    replace_in(value, Tensor, find)
    return found


def _storages_of(tensors: Sequence[Tensor]) -> dict[int, int] | None:
    found: dict[int, int] = {}
    for tensor in tensors:
        storages = storages_of(tensor)
        if storages is None:
            return None
        found |= storages
    return found


def _facts_of(args: Any, kwargs: Any) -> tuple[Any, ...]:
    return tuple((tensor.shape, tensor.dtype) for tensor in _tensors_in((args, kwargs)))


def _shown(facts: tuple[Any, ...]) -> str:
    return ", ".join(f"{tuple(shape)} {dtype}" for shape, dtype in facts) or "no tensor"
