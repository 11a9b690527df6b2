"""A collective in flight."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, Generic, NoReturn, TypeVar

from attrs import define, field

from ._errors import CommError

# NOTE(dropped): when a message arrives for a receive whose Work is gone, gloo stops reading from
# that peer for good, and every later collective of the group hangs. A handle that nobody waits on,
# because its model was deleted, say, is therefore waited on by a thread of its own.

T = TypeVar("T")

_FOR_EVER: Final = timedelta(days=365)  # a wait that times out breaks all connections of its group


@define(eq=False)
class Handle(Generic[T]):
    """What a collective returns. Wait once; the borrowed tensors live until then.

    On CUDA `wait` makes the current stream wait and returns at once; on the CPU it blocks.
    """

    _finish: Callable[[float | None], T]  # receives the timeout, for what it waits on itself
    _works: tuple[tuple[str, Any], ...] = ()  # (what is awaited, torch's Work), in order
    _borrowed: Sequence[Any] = ()
    _late_works: Sequence[tuple[str, Any]] = ()  # those that `_finish` waits on
    _spent: bool = field(default=False, init=False)

    @property
    def is_spent(self) -> bool:
        """Whether `wait` was called."""
        return self._spent

    def wait(self, *, timeout_s: float | None = None) -> T:
        """Block until done and return the result. Call exactly once.

        Args:
            timeout_s: Longest wait for each message, in seconds; the group's own when None.

        Raises:
            CommError: Called twice, or a peer did not take part in time.
        """
        if self._spent:
            raise CommError("Handle.wait() was already called; keep its result instead")
        self._spent = True
        for what, work in self._works:
            wait_for(work, what, timeout_s=timeout_s)
        finish, self._finish = self._finish, _is_over
        result = finish(timeout_s)
        self._works, self._borrowed, self._late_works = (), (), ()
        return result

    def __del__(self) -> None:
        works = (*self._works, *self._late_works)
        if works and not self._spent and not sys.is_finalizing():
            threading.Thread(target=_outlive, args=(works, self._borrowed), daemon=True).start()


def _is_over(_: float | None) -> NoReturn:
    raise AssertionError("a handle is waited on once")


def wait_for(work: Any, what: str, *, timeout_s: float | None = None) -> None:
    """Wait for one `Work`; a failure says which message it was."""
    try:
        if timeout_s is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        within = "" if timeout_s is None else f" within {timeout_s:g} s"
        raise CommError(
            f"{what} did not finish{within}: {error}. A rank that raised, ended, or runs other "
            "code than its peers leaves them waiting; look for the first error among all ranks."
        ) from error


def _outlive(works: Sequence[tuple[str, Any]], borrowed: Sequence[Any]) -> None:
    """Keep all of it alive until the messages have come; see NOTE(dropped)."""
    for _, work in works:
        with contextlib.suppress(RuntimeError):  # the peer, or the group, has ended
            work.wait(_FOR_EVER)
