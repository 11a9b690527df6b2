"""Parts of every suite: options, turns, ratios, a table, and a file of results.

A suite is a function under `@suite` from its options to the rows of its table. The decorator's
arguments are its columns and options; `run_suite` parses options, and prints and writes the table.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from tabulate import tabulate
from zero_comm.torch_private import accelerator

HERE: Final = Path(__file__).parent
MIB: Final = 2**20
OUR_PACKAGES: Final = (
    *("zero-comm", "zero-partition", "zero-ckpt", "zero-offload", "zero-engine", "zero-deepspeed"),
)
DEEPSPEED: Final = ("", "interpreter of an environment with DeepSpeed, to time as well")
# Options with paths of this machine, which are not written beside the figures.
PLACES: Final = {"deepspeed_python", "folder", "path", "plot", "pythons", "versions"}

Row = dict[str, Any]
Column = tuple[Any, ...]  # a title, a key of the row, its format, and a factor
K = TypeVar("K")
T = TypeVar("T")


# ---- Suites ----


@dataclass(frozen=True)
class Suite:
    """One benchmark.

    An option is a default and a help text; a type in place of the default asks for a value, False
    for a flag, and a list for values by commas. A dict is handed to argparse as it is.
    """

    measure: Callable[[argparse.Namespace], list[Row]]
    columns: tuple[Column, ...]
    options: Mapping[str, Any]


def suite(*columns: Column, **options: Any) -> Callable[[Callable[..., list[Row]]], Suite]:
    """Make a suite of the function that measures."""
    return lambda measure: Suite(measure, columns, options)


def run_suite(name: str, chosen: Suite, argv: Sequence[str]) -> int:
    """Measure, print the table, write the file. Returns 1 if a row has failed."""
    parser = argparse.ArgumentParser(
        prog=f"run.py {name}",
        description=chosen.measure.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    folder = HERE / "results", "for the JSON"
    for option, given in {**chosen.options, "folder": folder}.items():
        parser.add_argument(f"--{option.replace('_', '-')}", **_as_argparse(given))
    options = parser.parse_args(argv)
    options.versions = {}
    load_before = os.getloadavg()[0]
    try:
        rows = chosen.measure(options)
    except OptionError as error:
        parser.error(str(error))
    if not rows:
        return 0
    print(table(chosen.columns, rows))
    settings = {k: v for k, v in vars(options).items() if k not in PLACES}
    settings |= {"load_before": load_before, "load_after": os.getloadavg()[0]}
    path = write_results(
        name, rows, folder=options.folder, settings=settings, versions=options.versions
    )
    print(f"\nwritten to {path}")
    failed = [row["error"] for row in rows if row.get("error")]
    for error in failed:
        say(f"\n{error}")
    return int(bool(failed))


class OptionError(ValueError):
    """An option has an invalid value."""


def check_known(option: str, given: Iterable[Any], known: Iterable[Any]) -> None:
    """Raise OptionError for values that are not known."""
    if unknown := set(given) - set(known):
        expected, got = (", ".join(map(str, each)) for each in (known, unknown))
        raise OptionError(f"--{option}: expected some of {expected}, got {got}")


def device_name(device: str) -> str:
    """Return the name of a device to measure, "cpu" or "cuda"; OptionError if there is none."""
    if device == "cpu":
        return device
    if accelerator() != torch.device(device):
        raise OptionError(f"there is no {device.upper()} device; --device cpu measures the CPU")
    return torch.get_device_module(device).get_device_name()


def _as_argparse(given: Any) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    default, text = given
    if default is False:
        return {"action": "store_true", "help": text}
    if isinstance(default, type):
        return {"type": default, "required": True, "help": text}
    if isinstance(default, list):
        kind = type(default[0]) if default else str
        split = lambda words: [kind(word) for word in words.split(",") if word]  # noqa: E731
        shown = ",".join(map(str, default))
        return {"type": split, "default": default, "help": f"{text}; by commas, like {shown}"}
    return {"type": type(default), "default": default, "help": text}


def say(text: str) -> None:
    """Print progress to stderr; the table goes to stdout."""
    print(text, file=sys.stderr, flush=True)


# ---- Turns and ratios ----


def take_turns(
    ways: Mapping[K, Callable[[], T]], rounds: int, *, skipped: int = 1
) -> dict[K, list[T]]:
    """Call ways in the order A B C C B A, so that a disturbance hits all alike; return results.

    Args:
        ways: Functions to call, by name.
        rounds: Rounds to return the results of.
        skipped: Rounds before these, which create state and warm up caches and threads.
    """
    found: dict[K, list[T]] = {name: [] for name in ways}
    for turn in range(skipped + rounds):
        for name in ways if turn % 2 else reversed([*ways]):
            answer = ways[name]()
            if turn >= skipped:
                found[name].append(answer)
    return found


def timed(
    call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter
) -> Callable[[], float]:
    """Return a function that makes the call and returns its seconds."""

    def measure() -> float:
        start = clock()
        call()
        return clock() - start

    return measure


def by_figure(
    found: Mapping[K, Sequence[Sequence[Any]]], *names: str
) -> dict[str, dict[K, list[Any]]]:
    """Regroup results of `take_turns` with several figures each: by figure and way, all rounds."""
    return {
        name: {way: [each[index] for each in rounds] for way, rounds in found.items()}
        for index, name in enumerate(names)
    }


def ratio(own: Sequence[float], others: Sequence[float], name: str = "ratio") -> Row:
    """Return the median of `own` over `others` of each round, and the lowest and highest."""
    ratios = [a / b for a, b in zip(own, others, strict=True)]
    return {name: statistics.median(ratios), f"{name}_range": [min(ratios), max(ratios)]}


# ---- The limit, in C ----


def compiled(source: str, *flags: str) -> ctypes.CDLL:
    """Compile and load a C or C++ file of this folder."""
    from zero_offload.build import find_compiler  # noqa: PLC0415 - which not every suite needs

    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "limit.so")
        output = ["-O3", "-fPIC", "-shared", *flags, str(HERE / source), "-o", str(library)]
        subprocess.run([*find_compiler(os.environ), *output], check=True)
        return ctypes.CDLL(str(library))


# ---- The table ----


def table(columns: Sequence[Column], rows: Sequence[Row], form: str = "plain") -> str:
    """Return a table of the rows; texts are aligned left, and missing values are empty."""
    titles = [column[0] for column in columns]
    cells = [[cell(row, *column[1:]) for column in columns] for row in rows]
    is_text = [any(isinstance(row.get(column[1]), str) for row in rows) for column in columns]
    sides = ["left" if each else "right" for each in is_text]
    return tabulate(cells, titles, tablefmt=form, colalign=sides, disable_numparse=True)


def cell(row: Row, key: str, form: str = "", factor: float = 1) -> str:
    """Return the text of a figure of a row; empty where the row has none."""
    value = row.get(key)
    if value is None:
        return ""
    if isinstance(value, list):
        return "-".join(format(each * factor, form) for each in value)
    return value if isinstance(value, str) else format(value * factor, form)


# ---- Results: one JSON file per invocation, with the machine and the versions ----


def write_results(
    suite: str,
    rows: list[Row],
    *,
    folder: Path,
    settings: Mapping[str, Any],
    versions: Mapping[str, str] | None = None,
) -> Path:
    """Write `<date>-<suite>.json` and return its path; a second one of a day gets a number.

    Args:
        suite: Name of the benchmark.
        rows: The figures, one flat dict per line of its table.
        folder: Made if missing.
        settings: Values of the suite's options.
        versions: Versions of libraries in other environments, which this process cannot see.
    """
    now = datetime.now().astimezone()
    record = {
        "suite": suite,
        "time": now.isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": {
            "cpu": proc_fields("cpuinfo").get("model name") or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__}
        | {name: _version(name) for name in OUR_PACKAGES}
        | dict(versions or {}),
        "settings": dict(settings),
        "rows": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path, count = folder / f"{now:%Y-%m-%d}-{suite}.json", 1
    while path.exists():
        count += 1
        path = folder / f"{now:%Y-%m-%d}-{suite}-{count}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def proc_fields(name: str) -> dict[str, str]:
    """Return the first value of each key in a /proc file of lines `key: value`."""
    fields: dict[str, str] = {}
    for line in Path("/proc", name).read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    return fields


def _commit() -> str:
    """Return the current commit, marked if files differ from it; empty without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(HERE), *arguments]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _version(name: str) -> str:
    """Return the version of one of our packages, installed or on the path."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        return importlib.import_module(f"{name.replace('-', '_')}.__about__").__version__
    except ImportError:
        return ""
