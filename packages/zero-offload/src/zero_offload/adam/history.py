"""What the last step overwrote, so that it can be taken back to the bit."""

from __future__ import annotations

from typing import final

from attrs import define, field
from torch import Tensor

from .batches import Batch


@final
@define(eq=False)
class LastStep:
    """Copies of one step's outputs as they were before. Their memory is used again by the next."""

    _spans: list[tuple[Tensor, Tensor]] = field(factory=list)  # flat view, copy
    _steps: list[tuple[Tensor, float]] = field(factory=list)
    _spare: list[Tensor] = field(factory=list)

    def clear(self) -> None:
        """Begin another step."""
        self._spare = [copy for _, copy in self._spans]
        self._spans, self._steps = [], []

    def keep_step(self, step: Tensor) -> None:
        """Note a step count that is about to be advanced."""
        self._steps.append((step, step.item()))

    def keep(self, batch: Batch) -> None:
        """Copy what a step of this batch will overwrite. Local, blocking."""
        for column in batch.written():
            for tensor, start, stop in zip(column, batch.starts, batch.stops, strict=True):
                self._keep(tensor.view(-1)[start:stop])

    def keep_param(self, param: Tensor) -> None:
        """Copy a parameter that is stepped by way of another tensor."""
        self._spans.append((param, param.clone()))

    def restore(self) -> None:
        """Put everything back. Local, blocking."""
        for tensor, copy in reversed(self._spans):
            tensor.copy_(copy)
        for step, value in self._steps:
            step.fill_(value)

    def _keep(self, span: Tensor) -> None:
        at = len(self._spans)
        if at < len(self._spare) and _fits(self._spare[at], span):
            self._spans.append((span, self._spare[at].copy_(span)))
        else:
            self._spans.append((span, span.clone()))


def _fits(spare: Tensor, span: Tensor) -> bool:
    return spare.shape == span.shape and spare.dtype == span.dtype
