"""Change one operator, constant, condition or call at a time, and see which test fails.

`hatch run mutate zero_partition.run.gradients zero_engine.checkpoint` draws `--count` changes of
each module by `--seed`. All are compiled into the modules behind a switch that lies in a file, so
test sessions keep their processes and ranks, and take one change after another. First every test
runs with no change on, to learn how long it takes and which changes it reaches: of an expression,
those that give another value in it. Then each change is on while tests that reach it run, until one
fails: files take turns, and in each those come first that reach little and have seen most per
second. Without the change that test must pass again, else the session begins anew. A change that no
test sees within `--seconds` of tests is printed with its line. What runs at import is not changed,
nor are messages. `equal_changes.toml` lists changes that make no difference, with reasons; others
are drawn in their place. `--device sim`, with `simulated-device` on PYTHONPATH, runs tests on that
device. With `--quick` each change is shown to the tests that `hatch run quick` runs after an edit
of its line, and `--total 40` draws forty changes of all modules together.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import collections
import contextlib
import faulthandler
import importlib.abc
import importlib.machinery
import importlib.util
import json
import mmap
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs

_RUN: Final = "ZERO_MUTATE_RUN"  # environment: the file that says which changes there are
_STATE: Final = "ZERO_MUTATE_STATE"  # and the one, of a session, that says which is on
_COMPARES: Final = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
# `strict=True` of zip and its like asserts. The others say how values travel, and not which.
_KEYWORDS: Final = ("strict", "non_blocking", "mmap")
_ARITHMETIC: Final = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
# Calls that have no effect, whoever defines them.
_PURE: Final = re.compile(
    "abs|all|any|bool|dict|frozenset|getattr|hasattr|id|int|isinstance|len|list|max|min|range|set|"
    "sorted|str|sum|tuple|type|zip|dim|element_size|endswith|get|isdecimal|items|keys|numel|size|"
    "startswith|values"
)
_NOT_IN_LAMBDA: Final = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
_ENOUGH: Final = 0.95  # part of the changes that all tests must see
_ENOUGH_FOR_QUICK: Final = 0.9  # and that those of `hatch run quick` must see
_LOGS: Final = {"debug", "info", "warning", "warn", "exception", "error"}


class _Changes(ast.NodeTransformer):
    """Numbers the changes of a module, and puts `chosen` behind switches."""

    def __init__(self, chosen: dict[int, int]) -> None:
        self.chosen = chosen  # number in the module -> number in the run
        self.found: list[str] = []
        self.is_run = False  # within a function

    def _switch(self, node: Any, changed: Any, what: str) -> Any:
        """An expression that is `changed` while its switch is on."""
        if (number := self._number(node, what)) is None:
            return node
        if any(isinstance(each, _NOT_IN_LAMBDA) or _is_super(each) for each in ast.walk(node)):
            return ast.copy_location(ast.IfExp(_call("on", number), changed, node), node)
        none = ast.arguments([], [], None, [], [], None, [])
        both = (ast.Lambda(none, each) for each in (changed, node))
        return ast.copy_location(_call("choose", number, *both), node)

    def _number(self, node: Any, what: str) -> int | None:
        """Count a change; its number in the run, if it was chosen."""
        if not self.is_run:
            return None
        self.found.append(f"{node.lineno}: {what}: {ast.unparse(node).splitlines()[0][:90]}")
        return self.chosen.get(len(self.found) - 1)

    def _inside(self, node: Any, is_run: bool) -> Any:
        before, self.is_run = self.is_run, is_run
        node.body = (
            [self.visit(each) for each in node.body]
            if isinstance(node.body, list)
            else self.visit(node.body)
        )
        self.is_run = before
        return node

    def visit_FunctionDef(self, node: Any) -> Any:
        return self._inside(node, True)

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        return self._inside(node, False)

    def visit_Raise(self, node: ast.Raise) -> Any:  # messages
        return node

    visit_JoinedStr = visit_match_case = visit_Assert = visit_Raise

    def visit_keyword(self, node: ast.keyword) -> Any:
        return node if node.arg in _KEYWORDS else self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        node.value = node.value and self.visit(node.value)
        return node

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        other = [_COMPARES[type(node.ops[0])](), *node.ops[1:]]
        return self._switch(node, ast.Compare(node.left, other, node.comparators), "compare")

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return self._switch(node, ast.BoolOp(other, node.values), "and/or")

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        if (other := _ARITHMETIC.get(type(node.op))) is None:
            return node
        return self._switch(node, ast.BinOp(node.left, other(), node.right), "operator")

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        # A count that goes up by two instead of one is mostly as good: it is only compared.
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)
        if (other := _ARITHMETIC.get(type(node.op))) is None:
            return node
        return self._statement(node, ast.AugAssign(node.target, other(), node.value), "operator")

    def visit_Constant(self, node: ast.Constant) -> Any:
        if type(node.value) is bool:
            return self._switch(node, ast.Constant(not node.value), "constant")
        if type(node.value) is int:
            return self._switch(node, ast.Constant(node.value + 1), "constant")
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.operand, ast.Constant):  # -1: one constant
            return node
        self.generic_visit(node)
        return self._switch(node, node.operand, "not") if isinstance(node.op, ast.Not) else node

    def visit_If(self, node: Any) -> Any:
        self.generic_visit(node)
        node.test = self._switch(node.test, ast.UnaryOp(ast.Not(), node.test), "condition")
        return node

    visit_While = visit_IfExp = visit_If

    def visit_comprehension(self, node: ast.comprehension) -> Any:
        self.generic_visit(node)
        node.ifs = [
            self._switch(each, ast.UnaryOp(ast.Not(), each), "condition") for each in node.ifs
        ]
        return node

    def visit_Expr(self, node: ast.Expr) -> Any:
        call = node.value
        if not isinstance(call, ast.Call) or getattr(call.func, "attr", "") in _LOGS:
            return node
        self.generic_visit(node)
        return self._statement(node, ast.Pass(), "call")

    def _statement(self, node: Any, changed: Any, what: str) -> Any:
        if (number := self._number(node, what)) is None:
            return node
        return ast.copy_location(ast.If(_call("on", number), [changed], [node]), node)


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "super"


def _call(name: str, number: int, *arguments: ast.expr) -> ast.Call:
    switch = ast.Attribute(ast.Name("__mutant__", ast.Load()), name, ast.Load())
    return ast.Call(switch, [ast.Constant(number), *arguments], [])


def changes(source: str, chosen: dict[int, int]) -> tuple[ast.Module, list[str]]:
    """The module with `chosen` behind switches, and a line for every change that there is."""
    pass_ = _Changes(chosen)
    tree = ast.fix_missing_locations(pass_.visit(ast.parse(source)))
    return tree, pass_.found


@attrs.frozen
class Part:
    """A block or an expression, by a name without lines, which move.

    A block is a function, an arm of a condition, the body of a loop or of a handler, and is named
    by what leads to it. An expression is a comparison or the like, without effects.
    """

    name: str
    around: str  # the name of the block that it is in; empty for a function
    lines: set[int]  # of the source, whose edit is one of this part
    body: list[ast.stmt] | None  # of a block
    node: ast.expr | None = None  # of an expression


def parts(tree: ast.Module) -> list[Part]:
    """Return what a module's functions are made of."""
    found: list[Part] = []

    def enter(name: str, around: str, body: list[Any], *heads: Any) -> None:
        lines = {line for each in [*heads, *body] for line in _lines(each)}
        found.append(Part(name, around, lines, body))
        for each in body:
            walk(each, name)

    def walk(node: Any, block: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            enter(f"{block}/def {node.name}", block, node.body, node.args)
            return
        if isinstance(node, ast.If | ast.While | ast.For):
            head = node.iter if isinstance(node, ast.For) else node.test
            walk(head, block)
            at = f"{block}/{type(node).__name__} {ast.unparse(head)}"
            enter(at, block, node.body, head)
            if isinstance(node, ast.If) or node.orelse:
                enter(f"{at}/else", block, node.orelse, head)
            return
        if isinstance(node, ast.ExceptHandler | ast.match_case):
            of = node.type if isinstance(node, ast.ExceptHandler) else node.pattern
            at = f"{block}/{type(node).__name__} {of and ast.unparse(of)}"
            enter(at, block, node.body, *([of] if of else []))
            return
        if isinstance(node, ast.Compare | ast.BoolOp | ast.BinOp) and _is_pure(node):
            name = f"{block}|{ast.unparse(node)}"
            found.append(Part(name, block, {*_lines(node)}, None, node))
        for each in ast.iter_child_nodes(node):
            walk(each, block)

    within = [("", each) for each in tree.body]
    for prefix, node in within:
        name = f"{prefix}{getattr(node, 'name', '')}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            enter(name, "", node.body, *node.decorator_list, node)
        else:
            inner = ast.iter_child_nodes(node)
            outer = f"{name}." if isinstance(node, ast.ClassDef) else prefix
            within += [(outer, each) for each in inner if isinstance(each, ast.stmt)]
    return found


def _lines(node: Any) -> range:
    return range(node.lineno, node.end_lineno + 1) if hasattr(node, "lineno") else range(0)


def _is_pure(node: ast.AST) -> bool:
    """Whether an expression can be evaluated twice, as far as its text tells."""
    within = [*ast.walk(node)]
    calls = [each.func for each in within if isinstance(each, ast.Call)]
    names = [getattr(each, "id", getattr(each, "attr", "")) for each in calls]
    return all(map(_PURE.fullmatch, names)) and not any(
        isinstance(each, _NOT_IN_LAMBDA) for each in within
    )


class _Values(_Changes):
    """Puts changes of chosen expressions behind switches."""

    def __init__(self, numbers: dict[ast.AST, int]) -> None:
        super().__init__({})
        self.numbers = numbers

    def _number(self, node: Any, what: str) -> int | None:
        return self.numbers.get(node)


def with_switches(source: str, numbers: dict[str, int]) -> ast.Module:
    """Return a module whose parts have switches: at the entry of a block, and on expressions."""
    tree = ast.parse(source)
    of_nodes: dict[ast.AST, int] = {}
    for each in parts(tree):
        if each.name not in numbers:
            continue
        if each.node is not None:
            of_nodes[each.node] = numbers[each.name]
        if each.body is not None:
            first = each.body[0] if each.body else None
            is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            each.body.insert(is_text, ast.Expr(_call("on", numbers[each.name])))
    return ast.fix_missing_locations(_Values(of_nodes).visit(tree))


def named(path: Path, change: str) -> tuple[str, str, str]:
    """Return file, change and text of the line: what names a change when lines have moved."""
    line, _, what = change.partition(": ")
    return (
        f"{path.parent.name}/{path.name}",
        what,
        path.read_text().splitlines()[int(line) - 1].strip(),
    )


def sources(module: str) -> dict[str, Path]:
    """Names and files of the module, or of the modules of a package."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise SystemExit(f"there is no module {module}")
    origin = Path(spec.origin)
    if origin.name != "__init__.py":
        return {module: origin}
    return {
        f"{module}.{each.stem}": each
        for each in sorted(origin.parent.glob("*.py"))
        if each.stem != "__init__"
    }


class _Loader(importlib.machinery.SourceFileLoader):
    chosen: dict[str, int]

    def get_code(self, fullname: str) -> Any:  # past the cache of bytecode
        source = self.get_data(self.path).decode()
        if all(key.isdecimal() for key in self.chosen):
            tree, _ = changes(source, {int(key): number for key, number in self.chosen.items()})
        else:
            tree = with_switches(source, self.chosen)
        return compile(tree, self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, modules: dict[str, dict[str, int]]) -> None:
        self.modules = modules

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin:
            spec.loader = _Loader(name, spec.origin)
            spec.loader.chosen = self.modules[name]
        return spec


def install() -> None:
    """Compile modules with switches in this process; called by the run's `sitecustomize`."""
    run = json.loads(Path(os.environ[_RUN]).read_text())
    sys.meta_path.insert(0, _Finder(run["modules"]))
    with Path(os.environ[_STATE]).open("r+b") as file:
        flags = memoryview(mmap.mmap(file.fileno(), 0))
    active = flags[:4].cast("I")  # the number of the change that is on; 0: none
    is_learning = not run["order"]

    def is_on(number: int) -> bool:
        flags[3 + number] = 1  # reached
        return active[0] == number

    def choose(number: int, changed: Callable[[], Any], original: Callable[[], Any]) -> Any:
        """One of two values. Only where they differ a test can see it: that is "reached"."""
        if not is_learning:
            return (changed if active[0] == number else original)()
        value = original()
        if not flags[3 + number]:
            flags[3 + number] = _differ(value, changed)
        return value

    builtins.__mutant__ = types.SimpleNamespace(on=is_on, choose=choose)  # type: ignore[attr-defined]


def _differ(value: Any, changed: Callable[[], Any]) -> bool:
    try:
        other = changed()
        return type(other) is not type(value) or bool(other != value)
    except Exception:
        return True


class Session:
    """A plugin of pytest whose loop runs tests without changes, then with one after another."""

    def __init__(self, part: str) -> None:
        self.folder, self.part = Path(os.environ[_RUN]).parent, int(part)
        self.run = json.loads(Path(os.environ[_RUN]).read_text())
        with Path(os.environ[_STATE]).open("r+b") as file:
            self.flags = mmap.mmap(file.fileno(), 0)
        self.failed = self.was_late = False

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note a failure."""
        self.failed |= report.failed

    def pytest_runtestloop(self, session: Any) -> bool:
        """Learn in the first round, change in the second."""
        if self.run["order"]:
            self._change({item.nodeid: item for item in session.items})
        else:
            self._learn(session.items)
        return True

    def _fails(self, item: Any, number: int, limit_s: float) -> bool:
        """Run one test with change `number`; all fixtures but the session's end with it."""

        def late(*_: object) -> None:
            self.was_late = True
            raise TimeoutError(f"more than {limit_s} s")

        self.failed = False
        self.flags[:] = number.to_bytes(4, sys.byteorder) + bytes(len(self.flags) - 4)
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, limit_s, 5)
        faulthandler.dump_traceback_later(2 * limit_s + 30, exit=True)
        try:
            root = types.SimpleNamespace(listchain=lambda: [item.session])
            item.ihook.pytest_runtest_protocol(item=item, nextitem=root)
        except TimeoutError:
            self.failed = True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()
            self.flags[:4] = bytes(4)
        return self.failed

    def _learn(self, items: list[Any]) -> None:
        """Note which changes each test reaches, and its seconds."""
        claims = self.folder / "learnt"
        for path in dict.fromkeys(item.path for item in items):
            if _claims(claims / str(path).replace("/", "-")):
                for item in (each for each in items if each.path == path):
                    begun = time.monotonic()
                    if not self._fails(item, 0, 600) and any(self.flags[4:]):
                        reached = [
                            at + 1 for at, is_reached in enumerate(self.flags[4:]) if is_reached
                        ]
                        took = time.monotonic() - begun
                        self._write(
                            "reach", {"test": item.nodeid, "took": took, "reached": reached}
                        )

    def _change(self, items: dict[str, Any]) -> None:
        """Take changes that no session has taken, until all are."""
        tests = read(self.folder, "reach")
        is_fresh = True
        for number in self.run["order"]:
            claim = self.folder / "changed" / str(number)
            if not _claims(claim):
                continue
            seen = collections.Counter(each["by"] for each in read(self.folder, "results"))
            mine = [each for each in tests if number in each["reached"] and each["test"] in items]
            # A test that reaches little is about what it reaches.
            mine.sort(
                key=lambda each: (
                    (1 + seen[each["test"]]) / (1 + each["took"]) / len(each["reached"])
                ),
                reverse=True,
            )
            turns: collections.Counter[str] = collections.Counter()
            order = []
            for each in mine:  # files take turns: their laws differ more than those within one
                path = each["test"].partition("::")[0]
                order.append((turns[path], len(order)))
                turns[path] += 1
            mine = [mine[at] for _, at in sorted(order)]
            by, left, tried = "", self.run["seconds"], 0
            first = time.monotonic()
            for each in mine:
                tried += 1
                begun = time.monotonic()
                claim.write_text(each["test"])  # should the process end with it
                if self._fails(items[each["test"]], number, 30 + 5 * each["took"]):
                    by = each["test"]
                    break
                if (left := left - (time.monotonic() - begun)) < 0:
                    break
            took = time.monotonic() - first
            # What a late test has started may run on, until the session's processes are killed.
            is_late = self.was_late
            is_sound = not by or is_late or not self._fails(items[by], 0, 600)
            if is_sound or is_fresh:
                result = {"number": number, "by": by, "tried": tried, "of": len(mine)}
                self._write("results", {**result, "took": took})
            else:  # what came before may have broken this session
                claim.unlink()
            if is_late or not is_sound:
                os._exit(9)
            is_fresh = False

    def _write(self, name: str, line: dict[str, Any]) -> None:
        with (self.folder / f"{name}-{self.part}").open("a") as file:
            print(json.dumps(line), file=file)


