"""Checkpointer: how calls are checkpointed, and all state that this needs."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any, final

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ._ambient import Ambient
from ._buffers import OnceWritten
from ._call import Call
from ._errors import CheckpointError
from ._frame import Companion, Frame
from ._keep import Keeping
from ._memory import Ledger
from ._policy import OperatorPolicy, check_operator_policy
from ._rng import RngSnapshot, devices_of
from ._savers import AbstractSaver, KeepSaver
from ._torch_compat import uncompiled
from ._tracker import RngTracker


@final
class Checkpointer:
    """Runs functions whose activations are dropped, and computed again in backward.

    Args:
        saver: What is kept of a function's inputs; the inputs as they are when None.
        tracker: Named rngs, restored for the second run too; one of its own when None.
        stops_early: Whether the second run ends as soon as backward has all it needs.
        keeps: Decides, for each call of an operator in a function's first run, whether its output
            is kept, so that the operator need not run again: `MATMULS`, or any function of an
            `OperatorCall`. Kept are new tensors in memory of their own that nobody writes to before
            backward; other calls run again whatever it says. None keeps nothing.

    Raises:
        CheckpointError: An argument is not of its type.
    """

    def __init__(
        self,
        *,
        saver: AbstractSaver | None = None,
        tracker: RngTracker | None = None,
        stops_early: bool = True,
        keeps: OperatorPolicy | None = None,
    ) -> None:
        for name, value, kind in (
            ("saver", saver, AbstractSaver),
            ("tracker", tracker, RngTracker),
        ):
            if value is not None and not isinstance(value, kind):
                raise CheckpointError(
                    f"Checkpointer({name}=): expected {kind.__name__} or None, got {value!r}"
                )
        self.saver = KeepSaver() if saver is None else saver
        self.tracker = RngTracker() if tracker is None else tracker
        self.stops_early = stops_early
        if keeps is not None:
            check_operator_policy(keeps, "Checkpointer(keeps=)")
        self.keeps = keeps
        self._ledger = Ledger()
        self._lock = RLock()

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function and drop its activations; backward computes them again.

        Local, unless the saver splits inputs over ranks. Outputs, gradients and random numbers
        are, to the bit, those of `function(*args, **kwargs)`: for the second run every generator
        (the CPU's, those of the devices of tensors in the arguments, every rng of the tracker) and
        autocast are as they were for the first, and afterwards as they were before it. Buffers that
        a module writes in training (batch norm's statistics) are written once. Where gradients
        are off, nothing is kept at all.

        Inside torch.compile the compiler itself recomputes, as it does for torch's checkpoint. It
        knows nothing of savers, rngs and `keeps`: where this checkpointer has any, the graph breaks
        here, and the function runs as it is.

        Args:
            function: Takes and returns anything. It must compute the same when it is called again
                with the same arguments.
            *args: Tensors anywhere in nested dicts, lists, tuples and dataclasses, and all else.
            **kwargs: Likewise.

        Returns:
            What the function returns.

        Raises:
            CheckpointError: The function wrote in place to a tensor that it was given. In
                backward: an input or weight was written in place meanwhile.
            NondeterminismError: In backward: the second run saved other tensors than the first.
        """
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():
            if self._is_plain():
                return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
            return _record(self, function, args, kwargs)
        return self._record(function, args, kwargs)

    def _record(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        call, inputs = Call.of(function, args, kwargs)
        layer = _name_of(function)
        frame = Frame(
            layer=layer,
            call=call,
            kept=self.saver.save([tensor.detach() for tensor in inputs], layer),
            rng=RngSnapshot.take(devices_of(inputs), self.tracker),
            ambient=Ambient.take(),
            tracker=self.tracker,
            lock=self._lock,
            companions=self._companions(function),
            stops_early=self.stops_early,
        )
        with frame.recording():
            outputs = function(*args, **kwargs)
        call.check_unwritten(inputs, layer)
        return outputs

    def _is_plain(self) -> bool:
        """Whether it does no more than torch's own checkpoint."""
        has_rngs = bool(self.tracker.get_states())
        return isinstance(self.saver, KeepSaver) and not has_rngs and self.keeps is None

    def _companions(self, function: Callable[..., Any]) -> tuple[Companion, ...]:
        found = (OnceWritten.of(function), self._keeping(function))
        return tuple(companion for companion in found if companion is not None)

    def _keeping(self, function: Callable[..., Any]) -> Keeping | None:
        if self.keeps is None:
            return None
        return Keeping(_name_of(function), self.keeps, self._ledger)

    @property
    def kept_bytes(self) -> int:
        """Bytes of outputs of operators that `keeps` keeps now, on all devices together."""
        return self._ledger.num_bytes


@uncompiled
def _record(checkpointer: Checkpointer, function: Any, args: Any, kwargs: Any) -> Any:
    return checkpointer._record(function, args, kwargs)


def _name_of(function: Callable[..., Any]) -> str:
    module = getattr(function, "__self__", function)
    if isinstance(module, torch.nn.Module):
        return f"checkpoint of a {type(module).__name__}"
    return f"checkpoint of {getattr(function, '__qualname__', repr(function))}"
