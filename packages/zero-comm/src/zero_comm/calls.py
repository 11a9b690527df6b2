"""Calls that a rank is in, read from its frames where a wait or an error asks for them."""

from __future__ import annotations

import gc
import inspect
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

AnyCallable = TypeVar("AnyCallable", bound=Callable[..., Any])

# NOTE(frames): a garbage collection may run a finalizer that lets other threads run. If that
# happens while CPython 3.11 makes an object of another thread's frame, of its caller's or of its
# locals, the frame may be gone when it is read (gh-106883 is one such place). So collections are
# off meanwhile.

EVEN: Final = (
    "let every rank run as many batches, or backward_without_batch(model) and a step where one has "
    "none"
)
UNEVEN: Final = (
    "if there is none, a rank was killed, as for lack of memory, or has ended while others go on "
    f"(uneven batches, or a step that it skips, by `continue` or inside `if rank == 0:`): {EVEN}"
)
CAUSES: Final = f"look for the first error among all ranks\n  {UNEVEN}"
_CAUSES: Final = (
    f"a rank that raised, ended, or runs other code than its peers leaves them waiting; {CAUSES}"
)
SKIPPED: Final = "one of them has skipped a step, or had fewer batches"
# The last advice where ranks have made different calls, and the traceback may be of a correct one.
FIND_LINE: Final = "to find the line that not all ranks run, run a few steps with ZERO_SANITIZE=1"
_COLLECTIVE: Final[dict[CodeType, str]] = {}
# Thread -> the thread that waits for it, and whose call it is part of.
_CALLERS: Final[dict[int, int]] = {}
# Functions that lie between two of torch's where a mode, such as a default device's, sees calls.
_OF_MODES: Final = ("__torch_function__", "handle_torch_function")
# Files of the packages, of torch, and of Python itself such as contextlib.py: not the user's code.
_NOT_OF_USER: Final = re.compile(
    r"^<frozen |/(torch|zero_\w+)/|/python\d\.\d+/(?!(site|dist)-packages)"
)
# Each group has a thread that reads frames: none may allow collections while another one reads.
_READS_FRAMES: Final = threading.Lock()


class Place(NamedTuple):
    """A line of code that a stack is at."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class TorchCall(NamedTuple):
    """A collective of torch's own that blocks."""

    name: str  # such as "torch.distributed.barrier()"
    # Ranks of the job; the call does not end before each of them makes it too.
    needs: Sequence[int]


def collective(function: AnyCallable) -> AnyCallable:
    """Decorator of a function that all ranks must call; a rank that calls it alone is told so.

    The function is returned as it is, and calls cost nothing: errors find it among the frames of
    the thread that waits. Of several the outermost is named.
    """
    # The innermost function is registered: all functions of one wrapper share the wrapper's code.
    own: Any = inspect.unwrap(function)
    # A context that is a class is known by the name of that.
    is_context = own.__name__ == "__enter__"
    name = own.__qualname__.split(".")[-2] if is_context else f"{own.__name__}()"
    _COLLECTIVE[own.__code__] = name
    return function


def collective_call(thread: int | None = None) -> str:
    """The outermost call of such a function that a thread is in, "save()"; "" if none.

    Args:
        thread: Another one; the own when None.
    """
    asked = threading.get_ident() if thread is None else thread
    if asked == (of := thread_behind(asked)) and thread is None:
        return _outermost(sys._getframe())
    with _frame_of(of) as frame:
        return _outermost(frame)


@contextmanager
def in_call_of(thread: int) -> Iterator[None]:
    """A context in which this thread's collectives are part of the call that another is in."""
    own = threading.get_ident()
    _CALLERS[own] = thread
    try:
        yield
    finally:
        del _CALLERS[own]


def thread_behind(thread: int) -> int:
    """Return the thread that waits for another one, as `in_call_of` says; else that one itself."""
    return _CALLERS.get(thread, thread)


def is_collective(call: str) -> bool:
    """Return whether "save()" and the like is the name of such a function."""
    return call in _COLLECTIVE.values()


def call_in(stack: Iterable[Place]) -> tuple[str, int]:
    """Return the outermost call of such a function, and its position; ("", -1) if there is none.

    Args:
        stack: Where each frame is, outermost first.
    """
    names = {(code.co_filename, code.co_name): name for code, name in _COLLECTIVE.items()}
    for position, (file, _, function) in enumerate(stack):
        if name := names.get((file, function)):
            return name, position
    return "", -1


def of_user(stack: Sequence[Place]) -> list[Place]:
    """Return what of a stack is the user's code, in its order.

    What is of an installed library, such as a trainer, is left out if there is other code.
    """
    own = [each for each in stack if not _NOT_OF_USER.search(each.file)]
    return [each for each in own if "/site-packages/" not in each.file] or own


def main_stack() -> list[Place]:
    """Return where each frame of the main thread is, outermost first."""
    main = threading.main_thread().ident or 0
    # The frame that `_frame_of` finds of its own thread is its own, which leads to no other.
    own = nullcontext(sys._getframe()) if main == threading.get_ident() else _frame_of(main)
    with own as frame:
        return _stack_of(frame)