def _claims(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    """The lines that all sessions wrote."""
    files = sorted(folder.glob(f"{name}-*"))
    return [json.loads(line) for each in files for line in each.read_text().splitlines()]


def run_sessions(
    folder: Path, num_changes: int, num_sessions: int, tests: list[str], cases: str = "all"
) -> None:
    """Run sessions, which must have the same `cases`, until each has ended of itself."""
    own = Path(__file__).resolve().parent
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(own)!r})\nimport mutate\nmutate.install()\n"
    )
    code = (
        "import sys, pytest, mutate\n"
        "code = pytest.main(sys.argv[2:], [mutate.Session(sys.argv[1])])\n"
        "sys.exit(0 if code == 1 else code)"  # 1: by faulthandler, of a test that hangs
    )
    options = ["-q", "-p", "no:cacheprovider", "-rN", "--tb=no", *tests]

    def out_of(part: int) -> Path:
        return folder / f"out-{part}"

    def begin(part: int) -> subprocess.Popen[bytes]:
        state = folder / f"state-{part}"
        state.write_bytes(bytes(4 + num_changes))
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {_RUN: str(folder / "run.json"), _STATE: str(state), "PYTHONPATH": path}
        env["ZERO_CASES"] = cases
        out = out_of(part).open("ab")
        return subprocess.Popen(
            [sys.executable, "-c", code, str(part), *options],
            env={**os.environ, **env},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )

    running = {part: begin(part) for part in range(num_sessions)}
    while running:
        time.sleep(1)
        for part, process in [*running.items()]:
            if (ended := process.poll()) is None:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if ended < 0 or ended in (1, 9):
                running[part] = begin(part)
            else:
                del running[part]
            if ended in (2, 3, 4, 5):
                for other in running.values():
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(other.pid, signal.SIGKILL)
                sys.exit(f"pytest ended with {ended}, and no change is judged: {out_of(part)}")


