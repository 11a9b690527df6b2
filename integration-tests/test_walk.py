"""The walk of docs/how/walk.md exists, and a run takes it."""

from __future__ import annotations

import ast
import os
import re
import sys
from contextlib import chdir
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple
from unittest import mock

import parity
import pytest
import zero_comm
from zero_comm import Group

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs/how/walk.md"
TEXT: Final = PAGE.read_text()
PACKAGES: Final = str(ROOT / "packages")


class Stop(NamedTuple):
    """One function of the walk; names of functions inside others have no `<locals>`."""

    file: Path
    name: str


def _stops(text: str) -> list[Stop]:
    found = re.findall(r"(?m)^\d+\. `([\w.]+)` in \[[^\]]*\]\(([^)]+)\): ", text)
    return [Stop((PAGE.parent / link).resolve(), name) for name, link in found]


STOPS: Final = _stops(TEXT)


def _functions(tree: ast.AST, inside: str = "") -> set[str]:
    """Names of all functions, with those of the classes and functions that they are in."""
    found = set[str]()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{inside}{node.name}"
            found |= _functions(node, f"{name}.")
            if not isinstance(node, ast.ClassDef):
                found.add(name)
        else:
            found |= _functions(node, inside)
    return found


def test_every_stop_of_the_walk_is_a_function_in_the_file_that_it_links_to() -> None:
    """A function that is renamed or moved takes its line of the page along."""
    numbered = re.findall(r"(?m)^(\d+)\. ", TEXT)
    missing = [
        stop for stop in STOPS if stop.name not in _functions(ast.parse(stop.file.read_text()))
    ]

    assert not missing
    assert numbered == [str(number) for number in range(1, len(STOPS) + 1)], "a line was not read"
    assert len(set(STOPS)) == len(STOPS)


def test_entering_is_as_short_as_the_walk_says() -> None:
    """At most 20 functions in 10 files lead from `shard()` to the first forward."""
    [section] = re.findall(r"(?ms)^## Entering: .*?(?=^## )", TEXT)
    [(num_stops, num_files)] = re.findall(r"(?m)^(\d+) stops in (\d+) files\.$", section)
    stops = _stops(section)

    assert (int(num_stops), int(num_files)) == (len(stops), len({stop.file for stop in stops}))
    assert len(stops) <= 20
    assert int(num_files) <= 10


@pytest.mark.cpu_only("backward of a device has a thread of its own, which no profiler sees")
def test_a_run_calls_the_stops_in_the_order_of_the_walk(group: Group, tmp_path: Path) -> None:
    """A stop that is not called, or called in another order, misleads."""
    [script] = re.findall(r"(?ms)^```python\n(.*?)^```", TEXT)
    by_messages = parity.by_messages()  # before: only the script's calls count
    wanted = {(str(stop.file), stop.name) for stop in STOPS}
    first_calls: dict[tuple[str, str], int] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGES):
            code = frame.f_code
            name = code.co_qualname.replace(".<locals>", "")
            called = os.path.realpath(code.co_filename), name
            if called in wanted:
                first_calls.setdefault(called, len(first_calls))

    program = compile(script, str(PAGE), "exec")
    before = sys.getprofile()
    with chdir(tmp_path), mock.patch.object(zero_comm, "init", lambda: by_messages):
        sys.setprofile(note)
        try:
            exec(program, {"__name__": "__main__"})
        finally:
            sys.setprofile(before)

    order = [first_calls.get((str(stop.file), stop.name)) for stop in STOPS]
    not_called = [stop.name for stop, at in zip(STOPS, order, strict=True) if at is None]
    assert not not_called, not_called
    swapped = [
        f"{one.name} is called after {other.name}"
        for one, other in pairwise(STOPS)
        if first_calls[str(one.file), one.name] > first_calls[str(other.file), other.name]
    ]
    assert not swapped, swapped
    assert group.world_size > 1  # alone, nothing is sharded
