"""Marks of launches, over a group of gloo's: what they compare does not depend on the backend."""

from __future__ import annotations

import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from zero_comm import CommError, DivergenceError, Group, Purpose
from zero_comm.order import OrderWatch
from zero_comm.torch_private import backend_of

_CPU = torch.device("cpu")
_NEVER_S = 1e6  # no look of the thread's: each finding is the marks'


def _watch(*, timeout_s: float = 20.0) -> OrderWatch:
    made = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    watch = OrderWatch(
        made.group_name,
        dist.get_rank(made),
        lambda: None,
        _NEVER_S,
        world_size=dist.get_world_size(made),
        device=_CPU,
        backend=backend_of(made, _CPU),
        timeout_s=timeout_s,
    )
    watch.purposes |= {1: Purpose("fetching apples"), 2: Purpose("fetching pears")}
    return watch


def _launch(watch: OrderWatch, *tags: int) -> None:
    for tag in tags:
        watch.launch("all_gather", 100 + tag, tag=tag, shape=(torch.float32, (1, 1)))


@pytest.mark.ranks(2, 3)
def test_marks_of_the_same_launches_agree(group: Group) -> None:
    """Once a step, for as long as a training lasts; the store keeps the last two."""
    watch = _watch()
    for step in range(20):
        _launch(watch, 1, 2, 1)
        watch.compare("a step", at_once=step % 5 == 0, timeout_s=None)
    watch.compare("the end", at_once=True, timeout_s=None)
    dist.barrier()
    keys = [watch.key_of(f"mark/{number}") for number in range(1, 22)]
    assert [watch.store.check([key]) for key in keys] == [False] * 20 + [True]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("at_once", [True, False])
def test_marks_of_other_launches_part(group: Group, at_once: bool) -> None:
    """At once where the host asks so; else at the mark that follows, and no later."""
    watch = _watch()
    _launch(watch, 1, 1 + (group.rank == 1))
    with pytest.raises(DivergenceError, match=r"(?s)(?=.*number 2 ).*rank 1 in fetching pears"):
        watch.compare("a step", at_once=at_once, timeout_s=None)
        assert not at_once
        watch.compare("a step", at_once=False, timeout_s=None)
    with pytest.raises(DivergenceError, match="fetching pears"):
        _launch(watch, 1)


def test_many_launches_without_a_mark_are_compared_too(group: Group) -> None:
    """Whoever calls collectives in a loop makes no steps."""
    watch = _watch()
    _launch(watch, 1 + group.rank)
    with pytest.raises(DivergenceError, match=r"fetching apples.* number 1 .*\n.*fetching pears"):
        _launch(watch, *(1 for _ in range(600)))


def test_a_rank_that_makes_no_mark_is_waited_for_until_the_timeout(group: Group) -> None:
    """The timeout is what users of the call have said, or the group's."""
    watch, began = _watch(timeout_s=60.0), time.monotonic()
    if group.rank == 0:
        with pytest.raises(CommError, match=r"reading did not finish within 0.2 s .*: 1 of 2"):
            watch.compare("reading", at_once=True, timeout_s=0.2)
    assert time.monotonic() - began < 10


def test_a_store_may_be_lost_at_the_last_mark_and_at_no_other(group: Group) -> None:
    """Rank 0 hosts it, and may end after its last step, when others have one to make."""
    watch = _watch()
    lost = mock.Mock(**{"add.side_effect": dist.DistNetworkError("Broken pipe")})
    watch.compare("a step", at_once=False, timeout_s=None)
    dist.barrier()
    with mock.patch.object(OrderWatch, "store", lost):
        watch.compare("the last step", at_once=False, timeout_s=None)
        for at_once in (False, True):
            with pytest.raises(CommError, match=r"lost the store .*rank 0's or the launcher's"):
                watch.compare("one more", at_once=at_once, timeout_s=None)


def test_who_relies_on_the_others_needs_the_store(group: Group) -> None:
    """A rank that reads what all have sent is in no last step."""
    watch = _watch()
    lost = mock.Mock(**{"add.side_effect": dist.DistNetworkError("Broken pipe")})
    with (
        mock.patch.object(OrderWatch, "store", lost),
        pytest.raises(CommError, match=r"lost the store .*rank 0's or the launcher's"),
    ):
        watch.compare("save()", at_once=True, timeout_s=None)