def equal_changes() -> dict[tuple[str, str, str], str]:
    """Return why a change makes no difference, by file, change and text of the line."""
    said = tomllib.loads(Path(__file__).with_name("equal_changes.toml").read_text())
    return {(each["file"], each["change"], each["line"]): each["why"] for each in said["change"]}


def _draw(
    draw: random.Random, modules: list[str], taken: dict[str, dict[int, int]], count: int
) -> tuple[list[tuple[str, str, int, Path, str]], int]:
    """Draw changes that are not `taken`; how many were passed over since they make no difference.

    Of each its module as it was asked for, its module, number there, file and line.
    """
    found = [
        (asked_for, name, at, path, line)
        for asked_for in modules
        for name, path in sources(asked_for).items()
        for at, line in enumerate(changes(path.read_text(), {})[1])
        if at not in taken.get(name, {})
    ]
    reasons, chosen, num_equal = equal_changes(), [], 0
    for each in draw.sample(found, len(found)):
        if len(chosen) == count:
            break
        if named(*each[3:]) in reasons:
            num_equal += 1
        else:
            chosen.append(each)
    return chosen, num_equal


def _forget(folder: Path) -> None:
    """What is to be done again: tests that have changed, and changes that none has seen."""
    unseen = {each["number"] for each in read(folder, "results") if not each["by"]}
    for number in unseen:
        (folder / "changed" / str(number)).unlink()
    changed = set()
    for path in (each for each in Path().rglob("test_*.py") if "_build" not in each.parts):
        claim = folder / "learnt" / str(path.resolve()).replace("/", "-")
        if claim.exists() and claim.stat().st_mtime < path.stat().st_mtime:
            claim.unlink()
            changed.add(str(path))
    for file in [*folder.glob("results-*"), *folder.glob("reach-*")]:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        lines = [
            each
            for each in lines
            if each.get("number") not in unseen
            and each.get("test", "").partition("::")[0] not in changed
        ]
        file.write_text("".join(f"{json.dumps(each)}\n" for each in lines))