def user_line(thread: int) -> str:
    """Return the user's line that another thread is in, or the main one, and the line calling it.

    As "train.py:12 (called from train.py:30)"; "" if there is none.

    Args:
        thread: Which may be one of autograd's, with no code of the user's.
    """
    with _frame_of(thread_behind(thread)) as frame:
        stack = _stack_of(frame)
    places = of_user(stack) or of_user(main_stack())
    if len(places) < 2 or places[-1].function == "<module>":
        return str(next(reversed(places), ""))
    return f"{places[-1]} (called from {places[-2]})"


def in_lines(heading: str, *lines: str) -> str:
    """Return the text of an error that needs several lines; empty ones are left out."""
    return "\n  ".join(filter(None, (heading, *lines)))


def is_sanitized() -> bool:
    """Return whether the environment turns on the sanitizer of zero-engine."""
    return os.environ.get("ZERO_SANITIZE") == "1"


def how_to_find_line() -> str:
    """Return `FIND_LINE`; "" where that was done."""
    return "" if is_sanitized() else FIND_LINE


def causes() -> str:
    """Return causes for which a collective of this thread may have failed, to end an error."""
    call = collective_call()
    return in_lines(by_all_ranks(call), _CAUSES) if call else in_lines(_CAUSES, how_to_find_line())


def within(limit_s: float) -> str:
    """Return the limit that a wait has passed, and what to do if a rank is only slow."""
    return (
        f"within {limit_s:g} s (if a rank is only slow, as one that prepares data, let all ranks "
        "meet in torch.distributed.barrier() before)"
    )


def by_all_ranks(call: str) -> str:
    """Return the advice for a call that only some ranks have made."""
    return f"{call} must be called on all ranks, not inside `if rank == 0:`"


def alone(rank: int, call: str) -> str:
    """Say what to do where a rank is in a call, and waits for ranks that are not."""
    if not call:
        return in_lines(CAUSES, how_to_find_line())
    return (
        f"rank {rank} is in {call}, which must be called on all ranks, not inside `if rank == 0:`, "
        "after the same number of backwards and steps on each"
    )


def advice(calls: Mapping[int, str], remedies: Mapping[int, str]) -> list[str]:
    """Say in lines what to do where ranks wait in different collectives; none if not known.

    Args:
        calls: Rank -> the call that it is in, and that all ranks must make; "" if none.
        remedies: Rank -> remedy for its collective; "" if none.
    """
    differ = len({*calls.values()}) > 1
    lone = [alone(rank, call) for rank, call in calls.items() if call and differ]
    others = [remedy for rank, remedy in remedies.items() if not (calls[rank] and differ)]
    rest = [*dict.fromkeys(filter(None, others))]
    if not lone or not rest:
        return lone or rest
    # With uneven batches, one rank has come to a call that the others come to later.
    first, *rest = rest
    uneven = f"all ranks call it, and {SKIPPED}: {first}"
    # Programs end with a barrier or a sum, which few call on one rank alone.
    is_torchs = any(each.startswith("torch.distributed.") for each in calls.values())
    branches = [[uneven, *rest], lone] if is_torchs else [lone, [uneven, *rest]]
    (one, *more), (other, *others) = branches
    return [f"either {one}", *more, f"or {other}", *others]


def blocking_torch_call() -> TorchCall | None:
    """Return the call of torch's that the main thread is in, if it needs other ranks to end."""
    with _frame_of(threading.main_thread().ident or 0) as frame:
        return None if frame is None else _torch_call(frame)


def _torch_call(frame: FrameType) -> TorchCall | None:
    is_torchs = frame.f_code.co_filename == distributed_c10d.__file__
    # Only collectives have an argument `async_op`.
    if not is_torchs or "async_op" not in frame.f_code.co_varnames:
        return None
    given = frame.f_locals
    if given.get("async_op") is not False:
        return None
    group = given.get("group") or dist.group.WORLD
    ranks, own = dist.get_process_group_ranks(group), dist.get_rank(group)
    # A rank that only sends may be done before the others. So a receiver needs the source only, and
    # of a sender it is not known which of several receivers it waits for.
    if "group_src" in given and len(ranks) > 2:
        ranks = [] if given["group_src"] in (None, own) else [ranks[given["group_src"]]]
    elif given.get("group_dst", own) != own and len(ranks) > 2:
        ranks = []
    name, of = frame.f_code.co_name, frame.f_back
    while of is not None:
        if of.f_globals.get("__name__", "").startswith("torch.distributed"):
            name = name if of.f_code.co_name == "wrapper" else of.f_code.co_name
        elif of.f_code.co_name not in _OF_MODES:
            break
        of = of.f_back
    return TorchCall(f"torch.distributed.{name}()", ranks) if ranks else None


def _stack_of(frame: FrameType | None) -> list[Place]:
    found = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    return [Place(each.filename, each.lineno or 0, each.name) for each in reversed(found)]


def _outermost(frame: FrameType | None) -> str:
    found = ""
    while frame is not None:
        found = _COLLECTIVE.get(frame.f_code, found)
        frame = frame.f_back
    return found


@contextmanager
def _frame_of(thread: int) -> Iterator[FrameType | None]:
    """Give the frame of a thread; see NOTE(frames)."""
    with _READS_FRAMES:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield sys._current_frames().get(thread)
        finally:
            if was_enabled:
                gc.enable()
