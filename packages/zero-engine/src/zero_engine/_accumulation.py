"""Micro-batches: how many there have been, and whether the next one is a boundary."""

from __future__ import annotations

from attrs import define


@define
class Accumulation:
    """Counts the micro-batches since the last boundary.

    Args:
        num_micro_batches: Of one global step.
        num_pending: Micro-batches since the last boundary.
        chosen: Whether the next micro-batch is one, decided by hand; counted when None.
    """

    num_micro_batches: int
    num_pending: int = 0
    chosen: bool | None = None

    @property
    def is_boundary(self) -> bool:
        """Whether the optimizer steps at the end of the micro-batch at hand."""
        if self.chosen is not None:
            return self.chosen
        return self.num_pending + 1 >= self.num_micro_batches

    def end_micro_batch(self) -> None:
        """Go on to the next one."""
        self.num_pending = 0 if self.is_boundary else self.num_pending + 1
