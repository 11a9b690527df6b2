"""What is looked at, finished, saved and written while an update goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import zero_engine
import zero_partition
from delayed import (
    BF16,
    NUM_MICRO,
    NUM_STEPS,
    Case,
    Late,
    assert_same,
    build,
    on_disk,
    on_host,
    optimizer_of,
    read,
    train_alone,
    train_one,
    train_sharded,
    trainable,
    used,
)
from residences import failing_disk, is_same
from torch import Tensor, nn
from zero_comm import Group
from zero_offload import StoreError, TornStepError
from zero_partition.seams import find_sharded

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize("stage", [1, 3])
def test_looking_changes_nothing_and_sees_every_update(
    group: Group, tmp_path: Path, stage: int
) -> None:
    """Who logs a norm or a moment must not train another model than who does not."""
    case = Case(on_disk(tmp_path), stage, is_bf16=stage == 3)
    values, moments = [], []

    def remember(_: int, late: Late) -> None:
        values.append([param.detach().clone() for param in late.trained])
        states = [late.optimizer.state[param] for param in late.trained]
        moments.append([state["exp_avg"].clone() for state in states if state])

    expected = train_alone(case, rank=group.rank, world_size=group.world_size, after=remember)

    def look(step: int, model: nn.Module) -> None:
        assert is_same(read(model), values[step]), f"step {step}"
        stepped = [p for p in trainable(model) if p is not model.unused]
        averages = [zero_engine.full_optimizer_state(p, "exp_avg") for p in stepped]
        assert is_same(averages, moments[step]), f"step {step}"
        assert len(optimizer_of(model).state) >= len(stepped)
        zero_partition.memory_report(model)

    assert_same(train_sharded(case, group, after=look), expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_finishing_takes_the_delay_out_once(group: Group, tmp_path: Path, stage: int) -> None:
    """Before an evaluation the model has all of what was learnt; then it trains on, delayed."""
    ranks = {"rank": group.rank, "world_size": group.world_size}
    at = (1, NUM_STEPS - 1)

    def finish(step: int, model: nn.Module) -> None:
        if step in at:
            zero_engine.finish_update(model)
            zero_engine.finish_update(model)  # again: nothing is left to finish
            now = [value.to(BF16).float() for value in read(model)]
            assert is_same(used(model), now)

    for offload in (on_host(), on_disk(tmp_path, **({"params": "disk"} if stage == 3 else {}))):
        case = Case(offload, stage, is_bf16=True)
        expected = train_alone(case, **ranks, finishes_after=at)
        assert_same(train_sharded(case, group, after=finish), expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_saved_in_the_middle_can_be_gone_on_from(
    group: Group, tmp_path: Path, stage: int
) -> None:
    """Weights and optimizer state are of one step, and a new process trains on from both."""
    case = Case(on_disk(tmp_path), stage)
    rank, world_size = group.rank, group.world_size
    expected = train_alone(case, rank=rank, world_size=world_size, finishes_after=(1,))
    saved: dict[str, Any] = {}

    def save(step: int, model: nn.Module) -> None:
        if step == 1:
            saved["weights"] = [zero_engine.full_state_dict(model)]
            saved["optimizer"] = zero_engine.full_optimizer_state_dict(model)

    assert_same(train_sharded(case, group, after=save), expected)

    torch.distributed.broadcast_object_list(saved["weights"], src=0, group=group.process_group)
    model, optimizer = build(case, group)
    scheduler = parity.scheduler_for(optimizer)
    train_one(model, optimizer, group.rank, 7)  # something else is under way when it is loaded
    model.load_state_dict(saved["weights"][0])
    zero_engine.load_full_optimizer_state_dict(model, saved["optimizer"])
    scheduler.last_epoch = 2
    losses = []
    for step in range(2, NUM_STEPS):
        losses += train_one(model, optimizer, group.rank, step)
        scheduler.step()
    assert is_same(losses, expected.losses[2 * NUM_MICRO :])
    assert is_same(read(model), expected.trained)
    zero_engine.unshard(model, optimizer)


@pytest.mark.parametrize("stage", [2, 3])
def test_parking_leaves_the_update_under_way_alone(group: Group, stage: int) -> None:
    """Memory of parameters goes and comes back elsewhere; the values held back come in there."""
    case = Case(on_host(), stage, is_bf16=True)
    expected = train_alone(case, rank=group.rank, world_size=group.world_size)

    def offload_states(_: int, model: nn.Module) -> None:
        zero_engine.offload_states(model)
        with pytest.raises(zero_partition.StateError, match="finish_update"):
            zero_engine.finish_update(model)
        zero_engine.reload_states(model)

    assert_same(train_sharded(case, group, after=offload_states), expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_written_between_steps_outlives_the_update_under_way(
    group: Group, stage: int
) -> None:
    """Weights that are clipped or averaged by hand would else be as they were, a step later."""
    case = Case(on_host(), stage)

    def write_both(step: int, late: Late) -> None:
        for k, value in _written(step, [p.shape for p in late.trained]).items():
            with torch.no_grad():
                late.trained[k].copy_(value)
                trainable(late.model)[k].copy_(value)

    expected = train_alone(case, rank=group.rank, world_size=group.world_size, after=write_both)

    def write(step: int, model: nn.Module) -> None:
        params = trainable(model)
        for k, value in _written(step, [p.shape for p in params]).items():
            if step == 0:
                zero_engine.set_full_param(params[k], value)
            elif step == 1:
                with zero_engine.GatheredParameters(params[k], modifier_rank=0), torch.no_grad():
                    params[k].copy_(value)
            elif case.stage < 3:
                with torch.no_grad():
                    params[k].copy_(value)
            else:
                part = zero_partition.parameter_status(params[k]).part
                zero_engine.set_local_param(params[k], value.flatten()[part.as_slice()])

    assert_same(train_sharded(case, group, after=write), expected)


def _written(step: int, shapes: list[torch.Size]) -> dict[int, Tensor]:
    """What is written after a step, by parameter: to some of a flat buffer, and not to others."""
    chosen = {0: (1, 4), 1: (2,), 2: (3, 1)}.get(step, ())
    return {k: torch.full(shapes[k], 0.25 + step) for k in chosen}


# ---- Errors of an update that goes on ----


def test_an_update_that_could_not_begin_says_so_in_the_next_step_and_begins_again(
    group: Group, tmp_path: Path
) -> None:
    """A disk that fails for a while costs an exception, and no gradient."""
    case = Case(on_disk(tmp_path))
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
        with failing_disk("read") if step == 1 else nullcontext():
            optimizer.step()
            _let_it_end(model)
        scheduler.step()
        optimizer.zero_grad()
    assert is_same(read(model), expected.trained)
    zero_engine.unshard(model, optimizer)


def test_an_update_that_ended_midway_is_an_error_until_state_is_loaded(
    group: Group, tmp_path: Path
) -> None:
    """Parameters of two steps must not be trained on, saved or read without a word."""
    case = Case(on_disk(tmp_path))
    model, optimizer = build(case, group)
    train_one(model, optimizer, group.rank, 0)
    weights = [zero_engine.full_state_dict(model)]
    torch.distributed.broadcast_object_list(weights, src=0, group=group.process_group)
    state = zero_engine.full_optimizer_state_dict(model)
    with failing_disk("read", after=2):
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
    assert is_same(read(model), after_error)
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
