"""Ranges: what a rank does when, by name of the unit, for profilers and timelines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from operator import attrgetter
from typing import Any, Final, TypeAlias, TypeVar

from torch.profiler import record_function

from .torch_private import is_profiled

Method = TypeVar("Method", bound=Callable[..., Any])
# Returns the context of a range, from its kind and subject.
Recorder: TypeAlias = Callable[[str, str], AbstractContextManager[Any]]

# NOTE(ranges): `ranged` only marks a method, so without a recorder a call costs nothing. While
# there is a recorder, the method's class has a wrapper in its place; a wrapper that is running when
# the last recorder is removed finishes its call. Methods are found by their mark in all loaded
# packages; packages that do not import this one set the mark themselves.

MARK: Final = "zero_range"
recorders: Final[list[Recorder]] = []
# Whether torch's profiler ran at the last `follow_profiler`.
follows_profiler = False


def ranged(kind: str, subject: str = "") -> Callable[[Method], Method]:
    """Decorate a method: each call is a range while there is a recorder.

    Args:
        kind: Name of the operation, such as "gather".
        subject: Dotted attribute of the method's object that names what it operates on, such as
            "unit.name"; empty if it has no name.
    """

    def mark(method: Method) -> Method:
        setattr(method, MARK, (kind, subject))
        return method

    return mark


def start(recorder: Recorder) -> None:
    """Let it record from now on. Local.

    Args:
        recorder: Receives kind and subject; returns a context manager, which the call runs in.
    """
    recorders.append(recorder)
    _install()


def stop(recorder: Recorder) -> None:
    """Let it record no more. Local."""
    recorders.remove(recorder)
    _install()


def follow_profiler() -> None:
    """Record into torch's profiler where one runs: in Chrome traces, and by `emit_nvtx` in NVTX.

    Local; called where `is_profiled() is not follows_profiler`, once in each forward.
    """
    global follows_profiler  # noqa: PLW0603 (one profiler serves the process)
    follows_profiler = is_profiled()
    (start if follows_profiler else stop)(_into_profile)


def enter(kind: str, subject: str = "") -> ExitStack:
    """Begin a range that ends where the caller closes it. Local."""
    stack = ExitStack()
    for recorder in tuple(recorders):
        stack.enter_context(recorder(kind, subject))
    return stack


def _into_profile(kind: str, subject: str) -> AbstractContextManager[Any]:
    return record_function(f"zero::{kind} {subject}".rstrip())


def _install() -> None:
    modules = [module for name, module in sys.modules.items() if name.startswith("zero_")]
    owners = (value for module in modules for value in vars(module).values())
    for owner in {value for value in owners if isinstance(value, type)}:
        for name, method in tuple(vars(owner).items()):
            if (marked := getattr(method, MARK, None)) is not None:
                plain = getattr(method, "zero_plain", method)
                setattr(owner, name, _within(plain, *marked) if recorders else plain)


def _within(method: Callable[..., Any], kind: str, subject: str) -> Callable[..., Any]:
    subject_of = attrgetter(subject) if subject else lambda _: ""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with enter(kind, subject_of(self)):
            return method(self, *args, **kwargs)

    run.zero_plain = method  # type: ignore[attr-defined]
    return run
