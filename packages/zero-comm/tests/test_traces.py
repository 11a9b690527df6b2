"""Where the launches of two ranks first differ, said the same from either side; else nothing."""

from __future__ import annotations

import re

import pytest
from zero_comm.traces import Trace, Traced, difference
from zero_comm.watch import Purpose

PURPOSES = {1: Purpose("fetching apples", "fetch them alike"), 2: Purpose("fetching pears")}
OWN = "own"  # a collective of torch's that was not launched through us
MARK, CALL = "mark", "save()"


def _trace(rank: int, *program: str, forgets: int = 0) -> Trace:
    """What a rank has launched that ran a program: names of fruit, marks, and torch's own."""
    launches, counted = [], 0
    for each in program:
        number = len(launches) + 1
        if each == OWN:
            counted += 1
        elif each.startswith(MARK):
            call = each.removeprefix(MARK)
            launches.append(Traced(number, 0, counted, False, "a step", "", None, call))
        else:
            fruit, _, size = each.partition(" of ")
            tag = 1 if fruit == "apples" else 2
            key = hash(each)
            what = f"fetching {fruit}"
            launches.append(Traced(number, key, counted, True, what, size, tag, ""))
            counted += 1
    return Trace(rank, counted, launches[forgets:])


SAME = {
    "nothing": ((), ()),
    "one is behind": (("apples", "pears", "apples"), ("apples",)),
    "one has launched nothing": (("apples",), ()),
    "both have their own": ((OWN, "apples", OWN, "pears"), (OWN, "apples", OWN, "pears")),
    "one is behind, and will have its own": (("apples", OWN, "pears"), ("apples",)),
    "one has its own ahead": (("apples", OWN), ("apples",)),
    "marks": (("apples", MARK, "pears", MARK), ("apples", MARK, "pears")),
}


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_a_rank_that_is_behind_has_not_parted(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    """A slow rank must not be accused of what it has yet to launch."""
    for sides in ((one, other), (other, one)):
        first, second = (_trace(rank, *program) for rank, program in enumerate(sides))
        assert difference(first, second, PURPOSES) == ""


PARTED = {
    "another": (
        ("apples", "apples"),
        ("apples", "pears"),
        r"apples, as number 2 .*\n  rank 1.*pears",
    ),
    "another size": (
        ("apples of 1",),
        ("apples of 2",),
        r"apples of 1, .*\n  rank 1 in .*apples of 2",
    ),
    "one more": (
        ("pears", "apples"),
        ("pears", "pears", "apples"),
        r"apples, as number 2 .*\n.*pears",
    ),
    "a call": (("apples", f"{MARK}{CALL}"), ("apples", "pears"), r"rank 0 is in save\(\)"),
    "its own in a place of ours": (
        ("apples", "pears"),
        ("apples", OWN),
        r"before fetching pears, rank 1 .*own \(1\)",
    ),
    "its own between": (("apples", "pears"), (OWN, "apples"), r"apples, rank 1 .*own \(1\)"),
    "its own before a mark": (("apples", MARK), ("apples", OWN, MARK), r"rank 1 .*own \(1\)"),
    "its own, and then nothing": (("apples", MARK), ("apples", OWN), r"a step, rank 1 .*own \(1\)"),
    "two of its own": (("apples", MARK), (OWN, OWN, "apples"), r"rank 1 .*own \(2\)"),
}


@pytest.mark.parametrize(("one", "other", "says"), PARTED.values(), ids=PARTED)
def test_both_sides_say_the_same_of_where_they_parted(
    one: tuple[str, ...], other: tuple[str, ...], says: str
) -> None:
    """Each rank works it out by itself, and the job's log has both."""
    first, second = _trace(0, *one), _trace(1, *other)
    found = difference(first, second, PURPOSES)
    assert re.search(says, found), found
    assert difference(second, first, PURPOSES) == found


def test_what_only_one_rank_remembers_is_compared_with_nothing() -> None:
    """A rank has launched more since, and has forgotten the first."""
    first = _trace(0, "apples", "pears", "apples")
    second = _trace(1, "apples", "pears", "apples", "pears", forgets=2)
    assert difference(first, second, PURPOSES) == ""


def test_a_backend_that_counts_nothing_is_compared_by_our_numbers() -> None:
    """Not every backend of torch has sequence numbers: then all of them are 0."""
    first, second = (
        Trace(rank, 0, [each._replace(sequence=0) for each in _trace(rank, *program).launches])
        for rank, program in enumerate((("apples", "pears"), ("apples", "apples")))
    )
    assert "number 2 " in difference(first, second, PURPOSES)
    assert difference(first, first, PURPOSES) == ""
