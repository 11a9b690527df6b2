"""The engine's loop: the numbers of the plain one, and what it does around them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import attrs
import parity
import pytest
import torch
import zero_engine
from parity import Curve, Recipe, ZeroConfig
from torch import Tensor, nn
from zero_comm import Group, record_traffic
from zero_engine import DynamicLossScale, Engine, EngineConfig
from zero_partition import StateError

pytestmark = pytest.mark.xdist_group("ranks")


def _settings(
    group: Group, stage: int, *, accumulation_steps: int = 1, **settings: Any
) -> EngineConfig:
    return EngineConfig(
        zero=ZeroConfig(stage),
        train_batch_size=2 * accumulation_steps * group.world_size,
        micro_batch_size=2,
        accumulation_steps=accumulation_steps,
        checks_overflow=True,
        **settings,
    )


def _engine(
    group: Group, settings: EngineConfig, make: Callable[[], nn.Module] = parity.tiny_float32
) -> Engine:
    model, optimizer = parity.build_with_optimizer(make=make)
    engine, same, _, scheduler = zero_engine.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=parity.scheduler_for,
        config=settings,
        group=group,
    )
    assert same is optimizer and engine.lr_scheduler is scheduler
    return engine


def _micro_batch(engine: Engine, step: int, micro: int = 0, factor: float = 1.0) -> float:
    loss = parity.loss_of(engine, parity.batch(step, micro, engine.group.rank))
    engine.backward(loss * factor)
    engine.step()
    return loss.item()


def _weights(engine: Engine) -> dict[str, Tensor]:
    return zero_engine.full_state_dict(engine.module)


def _assert_same_weights(engine: Engine, expected: dict[str, Tensor]) -> None:
    """On rank 0, which alone has them. Collective."""
    weights = _weights(engine)
    if engine.group.rank == 0:
        parity.assert_same_weights(weights, expected, what="engine")


# ---- The same numbers ----


@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["free", "clipped"])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("stage", parity.STAGES)
def test_the_engine_trains_as_the_plain_loop_does(
    ranks, stage: int, num_micro_batches: int, max_norm: float | None
) -> None:
    """It owns no algorithm: whoever moves from one loop to the other must see no bit change."""
    recipe = Recipe(
        num_micro_batches=num_micro_batches,
        reduces_once=stage < 2,
        max_norm=max_norm,
        make=parity.tiny_float32,
        loss_of=partial(_share_of_loss, num_micro_batches=num_micro_batches),
    )
    ranks(2).run(_compare_with_plain_loops, stage=stage, recipe=recipe)


def _share_of_loss(model: nn.Module, data: Any, num_micro_batches: int) -> Tensor:
    return parity.loss_of(model, data) / num_micro_batches


def _compare_with_plain_loops(group: Group, stage: int, recipe: Recipe) -> None:
    count = recipe.num_micro_batches
    settings = _settings(group, stage, accumulation_steps=count, max_norm=recipe.max_norm or 0.0)
    engine = _engine(group, settings)
    losses = [
        _micro_batch(engine, step, micro) / count
        for step in range(recipe.num_steps)
        for micro in range(count)
    ]
    curve = Curve(losses=losses, weights=_weights(engine))

    ours = parity.train_sharded(group, recipe, ZeroConfig(stage))
    parity.assert_same(curve, ours, rank=group.rank, what="shard()")
    if recipe.reduces_once or count == 1:
        ddp = parity.train_ddp(group, recipe)
        if recipe.max_norm is None:
            parity.assert_same(curve, ddp, rank=group.rank, what="DDP")
    alone = parity.train_alone(recipe, rank=group.rank, world_size=group.world_size, stage=stage)
    parity.assert_same(curve, alone, rank=group.rank, what="one process")


# ---- The boundary ----


@pytest.mark.parametrize("stage", parity.STAGES)
def test_step_does_nothing_off_a_boundary(ranks, stage: int) -> None:
    """Scripts call it after every micro-batch, whatever the configuration says."""
    ranks(2).run(_step_off_the_boundary, stage=stage)


def _step_off_the_boundary(group: Group, stage: int) -> None:
    engine = _engine(group, _settings(group, stage, accumulation_steps=3))
    before, first_lr = _weights(engine), engine.get_lr()
    for micro in range(2):
        assert not engine.is_gradient_accumulation_boundary()

        _micro_batch(engine, 0, micro)

        assert not engine.was_step_applied()
        assert engine.get_lr() == first_lr
        assert (engine.global_steps, engine.micro_steps) == (0, micro + 1)
    _assert_same_weights(engine, before)
    assert engine.is_gradient_accumulation_boundary()

    _micro_batch(engine, 0, 2)

    assert engine.was_step_applied()
    assert engine.get_lr() != first_lr
    assert (engine.global_steps, engine.micro_steps) == (1, 3)
    assert engine.global_samples == engine.train_batch_size()


@pytest.mark.parametrize("calls", ["engine.backward", "loss.backward"])
@pytest.mark.parametrize("stage", parity.STAGES)
def test_gradients_travel_when_the_stage_says(ranks, stage: int, calls: str) -> None:
    """Once per step where they rest whole; in every micro-batch where there is no room for that."""
    ranks(2).run(_count_reductions, stage=stage, calls=calls)


def _count_reductions(group: Group, stage: int, calls: str) -> None:
    engine = _engine(group, _settings(group, stage, accumulation_steps=2))
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


def test_a_boundary_chosen_by_hand_holds_until_it_is_given_back(ranks) -> None:
    """Unequal accumulation, at the end of an epoch for one, is the user's to steer."""
    ranks(2).run(_choose_boundaries)


