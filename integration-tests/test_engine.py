"""The engine's loop: the numbers of the plain one, and what it does around them."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import attrs
import parity
import pytest
import torch
import zero_engine
from engines import (
    assert_near,
    assert_weights,
    build_engine,
    engine_config,
    run_micro_batch,
    train_ddp,
    weights_of,
)
from parity import Curve, Recipe, ZeroConfig
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from zero_comm import Group, record_traffic
from zero_engine import ConfigError
from zero_engine.engine import DynamicLossScale, StaticLossScale
from zero_partition import StateError

pytestmark = pytest.mark.xdist_group("ranks")


# ---- The same numbers ----


def _share_of_loss(model: nn.Module, data: Any, num_micro_batches: int) -> Tensor:
    return parity.loss_of(model, data) / num_micro_batches


@pytest.mark.parametrize(
    ("stage", "num_micro_batches", "max_norm"),
    [(0, 2, 0.5), (1, 1, 0.5), (1, 2, None), (2, 2, 0.5), (3, 1, None), (3, 2, 0.5)],
)
def test_the_engine_trains_as_the_plain_loop_does(
    group: Group, stage: int, num_micro_batches: int, max_norm: float | None
) -> None:
    """It owns no algorithm: whoever moves from one loop to the other must see no bit change."""
    recipe = Recipe(
        num_micro_batches=num_micro_batches,
        reduces_once=stage < 2,
        max_norm=max_norm,
        make=parity.tiny_float32,
        loss_of=partial(_share_of_loss, num_micro_batches=num_micro_batches),
    )
    settings = engine_config(
        group, stage, accumulation_steps=num_micro_batches, max_norm=max_norm or 0.0
    )
    engine = build_engine(group, settings)
    losses = [
        run_micro_batch(engine, step, micro) / num_micro_batches
        for step in range(recipe.num_steps)
        for micro in range(num_micro_batches)
    ]
    curve = Curve(losses=losses, weights=weights_of(engine))

    ours = parity.train_sharded(group, recipe, ZeroConfig(stage))
    parity.assert_same(curve, ours, rank=group.rank, what="shard()")


# ---- The boundary ----


@pytest.mark.parametrize("stage", [1, 3])
def test_step_does_nothing_off_a_boundary(group: Group, stage: int) -> None:
    """Scripts call it after every micro-batch, whatever the configuration says."""
    engine = build_engine(group, engine_config(group, stage, accumulation_steps=3))
    before, first_lr = weights_of(engine), engine.get_lr()
    for micro in range(2):
        assert not engine.is_gradient_accumulation_boundary()

        run_micro_batch(engine, 0, micro)

        assert not engine.was_step_applied()
        assert engine.get_lr() == first_lr
        assert (engine.global_steps, engine.micro_steps) == (0, micro + 1)
    assert_weights(engine, before)
    assert engine.is_gradient_accumulation_boundary()

    run_micro_batch(engine, 0, 2)

    assert engine.was_step_applied()
    assert engine.get_lr() != first_lr
    assert (engine.global_steps, engine.micro_steps) == (1, 3)
    assert engine.global_samples == engine.train_batch_size()


@pytest.mark.parametrize(
    ("stage", "calls"),
    [*enumerate(["engine.backward", "loss.backward"] * 2), (1, "engine.backward")],
)
def test_gradients_travel_when_the_stage_says(group: Group, stage: int, calls: str) -> None:
    """Once per step where they rest whole; in every micro-batch where there is no room for that."""
    engine = build_engine(group, engine_config(group, stage, accumulation_steps=2))
    counts = []
    for micro in range(2):
        loss = parity.loss_of(engine, parity.batch(0, micro, group.rank))
        with record_traffic(engine.group) as traffic:
            if calls == "engine.backward":
                engine.backward(loss)
            else:
                loss.backward()
        operations = traffic.operations
        reduced = [name for name in operations if "reduce" in name]
        counts.append(sum(operations[name].calls for name in reduced))
        engine.step()

    assert counts[1] > 0
    assert counts[0] == (counts[1] if stage >= 2 else 0)


def test_a_boundary_chosen_by_hand_holds_until_it_is_given_back(group: Group) -> None:
    """Unequal accumulation, at the end of an epoch for one, is the user's to steer."""
    engine = build_engine(group, engine_config(group, 1, accumulation_steps=2))
    for micro, is_boundary in enumerate([False, False, True]):
        engine.set_gradient_accumulation_boundary(is_boundary)
        run_micro_batch(engine, 0, micro)
    engine.set_gradient_accumulation_boundary(None)

    assert engine.global_steps == 1
    assert not engine.is_gradient_accumulation_boundary()
    assert_near(engine, train_ddp(group, [3], divisor=2))


