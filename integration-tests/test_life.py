"""A model is sharded, made plain and sharded anew as often as its user likes."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch
import training
import zero_engine
from high_water import HighWater, giving_memory_back, needs_high_water
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import RankPool, assert_close, equal
from zero_engine import ConfigError, Offload, ShardedAverage, ZeroConfig
from zero_partition import PartitionError, StateError
from zero_partition.seams import find_sharded

WIDTH: Final = 8
RESIDENCES: Final[dict[str, Callable[[Path], Offload | None]]] = {
    "device": lambda _: None,
    "host": lambda _: Offload(optimizer="host"),
    "parameters too": lambda _: Offload(optimizer="host", params="host"),
    "disk": lambda folder: Offload(optimizer="disk", path=folder),
}


class Run(NamedTuple):
    """A training, plain or sharded: what a life does to both alike."""

    model: nn.Module
    shard: Callable[..., object]  # (model, optimizer or None, which configuration); () is plain
    unshard: Callable[..., object]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _steps(run: Run, optimizer: torch.optim.Optimizer, *numbers: int) -> None:
    """Gradients of the last step wait until the next one drops them, as in many loops."""
    for number in numbers:
        optimizer.zero_grad()
        run.model(torch.ones(4, WIDTH) * (number + 1) / 10).square().sum().backward()
        optimizer.step()


def _once(run: Run) -> None:
    optimizer = _adamw(run.model)
    run.shard(run.model, optimizer, 0)
    _steps(run, optimizer, 0, 1)
    run.unshard(run.model, optimizer)
    _steps(run, optimizer, 2)


def _twice(run: Run) -> None:
    optimizer = _adamw(run.model)
    for first in (0, 3):
        run.shard(run.model, optimizer, first % 2)
        _steps(run, optimizer, first)
        run.unshard(run.model, optimizer)
        _steps(run, optimizer, first + 1)
    run.shard(run.model, optimizer, 0)
    _steps(run, optimizer, 6)


def _waiting(run: Run) -> None:
    """A backward before and one after, and one step of both."""
    optimizer = _adamw(run.model)
    run.shard(run.model, optimizer, 0)
    _steps(run, optimizer, 0)
    optimizer.zero_grad()
    run.model(torch.ones(4, WIDTH)).sum().backward()
    run.unshard(run.model, optimizer)
    run.model(torch.ones(4, WIDTH) / 2).square().sum().backward()
    optimizer.step()
    run.shard(run.model, optimizer, 1)
    _steps(run, optimizer, 1)


def _same_again(run: Run) -> None:
    optimizer = _adamw(run.model)
    for which in (0, 1, 0):
        run.shard(run.model, optimizer, which)
        _steps(run, optimizer, which)


def _another(run: Run) -> None:
    optimizer = _adamw(run.model)
    run.shard(run.model, optimizer, 0)
    _steps(run, optimizer, 0, 1)
    other = _momentum(run.model)
    run.shard(run.model, other, 1)
    _steps(run, other, 2, 3)
    again = _adamw(run.model)
    run.shard(run.model, again, 0)
    _steps(run, again, 4)


def _none(run: Run) -> None:
    optimizer = _adamw(run.model)
    run.shard(run.model, None, 2)
    with torch.no_grad():
        run.model(torch.ones(4, WIDTH))
    run.shard(run.model, optimizer, 0)
    _steps(run, optimizer, 0)
    run.shard(run.model, None, 1)
    _steps(run, optimizer, 1)


def _after_an_exception(run: Run) -> None:
    optimizer = _adamw(run.model)
    run.shard(run.model, optimizer, 0)
    _steps(run, optimizer, 0)
    optimizer.zero_grad()
    hidden = training.Interrupt.apply(run.model[0](torch.ones(4, WIDTH)))
    with pytest.raises(KeyError, match="interrupted"):
        run.model[1:](hidden).sum().backward()
    run.shard(run.model, optimizer, 1)
    _steps(run, optimizer, 1)
    run.unshard(run.model, optimizer)
    _steps(run, optimizer, 2)


LIVES: Final[dict[str, Callable[[Run], None]]] = {
    "once": _once,
    "twice": _twice,
    "gradients wait": _waiting,
    "the same optimizer": _same_again,
    "another optimizer": _another,
    "no optimizer": _none,
    "after an exception": _after_an_exception,
}


def _build() -> nn.Module:
    torch.manual_seed(0)
    parts = (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5))
    model = nn.Sequential(*parts)
    model[2].weight.requires_grad_(False)
    model.register_buffer("seen", torch.ones(2))
    return model


def _traces(model: nn.Module) -> dict[str, object]:
    """Whatever is on the objects that was not there before."""
    traces: dict[str, object] = {"printed": str(model)}
    for name, module in model.named_modules():
        traces[f"class of {name}"] = type(module)
        for key, value in vars(module).items():
            traces[f"{name}.{key}"] = len(value) if "_hooks" in key else key
    for name, param in model.named_parameters():
        hooks = (param._backward_hooks or (), param._post_accumulate_grad_hooks or ())
        traces[name] = (type(param), *map(len, hooks), sorted(vars(param)))
    return traces


@pytest.mark.ranks(1, 2, timeout_s=120)
@pytest.mark.parametrize("residence", RESIDENCES)
@pytest.mark.parametrize("life", LIVES)
@pytest.mark.drawn(4)
def test_a_life_leads_where_plain_torchs_does(
    group: Group, tmp_path: Path, life: str, residence: str
) -> None:
    """Sharding happened once in a model's life, with one optimizer."""
    plain = Run(_build(), lambda *_: None, lambda *_: None)
    LIVES[life](plain)
    for stage, other in itertools.product((0, 1, 2, 3), (0, 1, 2, 3)):
        configs = []
        for number, each in enumerate((stage, other)):
            folder = tmp_path / f"{group.rank}-{stage}-{other}-{number}"
            folder.mkdir()
            offload = RESIDENCES[residence](folder)
            if each == 0 or (each < 3 and offload is not None and offload.params != "device"):
                offload = None
            configs.append(ZeroConfig(each, min_unit_bytes=0, offload=offload))
        configs.append(ZeroConfig(stage, min_unit_bytes=0))  # without an optimizer
        model = _build()
        before = _traces(model)

        def shard(model: nn.Module, optimizer: Any, which: int, configs: Any = configs) -> None:
            zero_engine.shard(model, optimizer, configs[which], group=group)

        LIVES[life](Run(model, shard, zero_engine.unshard))
        if find_sharded(model) is not None:
            zero_engine.unshard(model)
        for name, value in model.state_dict().items():
            assert_close(
                value,
                plain.model.state_dict()[name],
                msg=lambda m: f"{stage} and {other}: {m}",  # noqa: B023
            )
        assert _traces(model) == before


