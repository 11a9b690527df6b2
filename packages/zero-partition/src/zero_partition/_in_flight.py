"""Reductions that travel while the next buffers fill, hop by hop."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, field

from ._gradients import BufferGradients

# NOTE(hops): a reduction may take several hops, and each begins when the one before has arrived.
# When that is differs from rank to rank, and what is launched then must be in one order everywhere.
# So reductions advance in step: whenever one is launched, those before it go one hop further, the
# oldest first, or end. A hop has the time in which the next buffer fills, and a reduction of three
# hops travels beside those of the next two buffers. Its slot is free after the first of them
# (docs/decisions/0038-reductions-advance-in-step.md).


@define(eq=False)
class InFlight:
    """See NOTE(hops). All methods but `return_accumulator` are collective."""

    keeps_accumulators: bool  # they are more than slots: gradients accumulate in them, or end there
    _reductions: list[BufferGradients] = field(factory=list, init=False)  # the oldest first

    @property
    def holds_slots(self) -> bool:
        """Whether one is in its first hop, and to advance would free a slot."""
        return any(g.slot is not None for g in self._reductions)

    def launch(self, g: BufferGradients) -> None:
        """Begin a reduction; those before it go one hop further."""
        g.launch()
        before = tuple(self._reductions)
        self._reductions.append(g)
        self._advance(before)

    def advance(self) -> None:
        """All go one hop further, or end."""
        self._advance(tuple(self._reductions))

    def end(self, g: BufferGradients) -> None:
        """Advance until this one has ended, if it is in flight."""
        while g.is_in_flight:
            self.advance()

    def end_all(self) -> None:
        """Advance until all have ended."""
        while self._reductions:
            self.advance()

    def return_accumulator(self, g: BufferGradients) -> None:
        """The accumulator is empty: give it to the next unit, unless this unit keeps it."""
        if not self.keeps_accumulators and not g.is_in_flight:
            g.leave_accumulator()

    def _advance(self, reductions: Iterable[BufferGradients]) -> None:
        arrived = []
        for g in reductions:
            if not g.route.advance():
                arrived.append(g)
            elif not self.keeps_accumulators:
                g.leave_accumulator()
        for g in arrived:
            g.finish()
            self._reductions.remove(g)
            self.return_accumulator(g)