# ---- The number of micro-batches ----


@pytest.mark.parametrize("stage", [1, 3])
def test_a_changed_number_of_micro_batches_divides_from_then_on(group: Group, stage: int) -> None:
    """Of a schedule of batch sizes, every step must be the mean over its own batch."""
    engine = build_engine(group, engine_config(group, stage))
    for step, count in enumerate([1, 4, 2]):
        if step == 1:
            engine.set_train_batch_size(2 * count * group.world_size)
        else:
            engine.set_gradient_accumulation_steps(count)
        assert engine.gradient_accumulation_steps() == count
        assert engine.train_batch_size() == 2 * count * group.world_size
        for micro in range(count):
            run_micro_batch(engine, step, micro)

    assert engine.managed_gradient_accumulation()
    assert (engine.global_steps, engine.global_samples) == (3, 2 * (1 + 4 + 2) * group.world_size)
    assert_near(engine, train_ddp(group, [1, 4, 2]))


@pytest.mark.parametrize("stage", [1, 3])
def test_without_management_every_step_is_a_boundary(group: Group, stage: int) -> None:
    """Loops that accumulate by themselves call `step` when they have enough, however many.

    DeepSpeed divides by the number in the file all the same.
    """
    settings = engine_config(group, stage, accumulation_steps=2, manages_accumulation=False)
    engine = build_engine(group, settings)
    for step, count in enumerate([3, 1, 3]):
        for micro in range(count):
            assert engine.is_gradient_accumulation_boundary()
            waits = step == 2 and micro + 1 < count
            with engine.no_sync() if waits else nullcontext():
                engine.backward(parity.loss_of(engine, parity.batch(step, micro, group.rank)))
        engine.step()
        assert engine.was_step_applied()

    assert not engine.managed_gradient_accumulation()
    # Of the batches that there were, and not of those that the file says.
    assert (engine.global_steps, engine.global_samples) == (3, 2 * (3 + 1 + 3) * group.world_size)
    assert_near(engine, train_ddp(group, [3, 1, 3], divisor=2))
    with pytest.raises(ConfigError, match=r"every step\(\) is a boundary; leave out"):
        engine.set_gradient_accumulation_boundary(None)


