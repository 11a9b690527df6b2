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
from ._watch import Launch, Wait

# NOTE(dropped): when a message arrives for a receive whose Work is gone, gloo stops reading from
# that peer for good, and every later collective of the group hangs. A handle that nobody waits on,
# because its model was deleted, say, is therefore waited on by a thread of its own.

T = TypeVar("T")

_FOR_EVER: Final = timedelta(days=365)  # a wait that times out breaks all connections of its group
_CAUSES: Final = (
    "A rank that raised, ended, or runs other code than its peers leaves them waiting; look for "
    "the first error among all ranks."
)


@define(eq=False)
class Message:
    """What torch has on its way: a send, a receive, or a collective of its own."""

    work: Any  # torch's Work
    what: str  # "receiving from rank 1"
    launch: Launch | None = None  # the collective of ours that it belongs to, if that is watched
    peer: int = -1  # the rank that must launch it too before this ends

    def wait(self, *, timeout_s: float | None = None) -> None:
        """Block until it has come; an error says which it was, and what for."""
        if self.launch is None:
            self._wait(timeout_s)
            return
        self.launch.watch.begin(Wait(self.launch, self.peer))
        try:
            self._wait(timeout_s)
        finally:
            self.launch.watch.end()

    def _wait(self, timeout_s: float | None) -> None:
        try:
            if timeout_s is None:
                self.work.wait()
            else:
                self.work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            within = "" if timeout_s is None else f" within {timeout_s:g} s"
            raise failure(f"{self.what} did not finish{within}", error, self.launch) from error


def failure(what: str, error: RuntimeError, launch: Launch | None) -> CommError:
    """What to raise where torch raised `error`."""
    if launch is None:
        return CommError(f"{what}: {error}. {_CAUSES}")
    return launch.watch.error() or CommError(f"{launch.operation}: {what}: {error}. {_CAUSES}")


@define(eq=False)
class Handle(Generic[T]):
    """What a collective returns. Wait once; the borrowed tensors live until then.

    On CUDA `wait` makes the current stream wait and returns at once; on the CPU it blocks.
    """

    _finish: Callable[[float | None], T]  # receives the timeout, for what it waits on itself
    _messages: Sequence[Message] = ()  # waited on in order
    _borrowed: Sequence[Any] = ()
    _late_messages: Sequence[Message] = ()  # those that `_finish` waits on
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
            DivergenceError: A peer cannot take part, because it waits for this rank elsewhere.
        """
        if self._spent:
            raise CommError("Handle.wait() was already called; keep its result instead")
        self._spent = True
        for message in self._messages:
            message.wait(timeout_s=timeout_s)
        finish, self._finish = self._finish, _is_over
        result = finish(timeout_s)
        self._messages, self._borrowed, self._late_messages = (), (), ()
        return result

    def __del__(self) -> None:
        messages = (*self._messages, *self._late_messages)
        if messages and not self._spent and not sys.is_finalizing():
            threading.Thread(target=_outlive, args=(messages, self._borrowed), daemon=True).start()


def _is_over(_: float | None) -> NoReturn:
    raise AssertionError("a handle is waited on once")


def _outlive(messages: Sequence[Message], borrowed: Sequence[Any]) -> None:
    """Keep all of it alive until the messages have come; see NOTE(dropped)."""
    for message in messages:
        with contextlib.suppress(RuntimeError):  # the peer, or the group, has ended
            message.work.wait(_FOR_EVER)
