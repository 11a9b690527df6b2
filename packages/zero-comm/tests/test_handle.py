"""A collective in flight: waited on once, and the owner of what it borrowed."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from zero_comm import (
    CommError,
    Group,
    Handle,
    all_gather_flat,
    all_reduce_flat,
    reduce_scatter_flat,
)
from zero_comm.handle import Message


def test_a_handle_is_waited_on_once() -> None:
    """A second wait is a sign that two owners believe the result is theirs."""
    handle = all_gather_flat(torch.ones(3), splits=[3], group=Group.solo())

    assert not handle.is_spent
    assert handle.wait().tolist() == [1, 1, 1]
    assert handle.is_spent
    with pytest.raises(CommError, match=r"already called; keep its result instead"):
        handle.wait()


def test_what_is_borrowed_lives_until_the_wait() -> None:
    """A buffer freed while its bytes travel is overwritten by the next allocation."""
    buffer = torch.ones(3)
    seen = weakref.ref(buffer)
    handle = Handle(lambda _: None, (), (buffer,))
    del buffer
    gc.collect()

    assert seen() is not None

    handle.wait()
    gc.collect()

    assert seen() is None


def test_works_are_waited_on_in_order_and_then_finished() -> None:
    """The sum may start only when what it adds has arrived."""
    happened: list[str] = []
    messages = [_FakeMessage(name, happened) for name in ("first", "second")]

    Handle(lambda timeout_s: happened.append(f"finish {timeout_s}"), messages).wait(timeout_s=2.0)

    assert happened == ["first", "second", "finish 2.0"]


def test_a_message_that_fails_says_which_and_what_to_do(group: Group) -> None:
    """Torch knows a connection; the reader needs the collective and the rank."""
    if group.rank == 0:
        dist.destroy_process_group()
        return
    messages = group.by_messages("this test asks for it")  # as between hosts
    what = r"(receiving from rank 0|the collective) did not finish"
    says = rf"^all_gather: {what} .*\(rank {group.rank}\)\n.*first error"
    with pytest.raises(CommError, match=says) as raised:
        all_gather_flat(torch.ones(2), splits=[1, 1], group=messages).wait(timeout_s=10.0)
    assert isinstance(backends := raised.value.__context__, RuntimeError)
    assert str(raised.value).endswith(f"The backend's own error: {backends}")
    # The message has its text: Python would print it a second time, before it.
    assert raised.value.__suppress_context__


@pytest.mark.parametrize("what", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_handle_that_is_dropped_leaves_the_connection_usable(group: Group, what: str) -> None:
    """A model that is deleted drops handles; the next one on this group hung, now and then."""
    messages = group.by_messages("this test asks for it")  # as between hosts
    launch = {
        "all_gather": lambda buffer: all_gather_flat(buffer, splits=[2, 2], group=messages),
        "reduce_scatter": lambda buffer: reduce_scatter_flat(buffer, splits=[2, 2], group=messages),
        "all_reduce": lambda buffer: all_reduce_flat(buffer, group=messages),
    }[what]
    if group.rank == 1:
        time.sleep(0.2)  # until the other has dropped it
    handle = launch(torch.ones(4))
    if group.rank == 1 and what != "all_reduce":  # of which the second half starts in wait()
        handle.wait()
    del handle

    out = torch.full((2,), float(group.rank))
    after = all_gather_flat(out, splits=[1, 1], group=messages, tag=1)
    assert after.wait(timeout_s=5.0).tolist() == [0, 1]


def test_hops_begin_one_after_the_other_and_only_when_told() -> None:
    """Ranks must begin the same hops in the same order: none may begin by itself."""
    happened: list[str] = []

    def hop(name: str) -> Handle[str]:
        happened.append(f"launch {name}")
        return Handle(lambda _: name, [_FakeMessage(f"wait for {name}", happened)])

    handle = hop("a").then(lambda a: hop(a + "b").then(lambda ab: hop(ab + "c"))).map(str.upper)
    assert happened == ["launch a"]
    assert handle.advance()
    assert happened[1:] == ["wait for a", "launch ab"]
    assert handle.advance()
    assert happened[3:] == ["wait for ab", "launch abc"]
    assert not handle.advance()  # the last hop is left to `wait`
    assert len(happened) == 5

    assert handle.wait() == "ABC"
    assert happened[5:] == ["wait for abc"]
    with pytest.raises(CommError, match=r"advance\(\) after wait\(\)"):
        handle.advance()


def test_a_wait_goes_through_all_hops_that_are_left() -> None:
    """Who does not care about overlap need not know how many hops a collective has."""
    timeouts: list[float | None] = []

    def hop(number: int) -> Handle[int]:
        def finish(timeout_s: float | None) -> int:
            timeouts.append(timeout_s)
            return number

        return Handle(finish)

    handle = hop(1).then(lambda n: hop(n + 1)).then(lambda n: hop(n + 1))
    assert handle.wait(timeout_s=2.0) == 3
    assert timeouts == [2.0, 2.0, 2.0]


class _FakeMessage:
    def __init__(self, name: str, happened: list[str]) -> None:
        self.name, self.happened = name, happened

    def wait(self, *, timeout_s: float | None = None) -> None:
        self.happened.append(self.name)


class _Work:
    """Torch's: it comes once, and a wait after that never ends."""

    def __init__(self, *, raises: BaseException | None = None) -> None:
        self.raises, self.num_waits = raises, 0

    def wait(self, *_: Any) -> None:
        """Come, or fail; an interrupt is noticed when it has come."""
        self.num_waits += 1
        assert self.num_waits == 1, "this would block for ever"
        if self.raises is not None:
            raise self.raises

    def is_completed(self) -> bool:
        """Whether a wait has ended."""
        return self.num_waits > 0


@pytest.mark.parametrize("how", ["wait", "drain"])
@pytest.mark.parametrize("made", ["itself", "mapped", "followed"])
def test_a_wait_that_was_interrupted_may_go_on(how: str, made: str) -> None:
    """What had come is not waited for again, and what had not is."""
    first, second = _Work(raises=KeyboardInterrupt()), _Work()
    handle = Handle(lambda _: 3, (Message(first, "first"), Message(second, "second")))
    if made == "mapped":
        handle = handle.map(lambda value: value)
    elif made == "followed":
        handle = handle.then(lambda value: Handle(lambda _: 1 + value))
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    assert not second.num_waits

    if how == "drain":
        handle.drain()
    else:
        assert handle.wait() == (4 if made == "followed" else 3)

    assert (first.num_waits, second.num_waits) == (1, 1)


def test_a_wait_that_failed_does_not_succeed_later() -> None:
    """What has not come is not to be taken for what has."""
    handle = Handle(lambda _: 3, (Message(_Work(raises=RuntimeError("reset")), "first"),))
    with pytest.raises(
        CommError, match=r"first did not finish\n(.*\n)*.*first error(.*\n)*.*: reset$"
    ):
        handle.wait()

    with pytest.raises(CommError, match="already called"):
        handle.wait()
    handle.drain()  # of nothing
