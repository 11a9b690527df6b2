"""One step made of ranges: which elements it has done, and whose step counts it has advanced."""

from __future__ import annotations

from bisect import insort
from typing import final

from attrs import define, field
from torch import Tensor

from ._errors import StepOrderError


@final
@define(eq=False)
class Round:
    """From the first range of a step until every element has had its turn."""

    numel: int  # of all parameters
    advanced: set[Tensor] = field(factory=set, init=False)
    _spans: list[tuple[int, int]] = field(factory=list, init=False)

    @property
    def num_done(self) -> int:
        """How many elements have had their turn."""
        return sum(stop - start for start, stop in self._spans)

    @property
    def is_complete(self) -> bool:
        """Whether all have."""
        return self.num_done == self.numel

    def check(self, start: int, stop: int) -> None:
        """Raise if [start, stop) is not a span of what is left to do.

        Raises:
            StepOrderError: It leaves the parameters' elements, or one of its elements was stepped.
        """
        if not 0 <= start <= stop <= self.numel:
            raise StepOrderError(
                f"step_range({start}, {stop}): expected 0 <= start <= stop <= {self.numel}, the "
                f"number of elements of all parameters"
            )
        for low, high in self._spans:
            if low < stop and start < high:
                raise StepOrderError(
                    f"step_range({start}, {stop}): [{low}, {high}) was already stepped; each "
                    f"element is stepped once before the next step begins "
                    f"({self.num_done} of {self.numel} elements are done)"
                )

    def add(self, start: int, stop: int) -> None:
        """Note that [start, stop) has had its turn."""
        if start < stop:
            insort(self._spans, (start, stop))
