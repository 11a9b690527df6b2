"""Reports of each rank: at an uncaught error, of ours or of torch.distributed, and at SIGUSR1."""

from __future__ import annotations

import gc
import os
import re
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

from .group import Group
from .handle import Message
from .logs import PACKAGES, REPORT_SWITCH, on_report_signal, rank_of_job
from .shared_host.peer_memory import PeerTransfer
from .watch import Launch

# NOTE(signal): Python runs handlers in the main thread between two of its instructions, so never
# while that thread waits in C, as in gloo. But the signal's number is written to the wakeup fd at
# once, and a thread reads it. A forked process has no such thread and writes no reports.

# The reason of a report that the signal asks for.
ASKED: Final = "SIGUSR1"
# What follows the type of an error of torch's in a report's reason.
OF_TORCH: Final = " in torch.distributed"
_ENDED_BEFORE: Final = (
    "a collective of torch.distributed failed, as another rank has ended: by an error, which it "
    "has printed; because it was killed, as for lack of memory; or without making this call"
)
Write: TypeAlias = Callable[[Path, str, Mapping[Any, Group]], None]
_MODELS: Final[WeakKeyDictionary[Any, Group]] = WeakKeyDictionary()
# Id of the process that writes reports; 0 before its first `install`.
_process = 0


def install(model: Any, group: Group, write: Write) -> None:
    """Include this model in reports, by a weak reference. Local.

    With ZERO_REPORT=off there are no reports. SIGUSR1 writes none if the program handles or ignores
    this signal, or has a wakeup fd.

    Args:
        model: The sharded model.
        group: The ranks that train it.
        write: Called with the file to write, why (in words, then a traceback), and all models.
    """
    global _process
    if os.environ.get(REPORT_SWITCH) == "off":
        return
    before, _process = _process, os.getpid()
    _MODELS[model] = group
    if before:
        return

    def around(hook: Callable[..., Any], error_of: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> None:
            written: Path | None = None
            if what := _described(error := error_of(*given)):
                trace = "".join(traceback.format_exception(error))
                written = _report(f"{what}\n{trace}", write)
            hook(*given)
            if written is not None:
                if OF_TORCH in what.partition(":")[0]:
                    print(f"zero_comm: {_cause_of_torch()}", file=sys.stderr)
                folder = shlex.quote(str(written.parent))
                print(f"report: {written}; run: zero report {folder}", file=sys.stderr)

        return run

    sys.excepthook = around(sys.excepthook, lambda _, error, __: error)
    threading.excepthook = around(threading.excepthook, lambda given: given.exc_value)
    # On Linux, this file says which signals are ignored or handled, by C code too.
    status = Path("/proc/self/status")
    masks = re.findall(r"Sig(?:Ign|Cgt):\t(\w+)", status.read_text()) if status.exists() else []
    is_taken = any(int(mask, 16) >> (signal.SIGUSR1 - 1) & 1 for mask in masks)
    if not is_taken and threading.current_thread() is threading.main_thread():
        _listen(write)


def started() -> float:
    """Return when this process was started, in seconds since the epoch. Local.

    Ranks of a job are started together, and one may write a report before another can.
    """
    # Of Linux, in ticks since it was booted; the name before it may have spaces.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks


def _listen(write: Write) -> None:
    if (before := signal.set_wakeup_fd(-1)) != -1:
        signal.set_wakeup_fd(before)
        return
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    signal.signal(signal.SIGUSR1, on_report_signal)

    def serve() -> None:
        while True:
            # Numbers of all signals that have a handler in Python arrive here.
            numbers = os.read(reads, 64)
            if signal.SIGUSR1 in numbers and signal.getsignal(signal.SIGUSR1) is on_report_signal:
                _report(ASKED, write)

    threading.Thread(target=serve, name="zero report", daemon=True).start()


def _described(error: BaseException | None) -> str:
    """Return type and message of the first error of ours or of torch's collectives; "" if none.

    The first among this one and what led to it.
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if type(error).__module__.split(".")[0] in PACKAGES:
            return f"{type(error).__name__}: {error}"
        if isinstance(error, RuntimeError) and _is_of_torch(error):
            return f"{type(error).__name__}{OF_TORCH}: {error}"
        seen.append(error)
        error = error.__cause__ or error.__context__
    return ""


def _cause_of_torch() -> str:
    """Return what is known of an error that names no rank: why ranks diverged, or what to look for.

    The rank that makes a collective of torch's alone has torch's error, and a peer finds the cause.
    """
    watches = [group.watch for group in (*_MODELS.values(),) if group.watch is not None]
    told = next(filter(None, (watch.error() for watch in watches)), None)
    return str(told or _ENDED_BEFORE)


def _is_of_torch(error: BaseException) -> bool:
    places = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(places) and places[-1].f_globals.get("__name__", "").startswith("torch.distributed")


def _report(why: str, write: Write) -> Path | None:
    """Write a report; return its path, None if this process writes none."""
    path = Path(os.environ.get(REPORT_SWITCH) or ".") / f"zero-report-rank{rank_of_job()}.txt"
    try:
        if _process == os.getpid():
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, why, dict(_MODELS))
            return path
    except Exception:
        # It is printed and not raised, so that it does not hide the program's own error.
        traceback.print_exc()
    return None


def describe_launches(group: Group) -> dict[str, str]:
    """Return what this rank launched last, by number. Local."""
    return {} if group.watch is None else group.watch.describe(_in_flight)


def _in_flight() -> list[Launch]:
    held = (found for found in gc.get_objects() if type(found) in (Message, PeerTransfer))
    return [each.launch for each in held if each.launch is not None]