WHEN: Final = (
    "between steps",
    "while gradients wait",
    "after an evaluation",
    "in place of the last",
)


def _finetune(
    model: nn.Module, when: str, shard: Callable[..., object], average_of: Callable[..., Any]
) -> tuple[list[float], Any]:
    """From the head to the front, one layer more each two steps; the last is frozen again."""
    layers = [model[0], model[2], model[4]]
    for layer in layers[:2]:
        layer.requires_grad_(False)
    optimizer = torch.optim.AdamW(layers[2].parameters(), lr=1e-2)
    shard(model, optimizer)
    average = average_of(model)
    losses = []
    for step in range(8):
        layer = layers[max(0, 2 - step // 2)]
        if step in (2, 4):
            if when == "while gradients wait":
                model(torch.ones(4, WIDTH)).square().sum().backward()
            layer.requires_grad_(True)
            if when == "in place of the last":
                layers[3 - step // 2].requires_grad_(False)
                optimizer.param_groups[0]["params"] = list(layer.parameters())
            else:
                optimizer.add_param_group({"params": list(layer.parameters()), "lr": 1e-2 / step})
        if step == 6 and when == "in place of the last":  # with the state that it had
            layers[2].requires_grad_(True)
            optimizer.param_groups[0]["params"] += list(layers[2].parameters())
        elif step == 6:
            layers[2].requires_grad_(False)
        if when == "after an evaluation":
            with torch.no_grad():
                model(torch.ones(4, WIDTH))
        loss = model(torch.ones(4, WIDTH) * (step + 1) / 10).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        losses.append(loss.item())
    return losses, average


class _Average:
    """The formula, over all of a plain model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.values = model, dict[str, Tensor]()

    def update(self) -> None:
        now = {name: param.detach().clone() for name, param in self.model.named_parameters()}
        self.values = {
            name: value.lerp(self.values.get(name, value), 0.5) for name, value in now.items()
        }


@pytest.mark.ranks(1, 2, timeout_s=120)
@pytest.mark.parametrize("residence", RESIDENCES)
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.drawn(2)
def test_what_is_unfrozen_and_added_to_the_optimizer_trains(
    group: Group, tmp_path: Path, when: str, residence: str
) -> None:
    """Fine-tuning thaws a model from its head on; it was refused after `shard()`."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        layers = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        return nn.Sequential(next(layers), nn.Tanh(), next(layers), nn.Tanh(), next(layers))

    plain = build()
    expected, expected_average = _finetune(plain, when, lambda *_: None, _Average)
    for stage in (0, 1, 2, 3):
        folder = tmp_path / f"{group.rank}-{stage}"
        folder.mkdir()
        offload = RESIDENCES[residence](folder)
        if offload is not None and (stage == 0 or (stage < 3 and offload.params != "device")):
            continue
        config = ZeroConfig(stage, min_unit_bytes=0, offload=offload)
        model = build()
        found, average = _finetune(
            model,
            when,
            lambda *of, config=config: zero_engine.shard(*of, config, group=group),  # type: ignore[misc]
            lambda model: ShardedAverage(model, decay=0.5),
        )
        assert_close(found, expected, rtol=1e-6, atol=0)
        for name, value in zero_engine.full_state_dict(model).items():
            assert_close(value, plain.state_dict()[name])
        # An average has what trains: what is frozen is the model's own.
        for name, value in average.full_state_dict().items() if when != WHEN[-1] else ():
            assert_close(value, expected_average.values[name])


@pytest.mark.parametrize("residence", RESIDENCES)
def test_state_of_what_is_frozen_is_saved_and_loaded(
    group: Group, tmp_path: Path, residence: str
) -> None:
    """A layer that is thawed later goes on with the state that it had."""

    def begin(name: str) -> tuple[nn.Module, torch.optim.Optimizer, ZeroConfig]:
        (folder := tmp_path / f"{name}-{group.rank}").mkdir()
        model = _build()
        config = ZeroConfig(3, min_unit_bytes=0, offload=RESIDENCES[residence](folder))
        return model, _adamw(model), config

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, *numbers: int) -> None:
        _steps(Run(model, print, print), optimizer, *numbers)

    model, optimizer, config = begin("first")
    zero_engine.shard(model, optimizer, config, group=group)
    train(model, optimizer, 0, 1)
    zero_engine.unshard(model, optimizer)
    next(model.children()).requires_grad_(False)
    zero_engine.shard(model, optimizer, config, group=group)
    zero_engine.save(tmp_path / "run", model, optimizer, step=2)
    other, its_optimizer, its_config = begin("second")
    next(other.children()).requires_grad_(False)
    zero_engine.shard(other, its_optimizer, its_config, group=group)
    zero_engine.load(tmp_path / "run", other, its_optimizer)

    for each, of_each in ((model, optimizer), (other, its_optimizer)):
        next(each.children()).requires_grad_(True)
        train(each, of_each, 2, 3)

    plain = _build()
    train(plain, _adamw(plain), 0, 1, 2, 3)
    for each in (model, other):
        found = zero_engine.full_state_dict(each)
        for name, value in found.items():  # on rank 0
            assert_close(value, plain.state_dict()[name])


@needs_high_water
def test_no_rank_holds_a_model_that_is_laid_out_anew() -> None:
    """Beside what rests: shards of parameters twice, and a unit with its state.

    Of ranks that have done nothing before: their allocators have no holes.
    """
    with RankPool(2) as fresh:
        for rise, shards, unit in fresh.run(_thaw_a_layer):
            assert rise <= 1.1 * shards + 3 * unit, (rise, shards, unit)


def _save_and_load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    zero_engine.save(folder, model, optimizer, step=1)
    zero_engine.load(folder, model, optimizer)


def _save_in_background(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    with zero_engine.Saver(folder, model, optimizer) as saver:
        saver.save(step=1)
    zero_engine.load(folder, model, optimizer)


def _load_whole_state(model: nn.Module, _: torch.optim.Optimizer, __: Path) -> None:
    state = zero_engine.full_optimizer_state_dict(model)
    zero_engine.load_full_optimizer_state_dict(model, state)


def _reshard(model: nn.Module, optimizer: torch.optim.Optimizer, _: Path) -> None:
    """With a configuration, so that it is laid out anew."""
    sharded = find_sharded(model)
    assert sharded is not None
    zero_engine.unshard(model, optimizer)
    zero_engine.shard(model, optimizer, ZeroConfig(1, min_unit_bytes=0), group=sharded.group)


AFTER_A_GROUP: Final[dict[str, Callable[[nn.Module, torch.optim.Optimizer, Path], object]]] = {
    "save and load": _save_and_load,
    "save in background": _save_in_background,
    "whole state": _load_whole_state,
    "unshard": _reshard,
    "park": lambda model, *_: (
        zero_engine.offload_states(model),
        zero_engine.reload_states(model),
    ),
    "clip": lambda model, *_: zero_engine.clip_grad_norm_(model, 1.0),
    "zero_grad": lambda _, optimizer, __: optimizer.zero_grad(),
    "report": lambda model, *_: zero_engine.memory_report(model),
}


@pytest.mark.parametrize("is_chained", [False, True], ids=["alone", "chained"])
@pytest.mark.parametrize("call", AFTER_A_GROUP)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.drawn(3)
def test_a_param_group_is_added_before_any_call(
    group: Group, tmp_path: Path, stage: int, call: str, is_chained: bool
) -> None:
    """Until the next forward the optimizer has the model's own parameter, and no shard of it."""

    def train(shard: Callable[..., object], act: Callable[..., object]) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        first = optimizer = _adamw(model[0])
        if is_chained:
            optimizer = zero_engine.ChainedOptimizer(first, _momentum(model[1]))
        shard(model, optimizer)
        for step in range(4):
            if step == 2:
                first.add_param_group({"params": list(model[2].parameters()), "lr": 1e-3})
                act(model, optimizer, tmp_path / "run")
            model(torch.ones(4, WIDTH) * (step + 1) / 10).square().sum().backward()
            optimizer.step()
            model.zero_grad()
        return model

    config = ZeroConfig(stage, min_unit_bytes=0)
    plain = train(lambda *_: None, lambda *_: None)
    model = train(lambda *of: zero_engine.shard(*of, config, group=group), AFTER_A_GROUP[call])
    found = zero_engine.full_state_dict(model)
    for name, value in found.items():
        assert_close(value, plain.state_dict()[name])


def _thaw_a_layer(group: Group) -> tuple[int, int, int]:
    """Measure the forward that follows; also bytes of shards, and of a unit with its state."""
    with giving_memory_back():
        model = nn.Sequential(*(nn.Linear(700, 700) for _ in range(24)))
        model[0].requires_grad_(False)
        optimizer = _adamw(model[1:])
        zero_engine.shard(model, optimizer, ZeroConfig(3, min_unit_bytes=0), group=group)
        for _ in range(2):
            model(torch.ones(2, 700)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters())})
        mark = HighWater()
        model(torch.ones(2, 700))
        unit = sum(param.nbytes for param in model[0].parameters())
        return mark.rise_bytes(), 24 * unit // 2, 3 * unit


def test_a_unit_that_is_most_of_the_model_is_named_where_shard_is_called(group: Group) -> None:
    model = nn.Sequential(nn.Linear(4100, 4100), nn.Linear(4100, 2))
    with pytest.warns(UserWarning, match="leaves little to save .* are 0.weight") as said:
        zero_engine.shard(model, None, ZeroConfig(3), group=group)
    assert [(warning.filename, warning.lineno) for warning in said] == [
        (__file__, inspect.currentframe().f_lineno - 2)  # type: ignore[union-attr]
    ]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_optimizer_without_shards_says_who_has_them(group: Group, stage: int) -> None:
    """It would update nothing, without a word."""
    model = _build()
    first, second = _adamw(model), _momentum(model)
    config = ZeroConfig(stage, min_unit_bytes=0)
    zero_engine.shard(model, first, config, group=group)
    run = Run(model, lambda *_: None, lambda *_: None)
    _steps(run, first, 0)
    with pytest.raises(PartitionError, match=r"parameter 0 of shape .* is not in the model"):
        zero_engine.shard(model, _momentum(_build()), config, group=group)
    _steps(run, first, 1)  # nothing was done
    zero_engine.shard(model, second, config, group=group)
    with pytest.raises(StateError, match=r"AdamW was stepped, but .*another optimizer"):
        first.step()
    _steps(run, second, 2)
    zero_engine.shard(model, first, config, group=group)
    _steps(run, first, 3)
    with pytest.raises(StateError, match="SGD was stepped"):
        second.step()


@pytest.mark.ranks(2, timeout_s=120)
@pytest.mark.parametrize("before", ["trained", "destroyed", "evaluates", "evaluates in between"])
def test_an_engine_may_come_after_another(group: Group, before: str) -> None:
    """`destroy()` and `initialize()`, or two engines, as notebooks and searches have them."""

    def settings(stage: int, *, trains: bool) -> dict[str, Any]:
        adamw = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
        return {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
        } | ({"optimizer": adamw} if trains else {})

    def engine_of(model: nn.Module, stage: int, *, trains: bool = True) -> Any:
        config = settings(stage, trains=trains)
        params = model.parameters() if trains else None
        options: Any = {"model": model, "model_parameters": params, "config": config}
        return zero_engine.initialize(**options, group=group)[0]

    def train(engine: Any) -> None:
        for number in range(2):
            engine.backward(engine(torch.ones(4, WIDTH) * (number + 1) / 10).square().sum())
            engine.step()

    def train_plain(model: nn.Module) -> None:
        run = Run(model, lambda *_: None, lambda *_: None)
        _steps(run, torch.optim.AdamW(model.parameters(), lr=0.01), 0, 1)

    for stage, other in itertools.product((0, 1, 2, 3), (0, 1, 2, 3)):
        model, plain = _build(), _build()
        if before == "evaluates":
            with torch.no_grad():
                engine_of(model, stage, trains=False)(torch.ones(4, WIDTH))
        else:
            first = engine_of(model, stage)
            train(first)
            train_plain(plain)
            if before == "destroyed":
                first.destroy()
        if before == "evaluates in between":
            with torch.no_grad():
                engine_of(model, other, trains=False)(torch.ones(4, WIDTH))
        train(engine_of(model, other))
        train_plain(plain)
        for name, value in zero_engine.full_state_dict(model).items():
            assert_close(value, plain.state_dict()[name])


# ---- Several optimizers ----


class _Gan(nn.Module):
    """Two networks, of which a loss may reach one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.makes, self.judges = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            for _ in range(2)
        )

    def forward(self, x: Tensor, *, is_detached: bool = False) -> Tensor:
        made = self.makes(x)
        return self.judges(made.detach() if is_detached else made)


def _by_turns(model: Any, first: Any, second: Any, clip: Callable[[Any], object]) -> None:
    """`first` updates what makes, `second` what judges."""
    for step in range(3):
        x = torch.ones(4, WIDTH) * (step + 1) / 10
        second.zero_grad()
        model(x, is_detached=True).square().sum().backward()
        clip(second)
        second.step()
        first.zero_grad()
        model(x).sum().backward()  # reaches both, and stays with the other
        clip(first)
        first.step()


def _both(model: Any, first: Any, second: Any, clip: Callable[[Any], object]) -> None:
    """One backward, two steps in another order; the second's gradients are of two."""
    for step in range(3):
        x = torch.ones(4, WIDTH) * (step + 1) / 10
        model(x).square().sum().backward()
        clip(first)
        first.step()
        first.zero_grad(set_to_none=False)
        model(x).sum().backward()
        clip(second)
        second.step()
        second.zero_grad()


def _in_parts(model: Any, first: Any, second: Any, clip: Callable[[Any], object]) -> None:
    """Neither loss is one of the model's call."""
    for step in range(3):
        x = torch.ones(4, WIDTH) * (step + 1) / 10
        first.zero_grad()
        second.zero_grad()
        model.makes(x).square().sum().backward()
        model.judges(model.makes(x)).sum().backward()
        clip(second)
        second.step()
        first.step()


@pytest.mark.ranks(1, 2, timeout_s=120)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("loop", [_by_turns, _both, _in_parts])
def test_several_optimizers_go_on_by_themselves(
    group: Group, stage: int, loop: Callable[..., None]
) -> None:
    """A GAN's, an actor's and a critic's: each is stepped, zeroed and clipped by itself."""

    def build() -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(0)
        model = _Gan()
        first = torch.optim.AdamW(model.makes.parameters(), lr=1e-2)
        return model, first, torch.optim.SGD(model.judges.parameters(), lr=0.05, momentum=0.9)

    plain, *theirs = build()
    loop(
        plain,
        *theirs,
        lambda by: nn.utils.clip_grad_norm_(
            [param for of_group in by.param_groups for param in of_group["params"]], 0.5
        ),
    )
    model, *ours = build()
    config = ZeroConfig(stage, min_unit_bytes=0)
    assert zero_engine.shard(model, ours, config, group=group)[1] is ours
    loop(model, *ours, lambda by: zero_engine.clip_grad_norm_(by, 0.5))
    for name, value in zero_engine.full_state_dict(model).items():
        assert_close(value, plain.state_dict()[name])

    zero_engine.shard(model, ours, ZeroConfig((stage + 1) % 4), group=group)  # with their state
    loop(model, *ours, lambda by: zero_engine.clip_grad_norm_(by, 0.5))
    loop(plain, *theirs, lambda by: nn.utils.clip_grad_norm_(by.param_groups[0]["params"], 0.5))
    zero_engine.unshard(model, ours)
    for name, value in model.state_dict().items():
        assert_close(value, plain.state_dict()[name])


def test_several_optimizers_are_saved_and_loaded(group: Group, tmp_path: Path) -> None:
    """All of them with the model, in their order."""
    torch.manual_seed(0)
    model, other = _Gan(), _Gan()
    both = [
        [torch.optim.AdamW(each.makes.parameters()), torch.optim.AdamW(each.judges.parameters())]
        for each in (model, other)
    ]
    for each, ours in zip((model, other), both, strict=True):
        zero_engine.shard(each, ours, ZeroConfig(3, min_unit_bytes=0), group=group)
    _both(model, *both[0], lambda _: None)
    zero_engine.save(tmp_path, model, both[0], step=3)
    zero_engine.load(tmp_path, other, both[1])
    for each, ours in zip((model, other), both, strict=True):
        for optimizer in ours:
            optimizer.zero_grad()
        _both(each, *ours, lambda _: None)
    weights = [zero_engine.full_state_dict(each) for each in (model, other)]
    for name, value in weights[0].items():
        assert equal(value, weights[1][name])


def test_several_optimizers_share_no_parameter_and_leave_none_out(group: Group) -> None:
    """Said by name, before training."""
    model = _Gan()
    makes, judges = (torch.optim.SGD(part.parameters()) for part in (model.makes, model.judges))
    for optimizers, said in (
        ([makes, judges, _momentum(model.judges)], r"'judges\.0\.weight' is in two .* 1 and 2"),
        ([makes], r"one of the 1 optimizers, got judges\.0\.weight.* in none"),
        ([makes, None], "optimizer to be one or several torch optimizers"),
    ):
        with pytest.raises(ConfigError, match=said):
            zero_engine.shard(model, optimizers, group=group)
    with pytest.raises(ConfigError, match="state on the device"):
        config = ZeroConfig(2, offload=Offload(optimizer="host"))
        zero_engine.shard(model, [makes, judges], config, group=group)
