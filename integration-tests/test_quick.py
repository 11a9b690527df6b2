"""`hatch run quick` finds the parts of functions that an edit is in, and tests that run them."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mutate
import numpy as np
import pytest
import quick

SOURCE = """\
LIMIT = 3


@decorated
def first(x):
    def inner():
        return x

    if x > 1 and send(x):
        return inner
    elif x:
        close()
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
ARM, ELSE = "first/If x > 1 and send(x)", "first/If x > 1 and send(x)/else"
EDITS = {
    "a statement": ({13}, ["first"]),
    "a function within": ({7}, ["first/def inner"]),
    "an arm": ({10}, [ARM]),
    "an arm of an arm": ({12}, [f"{ELSE}/If x"]),
    # Its call has effects, so it is not evaluated twice; the comparison within it may be.
    "a condition": ({9}, ["first|x > 1", "first", ARM, ELSE]),
    "a decorator": ({4}, ["first"]),
    "a setter": ({25}, ["Thing.name"]),
    "two functions": ({13, 31}, ["first", "last"]),
    "a constant": ({1}, ["first", "last", "Thing.name"]),
    "a field beside a body": ({13, 17}, ["first", "last", "Thing.name"]),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_in_the_parts_that_have_its_lines(edit: str) -> None:
    """A line outside of all functions may matter to each of the module."""
    lines, expected = EDITS[edit]
    found = quick.parts_at("m", SOURCE, lines)
    assert sorted(found) == sorted(f"m:{name}" for name in expected)
    assert not any("|" in name for name in found[1:]), "expressions come first"


def test_switches_leave_a_module_as_it_was_and_tell_what_is_run() -> None:
    """`x >= 1` in place of `x > 1` matters to a test that passes 1."""
    names = [each.name for each in mutate.parts(ast.parse(SOURCE))]
    tree = mutate.with_switches(SOURCE, {name: at for at, name in enumerate(names)})
    reached = set[str]()

    def choose(number: int, changed: Callable[[], Any], original: Callable[[], Any]) -> Any:
        reached.update({names[number]} if changed() != original() else ())
        return original()

    switches = SimpleNamespace(on=lambda at: reached.add(names[at]), choose=choose)
    module = {"__mutant__": switches, "decorated": lambda f: f, "send": bool, "close": list}
    exec(compile(tree, "m", "exec"), module)
    first: Any = module["first"]

    for value, parts in {2: [ARM], 1: ["first|x > 1", ELSE, f"{ELSE}/If x"]}.items():
        reached.clear()
        assert first(value)() == value
        assert reached == {"first", "first/def inner", *parts}


def test_tests_are_taken_until_the_time_is_spent() -> None:
    """A function of the middle of a step has more tests than the time allows."""
    name = "zero_partition.run.unit:Unit.reshard"
    few, many = quick.tests_of([name], 2.0), quick.tests_of([name], 20.0)
    assert sum(few.values()) <= 2.0 < sum(many.values()) <= 20.0


def test_tests_that_tell_the_most_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an edited line with a comparison and a call; the slowest test is the one that tells."""
    (tmp_path / "m.py").write_text(CALLED)
    path = tmp_path / "edited.py"
    path.write_text(CALLER)
    names = [
        *(f"edited:{each.name}" for each in mutate.parts(ast.parse(CALLER))),
        *(f"m:{each.name}" for each in mutate.parts(ast.parse(CALLED))),
    ]
    block = ["edited:run", "edited:run/If x"]
    reached = {
        "comparison": [*block, "edited:run/If x|x > 1"],
        "arm": [*block, "m:called", "m:called/If x"],
        "block": [*block, "m:called", "m:called/If x/else"],
        "function": ["edited:run", "edited:run/If x/else"],
        "elsewhere": ["m:called"],
    }
    took = {"comparison": 9.0, "arm": 8.0, "block": 7.0, "function": 6.0, "elsewhere": 5.0}
    matrix = np.array([[name in parts for name in names] for parts in reached.values()])
    columns = {quick._key(name): at for at, name in enumerate(names)}
    known = quick.Reached([*reached], np.array([*took.values()], np.float32), columns, matrix)
    monkeypatch.setattr(quick.Reached, "read", lambda: known)
    monkeypatch.setattr(quick, "sources", lambda: {"m": tmp_path / "m.py", "edited": path})

    assert [*quick.tests_after("edited", path, {3}, 100)] == [*reached][:4]
    assert [*quick.tests_after("edited", path, {3}, 4.6)] == ["comparison"]


CALLER = """\
def run(x):
    if x:
        called(x > 1)
"""
CALLED = """\
def called(x):
    if x:
        return 1
    return 2
"""


def test_the_map_is_of_tests_that_exist() -> None:
    """Else learn it anew: `hatch run quick --learn`."""
    tests = quick.Reached.read().tests
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
