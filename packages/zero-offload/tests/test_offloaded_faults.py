"""A disk that fails leaves a typed error, and nothing half updated that goes unnoticed."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from offloaded_training import CUT, HOMES, assert_equal, loss_of, make_model, train
from zero_offload import (
    BudgetError,
    OffloadedOptimizer,
    StoreError,
    TornStepError,
    host_memory,
    set_host_budget,
)
from zero_offload.testing import RecordingStore


def _trained(store: RecordingStore, num_steps: int = 2) -> tuple[Any, OffloadedOptimizer]:
    model = make_model()
    offloaded = OffloadedOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-2, state="disk", store=store, **CUT
    )
    train(model, offloaded, steps=range(num_steps))
    loss_of(model, num_steps).backward()
    return model, offloaded


@pytest.mark.parametrize("is_lazy", [False, True], ids=["at once", "when waited for"])
@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_torn_step_is_refused_until_a_load_makes_it_whole(
    verb: str, after: int, is_lazy: bool
) -> None:
    """Else the training goes on from parameters of two different steps, and nobody knows."""
    store = RecordingStore(is_lazy=is_lazy)
    model, offloaded = _trained(store)
    saved = copy.deepcopy(offloaded.state_dict()), copy.deepcopy(model.state_dict())
    store.fails = (verb, store.counts[verb] + after + (verb == "read"))

    with pytest.raises(TornStepError, match=r"injected.*optimizer-") as caught:
        offloaded.step()

    cause = caught.value.__cause__
    assert isinstance(cause, StoreError)
    number = 1 + int(cause.key.rsplit(".")[-1])  # keys count from 0
    assert f"sub-group {number} of {len(store.sizes())}," in str(caught.value)
    for attempt in (offloaded.step, offloaded.state_dict, lambda: offloaded.clip_grad_norm_(1)):
        with pytest.raises(TornStepError, match="of two different steps"):
            attempt()

    store.fails = None
    model.load_state_dict(saved[1])
    offloaded.load_state_dict(saved[0])
    offloaded.zero_grad()
    actual = train(model, offloaded, steps=range(2, 5))
    whole, never_failed = _trained(RecordingStore())
    never_failed.zero_grad()
    assert_equal(actual, train(whole, never_failed, steps=range(2, 5)))


def test_what_fails_before_anything_is_stepped_can_be_tried_again() -> None:
    """Nothing is lost: neither by a step whose first read fails, nor by a save."""
    store = RecordingStore()
    model, offloaded = _trained(store)
    before = copy.deepcopy((model.state_dict(), offloaded.state_dict()))
    for attempt, after in ((offloaded.step, 0), (offloaded.state_dict, 1)):
        store.fails = ("read", store.counts["read"] + after)
        with pytest.raises(StoreError, match="injected"):
            attempt()
        now = (model.state_dict(), offloaded.state_dict())
        torch.testing.assert_close(now, before, rtol=0, atol=0)

    num_writes = store.counts["write"]
    offloaded.state_dict()
    assert store.counts["write"] == num_writes  # what is only read costs one pass, not two
    offloaded.step()
    whole, _ = _trained(RecordingStore(), 3)
    torch.testing.assert_close(model.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_an_error_of_the_optimizer_midway_is_a_torn_step_too(tmp_path: Path) -> None:
    """Not only disks end a step between two sub-groups."""
    model = make_model()
    offloaded = OffloadedOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, **HOMES["disk"](tmp_path)
    )
    train(model, offloaded, steps=range(1))
    loss_of(model, 1).backward()
    offloaded.param_groups[0]["momentum"] = "much"

    with pytest.raises(TornStepError, match=r"different steps.*ended with TypeError"):
        offloaded.step()


def test_the_process_budget_holds_for_later_groups_and_leaves_no_trace(tmp_path: Path) -> None:
    """A refused group must not be half added."""
    model = make_model()
    offloaded = OffloadedOptimizer(model[0].parameters(), torch.optim.AdamW, state="host", **CUT)
    gc.collect()  # what an earlier test left must not make room in between
    set_host_budget(sum(host_memory().values()) + 1000)
    try:
        with pytest.raises(BudgetError, match="asks for"):
            offloaded.add_param_group({"params": model[2].parameters()})
    finally:
        set_host_budget(None)

    assert len(offloaded.param_groups) == 1
    offloaded.add_param_group({"params": model[2].parameters()})
    train(model, offloaded, steps=range(2))
    assert len(offloaded.state) == 4
