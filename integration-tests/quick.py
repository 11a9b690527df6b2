"""Run tests of what has changed, for a minute and a half; `hatch run quick`.

Parts of functions that differ from `--against` (a commit; HEAD when left out) are looked up in
`reached.npz`, which has the tests that run each part: each function, each arm of a condition, and
each comparison, with the tests to which another one would matter. Tests that are short and run few
parts come first, and are taken until their seconds add up to `--seconds` for each of two workers.
Where a function is called, tests that enter an arm of it have half of the time; decision 0070.
Tests whose own file has changed run too. Further arguments go to pytest.

`--learn` writes `reached.npz` anew: all tests that are not slow run once, with switches in all
parts of the packages (see `mutate.py`). It takes forty minutes. A map that is some weeks old is
only less exact: a part is known by its text, and new text by what is around it.
"""

from __future__ import annotations

import argparse
import ast
import collections
import itertools
import json
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Final

import attrs
import mutate
import numpy as np
import numpy.typing as npt

_MAP: Final = Path(__file__).with_name("reached.npz")
_ROOT: Final = Path(__file__).resolve().parents[1]
_WORKERS: Final = 2
_FIXED_S: Final = 0.05  # that a test costs beside its own seconds
_LEFT_BY_ARMS: Final = 0.5  # of the time: for tests that need not enter an arm of what is called
_NOT_ASKED: Final = "not slow and not gpu"


def sources() -> dict[str, Path]:
    """Return all modules of the packages, and their files."""
    found = {}
    for src in sorted(_ROOT.glob("packages/*/src")):
        for path in sorted(src.rglob("*.py")):
            parts = path.relative_to(src).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def changed_lines(against: str) -> dict[Path, tuple[set[int], set[int]]]:
    """Return, of each file of Python that differs from a commit, its lines there and its lines now.

    A file that the commit does not have differs in all of its lines.
    """
    found = collections.defaultdict[Path, tuple[set[int], set[int]]](lambda: (set(), set()))
    told = _git("diff", "-U0", "--no-color", "--no-ext-diff", "--no-renames", against, "--", "*.py")
    path = _ROOT
    for line in told.splitlines():
        if line.startswith(("--- a/", "+++ b/")):
            path = _ROOT / line[6:]
        elif said := re.match(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", line):
            for lines, first, count in zip(
                found[path], said.group(1, 3), said.group(2, 4), strict=True
            ):
                lines |= {*range(int(first), int(first) + int(count or 1))}
    for name in _git("ls-files", "--others", "--exclude-standard", "--", "*.py").splitlines():
        found[_ROOT / name][1].update(range(1, 1 + len((_ROOT / name).read_text().splitlines())))
    return {path: lines for path, lines in found.items() if path.exists()}


def _git(*words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=_ROOT, text=True)


def parts_at(module: str, source: str, lines: set[int]) -> list[str]:
    """Return the innermost parts that have these lines: expressions first, then blocks.

    A line outside of functions is one of every function of the module.
    """
    found = mutate.parts(ast.parse(source))
    chosen: dict[str, bool] = {}
    for line in lines:
        here = [each for each in found if line in each.lines]
        around = {each.around for each in here if each.body is not None}
        inner = [each for each in here if each.name not in around]
        for each in inner or [each for each in found if not each.around]:
            chosen[each.name] = each.body is None
            if each.body is None:
                chosen.setdefault(each.around, False)
    return [f"{module}:{name}" for name in sorted(chosen, key=chosen.__getitem__, reverse=True)]


def called_at(source: str, lines: set[int]) -> set[str]:
    """Return the names of functions that are called on these lines."""
    calls = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Call)]
    here = [
        each.func for each in calls if lines & {*range(each.lineno, 1 + (each.end_lineno or 0))}
    ]
    return {getattr(each, "id", getattr(each, "attr", "")) for each in here}


def arms_of(calls: AbstractSet[str]) -> list[str]:
    """Return the parts of all functions of these names, in any module, but for their entries."""
    found = []
    for module, path in sources().items():
        source = path.read_text()
        if any(f"def {name}(" in source for name in calls):
            inner = [each for each in mutate.parts(ast.parse(source)) if each.around]
            names = {each.name: re.split(r"[/|]", each.name)[0] for each in inner}
            found += [
                f"{module}:{name}" for name, of in names.items() if of.rpartition(".")[2] in calls
            ]
    return found


def tests_after(module: str, path: Path, lines: set[int], seconds: float) -> dict[str, float]:
    """Return the tests that run after an edit of these lines; see `tests_of`."""
    source = path.read_text()
    names = parts_at(module, source, lines)
    return tests_of(names, _WORKERS * seconds, called_at(source, lines))


def tests_of(
    names: Sequence[str], seconds: float, calls: AbstractSet[str] = frozenset()
) -> dict[str, float]:
    """Return tests that run these parts, and their seconds, which add up to `seconds` at most.

    First those of expressions, to which a change of them would give another value; then those that
    enter the blocks, and before them, for a part of the time, those that also enter an arm of what
    is called there; then those of the functions. Parts take turns.
    """
    known = Reached.read()
    parts = [*filter(None, map(known.nearest, names))]
    expressions = [each for each in parts if "|" in each]
    blocks = [each for each in parts if "|" not in each]
    functions = [re.split(r"[/|]", each)[0] for each in parts]
    inside = {row for each in blocks for row in known.in_order(each)}
    arms = [
        [row for row in known.in_order(each) if row in inside]
        for each in arms_of(calls)
        if each in known
    ]
    found: dict[str, float] = {}
    groups = [
        (map(known.in_order, dict.fromkeys(expressions)), 0.0),
        (arms, _LEFT_BY_ARMS * seconds),
        (map(known.in_order, dict.fromkeys(blocks)), 0.0),
        (map(known.in_order, dict.fromkeys(functions)), 0.0),
    ]
    for orders, left in groups:
        for row in itertools.chain.from_iterable(itertools.zip_longest(*orders)):
            if row is None or (test := known.tests[row]) in found:
                continue
            if (took := float(known.seconds[row])) <= seconds - left:
                found[test] = took
                seconds -= took
    return found


