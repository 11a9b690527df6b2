"""Half-open runs of elements."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge


@frozen(order=True)
class Span:
    """Elements `start` up to, not including, `stop`."""

    start: int = field(validator=ge(0))
    stop: int = field()

    @stop.validator
    def _check_stop(self, _: object, stop: int) -> None:
        if stop < self.start:
            raise ValueError(f"expected stop >= start, got [{self.start}, {stop})")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def overlap(self, other: Span) -> Span | None:
        """The elements in both, None if there are none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Span(start, stop) if start < stop else None

    def shifted(self, offset: int) -> Span:
        """The same run seen from another origin."""
        return Span(self.start + offset, self.stop + offset)

    def as_slice(self) -> slice:
        """For indexing a 1-D tensor."""
        return slice(self.start, self.stop)
