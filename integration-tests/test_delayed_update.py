"""An update that goes on during the next forward and backward, against plain torch."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import zero_engine
import zero_offload
import zero_partition
from attrs import evolve
from delayed import (
    NUM_STEPS,
    Case,
    Late,
    adam,
    assert_same,
    build,
    copy_of,
    on_disk,
    on_host,
    read,
    sgd,
    train_alone,
    train_one,
    train_sharded,
    trainable,
    used,
)
from residences import is_same, skipping_adam
from torch import Tensor
from zero_comm import Group
from zero_engine import Offload
from zero_offload import BudgetError

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.drawn(3)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.ranks(timeout_s=60)
def test_gradients_are_of_parameters_that_lack_the_last_update_alone(
    group: Group, tmp_path: Path, stage: int
) -> None:
    """One step late and not two, nor by chance: every bit is that of two copies in plain torch."""
    offloads = [(on_host(), adam), (on_host(fraction=0.4), adam), (on_disk(tmp_path), adam)]
    if stage == 3:
        both = on_disk(tmp_path, params="disk")
        offloads += [(evolve(both, optimizer="host"), adam), (both, adam)]
        offloads += [(on_host(), sgd), (on_disk(tmp_path), sgd)]  # without a native kernel
    for turn, (offload, make) in enumerate(offloads):
        case = Case(offload, stage, is_bf16=(stage + turn) % 2 == 1, make=make)
        expected = train_alone(case, rank=group.rank, world_size=group.world_size)
        assert_same(train_sharded(case, group), expected)


def test_nothing_is_delayed_unless_asked_for(group: Group, tmp_path: Path) -> None:
    """The numbers change, so it must be the user's choice."""
    ranks = {"rank": group.rank, "world_size": group.world_size}
    for offload in (
        Offload(optimizer="host"),
        Offload(optimizer="disk", path=tmp_path, subgroup_bytes=1000),
    ):
        case = Case(offload)
        expected = train_alone(case, **ranks, finishes_after=range(NUM_STEPS))
        assert_same(train_sharded(case, group), expected)
        assert expected.losses != train_alone(case, **ranks).losses, "the oracle tells them apart"


# ---- Beside forward and backward ----


@pytest.mark.parametrize("stage", [2, 3])
def test_the_update_goes_on_beside_forward_and_backward(
    group: Group, tmp_path: Path, stage: int
) -> None:
    """Each update is held until the next backward has ended: it shares nothing with that."""
    may_go_on, threads = threading.Semaphore(0), set[threading.Thread]()
    step_at_once = zero_offload.OffloadedState.step

    def held(*args: Any, **kwargs: Any) -> None:
        threads.add(threading.current_thread())
        assert may_go_on.acquire(timeout=60), "nobody waits for the step in step()"
        step_at_once(*args, **kwargs)

    for offload in (on_host(), on_disk(tmp_path)):
        case = Case(offload, stage, is_bf16=True)
        expected = train_alone(case, rank=group.rank, world_size=group.world_size)
        with mock.patch.object(zero_offload.OffloadedState, "step", held):
            found = train_sharded(
                case,
                group,
                before_step=lambda step: may_go_on.release() if step else None,
                after=lambda step, _: may_go_on.release() if step == NUM_STEPS - 1 else None,
            )
        assert_same(found, expected)
        assert len(threads) == 1
        assert not threads.pop().is_alive(), "unshard() joins it"


def test_a_step_that_is_skipped_takes_over_the_one_before(group: Group) -> None:
    """Gradients with inf are dropped, and with them no update that was under way."""
    model, optimizer = build(Case(on_host(), make=skipping_adam), group)
    train_one(model, optimizer, group.rank, 0)
    first = read(model)
    optimizer.found_inf = torch.ones(())
    train_one(model, optimizer, group.rank, 1)
    del optimizer.found_inf
    assert is_same(used(model), first)
    assert is_same(read(model), first)
    zero_engine.unshard(model, optimizer)


@pytest.mark.parametrize("make", [adam, sgd])  # with and without a native kernel
def test_a_late_step_unscales_its_gradients(group: Group, make: Any) -> None:
    """By the factor of its own step; the next one's is known by then."""
    found = []
    for scales in ((1.0, 1.0, 1.0), (4.0, 16.0, 2.0)):
        model, optimizer = build(Case(on_host(), make=make), group)
        for step, scale in enumerate(scales):
            (parity.loss_of(model, parity.batch(step, 0, group.rank)) * scale).backward()
            zero_engine.unscale_and_clip_(model, scale=scale, in_step=True)
            optimizer.step()
            optimizer.zero_grad()
        found.append(read(model))
        zero_engine.unshard(model, optimizer)

    assert is_same(*found)


def test_a_closure_is_stepped_as_late(group: Group) -> None:
    """The other way to call step()."""
    case = Case(on_host(), make=sgd)
    late = Late.of(case)
    model, optimizer = build(case, group)
    for step in range(NUM_STEPS):
        local = []
        for peer in range(group.world_size):
            parity.loss_of(late.model, parity.batch(step, 0, peer)).backward()
            local.append([copy_of(p.grad) for p in trainable(late.model)])
            late.model.zero_grad()

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = parity.loss_of(model, parity.batch(step, 0, group.rank))
            loss.backward()
            return loss

        late.step(parity.mean(local))
        optimizer.step(closure)
    optimizer.zero_grad()
    assert is_same(read(model), [p.detach() for p in late.trained])
    zero_engine.unshard(model, optimizer)


def test_it_takes_the_new_values_and_the_gradients_once_more(group: Group) -> None:
    """What it costs is known beforehand, reported, and kept to the budget."""
    for is_bf16 in (False, True):
        held = []
        for is_delayed in (True, False):
            case = Case(evolve(on_host(), delayed_update=is_delayed), is_bf16=is_bf16)
            model, optimizer = build(case, group)
            report = zero_partition.memory_report(model)
            held.append(report.host_bytes)
            zero_engine.unshard(model, optimizer)
        numel = report.trained_bytes_per_rank[group.rank] // (2 if is_bf16 else 4)
        # New values and gradients; and fp32 masters, which are not needed otherwise.
        needed = numel * (2 + 4 if is_bf16 else 4 + 4 + 4)
        if group.device.type != "cpu":  # where values are held back, and masters are on the host
            needed = numel * 4
        assert needed <= held[0] - held[1] <= needed + 5000, (held, needed)
    with pytest.raises(BudgetError, match="budget"):
        build(Case(on_host(budget_bytes=4000)), group)
