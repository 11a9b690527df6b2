"""A collective in flight."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, Generic, NoReturn, Protocol, TypeVar

from attrs import define, field

from .calls import causes, collective_call, in_lines, within
from .errors import CommError
from .watch import Launch, Wait

# NOTE(dropped): when a message arrives for a receive whose Work is gone, gloo stops reading from
# that peer for good, and every later collective of the group hangs. So if a handle is dropped
# before `wait()`, as when its model is deleted, a thread waits for it.

# NOTE(interrupted): an exception that comes from outside, such as Ctrl-C, may end a wait anywhere.
# Values that have not arrived by then arrive later, and may be written to memory that is used for
# something else. So a handle keeps its messages and tensors until its wait has ended, and `drain`
# waits for those that are left.

# NOTE(hops): a collective may be several exchanges, each of which sends what the one before has
# brought: a reduction inside nodes and one across, a reduction and a gather of its result. The next
# one is launched when the one before has arrived. A thread would do that at a different moment on
# each rank, but ranks must launch the same things in the same order. So the holder of the handle
# does it: by `advance()` at a moment that all ranks reach in the same order, or else by `wait()`.

T = TypeVar("T")
U = TypeVar("U")

# Never reached: a wait that times out closes all connections of its group.
_FOR_EVER: Final = timedelta(days=365)


@define(eq=False)
class Message:
    """A send, a receive, or a collective of torch's own, in flight."""

    work: Any  # torch's Work
    what: str  # such as "receiving from rank 1"
    # The collective that the message belongs to; None if no watch counts it.
    launch: Launch | None = None
    # The rank that must launch it too before it ends; negative if that is all ranks, or the device.
    peer: int = -1
    # Whether a wait has begun; an exception may have ended it early.
    _has_started: bool = field(default=False, init=False)

    def wait(self, *, timeout_s: float | None = None) -> None:
        """Block until it is done; an error says which message failed, and what it was for."""
        if self.is_over:
            return
        self._has_started = True
        if self.launch is not None:
            self.launch.watch.begin(Wait(self.launch, self.peer))
        try:
            self._wait(timeout_s)
        finally:
            if self.launch is not None:
                self.launch.watch.end()

    @property
    def is_over(self) -> bool:
        """Return whether a wait began and torch's work is done: one more wait would never end."""
        return self._has_started and bool(self.work.is_completed())

    def _wait(self, timeout_s: float | None) -> None:
        began = time.monotonic()
        try:
            if timeout_s is None:
                self.work.wait()
            else:
                self.work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            # A message of gloo (with a peer) that times out closes all connections by itself.
            if self.launch is not None and self.peer < 0:
                self.launch.watch.interrupt()
            what = f"{self.what} did not finish"
            # An error that comes earlier is of the connection.
            if timeout_s is not None and time.monotonic() - began >= timeout_s:
                what += f" {within(timeout_s)}"
            fail(what, error, self.launch, self.peer)


def fail(what: str, error: Exception, launch: Launch | None, peer: int) -> NoReturn:
    """Raise a CommError where torch raised `error` in an exchange with rank `peer`."""
    # The backend's text is last: it is long, and names neither ranks of ours nor a remedy.
    backend = f"The backend's own error: {error}"
    if launch is None:
        raise CommError(in_lines(what, causes(), backend)) from error
    if told := launch.watch.error():
        # The backend's error follows from what was found.
        raise told from None
    blame = "" if peer < 0 else launch.watch.blame(peer)
    doing, rank = launch.doing(collective_call()), launch.watch.scope.rank
    lines = (blame, causes(), launch.watch.scope.remark, backend)
    # The backend's traceback would come first, and says nothing that this does not.
    raise CommError(in_lines(f"{doing}: {what} (rank {rank})", *lines)) from None


def _is_last(_: float | None) -> bool:
    return False


class _Draining(Protocol):
    """A `Handle`, or the hops that it waits on."""

    def drain(self) -> None: ...