def _report(modules: list[str], lines: dict[int, tuple[str, str]], folder: Path) -> float:
    """Print what became of each change, the unseen ones last; return the part that was seen."""
    results = {each["number"]: each for each in read(folder, "results")}
    # One without a result ended its session, which a test run would see.
    unseen = [each for each in lines if each in results and not results[each]["by"]]
    for number in sorted(lines, key=unseen.__contains__):
        module, line = lines[number]
        result = results.get(number, {"by": "it ended the session", "took": 0})
        how = f"{result['took']:.1f} s, {result['by']}"
        if number in unseen:
            how = f"{result['tried']} of {result['of']} tests"
        print(f"{'unseen' if number in unseen else 'seen'}: {module}: {line} ({how})")
    said = []
    for module in modules:
        mine = [each for each in lines if lines[each][0] == module]
        said.append(f"{module} {len([each for each in mine if each not in unseen])} of {len(mine)}")
    num_seen = len(lines) - len(unseen)
    print(f"seen {num_seen} of {len(lines)}: {', '.join(said)}")
    return num_seen / max(1, len(lines))


def main() -> None:
    """Draw changes, learn which tests reach them, see which fail."""
    asked = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    asked.add_argument("modules", nargs="+", help="a module, or a package with all that is in it")
    asked.add_argument("--count", type=int, default=60, help="changes of each")
    asked.add_argument("--total", type=int, help="changes of all together, in place of --count")
    asked.add_argument("--seed", type=int, default=int(time.time()))
    asked.add_argument("--seconds", type=float, default=120, help="of tests for a change at most")
    asked.add_argument("--tests", nargs="+", default=["packages", "integration-tests"])
    asked.add_argument(
        "--quick",
        type=float,
        nargs="?",
        const=50,
        metavar="SECONDS",
        help="in place of --tests: those of `hatch run quick`, so many seconds in each worker",
    )
    asked.add_argument(
        "--sessions",
        type=int,
        default=2 * (os.cpu_count() or 1),
        help="at once; two a core, as ranks wait half of the time",
    )
    asked.add_argument("--device", default="cpu", help="of the tests with ranks")
    asked.add_argument(
        "--folder", type=Path, help="for what is found; again: only unseen changes, by all tests"
    )
    args = asked.parse_args()
    if args.quick:
        import quick  # which imports this module
    draw = random.Random(args.seed)
    print(f"seed {args.seed}", flush=True)
    lines, modules, num_equal = {}, {}, 0
    of_quick = collections.defaultdict[tuple[str, float], list[int]](list)
    groups = [[each] for each in args.modules] if args.total is None else [args.modules]
    for group in groups:
        chosen, num_passed = _draw(draw, group, modules, args.total or args.count)
        num_equal += num_passed
        for asked_for, name, at, path, line in chosen:
            lines[len(lines) + 1] = (asked_for, f"{path.name}:{line}")
            modules.setdefault(name, {})[at] = len(lines)
            if args.quick:
                changed = {int(line.partition(":")[0])}
                for test, took in quick.tests_after(name, path, changed, args.quick).items():
                    of_quick[test, took].append(len(lines))
    folder = args.folder or Path(tempfile.mkdtemp(prefix="mutate-"))
    for each in ("learnt", "changed"):
        (folder / each).mkdir(parents=True, exist_ok=True)
    _forget(folder)
    run = {"modules": modules, "seconds": args.seconds, "order": []}
    (folder / "run.json").write_text(json.dumps(run))
    if args.quick:
        # The map may have tests that are no longer there.
        (folder / "tests").write_text("\n".join(test for test, _ in of_quick))
        files = {test.partition("::")[0] for test, _ in of_quick}
        args.tests = ["--only", str(folder / "tests"), *filter(os.path.exists, sorted(files))]
    tests = ["--device", args.device, *args.tests]
    if args.quick:  # which tests run a change is known
        reach = [
            {"test": test, "took": took, "reached": reached}
            for (test, took), reached in of_quick.items()
        ]
        (folder / "reach-quick").write_text("\n".join(map(json.dumps, reach)))
    else:
        run_sessions(folder, len(lines), args.sessions, tests)
    run["order"] = draw.sample([*lines], len(lines))
    (folder / "run.json").write_text(json.dumps(run))
    run_sessions(folder, len(lines), args.sessions, tests)
    part = _report(args.modules, lines, folder)
    print(f"seed {args.seed}; {num_equal} more make no difference")
    sys.exit(part < (_ENOUGH_FOR_QUICK if args.quick else _ENOUGH))


if __name__ == "__main__":
    main()