def _choose_boundaries(group: Group) -> None:
    engine = _engine(group, _settings(group, 1, accumulation_steps=2))
    plain, plain_optimizer = parity.build_sharded(group, ZeroConfig(1), make=parity.tiny_float32)
    scheduler = parity.scheduler_for(plain_optimizer)
    for step, is_boundary in enumerate([False, False, True]):
        engine.set_gradient_accumulation_boundary(is_boundary)
        _micro_batch(engine, step)
        with nullcontext() if is_boundary else zero_engine.no_sync(plain):
            (parity.loss_of(plain, parity.batch(step, 0, group.rank)) / 2).backward()
    engine.set_gradient_accumulation_boundary(None)
    plain_optimizer.step()
    plain_optimizer.zero_grad()
    scheduler.step()

    assert engine.global_steps == 1
    assert not engine.is_gradient_accumulation_boundary()
    _assert_same_weights(engine, zero_engine.full_state_dict(plain))


def test_no_sync_is_for_whole_micro_batches(ranks) -> None:
    """A step inside would update with what one rank has seen, and ranks would part."""
    ranks(2).run(_step_inside_no_sync)


def _step_inside_no_sync(group: Group) -> None:
    engine = _engine(group, _settings(group, 2))
    loss = parity.loss_of(engine, parity.batch(0, 0, group.rank))
    with engine.no_sync():
        engine.backward(loss)
        with pytest.raises(StateError, match=r"step\(\) inside no_sync\(\)"):
            engine.step()

    engine.step()

    assert engine.was_step_applied()


def test_the_batch_size_changes_between_steps(ranks) -> None:
    """A schedule of batch sizes is a number of micro-batches that changes."""
    ranks(2).run(_change_batch_size)


def _change_batch_size(group: Group) -> None:
    engine = _engine(group, _settings(group, 1))
    assert engine.train_batch_size() == 2 * engine.train_micro_batch_size_per_gpu()

    engine.set_train_batch_size(2 * engine.train_batch_size())
    _micro_batch(engine, 0)

    assert engine.gradient_accumulation_steps() == 2
    assert engine.global_steps == 0
    with pytest.raises(StateError, match="1 micro-batches have been accumulated"):
        engine.set_train_batch_size(engine.train_batch_size())
    with pytest.raises(zero_engine.ConfigError, match="a multiple of 4"):
        engine.set_train_batch_size(3)
    _micro_batch(engine, 0, 1)
    assert engine.global_steps == 1


