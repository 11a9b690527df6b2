"""`hatch run quick` finds the functions that an edit is in, and tests that run them."""

import re
from pathlib import Path

import pytest
import quick

SOURCE = """\
LIMIT = 3


@decorated
def first(x):
    def inner():
        return x

    return inner


class Thing:
    size = 1

    @property
    def name(self):
        return "a"

    @name.setter
    def name(self, value):
        pass


if LIMIT:

    def last():
        return 1
"""
EDITS = {
    "a body": ({9}, ["m:first"]),
    "a function within": ({7}, ["m:first"]),
    "a decorator": ({4}, ["m:first"]),
    "a setter": ({21}, ["m:Thing.name"]),
    "two functions": ({6, 27}, ["m:first", "m:last"]),
    "a constant": ({1}, ["m:first", "m:Thing.name", "m:last"]),
    "a field beside a body": ({9, 13}, ["m:first", "m:Thing.name", "m:last"]),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_in_the_functions_that_have_its_lines(edit: str, tmp_path: Path) -> None:
    """A line outside of all functions may matter to each of the module."""
    path = tmp_path / "m.py"
    path.write_text(SOURCE)
    lines, expected = EDITS[edit]
    assert sorted(quick.functions_at("m", path, lines)) == sorted(expected)


def test_tests_are_taken_until_the_time_is_spent() -> None:
    """A function of the middle of a step has more tests than the time allows."""
    name = "zero_partition.run.unit:Unit.reshard"
    few, many = quick.tests_of([name], 2.0), quick.tests_of([name], 20.0)
    assert sum(few.values()) <= 2.0 < sum(many.values()) <= 20.0
    assert len({test.partition("::")[0] for test in few}) > 1, "files take turns"


def test_the_map_is_of_tests_that_exist() -> None:
    """Else learn it anew: `hatch run quick --learn`."""
    tests = quick.known_tests()
    texts = {file: Path(file) for file, _, _ in (test.partition("::") for test in tests)}
    names = {
        file: set(re.findall(r"def (test_\w+)", path.read_text())) if path.exists() else set()
        for file, path in texts.items()
    }
    lost = [
        test
        for test in tests
        if test.partition("::")[2].partition("[")[0] not in names[test.partition("::")[0]]
    ]
    assert len(lost) < len(tests) / 10, lost[:10]
