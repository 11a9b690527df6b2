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
from engines import assert_weights, build_engine, engine_config, run_micro_batch, weights_of
from parity import Curve, Recipe, ZeroConfig
from torch import Tensor, nn
from zero_comm import Group, record_traffic
from zero_engine import ConfigError
from zero_engine.deepspeed import DynamicLossScale, StaticLossScale
from zero_partition import StateError

pytestmark = pytest.mark.xdist_group("ranks")


# ---- The same numbers ----


def _share_of_loss(model: nn.Module, data: Any, num_micro_batches: int) -> Tensor:
    return parity.loss_of(model, data) / num_micro_batches


@pytest.mark.parametrize(
    ("stage", "num_micro_batches", "max_norm"),
    [
        (stage, micro, (stage + micro) % 2 / 2 or None)
        for stage in parity.STAGES
        for micro in (1, 2)
    ],
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
    if recipe.max_norm is None and (recipe.reduces_once or num_micro_batches == 1):
        ddp = parity.train_ddp(group, recipe)
        parity.assert_same(curve, ddp, rank=group.rank, what="DDP")
    alone = parity.train_alone_by_stage(group, recipe)
    parity.assert_same(curve, alone[stage], rank=group.rank, what="one process")


# ---- The boundary ----


@pytest.mark.parametrize("stage", parity.STAGES)
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


@pytest.mark.parametrize("calls", ["engine.backward", "loss.backward"])
@pytest.mark.parametrize("stage", parity.STAGES)
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
    plain, plain_optimizer = parity.build_sharded(group, ZeroConfig(1), make=parity.tiny_float32)
    scheduler = parity.scheduler_for(plain_optimizer)
    for step, is_boundary in enumerate([False, False, True]):
        engine.set_gradient_accumulation_boundary(is_boundary)
        run_micro_batch(engine, step)
        with nullcontext() if is_boundary else zero_engine.no_sync(plain):
            (parity.loss_of(plain, parity.batch(step, 0, group.rank)) / 2).backward()
    engine.set_gradient_accumulation_boundary(None)
    plain_optimizer.step()
    plain_optimizer.zero_grad()
    scheduler.step()

    assert engine.global_steps == 1
    assert not engine.is_gradient_accumulation_boundary()
    assert_weights(engine, zero_engine.full_state_dict(plain))


def test_no_sync_is_for_whole_micro_batches(group: Group) -> None:
    """A step inside would update with what one rank has seen, and ranks would part."""
    engine = build_engine(group, engine_config(group, 2))
    loss = parity.loss_of(engine, parity.batch(0, 0, group.rank))
    with engine.no_sync():
        engine.backward(loss)
        with pytest.raises(StateError, match=r"step\(\) inside no_sync\(\)"):
            engine.step()

    engine.step()

    assert engine.was_step_applied()


def test_the_batch_size_changes_between_steps(group: Group) -> None:
    """A schedule of batch sizes is a number of micro-batches that changes."""
    engine = build_engine(group, engine_config(group, 1))
    assert engine.train_batch_size() == 2 * engine.train_micro_batch_size_per_gpu()

    engine.set_train_batch_size(2 * engine.train_batch_size())
    run_micro_batch(engine, 0)

    assert engine.gradient_accumulation_steps() == 2
    assert engine.global_steps == 0
    with pytest.raises(StateError, match="1 micro-batches have been accumulated"):
        engine.set_train_batch_size(engine.train_batch_size())
    with pytest.raises(zero_engine.ConfigError, match="a multiple of 4"):
        engine.set_train_batch_size(3)
    with pytest.raises(zero_engine.ConfigError, match="expected an integer"):
        engine.set_train_batch_size("8")
    with pytest.raises(zero_engine.ConfigError, match="expected true or false, got 'no'"):
        engine.set_gradient_accumulation_boundary("no")
    run_micro_batch(engine, 0, 1)
    assert engine.global_steps == 1


# ---- The end ----


@pytest.mark.parametrize("stage", parity.STAGES)
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


@pytest.mark.ranks(1)
def test_an_engine_passes_on_what_it_does_not_know(group: Group) -> None:
    """Scripts ask it for the model's own attributes."""
    engine = build_engine(group, engine_config(group, 1))

    assert engine.gates is engine.module.gates
    assert next(engine.named_parameters())[0] == "module.frozen"
    assert not hasattr(engine, "no_such_thing")
    assert engine.eval() is engine and not engine.module.training


# ---- The rest ----


@pytest.mark.ranks(1)
def test_autocast_is_the_configurations(group: Group) -> None:
    """Of two settings of one thing, the file's wins, and the user's is back afterwards."""
    settings = attrs.evolve(engine_config(group, 3), autocast_dtype=torch.bfloat16)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    engine, *_ = zero_engine.initialize(model=model, config=settings, group=group)
    in_backward, x = [], torch.randn(2, 8)
    watched = x.clone().requires_grad_()
    watched.register_hook(lambda _: in_backward.append(torch.is_autocast_enabled("cpu")))

    loss = engine(watched)
    assert loss.dtype == torch.bfloat16
    assert engine.module(x).dtype == torch.float32
    engine.backward(loss.float().square().sum())

    assert in_backward == [False]
    assert not torch.is_autocast_enabled("cpu")
    assert model[1].running_mean.dtype == torch.float32
    with torch.autocast("cpu", torch.float16):
        assert engine(x).dtype == torch.bfloat16
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert (x @ x.T).dtype == torch.float16


def test_progress_is_printed_as_often_as_asked(ranks, capsys) -> None:
    """It is all that a script without a logger shows for hours."""
    group = Group.solo()
    engine = build_engine(group, attrs.evolve(engine_config(group, 1), steps_per_print=2))
    for step in range(4):
        run_micro_batch(engine, step)

    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["step=2", "step=4"]


def test_an_engine_answers_what_scripts_ask(monkeypatch) -> None:
    """Logging, schedules and launch code of DeepSpeed scripts hang on these names."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    group = Group.solo()
    engine = build_engine(group, engine_config(group, 2, max_norm=0.5, accumulation_steps=3))

    sizes = (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu())
    assert (*sizes, engine.gradient_accumulation_steps()) == (6, 2, 3)
    assert (engine.zero_optimization_stage(), engine.zero_optimization()) == (2, True)
    assert (engine.local_rank, engine.global_rank, engine.world_size) == (3, 0, 1)
    assert engine.device == torch.device("cpu")
    assert engine.gradient_clipping() == 0.5
    assert engine.get_mom() == [(0.9, 0.999)] * 2
    assert engine.get_type() == [0.0, 0.0]
    assert engine.get_global_grad_norm() is None
    for chosen, said, current in (
        (None, 1.0, 1.0),
        (StaticLossScale(8.0), 8.0, 8.0),
        (DynamicLossScale(initial_power=4), 0.0, 16.0),
    ):
        scaled = build_engine(group, engine_config(group, 2, loss_scale=chosen))
        assert (scaled.loss_scale(), scaled.cur_scale) == (said, current)


@pytest.mark.ranks(1)
def test_a_scheduler_that_needs_a_metric_is_asked_for_before_anything_moves(group: Group) -> None:
    """Its TypeError after the optimizer's step would leave the two apart."""
    model, optimizer = parity.build_with_optimizer(make=parity.tiny_float32)
    engine, *_ = zero_engine.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5),
        config=engine_config(group, 2),
        group=group,
    )
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
