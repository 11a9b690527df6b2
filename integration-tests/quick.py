"""Run tests of what has changed, for a minute and a half; `hatch run quick`.

Functions that differ from `--against` (a commit; HEAD when left out) are looked up in
`reached.json.gz`, which has the tests that run each function. Tests that run few functions come
first, files take turns, and tests are taken until their seconds add up to `--seconds` for each of
two workers. Tests whose own file has changed run too. Further arguments go to pytest.

`--learn` writes `reached.json.gz` anew: all tests that are not slow run once, with a switch at the
entry of every function of the packages (see `mutate.py`). It takes half an hour; a map that is some
weeks old is only less exact, as names of functions change little.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import mutate

_MAP: Final = Path(__file__).with_name("reached.json.gz")
_ROOT: Final = Path(__file__).resolve().parents[1]
_WORKERS: Final = 2
_MOST: Final = 200  # tests of a function that are kept
_NOT_ASKED: Final = "not slow and not gpu"


def sources() -> dict[str, Path]:
    """Return all modules of the packages, and their files."""
    found = {}
    for src in sorted(_ROOT.glob("packages/*/src")):
        for path in sorted(src.rglob("*.py")):
            parts = path.relative_to(src).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def changed_lines(against: str) -> dict[Path, set[int]]:
    """Return the lines of each file of Python that differ from a commit, and those of new files."""
    found = collections.defaultdict[Path, set[int]](set)
    told = _git("diff", "-U0", "--no-color", "--no-ext-diff", against, "--", "*.py")
    path = _ROOT
    for line in told.splitlines():
        if line.startswith("+++ "):
            path = _ROOT / line.removeprefix("+++ b/")
        elif said := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(said[1]), int(said[2] or 1)
            # Lines that were removed were in the function of the lines beside them.
            found[path] |= {*range(first, first + count)} if count else {first, first + 1}
    for name in _git("ls-files", "--others", "--exclude-standard", "--", "*.py").splitlines():
        found[_ROOT / name] = {*range(1, 1 + len((_ROOT / name).read_text().splitlines()))}
    return {path: lines for path, lines in found.items() if path.exists()}


def _git(*words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=_ROOT, text=True)


def functions_at(module: str, path: Path, lines: set[int]) -> list[str]:
    """Return the functions that have these lines; all of the module for a line outside of them."""
    spans = mutate.functions(path.read_text())
    inside = [name for name, span in spans.items() if lines & {*span}]
    covered = {line for name in inside for line in spans[name]}
    return [f"{module}:{name}" for name in (inside if lines <= covered else spans)]


def tests_after(module: str, path: Path, lines: set[int], seconds: float) -> dict[str, float]:
    """Return the tests that run after an edit of these lines; see `tests_of`."""
    return tests_of(functions_at(module, path, lines), _WORKERS * seconds)


def tests_of(functions: Sequence[str], seconds: float) -> dict[str, float]:
    """Return tests that run these functions, and their seconds, which add up to `seconds` at most.

    Functions take turns: each has its best test before one has its second.
    """
    said = _read_map()
    found: dict[str, float] = {}
    for turn in range(_MOST):
        for name in functions:
            if turn >= len(said["functions"].get(name, ())):
                continue
            test, took = said["tests"][said["functions"][name][turn]]
            if test not in found and took <= seconds:
                found[test] = took
                seconds -= took
    return found


def _read_map() -> dict[str, Any]:
    """Return what `write_map` has written: tests with seconds, and tests of functions by place."""
    return json.loads(gzip.decompress(_MAP.read_bytes()))


def known_tests() -> list[str]:
    """Return the tests that the map has."""
    return [test for test, _ in _read_map()["tests"]]


def learn(num_sessions: int) -> None:
    """Run all tests once, and write which functions each runs."""
    numbers: dict[str, int] = {}
    modules: dict[str, dict[str, int]] = {}
    for module, path in sources().items():
        for name in mutate.functions(path.read_text()):
            numbers[f"{module}:{name}"] = len(numbers) + 1
            modules.setdefault(module, {})[name] = len(numbers)
    folder = Path(tempfile.mkdtemp(prefix="quick-"))
    (folder / "learnt").mkdir()
    (folder / "run.json").write_text(json.dumps({"modules": modules, "seconds": 0, "order": []}))
    tests = ["-m", _NOT_ASKED, "packages", "integration-tests"]
    mutate.run_sessions(folder, len(numbers), num_sessions, tests, "drawn")
    write_map(numbers, mutate.read(folder, "reach"))


def write_map(numbers: Mapping[str, int], tests: list[dict[str, Any]]) -> None:
    """Keep the tests of each function that are best at it, and the seconds of each test."""
    tests = sorted(tests, key=lambda each: each["test"])
    by_function = collections.defaultdict[int, list[int]](list)
    for at, each in enumerate(tests):
        for number in each["reached"]:
            by_function[number].append(at)
    functions = {}
    for name, number in sorted(numbers.items()):
        found = in_turns(by_function[number], tests)[:_MOST]
        if found:
            functions[name] = found
    kept = sorted({at for found in functions.values() for at in found})
    place = {at: index for index, at in enumerate(kept)}
    said = {
        "tests": [[tests[at]["test"], round(tests[at]["took"], 2)] for at in kept],
        "functions": {name: [place[at] for at in found] for name, found in functions.items()},
    }
    # Without a time in it, so that equal maps are equal files.
    _MAP.write_bytes(gzip.compress(json.dumps(said).encode(), mtime=0))


def in_turns(found: Iterable[int], tests: list[dict[str, Any]]) -> list[int]:
    """Order tests: in each file those first that run little and are short; files take turns."""
    best = sorted(found, key=lambda at: (1 + tests[at]["took"]) * len(tests[at]["reached"]))
    turns = collections.Counter[str]()
    order = []
    for place, at in enumerate(best):
        path = tests[at]["test"].partition("::")[0]
        order.append((turns[path], place, at))
        turns[path] += 1
    return [at for _, _, at in sorted(order)]


def main() -> int:
    """Choose tests and run them, or learn which there are; return pytest's exit status."""
    asked = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    asked.add_argument("--against", default="HEAD", help="a commit; HEAD when left out")
    asked.add_argument("--seconds", type=float, default=45, help="of tests in each worker")
    asked.add_argument("--learn", action="store_true", help="write reached.json.gz anew")
    options, others = asked.parse_known_args()
    if options.learn:
        # As many as workers, so that seconds are those of a later run.
        learn(num_sessions=_WORKERS)
        return 0
    modules = {path: module for module, path in sources().items()}
    changed = changed_lines(options.against)
    names = [
        name
        for path, lines in changed.items()
        if path in modules
        for name in functions_at(modules[path], path, lines)
    ]
    own = [path for path in changed if path.name.startswith("test_")]
    chosen = tests_of(names, _WORKERS * options.seconds)
    print(
        f"{len(names)} functions and {len(own)} files of tests differ from {options.against}: "
        f"{len(chosen)} tests run these functions"
    )
    if not chosen and not own:
        return 0
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join([*chosen, *(str(path.relative_to(_ROOT)) for path in own)]))
        file.flush()
        files = {*(test.partition("::")[0] for test in chosen), *map(str, own)}
        files = {each for each in files if (_ROOT / each).exists()}
        command = [sys.executable, "-m", "pytest", "-n", str(_WORKERS), "--dist", "loadfile"]
        command += ["-m", _NOT_ASKED, "--only", file.name, *others, *sorted(files)]
        return subprocess.run(command, cwd=_ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
