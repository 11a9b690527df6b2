"""Outputs of operators that are kept, and stand in for the operators in the second run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch._ops import OpOverload

from zero_ckpt.inputs.memory import Ledger, Storages, is_known, storages_in, tensors_in

from .call import replace_in
from .errors import NondeterminismError
from .frame import AbstractCompanion
from .policies import OperatorCall, OperatorPolicy
from .rng import devices_of, get_state, set_state
from .torch_private import (
    OperatorMode,
    alias_of,
    can_be_kept,
    current_backward,
    keeps_graph,
    may_draw,
    untraced,
    version_of,
    writes_unseen,
)

# NOTE(keep): both runs pass through a dispatch mode, which sees operators below autograd: nodes are
# recorded as ever, only kernels need not run. To run an operator after all is always right, as its
# arguments are there; so whatever is in doubt (memory that was written to since, a second backward
# over a graph that was not retained) is not kept, or not used.


@define(eq=False)
class _Kept:
    """What one call of an operator returned; counted for as long as it lives."""

    arguments: tuple[Any, ...]  # shapes and dtypes
    _output: Any  # aliases: the tensors themselves lead to their graph, which leads to us
    _versions: Sequence[int]
    _generators: Mapping[torch.device, Tensor]  # where they were afterwards, if it may draw
    _storages: Storages
    _ledger: Ledger

    def __attrs_post_init__(self) -> None:
        self._ledger.enter(self._storages)

    def __del__(self) -> None:
        self._ledger.give_up(self._storages)

    @property
    def is_written(self) -> bool:
        """Whether it is no longer what the operator returned."""
        return [version_of(tensor) for tensor in tensors_in(self._output)] != self._versions

    def lies_in(self, written: Storages) -> bool:
        """Whether any of its memory is among this."""
        return not self._storages.keys().isdisjoint(written)

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
class Keeping(AbstractCompanion):
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

    def give_up(self, written: Storages) -> None:
        """This memory has been written to, perhaps."""
        self.steps = [
            _Step(step.operator, None) if step.kept and step.kept.lies_in(written) else step
            for step in self.steps
        ]

    def keep(self, operator: OpOverload, args: Any, kwargs: Any, output: Any) -> _Kept | None:
        """If the policy says so, and it can be kept."""
        if not self.policy(OperatorCall(operator, args, kwargs, output, self.ledger.num_bytes)):
            return None
        tensors = tensors_in(output)
        if not tensors or not all(map(is_known, tensors)):
            return None
        storages = storages_in(output)
        if not storages.keys().isdisjoint(storages_in((args, kwargs))):
            return None  # an alias that does not say so
        devices = (_CPU, *devices_of(tensors)) if may_draw(operator) else ()
        return _Kept(
            _facts_of(args, kwargs),
            replace_in(output, Tensor, alias_of),
            [version_of(tensor) for tensor in tensors],
            {device: get_state(device) for device in devices},
            storages,
            self.ledger,
        )


class _Mode(OperatorMode):
    def __init__(self, keeping: Keeping) -> None:
        super().__init__()
        self.keeping = keeping


class _First(_Mode):
    @untraced
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if writes_unseen(func):
            self.keeping.give_up(storages_in((args, kwargs)))
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


def _facts_of(args: Any, kwargs: Any) -> tuple[Any, ...]:
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors_in((args, kwargs)))


def _shown(facts: tuple[Any, ...]) -> str:
    return ", ".join(f"{tuple(shape)} {dtype}" for shape, dtype in facts) or "no tensor"