def test_a_changed_micro_batch_counts_other_samples(group: Group) -> None:
    """Sequences grow while a model trains, and batches shrink: throughput is read off the count.

    The loader keeps its own, as DeepSpeed's does: workers may have loaded ahead.
    """
    model = nn.Linear(1, 1)
    engine, _, loader, _ = zero_engine.initialize(
        model=model,
        optimizer=parity.adamw(model),
        training_data=TensorDataset(torch.arange(24.0, device="cpu").view(24, 1)),
        config=engine_config(group, 1, accumulation_steps=2),
        group=group,
    )
    engine.set_train_micro_batch_size(3)

    assert (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()) == (3, 2)
    assert engine.train_batch_size() == 3 * 2 * group.world_size
    engine.set_train_batch_size(3 * 3 * group.world_size)
    for micro in range(3):
        engine.backward(engine(torch.ones(3, 1)).sum())
        engine.step()
        if micro < 2:
            said = rf"{micro + 1} micro-batches have been accumulated.*rank {group.rank}"
            with pytest.raises(StateError, match=said):
                engine.set_gradient_accumulation_steps(1)
            with pytest.raises(StateError, match="micro-batches have been accumulated"):
                engine.set_train_batch_size(3 * group.world_size)
            with pytest.raises(StateError, match=r"set_train_micro_batch_size\(\): .*right af"):
                engine.set_train_micro_batch_size(1)
    assert engine.global_samples == 3 * 3 * group.world_size
    assert [len(batch) for (batch,) in loader] == [2] * (24 // 2 // group.world_size)
    for change, wrong, said in (
        (engine.set_train_micro_batch_size, "4", "size.*: expected int"),
        (engine.set_train_batch_size, True, "size.*: expected int"),
        (engine.set_train_batch_size, 3 * group.world_size + 1, "a multiple of 6"),
        (engine.set_gradient_accumulation_steps, 0, "steps.*: expected int"),
        (engine.set_gradient_accumulation_boundary, "no", "expected true or false, got 'no'"),
    ):
        with pytest.raises(ConfigError, match=said):
            change(wrong)


# ---- The end ----


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_is_destroyed_once_or_twice_and_followed_by_another(
    group: Group, stage: int
) -> None:
    """Sweeps build engine after engine in one process, and clean up without asking."""
    settings = engine_config(group, stage, accumulation_steps=2)
    engine = build_engine(group, settings)
    run_micro_batch(engine, 0)
    before = weights_of(engine)

    engine.destroy()
    engine.destroy()

    with pytest.raises(StateError, match=r"step\(\) after destroy\(\)"):
        engine.step()
    with pytest.raises(StateError, match=r"after destroy\(\)"):
        engine.set_gradient_accumulation_steps(1)
    with pytest.raises(StateError, match=r"forward after destroy\(\)"):
        engine(parity.batch(0, 0, 0)[0])
    model, optimizer = zero_engine.unshard(engine.module, engine.optimizer)
    assert all(param.grad is None for param in model.parameters())
    if group.rank == 0:
        parity.assert_same_weights(model.state_dict(), before, what="destroyed")
    again, *_ = zero_engine.initialize(
        model=model, optimizer=optimizer, config=settings, group=group
    )
    for micro in range(2):
        run_micro_batch(again, 0, micro)
    assert again.was_step_applied()


# ---- The rest ----


@pytest.mark.ranks(1)
def test_autocast_is_the_configurations(group: Group) -> None:
    """Of two settings of one thing, the file's wins, and the user's is back afterwards."""
    settings = attrs.evolve(engine_config(group, 3), autocast_dtype=torch.bfloat16)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    engine, *_ = zero_engine.initialize(model=model, config=settings, group=group)
    in_backward, x = [], torch.randn(2, 8)
    watched = x.clone().requires_grad_()
    kind = x.device.type
    watched.register_hook(lambda _: in_backward.append(torch.is_autocast_enabled(kind)))

    loss = engine(watched)
    assert loss.dtype == torch.bfloat16
    assert engine.module(x).dtype == torch.float32
    engine.backward(loss.float().square().sum())

    assert in_backward == [False]
    assert not torch.is_autocast_enabled(kind)
    assert model[1].running_mean.dtype == torch.float32
    with torch.autocast(kind, torch.float16):
        assert engine(x).dtype == torch.bfloat16
        assert torch.get_autocast_dtype(kind) == torch.float16
        assert (x @ x.T).dtype == torch.float16


def test_an_engine_answers_what_scripts_ask(monkeypatch, capsys) -> None:
    """Logging, schedules and launch code of DeepSpeed scripts hang on these names."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    group = Group.solo()
    engine = build_engine(group, engine_config(group, 2, max_norm=0.5))

    assert (engine.zero_optimization_stage(), engine.zero_optimization()) == (2, True)
    assert (engine.local_rank, engine.global_rank, engine.world_size) == (3, 0, 1)
    assert (engine.device, engine.gradient_clipping()) == (torch.device("cpu"), 0.5)
    assert (engine.get_mom(), engine.get_type()) == ([(0.9, 0.999)] * 2, [0.0, 0.0])
    assert engine.get_global_grad_norm() is None
    assert engine.gates is engine.module.gates  # what it does not know is the model's
    assert next(engine.named_parameters())[0] == "module.frozen"
    assert not hasattr(engine, "no_such_thing")
    assert engine.eval() is engine and not engine.module.training
    for chosen, said, current in (
        (None, 1.0, 1.0),
        (StaticLossScale(8.0), 8.0, 8.0),
        (DynamicLossScale(initial_power=4), 0.0, 16.0),
    ):
        scaled = build_engine(group, engine_config(group, 2, loss_scale=chosen))
        assert (scaled.loss_scale(), scaled.cur_scale) == (said, current)
    talks = build_engine(group, attrs.evolve(engine_config(group, 1), steps_per_print=2))
    for step in range(4):
        run_micro_batch(talks, step)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["step=2", "step=4"]


@pytest.mark.ranks(1)
def test_a_scheduler_that_needs_a_metric_is_asked_for_before_anything_moves(group: Group) -> None:
    """Its TypeError after the optimizer's step would leave the two apart."""
    plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5)
    engine = build_engine(group, engine_config(group, 2), lr_scheduler=plateau)
    before, (rate,) = weights_of(engine), set(engine.get_lr())
    loss = parity.loss_of(engine, parity.batch(0, 0, 0))
    engine.backward(loss)
    with pytest.raises(ConfigError, match=r"expected lr_kwargs .*'metrics'.*nothing was done"):
        engine.step()
    assert engine.global_steps == 0
    assert_weights(engine, before)

    engine.step(lr_kwargs={"metrics": 1.0})
    assert set(engine.get_lr()) == {rate}
    engine.backward(parity.loss_of(engine, parity.batch(0, 0, 0)))
    engine.step(lr_kwargs={"metrics": 2.0})
    assert set(engine.get_lr()) == {rate / 2}
