"""Reports that ranks write after an error, and `zero report`, which compares those of all ranks."""

from __future__ import annotations

import faulthandler
import os
import platform
import re
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from configparser import Error
from configparser import RawConfigParser as Report
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import attrs
from torch import nn
from zero_comm import Group
from zero_comm.calls import FIND_LINE, Place, call_in, is_sanitized, main_stack, of_user
from zero_comm.failure import ASKED, OF_TORCH, describe_launches, started
from zero_partition import memory_report
from zero_partition.seams import ModelPhase, ShardedModel, find_sharded

from zero_engine.errors import FileError

_WAITS: Final = "waits for"
_BACKWARDS: Final = "backwards begun since the last update"
# Sections that should be equal on all ranks.
_OWN: Final = ("versions", "launched", "schedule")
_NOT_COMPARED: Final = ("state", "whole", "on their way")
_PHASES: Final = {
    ModelPhase.IDLE: "outside forward and backward",
    ModelPhase.FORWARD: "in forward",
    ModelPhase.BACKWARD: "in backward",
    ModelPhase.FAILED: "after a backward that failed",
}
_TRACEBACK: Final = "Traceback (most recent call last)"
# A frame as Python prints it: in a traceback with the name of its function, by faulthandler too.
_FRAME: Final = re.compile(r'File "(.+)", line (\d+),? in (\S+)')
# Collectives without a purpose of their own: operation -> words for it.
_NAMED: Final = {"agree": "comparing values of the ranks"}
# Calls of each step: the other rank may have made a backward or a step more than this one.
_OF_STEP: Final = ("clip_grad_norm_()", "clip_grad_value_()", "unscale_and_clip_()")
# Launches of a backward. A rank that has yet to make one is late, whichever call the others are in.
_OF_BACKWARD: Final = ("reducing the gradients", "publishing")
# What an error says of a call that one rank has made more often than another.
_ENDED_CALL: Final = re.compile(r"rank (\d+) (has called \S+ more often than rank \d+: [^;\n]*)")
# What it says where a peer's process or program is over.
_HAS_ENDED: Final = re.compile(r"(its process|(process|program) of rank \d+( \(\d+\))?) has ended")
# What it says of a collective of torch's.
_IN_TORCH: Final = re.compile(
    r"rank (\d+) is in (torch\.distributed\.\S+\(\)), which must be called"
)
# Why a rank may be ahead of another one.
_UNEVEN: Final = "uneven batches: backward_without_batch(model) where a rank has none"
_EITHER: Final = (
    "one makes this call, or a backward or step before it, more often than the other. The usual "
    f"causes are `if rank == 0:` around one of these, and {_UNEVEN}"
)
# What the sanitizer's errors say.
_COMPARED: Final = "ranks disagree on the next collective"
_CAME_APART: Final = re.compile(
    r"from different lines: (rank \d+) from (.+?), (rank \d+) from (.+?); (one of them [^.,(\n]*)"
)
# Errors that another rank may have caused, and those of torch's collectives.
_SHARED: Final = ("CommError", "DivergenceError", "AgreementError")