# ---- Overflow ----


@pytest.mark.parametrize("stage", parity.STAGES)
def test_inf_on_one_rank_skips_the_step_on_all(ranks, stage: int) -> None:
    """Otherwise ranks part, or inf is averaged into every weight."""
    ranks(4).run(_overflow_on_one_rank, stage=stage)


def _overflow_on_one_rank(group: Group, stage: int) -> None:
    scale = DynamicLossScale(initial_power=4, hysteresis=1)
    engine = _engine(group, _settings(group, stage, loss_scale=scale, max_norm=0.5))
    steady = _engine(group, _settings(group, stage, max_norm=0.5))  # never sees the bad batch
    _micro_batch(engine, 0)
    _micro_batch(steady, 0)
    before, lr = _weights(engine), engine.get_lr()

    _micro_batch(engine, 99, factor=float("inf") if group.rank == 1 else 1.0)

    assert not engine.was_step_applied()
    assert (engine.global_steps, engine.skipped_steps) == (2, 1)
    assert engine.cur_scale == 8.0
    assert engine.get_lr() == lr
    _assert_same_weights(engine, before)
    for step in (1, 2):
        _micro_batch(engine, step)
        _micro_batch(steady, step)
        assert engine.was_step_applied()
        assert engine.get_global_grad_norm() == steady.get_global_grad_norm()
    # Powers of two change no bit of what they multiply and divide.
    _assert_same_weights(engine, _weights(steady))


def test_an_engine_told_not_to_look_steps_as_plain_torch_does(ranks) -> None:
    """`check_grad_overflow: false` is a wish, and the weights show what came of it."""
    ranks(1).run(_overflow_unchecked)


def _overflow_unchecked(group: Group) -> None:
    unchecked = attrs.evolve(_settings(group, 2), checks_overflow=False)
    engine = _engine(group, unchecked)

    _micro_batch(engine, 0, factor=float("nan"))

    assert engine.was_step_applied()
    assert _weights(engine)["scale"].isnan().all()


def test_a_loss_that_nobody_scaled_is_noticed(ranks) -> None:
    """Its gradients would be divided by 65536, and training would stand still in silence."""
    ranks(1).run(_forget_to_scale)


def _forget_to_scale(group: Group) -> None:
    engine = _engine(group, _settings(group, 2, loss_scale=DynamicLossScale()))
    data = parity.batch(0, 0, 0)
    parity.loss_of(engine, data).backward()
    with pytest.raises(StateError, match=r"no loss was multiplied by it .* engine.scale"):
        engine.step()
    engine.zero_grad()

    engine.scale(parity.loss_of(engine, data)).backward()
    engine.step()

    assert engine.was_step_applied()
    other = _engine(group, _settings(group, 2))
    _micro_batch(other, 0)
    _assert_same_weights(engine, _weights(other))


# ---- Sixteen bits ----


@pytest.mark.parametrize("section", ["fp16", "bf16"])
@pytest.mark.parametrize("stage", parity.STAGES)
def test_sixteen_bits_follow_masters_in_plain_torch(ranks, stage: int, section: str) -> None:
    """The file says `fp16`, and weights, skipped steps and loss scale are those of the recipe."""
    ranks(2).run(_train_in_16_bits, stage=stage, section=section)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def _square_of(model: nn.Module, step: int, rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(4, 8, generator=generator).to(dtype)).float().square().sum()