@attrs.frozen(eq=False)
class Reached:
    """The tests that run each part of the packages, as `reached.npz` has them."""

    tests: Sequence[str]
    seconds: npt.NDArray[np.float32]
    columns: Mapping[str, int]  # by key of a part
    matrix: npt.NDArray[np.bool_]  # (tests, parts)

    @classmethod
    def read(cls) -> Reached:
        """Return what `write` has written."""
        with np.load(_MAP) as file:
            tests, keys = (file[name].tobytes().decode().split("\n") for name in ("tests", "keys"))
            matrix = np.unpackbits(file["matrix"], axis=1, count=len(keys)).astype(bool)
            places = {key: at for at, key in enumerate(keys)}
            return cls(tests, file["seconds"], places, matrix)

    @classmethod
    def write(cls, numbers: Mapping[str, int], tests: list[dict[str, Any]]) -> None:
        """Keep which tests reach which parts, and how long each test takes."""
        tests = sorted(tests, key=lambda each: each["test"])
        matrix = np.zeros((len(tests), len(numbers)), bool)
        for at, each in enumerate(tests):
            matrix[at, np.array(each["reached"]) - 1] = True
        used = matrix.any(0)
        names = [name for at, name in enumerate(numbers) if used[at]]
        np.savez_compressed(
            _MAP,
            tests=_as_bytes("\n".join(each["test"] for each in tests)),
            seconds=np.array([each["took"] for each in tests], np.float32).round(2),
            keys=_as_bytes("\n".join(_key(name) for name in names)),
            matrix=np.packbits(matrix[:, used], axis=1),
        )

    def __contains__(self, name: str) -> bool:
        return _key(name) in self.columns

    def nearest(self, name: str) -> str:
        """Return the part of this name, or, where the code is new, the one around it."""
        while name and name not in self:
            name = max(name.rpartition("/")[0], name.rpartition("|")[0], key=len)
        return name

    def in_order(self, name: str) -> Sequence[int]:
        """Return the places of the tests that run a part, short ones that run little first.

        Such a test is about what it runs, and most of them fit into the time.
        """
        rows = np.flatnonzero(self.matrix[:, self.columns[_key(name)]])
        cost = (_FIXED_S + self.seconds[rows]) * self.matrix[rows].sum(1)
        return rows[np.argsort(cost, kind="stable")].tolist()


def _key(name: str) -> str:
    return f"{zlib.crc32(name.encode()):08x}"


def _as_bytes(text: str) -> npt.NDArray[np.uint8]:
    return np.frombuffer(text.encode(), np.uint8)


def learn(num_sessions: int) -> None:
    """Run all tests once, and write which functions each runs."""
    numbers: dict[str, int] = {}
    modules: dict[str, dict[str, int]] = {}
    for module, path in sources().items():
        for part in mutate.parts(ast.parse(path.read_text())):
            number = numbers.setdefault(f"{module}:{part.name}", len(numbers) + 1)
            modules.setdefault(module, {})[part.name] = number
    folder = Path(tempfile.mkdtemp(prefix="quick-"))
    (folder / "learnt").mkdir()
    (folder / "run.json").write_text(json.dumps({"modules": modules, "seconds": 0, "order": []}))
    tests = ["-m", _NOT_ASKED, "packages", "integration-tests"]
    mutate.run_sessions(folder, len(numbers), num_sessions, tests, "drawn")
    Reached.write(numbers, mutate.read(folder, "reach"))


def main() -> int:
    """Choose tests and run them, or learn which there are; return pytest's exit status."""
    asked = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    asked.add_argument("--against", default="HEAD", help="a commit; HEAD when left out")
    asked.add_argument("--seconds", type=float, default=50, help="of tests in each worker")
    asked.add_argument("--learn", action="store_true", help="write reached.npz anew")
    options, others = asked.parse_known_args()
    if options.learn:
        # As many as workers, so that seconds are those of a later run.
        learn(num_sessions=_WORKERS)
        return 0
    modules = {path: module for module, path in sources().items()}
    changed = changed_lines(options.against)
    names, calls = dict[str, None](), set[str]()
    for path, (before, now) in changed.items():
        if path in modules:
            # What was removed is known by its old name, what was added by what is around it.
            old = _git("show", f"{options.against}:{path.relative_to(_ROOT)}") if before else ""
            for source, lines in ((old, before), (path.read_text(), now)):
                names.update(dict.fromkeys(parts_at(modules[path], source, lines)))
                calls |= called_at(source, lines)
    own = [path for path in changed if path.name.startswith("test_")]
    chosen = tests_of([*names], _WORKERS * options.seconds, calls)
    print(
        f"{len(names)} parts of functions and {len(own)} files of tests differ from "
        f"{options.against}: {len(chosen)} tests run these parts"
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