def write(path: Path, why: str, models: Mapping[nn.Module, Group]) -> None:
    """Write a report of this rank's state to `path`. Local; waits for no other rank.

    Called as `zero_comm.failure.install` documents. The report has sections of `key = value`, which
    configparser reads, and the Python stacks of all threads.
    """
    report, sizes = Report(strict=False), [group.world_size for group in models.values()]
    report["report"] = {
        "why": why,
        "started": _time(started()),
        "time": _time(time.time()),
        "ranks": os.environ.get("WORLD_SIZE") or str(max(sizes, default=1)),
        "process": f"{os.getpid()} on {socket.gethostname()}",
        "main thread": f"0x{threading.main_thread().ident:016x}",
        "call": _call(why),
        "sanitizer": "on" if is_sanitized() else "off",
    }
    packages = [name for name in sys.modules if re.fullmatch(r"torch|zero_[a-z]+", name)]
    versions = {name: str(sys.modules[name].__version__) for name in sorted(packages)}
    report["versions"] = {"python": platform.python_version(), **versions}
    for number, (model, group) in enumerate(models.items()):
        of = f" of model {number}" if number else ""
        sharded = find_sharded(model)
        whole = group if sharded is None else sharded.whole
        launched = _known(describe_launches, whole)
        if why != ASKED and launched.get(_WAITS) == "no rank":
            # The error has ended the wait: it says itself what was waited for.
            del launched[_WAITS]
        report[f"launched{of}"] = launched
        if sharded is not None:
            report[f"schedule{of}"] = _known(lambda of: _schedule_of(of, why), sharded)
            report[f"memory{of}"] = _known(lambda of: attrs.asdict(memory_report(of)), model)
    partial = path.with_suffix(".partial")
    # A symbolic link with this name could lead to another user's file.
    partial.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(partial, flags, 0o666), "w") as file:
        report.write(file)
        file.write("[stacks]\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    partial.replace(path)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _call(why: str) -> str:
    """Return the call of ours that all ranks must make, with its line in the user's code, or ""."""
    stack = main_stack() if why == ASKED else _places(why.rpartition(_TRACEBACK)[2])
    call, position = call_in(stack)
    return f"{call} at {_users(stack[:position])}" if call else ""


def _places(text: str) -> list[Place]:
    """Return the places that a traceback names, in its order."""
    return [Place(file, int(line), name) for file, line, name in _FRAME.findall(text)]


def _users(stack: Sequence[Place]) -> str:
    """Return file:line of the innermost of these frames, outermost first, that is the user's."""
    return str((*stack, *of_user(stack))[-1]) if stack else "no Python code"


def _known(ask: Callable[[Any], Mapping[str, Any]], of: Any) -> dict[str, str]:
    try:
        return {name: str(value) for name, value in ask(of).items()}
    # The state may be in the middle of a change. The other sections are written all the same.
    except Exception as error:
        return {"not known": repr(error)}


def _schedule_of(sharded: ShardedModel, why: str) -> dict[str, str]:
    names = defaultdict[str, list[str]](list)
    for unit in sharded.units:
        names[unit.state.name].append(unit.name)
    # A report that was asked for is written by another thread, which autograd runs no backward in.
    is_in_backward = why == ASKED and sharded.backward is ModelPhase.BACKWARD
    return {
        "state": _PHASES[ModelPhase.BACKWARD if is_in_backward else sharded.phase],
        "updates": str(max(unit.version for unit in sharded.units)),
        _BACKWARDS: str(sharded.num_backwards),
        "whole": ", ".join(names["UNSHARDED"]),
        "on their way": ", ".join(names["GATHERING"]),
    }


def summary(folder: str | Path) -> str:
    """Compare the reports of all ranks: a line for each, how they differ, and whom to look at.

    Reports of an earlier job in the same folder are named and not compared.

    Raises:
        FileError: There are none, or one is damaged.
    """
    found = dict[Path, Report]()
    for path in sorted(Path(folder).glob("zero-report-rank*.txt")):
        report = found[path] = Report(strict=False)
        try:
            report.read(path)
            report.getint("report", "ranks")
            for key in ("started", "time"):
                report.get("report", key)
            report["stacks"]
        except (Error, KeyError, ValueError) as error:
            # Errors of configparser have several lines.
            found_there = " ".join(str(error).split())
            raise FileError(f"{path}: not a report, or not a whole one ({found_there})") from error
    if not found:
        got = "found none" if Path(folder).is_dir() else "there is no such folder"
        raise FileError(f"{folder}: expected zero-report-rank0.txt and so on, {got}")
    newest = max((report["report"] for report in found.values()), key=itemgetter("time"))
    since = newest["started"]
    earlier = [path for path in found if found[path]["report"]["time"] < since]
    reports = {
        int(re.findall(r"\d+", path.stem)[-1]): report
        for path, report in found.items()
        if path not in earlier
    }
    size = max(report.getint("report", "ranks") for report in reports.values())
    left_out = [f"{path}: of a job before {since}; not compared" for path in earlier]
    lines = [*_lines(reports, size), *_differences(reports), _suspect(reports, size)]
    return "\n".join([*left_out, *lines])


def _lines(reports: Mapping[int, Report], size: int) -> Iterator[str]:
    told = dict[str, int]()
    for rank in range(size):
        if rank not in reports:
            yield f"rank {rank}: no report; it was killed, or ended without an error of ours"
            continue
        report = reports[rank]
        state = report.get("schedule", "state", fallback="before or in shard()")
        why, when = _message(report), report["report"]["time"]
        # Where the error was seen differs.
        first = told.setdefault(re.sub(r"\(seen on rank \d+", "(", why), rank)
        if first != rank and why != ASKED:
            why = f"the same error as on rank {first}"
        call = report.get("report", "call", fallback="")
        waits = report.get("launched", _WAITS, fallback="not known" if why == ASKED else "")
        where = f"in {call}" if call else f"at {_place(report)}"
        ending = f"; waits for {waits}" if waits else ""
        yield f"rank {rank}: {why}\n  {when}, {state}, {where}{ending}"


def _message(report: Report) -> str:
    """Return type and text of the error, without its traceback."""
    heading, *lines = report["report"]["why"].partition(_TRACEBACK)[0].splitlines()
    # Lines that follow in an error of torch's are frames of C++.
    return "\n  ".join([heading] if OF_TORCH in heading.partition(":")[0] else [heading, *lines])


def _place(report: Report) -> str:
    """Return the innermost file:line of the error, or of the main thread, in the user's code."""
    main, why = report["report"]["main thread"], report["report"]["why"]
    stack = "".join(text for name, text in report["stacks"].items() if main in name)
    return _users(_places(why) or _places(stack)[::-1])


def _differences(reports: Mapping[int, Report]) -> Iterator[str]:
    for section in _OWN:
        if section == "launched":
            yield from _launched_differently(reports)
            continue
        found = defaultdict[str, dict[str, list[int]]](dict)
        for rank, report in sorted(reports.items()):
            for name, value in report[section].items() if section in report else ():
                found[name].setdefault(value, []).append(rank)
        differ = [name for name in found if len(found[name]) > 1 and name not in _NOT_COMPARED]
        for name in differ[:4]:
            values = (f"{what} on rank {', '.join(map(str, r))}" for what, r in found[name].items())
            yield f"{section}: {name} = {'; '.join(values)}"


def _launched_differently(reports: Mapping[int, Report]) -> Iterator[str]:
    """Return how many collectives ranks have launched, and the first that they do not share."""
    launched = {rank: _launches(report) for rank, report in sorted(reports.items())}
    counts = {rank: max(found, default=0) for rank, found in launched.items()}
    if len({*counts.values()}) > 1:
        said = ", ".join(f"{count} on rank {rank}" for rank, count in counts.items())
        yield f"number of collectives launched so far: {said}"
    for number in sorted({each for found in launched.values() for each in found}):
        ranks = defaultdict[str, list[str]](list)
        for rank, found in launched.items():
            if number in found:
                ranks[found[number]].append(str(rank))
        if len(ranks) > 1:
            said = "; ".join(f"on rank {', '.join(on)} {what}" for what, on in ranks.items())
            yield f"the first collective that differs between ranks is number {number}: {said}"
            return


def _launches(report: Report) -> dict[int, str]:
    """Return the last launches of a rank, by number."""
    launched = report.items("launched") if report.has_section("launched") else ()
    found = {n: text.rpartition(", ")[0] for n, text in launched if n.isdecimal()}
    return {int(number): _NAMED.get(what, what) for number, what in found.items()}


def _lone_call(reports: Mapping[int, Report], size: int) -> str:
    """Return a line about a call that all ranks must make, and that a few are in; "" if none."""
    inside = defaultdict[str, list[int]](list)
    for rank, report in sorted(reports.items()):
        if call := report.get("report", "call", fallback=""):
            inside[call.partition(" at ")[0]].append(rank)
    for call, ranks in sorted(inside.items(), key=lambda found: len(found[1])):
        others = [rank for rank in range(size) if rank not in ranks]
        if not others or len(ranks) > len(others):
            continue
        counts = [max(_launches(reports[r]), default=0) for r in others if r in reports]
        more = [
            what
            for rank in ranks
            for number, what in _launches(reports[rank]).items()
            if counts and number > min(counts)
        ]
        if any(what.startswith(_OF_BACKWARD) for what in more):
            continue
        return _describe_lone(call, ranks, others, reports)
    return ""


def _describe_lone(
    call: str, ranks: Sequence[int], others: Sequence[int], reports: Mapping[int, Report]
) -> str:
    alone, rest = (f"rank {', '.join(map(str, those))}" for those in (ranks, others))
    place = reports[ranks[0]]["report"]["call"].partition(" at ")[2]
    first = others[0]
    states = (_PHASES[ModelPhase.BACKWARD], _PHASES[ModelPhase.FAILED])
    trains = first in reports and reports[first].get("schedule", "state", fallback="") in states
    if trains or (call in _OF_STEP and first in reports):
        return (
            f"look at {alone}, in {call} at {place}, and at {rest}, at {_place(reports[first])}: "
            f"{_EITHER}{_to_find(reports)}"
        )
    line = (
        f"look at {alone} first: {call} is called there, at {place}, and not on {rest}. Every rank "
        "must make this call, after the same number of backwards and steps; the usual causes are "
        f"`if rank == 0:` around it, or around a backward or step before it, and {_UNEVEN}"
    )
    if first not in reports:
        return f"{line}. If {rest} was killed before it made the call, look there"
    return f"{line}. If {rest} makes it later, see what it does at {_place(reports[first])}"


def _suspect(reports: Mapping[int, Report], size: int) -> str:
    """Return a line that says which rank to look at first, and why."""
    looks = (_own_error, _disagreement, _lines_apart, _lone_call, _ended_call, _missing, _awaited)
    looks += (_in_torch, _ahead)
    return next(filter(None, (look(reports, size) for look in looks)), "") or _no_rank(reports)


def _own_error(reports: Mapping[int, Report], size: int) -> str:
    first = sorted(
        (report["report"]["time"], rank)
        for rank, report in reports.items()
        if (kind := report["report"]["why"].partition(":")[0]) not in (*_SHARED, ASKED)
        and not kind.endswith(OF_TORCH)
    )
    if not first:
        return ""
    rank, why = first[0][1], _message(reports[first[0][1]])
    # An error that all ranks have says itself which one differs.
    of_all = all(_message(report) == why for report in reports.values())
    if of_all and size > 1 and (named := re.search(r"\(rank (\d+)\)", why)):
        return f"look at rank {named[1]} first: the error of all ranks names it"
    return f"look at rank {rank} first: its error is no consequence of another rank's"


def _disagreement(reports: Mapping[int, Report], size: int) -> str:
    """Return a line about values that ranks have compared, and of which the error says all."""
    whys = [report["report"]["why"] for report in reports.values()]
    if any(_COMPARED in why or not why.startswith("AgreementError: ") for why in whys):
        return ""
    return "the error of all ranks says which of them differ, in what, and what to do"


def _lines_apart(reports: Mapping[int, Report], size: int) -> str:
    """Return a line about the call to which ranks came from different lines; "" if none."""
    came = _CAME_APART.search(_reasons(reports))
    return f"look at {came[1]}, {came[2]}, and {came[3]}, {came[4]}: {came[5]}" if came else ""


def _ended_call(reports: Mapping[int, Report], size: int) -> str:
    """Return a line about a call that has ended, as the error of ranks that wait says; or ""."""
    ended = _ENDED_CALL.search(_reasons(reports))
    return f"look at rank {ended[1]} first: it {ended[2]}" if ended else ""


def _missing(reports: Mapping[int, Report], size: int) -> str:
    missing = [str(rank) for rank in range(size) if rank not in reports]
    if not missing:
        return ""
    line = f"look at rank {', '.join(missing)}, of which there is no report: ended or killed?"
    went_on = [
        f"rank {rank} at {_place(report)}"
        for rank, report in sorted(reports.items())
        if _HAS_ENDED.search(why := report["report"]["why"])
        or OF_TORCH in (kind := why.partition(":")[0])
        or kind == "CommError"
    ]
    if went_on:
        line += (
            f" If it has ended, {went_on[0]} went on with a call, backward or step that it did "
            "not make: every rank must make it"
        )
    return line


def _awaited(reports: Mapping[int, Report], size: int) -> str:
    waits = {rank: r.get("launched", _WAITS, fallback="") for rank, r in reports.items()}
    for rank, what in waits.items():
        if (peer := re.match(r"rank (\d+)", what)) and waits.get(int(peer[1])) == "no rank":
            return f"look at rank {peer[1]} first: rank {rank} waits for it, and it for no rank"
    return ""


def _in_torch(reports: Mapping[int, Report], size: int) -> str:
    """Return a line about a collective of torch's that an error names; "" if none."""
    found = _IN_TORCH.search(_reasons(reports))
    if found is None or (rank := int(found[1])) not in reports:
        return ""
    others = (f"rank {other} at {_place(each)}" for other, each in reports.items() if other != rank)
    return (
        f"look at rank {rank}, in {found[2]} at {_place(reports[rank])}, and {', '.join(others)}: "
        f"{_EITHER}{_to_find(reports)}"
    )


def _ahead(reports: Mapping[int, Report], size: int) -> str:
    """Return a line about a rank that has begun a backward more than another; "" if none."""
    begun = {
        rank: report.getint("schedule", _BACKWARDS)
        for rank, report in sorted(reports.items())
        if report.has_option("schedule", _BACKWARDS)
    }
    launched = {rank: max(_launches(report), default=0) for rank, report in reports.items()}
    is_known = len({*begun.values()}) > 1
    counts = begun if is_known else launched
    rank, last = (pick(counts, key=counts.__getitem__) for pick in (max, min))
    more = (what for n, what in _launches(reports[rank]).items() if n > launched[last])
    if not is_known and not any(what.startswith(_OF_BACKWARD) for what in more):
        return ""
    said = "a backward or step more"
    if is_known:
        said = f"{begun[rank]} backwards since the last update, the other {begun[last]}"
    return (
        f"look at rank {rank}, at {_place(reports[rank])}, and rank {last}, at "
        f"{_place(reports[last])}: the first has begun {said}. If the other is not only late, the "
        "usual causes are a step that one rank skips (`continue`), `if rank == 0:` around a "
        f"backward or step, and {_UNEVEN}{_to_find(reports)}"
    )


def _no_rank(reports: Mapping[int, Report]) -> str:
    places = {rank: _place(report) for rank, report in sorted(reports.items())}
    said = ", ".join(f"rank {rank} is at {place}" for rank, place in places.items())
    line = f"no rank stands out: {said}; look for a line up to these that not all ranks run"
    return f"{line}{_to_find(reports)}"


def _to_find(reports: Mapping[int, Report]) -> str:
    """Return how to find the line that not all ranks run; "" where that was done."""
    said = {report.get("report", "sanitizer", fallback="off") for report in reports.values()}
    return "" if "on" in said or _COMPARED in _reasons(reports) else f"; {FIND_LINE}"


def _reasons(reports: Mapping[int, Report]) -> str:
    return " ".join(report["report"]["why"] for report in reports.values())
