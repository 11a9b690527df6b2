"""Errors of an update that goes on while the model computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import zero_engine
from delayed import (
    NUM_MICRO,
    NUM_STEPS,
    Case,
    build,
    on_disk,
    read,
    train_alone,
    train_one,
)
from torch import Tensor, nn
from zero_comm import Group
from zero_offload import DiskStore, StoreError, TornStepError
from zero_partition.seams import find_sharded

pytestmark = pytest.mark.xdist_group("ranks")


def test_an_update_that_could_not_begin_says_so_in_the_next_step_and_begins_again(
    ranks, tmp_path: Path
) -> None:
    """A disk that fails for a while costs an exception, and no gradient."""
    ranks(2).run(_begin_again, case=Case(on_disk(tmp_path)))


def _begin_again(group: Group, case: Case) -> None:
    expected = train_alone(case, rank=group.rank, world_size=group.world_size)
    model, optimizer = build(case, group)
    scheduler = parity.scheduler_for(optimizer)
    for step in range(NUM_STEPS):
        for micro in range(NUM_MICRO):
            parity.loss_of(model, parity.batch(step, micro, group.rank)).backward()
        if step == 2:  # which began the one before with a disk that fails
            with pytest.raises(StoreError, match="no such disk"):
                optimizer.step()
        if step == 1:
            _let_it_end(model)
            _forget_what_was_read_ahead(model)
        with _failing_reads(after=0) if step == 1 else nullcontext():
            optimizer.step()
            _let_it_end(model)
        scheduler.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, read(model), expected.trained))
    zero_engine.unshard(model, optimizer)


def test_an_update_that_ended_midway_is_an_error_until_state_is_loaded(
    ranks, tmp_path: Path
) -> None:
    """Parameters of two steps must not be trained on, saved or read without a word."""
    ranks(2).run(_tear, case=Case(on_disk(tmp_path)))


def _tear(group: Group, case: Case) -> None:
    model, optimizer = build(case, group)
    train_one(model, optimizer, group.rank, 0)
    weights = [zero_engine.full_state_dict(model)]
    torch.distributed.broadcast_object_list(weights, src=0, group=group.process_group)
    state = zero_engine.full_optimizer_state_dict(model)
    with _failing_reads(after=2):
        train_one(model, optimizer, group.rank, 1)
        _let_it_end(model)
    uses: dict[str, Callable[[], Any]] = {
        "step": optimizer.step,
        "state": lambda: dict(optimizer.state.items()),
        "save": lambda: zero_engine.full_optimizer_state_dict(model),
        "value": lambda: zero_engine.local_param(model.head.weight),
        "finish": lambda: zero_engine.finish_update(model),
    }
    for name, use in uses.items():
        with pytest.raises(TornStepError, match="no such disk"):
            use()
            pytest.fail(name)

    zero_engine.load_full_optimizer_state_dict(model, state)
    model.load_state_dict(weights[0])
    train_one(model, optimizer, group.rank, 1)
    after_error = read(model)
    zero_engine.unshard(model, optimizer)

    model, optimizer = build(case, group)
    train_one(model, optimizer, group.rank, 0)
    zero_engine.finish_update(model)
    train_one(model, optimizer, group.rank, 1)
    assert all(map(torch.equal, read(model), after_error))
    zero_engine.unshard(model, optimizer)


def _let_it_end(model: nn.Module) -> None:
    """Block until no update is under way, without asking for its outcome."""
    sharded = find_sharded(model)
    assert sharded is not None
    sharded.residence.offload._wait()


def _forget_what_was_read_ahead(model: nn.Module) -> None:
    """So that the next update needs the disk for its first sub-group."""
    sharded = find_sharded(model)
    assert sharded is not None
    sharded.residence.offload.inner._window.forget()


@contextmanager
def _failing_reads(*, after: int) -> Iterator[None]:
    """A disk store whose reads fail, after so many."""
    read, left = DiskStore.read, after

    def failing(store: DiskStore, key: str, into: Tensor) -> Future[Tensor]:
        nonlocal left
        left -= 1
        if left >= 0:
            return read(store, key, into)
        failed: Future[Tensor] = Future()
        failed.set_exception(StoreError("no such disk", key=key))
        return failed

    with mock.patch.object(DiskStore, "read", failing):
        yield
