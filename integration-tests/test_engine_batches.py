"""How many micro-batches make a step, and who decides it: the file, a setter, or the loop."""

from __future__ import annotations

from contextlib import nullcontext

import parity
import pytest
import torch
import zero_engine
from engines import assert_weights, build_engine, engine_config, run_micro_batch, weights_of
from torch.utils.data import TensorDataset
from zero_comm import Group
from zero_partition import StateError

pytestmark = pytest.mark.xdist_group("ranks")


# ---- Setters ----


@pytest.mark.parametrize("stage", parity.STAGES)
def test_a_changed_number_of_micro_batches_divides_from_then_on(group: Group, stage: int) -> None:
    """Of a schedule of batch sizes, every step must be the mean over its own batch."""
    engine = build_engine(group, engine_config(group, stage))
    plain, optimizer = parity.build_with_optimizer(make=parity.tiny_float32)
    scheduler, ddp = parity.scheduler_for(optimizer), parity.as_ddp(plain, group)
    for step, count in enumerate([1, 4, 2]):
        engine.set_gradient_accumulation_steps(count)
        assert engine.gradient_accumulation_steps() == count
        assert engine.train_batch_size() == 2 * count * group.world_size
        for micro in range(count):
            run_micro_batch(engine, step, micro)
            with ddp.no_sync() if micro + 1 < count else nullcontext():
                loss = parity.loss_of(ddp, parity.batch(step, micro, group.rank))
                (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    assert engine.managed_gradient_accumulation()
    assert (engine.global_steps, engine.global_samples) == (3, 2 * (1 + 4 + 2) * group.world_size)
    weights = weights_of(engine)
    if group.rank == 0:
        torch.testing.assert_close(weights, plain.state_dict(), rtol=0, atol=1e-6)


def test_a_changed_micro_batch_counts_other_samples(group: Group) -> None:
    """Sequences grow while a model trains, and batches shrink: throughput is read off the count."""
    engine = build_engine(group, engine_config(group, 1, accumulation_steps=2))
    engine.set_train_micro_batch_size(3)

    assert engine.train_micro_batch_size_per_gpu() == 3
    assert engine.gradient_accumulation_steps() == 2
    assert engine.train_batch_size() == 3 * 2 * group.world_size
    engine.set_train_batch_size(3 * 3 * group.world_size)
    assert engine.gradient_accumulation_steps() == 3
    for micro in range(3):
        run_micro_batch(engine, 0, micro)
        if micro < 2:
            with pytest.raises(
                StateError, match=r"Engine.set_train_micro_batch_size\(\): .*right af"
            ):
                engine.set_train_micro_batch_size(1)
            with pytest.raises(StateError, match=rf"{micro + 1} micro-batches .*rank {group.rank}"):
                engine.set_gradient_accumulation_steps(1)
    assert engine.global_samples == 3 * 3 * group.world_size

    for wrong in (0, -2, 1.5, "4", True, None):
        with pytest.raises(zero_engine.ConfigError, match=r"size.*: expected an integer"):
            engine.set_train_micro_batch_size(wrong)
        with pytest.raises(zero_engine.ConfigError, match=r"steps.*: expected an integer"):
            engine.set_gradient_accumulation_steps(wrong)
    engine.destroy()
    with pytest.raises(StateError, match=r"after destroy\(\)"):
        engine.set_gradient_accumulation_steps(1)


def test_the_loader_keeps_the_batches_it_was_made_with(group: Group) -> None:
    """Workers may have loaded ahead; DeepSpeed's loader stays the same, and scripts make their own.

    A script that believed otherwise would train on other batches than it counts.
    """
    samples = TensorDataset(torch.arange(24.0).view(24, 1))
    model = torch.nn.Linear(1, 1)
    config = engine_config(group, 1)
    engine, _, loader, _ = zero_engine.initialize(
        model=model, training_data=samples, config=config, group=group
    )
    engine.set_train_micro_batch_size(3)

    assert engine.train_micro_batch_size_per_gpu() == 3
    assert [len(batch) for (batch,) in loader] == [2] * (24 // 2 // group.world_size)


# ---- Boundaries that are the user's ----


@pytest.mark.parametrize("stage", parity.STAGES)
def test_without_management_every_step_is_a_boundary(group: Group, stage: int) -> None:
    """Loops that accumulate by themselves call `step` when they have enough, however many."""
    settings = engine_config(group, stage, accumulation_steps=2, manages_accumulation=False)
    engine = build_engine(group, settings)
    plain, optimizer = parity.build_with_optimizer(make=parity.tiny_float32)
    scheduler, ddp = parity.scheduler_for(optimizer), parity.as_ddp(plain, group)
    for step, count in enumerate([3, 1, 2]):
        for micro in range(count):
            data = parity.batch(step, micro, group.rank)
            assert engine.is_gradient_accumulation_boundary()
            waits = step == 2 and micro + 1 < count
            with engine.no_sync() if waits else nullcontext():
                engine.backward(parity.loss_of(engine, data))
            with ddp.no_sync() if waits else nullcontext():
                (parity.loss_of(ddp, data) / 2).backward()
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        assert engine.was_step_applied()
    assert not engine.managed_gradient_accumulation()
    # Of the batches that there were, and not of those that the file says.
    assert (engine.global_steps, engine.global_samples) == (3, 2 * (3 + 1 + 2) * group.world_size)
    weights = weights_of(engine)
    if group.rank == 0:
        torch.testing.assert_close(weights, plain.state_dict(), rtol=0, atol=1e-6)

    with pytest.raises(zero_engine.ConfigError, match=r"every step\(\) is a boundary; leave out"):
        engine.set_gradient_accumulation_boundary(None)


def test_without_management_losses_are_divided_all_the_same(group: Group) -> None:
    """DeepSpeed divides by the number in the file whoever counts, and a mean would be a sum."""
    model, optimizer = parity.build_with_optimizer(make=parity.tiny_float32)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2},
    }
    unmanaged, *_ = zero_engine.initialize(
        model=model, optimizer=optimizer, config=config, group=group
    )
    managed = build_engine(group, engine_config(group, 2, accumulation_steps=2))
    for micro in range(2):
        run_micro_batch(managed, 0, micro)
        unmanaged.backward(parity.loss_of(unmanaged, parity.batch(0, micro, group.rank)))
    unmanaged.step()

    assert_weights(unmanaged, weights_of(managed))
