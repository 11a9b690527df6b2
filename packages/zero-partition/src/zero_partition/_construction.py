"""Whose constructor is running, and inside which Init."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any, Final

from torch import nn

CURRENT: Final[ContextVar[Any]] = ContextVar("the innermost Init of this thread", default=None)


def module_under_construction() -> nn.Module | None:
    """The module whose `__init__` is the innermost on this thread's stack. Local.

    Seen from the stack, no class has to be patched: neither those that exist nor those that are
    defined meanwhile. A wrong answer costs time and no correctness: what is sharded too early is
    gathered when it is touched.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            if isinstance(owner, nn.Module):
                return owner
        frame = frame.f_back
    return None