def _train_in_16_bits(group: Group, stage: int, section: str) -> None:
    is_scaled = section == "fp16"
    options = {"initial_scale_power": 17, "loss_scale_window": 2, "hysteresis": 1}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        section: {"enabled": True} | (options if is_scaled else {}),
    }
    model, plain = parity.build(_mlp), parity.build(_mlp)
    make = partial(torch.optim.AdamW, lr=1e-2, foreach=False)
    engine, *_ = zero_engine.initialize(model=model, optimizer=make, config=config, group=group)
    dtype = torch.float16 if is_scaled else torch.bfloat16
    assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == (is_scaled, not is_scaled)
    scales, skipped = [], []
    for step in range(10):
        scales.append(engine.cur_scale)
        engine.backward(_square_of(engine, step, group.rank, dtype))
        engine.step()
        if not engine.was_step_applied():
            skipped.append(step)

    expected_scales, expected_skipped = _train_masters(plain, make, dtype, group.world_size)
    assert (scales, skipped) == (expected_scales, expected_skipped)
    assert (len(set(scales)) > 2 and bool(skipped)) == is_scaled, f"{scales}, {skipped}: no change"
    for param, master in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(zero_engine.full_param(param), master)


def _train_masters(
    masters: nn.Module, make: Callable[..., Any], dtype: torch.dtype, world_size: int
) -> tuple[list[float], list[int]]:
    """One process, both ranks' batches in turn: the loss scale of each step, and steps skipped."""
    optimizer = make(masters.parameters())
    scale, clean, scales, skipped = 2.0**17 if dtype is torch.float16 else 1.0, 0, [], []
    for step in range(10):
        scales.append(scale)
        model = _mlp().to(dtype)
        model.load_state_dict(masters.state_dict())
        sums: list[Tensor] = []
        for rank in range(world_size):
            (_square_of(model, step, rank, dtype) * scale).backward()
            grads = [param.grad.clone() for param in model.parameters()]
            sums = [a + b for a, b in zip(sums, grads, strict=True)] if sums else grads
            model.zero_grad()
        means = [(total / world_size).float() for total in sums]
        if all(grad.isfinite().all() for grad in means):
            for master, grad in zip(masters.parameters(), means, strict=True):
                master.grad = grad / scale
            optimizer.step()
            if clean and clean % 2 == 0 and dtype is torch.float16:
                scale *= 2
            clean += 1
        else:
            skipped.append(step)
            scale, clean = scale / 2, 0
    return scales, skipped


# ---- Other backwards ----


@pytest.mark.parametrize("how", ["first.backward", "loss.backward"])
@pytest.mark.parametrize("stage", parity.STAGES)
def test_losses_of_two_engines_go_through_one_backward(ranks, stage: int, how: str) -> None:
    """A student and a critic, say: each engine finds its own gradients."""
    ranks(2).run(_combine_losses, stage=stage, how=how)


def _combine_losses(group: Group, stage: int, how: str) -> None:
    together = [_engine(group, _settings(group, stage, max_norm=0.5)) for _ in range(2)]
    apart = [_engine(group, _settings(group, stage, max_norm=0.5)) for _ in range(2)]
    for step in range(2):
        data = [parity.batch(step, index, group.rank) for index in range(2)]
        loss = sum(parity.loss_of(engine, of) for engine, of in zip(together, data, strict=True))
        if how == "first.backward":
            together[0].backward(loss)
        else:
            loss.backward()
        for engine in together:
            engine.step()
        for engine, of in zip(apart, data, strict=True):
            engine.backward(parity.loss_of(engine, of))
            engine.step()

    for engine, expected in zip(together, apart, strict=True):
        _assert_same_weights(engine, _weights(expected))


@pytest.mark.parametrize("how", ["engine.backward", "outputs.backward"])
def test_a_gradient_by_hand_counts_as_the_loss_it_comes_from(ranks, how: str) -> None:
    """Pipelines and custom losses start backward in the middle."""
    ranks(2).run(_backward_from_outputs, how=how)


