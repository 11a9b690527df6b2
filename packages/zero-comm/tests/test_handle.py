"""A collective in flight: waited on once, and the owner of what it borrowed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from zero_comm import CommError, Group, Handle, all_gather_flat


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
    works = tuple((name, _FakeWork(name, happened)) for name in ("first", "second"))

    Handle(lambda timeout_s: happened.append(f"finish {timeout_s}"), works).wait(timeout_s=2.0)

    assert happened == ["first", "second", "finish 2.0"]


def test_a_failed_work_says_which_and_what_to_do() -> None:
    """Torch knows a connection; the reader needs the collective and the rank."""
    handle = Handle(lambda _: None, (("all_gather: receiving from rank 1", _BrokenWork()),))

    with pytest.raises(
        CommError, match=r"receiving from rank 1 did not finish: reset by peer"
    ) as e:
        handle.wait()

    assert isinstance(e.value.__cause__, RuntimeError)
    assert "look for the first error" in str(e.value)


class _FakeWork:
    def __init__(self, name: str, happened: list[str]) -> None:
        self.name, self.happened = name, happened

    def wait(self, timeout: object = None) -> None:
        self.happened.append(self.name)


class _BrokenWork:
    def wait(self, timeout: object = None) -> None:
        raise RuntimeError("reset by peer")
