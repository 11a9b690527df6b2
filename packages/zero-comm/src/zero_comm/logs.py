"""Log lines of all packages, on standard error where ZERO_LOG asks for them."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Final

import torch.distributed as dist

from .errors import CommError

SWITCH: Final = "ZERO_LOG"
# Folder of reports, or "off".
REPORT_SWITCH: Final = "ZERO_REPORT"
_LEVELS: Final = ("debug", "info", "warning", "error")
PACKAGES: Final = (
    *("zero_comm", "zero_partition", "zero_offload", "zero_ckpt", "zero_engine", "zero_deepspeed"),
)
# Root modules whose frames are never the place of a warning.
_PASSED_OVER: Final = {*PACKAGES, "torch", "contextlib", "functools", "attr", "threading"}


def follow_environment() -> None:
    """Let loggers write as ZERO_LOG says: debug, info, warning or error. Local, once.

    Without it, the program's own handlers and levels apply, as to any logger.

    Raises:
        CommError: It says something else.
    """
    level = os.environ.get(SWITCH, "")
    if not level:
        return
    if level.lower() not in _LEVELS:
        raise CommError(f"expected {SWITCH} to be one of {', '.join(_LEVELS)}, got {level!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s rank %(rank)s: %(message)s"))
    handler.addFilter(_add_rank)
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.setLevel(level.upper())
        logger.addHandler(handler)
        logger.propagate = False


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning whose place is the user's line that led here. Local.

    Frames of these packages, of torch (a hook, say), of Python's own modules such as contextlib,
    and of what attrs has generated are passed over. If there is no other, the outermost counts.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_back is not None and _is_of_library(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _is_of_library(frame: FrameType) -> bool:
    root = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return root in _PASSED_OVER or frame.f_code.co_filename.startswith("<attrs generated")


def rank_of_job() -> int | str:
    """This process's rank, as far as it is known."""
    return dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", "0")


def on_report_signal(*_: object) -> None:
    """Handler of SIGUSR1 where a thread reads of the signal and writes a report; see `failure`."""


def how_to_ask() -> str:
    """Return the command that makes each rank of this host write a report, to end a warning.

    Local. "" if this process writes none at a signal, or if torchrun has not started it: the signal
    would end other processes.
    """
    is_ready = signal.getsignal(signal.SIGUSR1) is on_report_signal
    if not is_ready or "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    folder = shlex.quote(str(Path(os.environ.get(REPORT_SWITCH) or ".").absolute()))
    return f"; for reports: pkill -USR1 -P {os.getppid()}; zero report {folder}"


def _add_rank(record: logging.LogRecord) -> bool:
    record.rank = rank_of_job()
    return True