@define(eq=False)
class Handle(Generic[T]):
    """Result of a collective in flight. Wait once; the borrowed tensors live until then.

    On CUDA `wait` makes the current stream wait and returns at once; on the CPU it blocks. Before
    that, `advance` launches the next hop of a collective of several; see NOTE(hops).
    """

    # Returns the result once `_messages` have been waited on, in order. It receives the timeout of
    # `wait` for its own waits: for `_late_messages`, and for the handles in `_inside`.
    _finish: Callable[[float | None], T]
    _messages: Sequence[Message] = ()
    # Tensors that stay allocated until all messages are done.
    _borrowed: Sequence[Any] = ()
    _late_messages: Sequence[Message] = ()
    _advance: Callable[[float | None], bool] = field(default=_is_last, kw_only=True)
    _inside: Sequence[_Draining] = field(default=(), kw_only=True)
    _spent: bool = field(default=False, init=False)

    @property
    def is_spent(self) -> bool:
        """Return whether `wait` has returned, or raised a CommError."""
        return self._spent

    def wait(self, *, timeout_s: float | None = None) -> T:
        """Block until done and return the result. Call exactly once.

        Local, but collective where hops are left to launch, as `advance` is.

        Args:
            timeout_s: Longest wait for each message, in seconds; the group's own when None.

        Raises:
            CommError: Called twice, or a peer did not take part in time.
            DivergenceError: A peer cannot take part: it waits for this rank in another collective.
        """
        if self._spent:
            raise CommError("Handle.wait() was already called; keep its result instead")
        try:
            for message in self._messages:
                message.wait(timeout_s=timeout_s)
            result = self._finish(timeout_s)
        except CommError:
            # Values are missing, so a second wait must not return a result.
            self._spent = True
            raise
        self._spent, self._finish = True, _is_over
        self._messages, self._borrowed, self._late_messages = (), (), ()
        return result

    def drain(self) -> None:
        """Wait for what is in flight, and drop it; see NOTE(interrupted). Launches nothing.

        Raises:
            CommError: A peer did not take part in time.
            DivergenceError: As `wait` does.
        """
        for inner in self._inside:
            inner.drain()
        if not self._inside and not self._spent:
            self.wait()

    def advance(self, *, timeout_s: float | None = None) -> bool:
        """Go one hop further: wait for the one in flight, and launch the next. Collective.

        What is launched so must be in the same order on every rank, as all that a group does.

        Args:
            timeout_s: As for `wait`.

        Returns:
            Whether it did. False if the last hop is in flight already, and then at once: that one
            is for `wait`.

        Raises:
            CommError: It was waited on, or a peer did not take part in time.
            DivergenceError: As `wait` does.
        """
        if self._spent:
            raise CommError("Handle.advance() after wait(): nothing is in flight any more")
        return self._advance(timeout_s)

    def then(self, launch: Callable[[T], Handle[U]]) -> Handle[U]:
        """Return a handle with one more hop. It takes this handle over.

        Args:
            launch: Receives the result of this one, in `advance` or `wait`; begins what follows.

        Returns:
            Handle of what `launch` returns a handle of.
        """
        hops = _Hops(self, launch)
        return Handle(hops.finish, advance=hops.advance, inside=(hops,))

    def map(self, make: Callable[[T], U]) -> Handle[U]:
        """Return a handle of `make(result)`, computed locally. It takes this handle over."""
        return Handle(
            lambda timeout_s: make(self.wait(timeout_s=timeout_s)),
            advance=lambda timeout_s: self.advance(timeout_s=timeout_s),
            inside=(self,),
        )

    def __del__(self) -> None:
        messages = (*self._messages, *self._late_messages)
        if messages and not sys.is_finalizing():
            threading.Thread(target=_outlive, args=(messages, self._borrowed), daemon=True).start()


@define(eq=False)
class _Hops:
    """Hops in flight, and the launch of the one that follows."""

    current: Handle[Any]
    launch: Callable[[Any], Handle[Any]] | None

    def advance(self, timeout_s: float | None) -> bool:
        if self.current.advance(timeout_s=timeout_s):
            return True
        if self.launch is None:
            return False
        result = self.current.wait(timeout_s=timeout_s)
        launch, self.launch = self.launch, None
        self.current = launch(result)
        return True

    def finish(self, timeout_s: float | None) -> Any:
        while self.advance(timeout_s):
            pass
        return self.current.wait(timeout_s=timeout_s)

    def drain(self) -> None:
        self.current.drain()


def _is_over(_: float | None) -> NoReturn:
    raise AssertionError("a handle is waited on once")


def _outlive(messages: Sequence[Message], borrowed: Sequence[Any]) -> None:
    """Keep the borrowed tensors alive until the messages are done; see NOTE(dropped)."""
    for message in messages:
        # An error means that the peer or the group has ended.
        with contextlib.suppress(RuntimeError):
            if not message.is_over:
                message.work.wait(_FOR_EVER)
