"""Spans are half-open, so neighbours neither overlap nor leave a gap."""

import pytest
from zero_partition.plan import Span


def test_neighbours_do_not_overlap() -> None:
    """Else an element on the border would be updated twice."""
    assert Span(0, 4).overlap(Span(4, 8)) is None


def test_overlap_is_what_both_contain() -> None:
    """It decides which part of a tensor a rank keeps."""
    assert Span(2, 9).overlap(Span(5, 20)) == Span(5, 9)


def test_an_empty_span_overlaps_nothing() -> None:
    """A rank that keeps nothing must not be handed an empty piece of everything."""
    assert Span(3, 3).overlap(Span(0, 9)) is None


def test_a_backward_span_is_refused() -> None:
    """It would slice to nothing and hide a mistake in the arithmetic."""
    with pytest.raises(ValueError, match=r"expected stop >= start, got \[5, 3\)"):
        Span(5, 3)
