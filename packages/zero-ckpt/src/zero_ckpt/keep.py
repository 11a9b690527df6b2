"""Outputs of operators that are kept in the first run and returned in the second one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from attrs import define, field
from torch import Tensor

from zero_ckpt.inputs.memory import Ledger, Storages, is_known, storages_in, tensors_in

from .call import replace_in
from .errors import NondeterminismError
from .frame import AbstractCompanion
from .policies import OperatorCall, OperatorPolicy
from .rng import devices_of, get_state, set_state
from .torch_private import (
    OperatorMode,
    OpOverload,
    alias_of,
    can_be_kept,
    current_backward,
    keeps_graph,
    may_draw,
    untraced,
    version_of,
    views_unseen,
    written_by,
)

# NOTE(keep): both runs pass through a dispatch mode, which sees operators below autograd: nodes are
# recorded as without it, only kernels need not run. Running an operator is always right, as its
# arguments exist. So an output is not kept, or not used, wherever it may be wrong: if its memory
# was written to since, or in a second backward over a graph that was not retained.


@define(eq=False)
class _KeptOutput:
    """Output of one call of an operator; its bytes are in the ledger for as long as it lives."""

    # Shape and dtype of each tensor among the arguments.
    arguments: tuple[Any, ...]
    # What the operator returned, with aliases in place of tensors: the tensors themselves refer to
    # their graph, and the graph to this object.
    _output: Any
    # Device -> state of its generator after the call; empty if the operator draws no numbers.
    _generators: Mapping[torch.device, Tensor]
    _storages: Storages
    _ledger: Ledger
    # Aliases of the output, each with its version when it was recorded.
    _watched: list[tuple[Tensor, int]] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self.watch(tensors_in(self._output))
        self._ledger.count(self._storages)

    def __del__(self) -> None:
        self._ledger.give_up(self._storages)

    @property
    def is_written(self) -> bool:
        """Return whether the output was written in place after the operator returned it."""
        return any(version_of(tensor) != version for tensor, version in self._watched)

    def watch(self, aliases: Iterable[Tensor]) -> None:
        """Record versions of aliases: a write in place to one of them changes the output."""
        self._watched += ((alias, version_of(alias)) for alias in aliases)

    def lies_in(self, written: Storages) -> bool:
        """Return whether any storage of the output is among these."""
        return not self._storages.keys().isdisjoint(written)

    def stand_in(self) -> Any:
        """Return new aliases of the output, and set generators to their states after the call."""
        for device, state in self._generators.items():
            set_state(device, state)
        return replace_in(self._output, Tensor, alias_of)


@define(eq=False)
class Keeping(AbstractCompanion):
    """Outputs of operators that a policy keeps in the first run, and later runs return."""

    layer: str
    policy: OperatorPolicy
    ledger: Ledger
    # The calls of the first run, in order, of operators of which any call is kept.
    _calls: list[tuple[OpOverload, _KeptOutput | None]] = field(factory=list, init=False)
    # Whether the first run was in inference mode at times. Below a dispatch mode, versions of a
    # copy of an inference tensor are counted differently, so the second run needs the mode too.
    _has_inference: bool = field(default=False, init=False)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Keep the outputs of the first run that the policy selects, one call after another."""
        try:
            with _Mode(self._call_first):
                yield
        finally:
            self._forget(lambda kept: kept.is_written)
            operators = {operator for operator, kept in self._calls if kept is not None}
            self._calls = [call for call in self._calls if call[0] in operators]

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Run only operators whose outputs are not kept, and return those that are.

        A backward that does not retain its graph drops them afterwards.
        """
        if not self._calls and not self._has_inference:
            yield
            return
        operators = {operator for operator, _ in self._calls}
        try:
            with _Mode(partial(self._call_again, iter(self._calls), operators)):
                yield
        finally:
            if current_backward() != -1 and not keeps_graph():
                self._calls = []

    def _forget(self, is_lost: Callable[[_KeptOutput], bool]) -> None:
        self._calls = [
            (operator, None if kept is not None and is_lost(kept) else kept)
            for operator, kept in self._calls
        ]

    def _call_first(self, func: Any, args: Any, kwargs: Any) -> Any:
        output = func(*args, **kwargs)
        self._has_inference |= torch.is_inference_mode_enabled()
        if written := storages_in(written_by(func, args, kwargs)):
            self._forget(lambda kept: kept.lies_in(written))
        if views_unseen(func):
            self._watch(tensors_in(output))
        if can_be_kept(func):
            self._calls.append((func, self._keep(func, args, kwargs, output)))
        return output

    def _watch(self, views: Iterable[Tensor]) -> None:
        memory = storages_in(views)
        # Most views are of the output that was returned last, so it is looked at first.
        for _, kept in reversed(self._calls):
            if kept is not None and kept.lies_in(memory):
                kept.watch(map(alias_of, views))
                return

    def _keep(
        self, operator: OpOverload, args: Any, kwargs: Any, output: Any
    ) -> _KeptOutput | None:
        """Return the output to keep; None if the policy does not select it or it cannot be kept."""
        if not self.policy(OperatorCall(operator, args, kwargs, output, self.ledger.num_bytes)):
            return None
        tensors = tensors_in(output)
        if not tensors or not all(map(is_known, tensors)):
            return None
        storages = storages_in(output)
        if not storages.keys().isdisjoint(storages_in((args, kwargs))):
            # The output is an alias of an argument, though the operator's schema says otherwise.
            return None
        devices = (_CPU, *devices_of(tensors)) if may_draw(operator) else ()
        return _KeptOutput(
            _facts_of(args, kwargs),
            replace_in(output, Tensor, alias_of),
            {device: get_state(device) for device in devices},
            storages,
            self.ledger,
        )

    def _call_again(
        self,
        calls: Iterator[tuple[OpOverload, _KeptOutput | None]],
        operators: Set[OpOverload],
        func: Any,
        args: Any,
        kwargs: Any,
    ) -> Any:
        if func not in operators:
            return func(*args, **kwargs)
        operator, kept = next(calls, (None, None))
        if operator is not func:
            raise NondeterminismError(
                f"{self.layer}: {func} was called when it was computed again, where in "
                f"forward {'nothing more' if operator is None else operator} was, of the "
                f"operators that are kept; {_WHY}"
            )
        if kept is None or kept.is_written:
            return func(*args, **kwargs)
        if (arguments := _facts_of(args, kwargs)) != kept.arguments:
            raise NondeterminismError(
                f"{self.layer}: {func}, whose output is kept, was given "
                f"{_shown(kept.arguments)} in forward, and {_shown(arguments)} when it was "
                f"computed again; {_WHY}"
            )
        return kept.stand_in()


class _Mode(OperatorMode):
    def __init__(self, call: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self._call = call

    @untraced
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._call(func, args, kwargs or {})


_CPU: Final = torch.device("cpu")
_WHY: Final = (
    "what a function computes must depend on its arguments, its modules and tracked randomness "
    "alone (a counter, a cache, numpy's or Python's random?)"
)


def _facts_of(args: Any, kwargs: Any) -> tuple[Any, ...]:
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors_in((args, kwargs)))


def _shown(facts: tuple[Any, ...]) -> str:
    return ", ".join(f"{tuple(shape)} {dtype}" for shape, dtype in facts) or "no tensor"
