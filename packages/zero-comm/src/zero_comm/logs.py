"""Log lines of all packages, on standard error where ZERO_LOG asks for them."""

from __future__ import annotations

import logging
import os
from typing import Final

import torch.distributed as dist

from .errors import CommError

SWITCH: Final = "ZERO_LOG"
_LEVELS: Final = ("debug", "info", "warning", "error")
PACKAGES: Final = (
    *("zero_comm", "zero_partition", "zero_offload", "zero_ckpt", "zero_engine", "zero_deepspeed"),
)


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


def rank_of_job() -> int | str:
    """This process's rank, as far as it is known."""
    return dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", "0")


def _add_rank(record: logging.LogRecord) -> bool:
    record.rank = rank_of_job()
    return True
