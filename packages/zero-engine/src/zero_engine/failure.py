"""Reports that ranks write after an error, and `zero report`, which compares those of all ranks."""

from __future__ import annotations

import faulthandler
import os
import platform
import re
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from configparser import Error
from configparser import RawConfigParser as Report
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import attrs
from torch import nn
from zero_comm import Group
from zero_comm.failure import ASKED, describe_launches
from zero_partition import memory_report
from zero_partition.seams import ModelPhase, ShardedModel, find_sharded

from zero_engine.errors import FileError

_WAITS: Final = "waits for"
_OWN: Final = ("versions", "launched", "schedule")  # what should be equal on all ranks
_NOT_COMPARED: Final = (_WAITS, "state", "whole", "on their way")
_PHASES: Final = {
    ModelPhase.IDLE: "outside forward and backward",
    ModelPhase.FORWARD: "in forward",
    ModelPhase.BACKWARD: "in backward",
    ModelPhase.FAILED: "after a backward that failed",
}
_SHARED: Final = ("CommError", "DivergenceError", "AgreementError")  # another rank is the cause


def write(path: Path, why: str, models: Mapping[nn.Module, Group]) -> None:
    """Write a report of this rank's state to `path`. Local; waits for no other rank.

    Called as `zero_comm.failure.install` documents. The report has sections of `key = value`, which
    configparser reads, and the Python stacks of all threads.
    """
    report, sizes = Report(strict=False), [group.world_size for group in models.values()]
    report["report"] = {
        "why": why,
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "ranks": os.environ.get("WORLD_SIZE") or str(max(sizes, default=1)),
        "process": f"{os.getpid()} on {socket.gethostname()}",
        "main thread": f"0x{threading.main_thread().ident:016x}",
    }
    packages = [name for name in sys.modules if re.fullmatch(r"torch|zero_[a-z]+", name)]
    versions = {name: str(sys.modules[name].__version__) for name in sorted(packages)}
    report["versions"] = {"python": platform.python_version(), **versions}
    for number, (model, group) in enumerate(models.items()):
        of = f" of model {number}" if number else ""
        sharded = find_sharded(model)
        whole = group if sharded is None else sharded.whole
        report[f"launched{of}"] = _known(describe_launches, whole)
        if sharded is not None:
            report[f"schedule{of}"] = _known(_schedule_of, sharded)
            report[f"memory{of}"] = _known(lambda of: attrs.asdict(memory_report(of)), model)
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)  # a link of this name leads to somebody's file
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(partial, flags, 0o666), "w") as file:
        report.write(file)
        file.write("[stacks]\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    partial.replace(path)


def _known(ask: Callable[[Any], Mapping[str, Any]], of: Any) -> dict[str, str]:
    try:
        return {name: str(value) for name, value in ask(of).items()}
    except Exception as error:  # in the middle of a change, say: the rest of a report is worth it
        return {"not known": repr(error)}


def _schedule_of(sharded: ShardedModel) -> dict[str, str]:
    names = defaultdict[str, list[str]](list)
    for unit in sharded.units:
        names[unit.state.name].append(unit.name)
    return {
        "state": _PHASES[sharded.phase],
        "updates": str(max(unit.version for unit in sharded.units)),
        "whole": ", ".join(names["UNSHARDED"]),
        "on their way": ", ".join(names["GATHERING"]),
    }


def summary(folder: str | Path) -> str:
    """Compare the reports of all ranks: a line for each, how they differ, and whom to look at.

    Raises:
        FileError: There are none, or one is damaged.
    """
    reports, sizes = dict[int, Report](), list[int]()
    for path in sorted(Path(folder).glob("zero-report-rank*.txt")):
        report = reports[int(re.findall(r"\d+", path.stem)[-1])] = Report(strict=False)
        try:
            report.read(path)
            sizes.append(len(report["stacks"]) and report.getint("report", "ranks"))
        except (Error, KeyError, ValueError) as error:
            raise FileError(f"{path}: not a report, or not a whole one ({error})") from error
    if not reports:
        raise FileError(f"{folder}: expected zero-report-rank0.txt and so on, found none")
    size = max(sizes)
    return "\n".join([*_lines(reports, size), *_differences(reports), _suspect(reports, size)])


def _lines(reports: Mapping[int, Report], size: int) -> Iterator[str]:
    for rank in range(size):
        if rank not in reports:
            yield f"rank {rank}: no report; it was killed, or ended without an error of ours"
            continue
        report = reports[rank]
        state = report.get("schedule", "state", fallback="before or in shard()")
        waits = report.get("launched", _WAITS, fallback="not known")
        why, when = report["report"]["why"].splitlines()[0], report["report"]["time"]
        yield f"rank {rank}: {why}\n  {when}, {state}, at {_place(report)}; waits for {waits}"


def _place(report: Report) -> str:
    """Return the innermost file:line of the error, or of the main thread, in the user's code."""
    main, why = report["report"]["main thread"], report["report"]["why"]
    stack = "".join(text for name, text in report["stacks"].items() if main in name)
    frame = re.compile(r'File "(.+)", line (\d+)')
    frames = frame.findall(why)[::-1] or frame.findall(stack) or [("no Python code", "")]
    own = [found for found in frames if not re.search(r"/(torch|zero_\w+)/", found[0])]
    return ":".join([*own, *frames][0])


def _differences(reports: Mapping[int, Report]) -> Iterator[str]:
    for section in _OWN:
        found = defaultdict[str, dict[str, list[int]]](dict)
        for rank, report in sorted(reports.items()):
            for name, value in report[section].items() if section in report else ():
                what = value.removesuffix(", in flight").removesuffix(", finished")
                found[name].setdefault(what, []).append(rank)
        differ = [name for name in found if len(found[name]) > 1 and name not in _NOT_COMPARED]
        for name in differ[:4]:
            values = (f"{what} on rank {', '.join(map(str, r))}" for what, r in found[name].items())
            yield f"{section}: {name} = {'; '.join(values)}"


def _suspect(reports: Mapping[int, Report], size: int) -> str:
    """Return a line that says which rank to look at first, and why."""
    first = sorted(
        (report["report"]["time"], rank)
        for rank, report in reports.items()
        if report["report"]["why"].split(":")[0] not in (*_SHARED, ASKED)
    )
    if first:
        return f"look at rank {first[0][1]} first: its error is no consequence of another rank's"
    if missing := [str(rank) for rank in range(size) if rank not in reports]:
        return f"look at rank {', '.join(missing)} first, of which there is no report"
    waits = {rank: r.get("launched", _WAITS, fallback="") for rank, r in reports.items()}
    for rank, what in waits.items():
        if (peer := re.match(r"rank (\d+)", what)) and waits.get(int(peer[1])) == "nobody":
            return f"look at rank {peer[1]} first: rank {rank} waits for it, and it for nobody"
    return "no rank stands out: compare the lines above, and [stacks] in the reports"