def _backward_from_outputs(group: Group, how: str) -> None:
    scale = DynamicLossScale(initial_power=3)
    engine, expected = (
        _engine(group, _settings(group, 3, loss_scale=scale)),
        _engine(group, _settings(group, 3)),
    )
    tokens, targets = parity.batch(0, 0, group.rank)
    outputs = engine(tokens)
    leaf = outputs.detach().requires_grad_()
    nn.functional.cross_entropy(leaf.flatten(0, 1), targets.flatten()).backward()
    if how == "engine.backward":
        engine.backward(outputs, gradient=leaf.grad)
    else:
        engine.scale(outputs).backward(leaf.grad)
    engine.step()
    _micro_batch(expected, 0)

    _assert_same_weights(engine, _weights(expected))


@pytest.mark.parametrize("stage", parity.STAGES)
def test_backwards_of_one_micro_batch_can_share_a_reduction(ranks, stage: int) -> None:
    """Contrastive losses run backward in pieces; each piece need not travel by itself."""
    ranks(2).run(_coalesce, stage=stage)


def _coalesce(group: Group, stage: int) -> None:
    engine, expected = (
        _engine(group, _settings(group, stage, accumulation_steps=2)) for _ in range(2)
    )
    for step in range(2):
        losses = [parity.loss_of(engine, parity.batch(step, part, group.rank)) for part in range(2)]
        with engine.coalesce_grad_reduction():
            for loss in losses:
                engine.backward(loss)
            with pytest.raises(StateError, match=r"coalesce_grad_reduction\(\)"):
                engine.step()
        engine.step()
        for part in range(2):
            loss = parity.loss_of(expected, parity.batch(step, part, group.rank))
            with nullcontext() if part else expected.no_sync():
                expected.backward(loss)
        expected.step()

    assert engine.global_steps == 1
    _assert_same_weights(engine, _weights(expected))


def test_autocast_is_the_configurations(ranks) -> None:
    """Of two settings of one thing, the file's wins, and the user's is back afterwards."""
    ranks(1).run(_autocast)


def _autocast(group: Group) -> None:
    settings = attrs.evolve(_settings(group, 3), autocast_dtype=torch.bfloat16)
    engine, *_ = zero_engine.initialize(model=_mlp(), config=settings, group=group)

    assert engine(torch.ones(1, 8)).dtype == torch.bfloat16
    assert engine.module(torch.ones(1, 8)).dtype == torch.float32


def test_progress_is_printed_as_often_as_asked(ranks, capsys) -> None:
    """It is all that a script without a logger shows for hours."""
    group = Group.solo()
    engine = _engine(group, attrs.evolve(_settings(group, 1), steps_per_print=2))
    for step in range(4):
        _micro_batch(engine, step)

    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["step=2", "step=4"]


# ---- The end ----


@pytest.mark.parametrize("stage", parity.STAGES)
def test_an_engine_is_destroyed_once_or_twice_and_followed_by_another(ranks, stage: int) -> None:
    """Sweeps build engine after engine in one process, and clean up without asking."""
    ranks(2).run(_destroy_and_go_on, stage=stage)


def _destroy_and_go_on(group: Group, stage: int) -> None:
    settings = _settings(group, stage, accumulation_steps=2)
    engine = _engine(group, settings)
    _micro_batch(engine, 0)
    before = _weights(engine)

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
        _micro_batch(again, 0, micro)
    assert again.was_step_applied()


def test_an_engine_passes_on_what_it_does_not_know(ranks) -> None:
    """Scripts ask it for the model's own attributes, and for what is not built yet."""
    ranks(1).run(_ask_for_attributes)


def _ask_for_attributes(group: Group) -> None:
    engine = _engine(group, _settings(group, 1))

    assert engine.gates is engine.module.gates
    assert next(engine.named_parameters())[0] == "module.frozen"
    assert not hasattr(engine, "no_such_thing")
    with pytest.raises(AttributeError, match="save_checkpoint is not built yet; meanwhile"):
        engine.save_checkpoint("there")
    assert engine.eval() is engine and not engine.module.training
