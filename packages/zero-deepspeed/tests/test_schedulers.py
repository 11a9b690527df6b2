"""Each schedule against its formula."""

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import zero_deepspeed.schedules
import zero_engine
from torch import nn
from zero_comm import Group
from zero_deepspeed.engine_config import NamedScheduler
from zero_engine import ChainedOptimizer, ConfigError
from zero_engine.engine import EngineConfig

LRS = (0.5, 0.02)  # one for each param group


def _optimizer(kind: Any = torch.optim.Adam, **options: Any) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": lr} for lr in LRS]
    return kind(groups, **options)


def _make(optimizer: torch.optim.Optimizer, type: str, params: dict) -> Any:
    return getattr(zero_deepspeed.schedules, type)(optimizer, **params)


def _run(optimizer: torch.optim.Optimizer, scheduler: Any, num_steps: int) -> list[list[float]]:
    """The learning rates of each param group that the optimizer steps with."""
    lrs = []
    for _ in range(num_steps):
        lrs.append([group["lr"] for group in optimizer.param_groups])
        assert scheduler.get_last_lr() == lrs[-1]
        optimizer.step()
        scheduler.step()
    return lrs


def _warmed(k: int, num_steps: int, kind: str) -> float:
    i = max(0, k - 1)
    return math.log(i + 1) / math.log(num_steps) if kind == "log" else i / num_steps


Formula = Callable[[float, int], float]


def _warmup(num_steps: int, kind: str, low: float, high: float | None) -> Formula:
    """Up to `high`, or to the learning rate of the optimizer where none is given."""

    def formula(lr: float, k: int) -> float:
        done = _warmed(k, num_steps, kind) if k - 1 < num_steps else 1.0
        return low + ((lr if high is None else high) - low) * done

    return formula


def _each_its_own(lr: float, k: int) -> float:
    low, high = {0.5: (0.0, 2.0), 0.02: (0.5, 1.0)}[lr]
    return _warmup(10, "linear", low, high)(lr, k)


def _decay(kind: str, _: float, k: int) -> float:
    gamma = _warmed(k, 10, kind) if k - 1 < 10 else max(0.0, (40 - (k - 1)) / (40 - 10))
    return 0.1 + 0.4 * gamma


def _cosine(kind: str, lr: float, k: int) -> float:
    if k - 1 < 10:
        return lr * (0.2 + 0.8 * _warmed(k, 10, kind))
    progress = min(1.0, (k - 10) / 30)
    return lr * (0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2)


def _range(is_staircase: bool, _: float, k: int) -> float:
    return 0.01 * (1 + 2.5 * (math.floor(k / 7) if is_staircase else k / 7))


def _formulas() -> Iterator[tuple[str, str, dict[str, Any], Formula]]:
    """What it is for, type, parameters as in a file, formula."""
    total = {"warmup_num_steps": 10, "total_num_steps": 40}
    for kind in ("log", "linear"):
        of = {"warmup_type": kind}
        ends = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.8, "warmup_num_steps": 20}
        yield f"{kind} stays at its end", "WarmupLR", ends | of, _warmup(20, kind, 0.1, 0.8)
        ends = total | {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5}
        # Past the end it must not go below, and further on negative; nor a cosine rise again.
        yield f"{kind} falls in a line", "WarmupDecayLR", ends | of, partial(_decay, kind)
        ends = total | {"warmup_min_ratio": 0.2, "cos_min_ratio": 0.05}
        yield f"{kind}, cosine of its lr", "WarmupCosineLR", ends | of, partial(_cosine, kind)
    # Param groups with their own learning rates keep their ratio; a list has a value for each.
    yield "of the lr", "WarmupLR", {"warmup_num_steps": 20}, _warmup(20, "log", 0, None)
    lists = {"warmup_min_lr": [0.0, 0.5], "warmup_max_lr": [2.0, 1.0], "warmup_type": "linear"}
    yield "lists", "WarmupLR", lists | {"warmup_num_steps": 10}, _each_its_own
    # Hugging Face writes 0 where no warmup is wanted; log(1) must not be divided by.
    for steps in (0, 1, 2):  # log(1), log(1), log(2) / log(2)
        short = {"warmup_max_lr": 1.0, "warmup_num_steps": steps}
        yield f"{steps} steps take two", "WarmupLR", short, lambda _, k: float(k >= 2)
    # One run shows every learning rate: it rises without end.
    rises = {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 7}
    for stairs in (False, True):
        options = {"lr_range_test_step_rate": 2.5, "lr_range_test_staircase": stairs}
        yield f"stairs: {stairs}", "LRRangeTest", rises | options, partial(_range, stairs)


FORMULAS = {f"{type}, {what}": row for what, type, *row in _formulas()}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_schedule_is_its_formula(name: str) -> None:
    """The first steps decide whether a transformer trains at all."""
    params, formula = FORMULAS[name]
    optimizer = _optimizer()
    lrs = _run(optimizer, _make(optimizer, name.split(",", maxsplit=1)[0], params), num_steps=60)

    for k, found in enumerate(lrs):
        assert found == pytest.approx([formula(lr, k) for lr in LRS], rel=1e-12, abs=1e-15), k


@pytest.mark.parametrize("type", ["WarmupDecayLR", "WarmupCosineLR"])
def test_a_total_shorter_than_the_warmup_is_warned_about(type: str) -> None:
    """A short trial run with the file of a long one: it runs, and says what is odd."""
    with pytest.warns(UserWarning, match="3 steps in total are fewer than the 1000 of the warmup"):
        _make(_optimizer(), type, {"total_num_steps": 3})


def _cycle_height(k: int, first: int, second: int, stairs: tuple[int, int]) -> float:
    up = k <= first
    step, size = (k, first) if up else (first + second - k, second)
    count = stairs[0] if up else stairs[1]
    if count == 0:
        return step / size
    return sum(step * count >= size * stair for stair in range(1, count + 1)) / count


@pytest.mark.parametrize(("first", "second"), [(7, 20), (12, None)])
@pytest.mark.parametrize("stairs", [(0, 0), (4, 0), (3, 5)])
@pytest.mark.parametrize("decay_steps", [0, 5])
def test_one_cycle_goes_up_and_down_and_the_momentum_down_and_up(
    first: int, second: int | None, stairs: tuple[int, int], decay_steps: int
) -> None:
    """The momentum moves against the learning rate: both at their largest together diverge."""
    optimizer = _optimizer(betas=(0.5, 0.75))
    params = {
        "cycle_min_lr": 0.1,
        "cycle_max_lr": [0.9, 0.4],
        "cycle_first_step_size": first,
        "cycle_second_step_size": second,
        "cycle_first_stair_count": stairs[0],
        "cycle_second_stair_count": stairs[1],
        "cycle_min_mom": 0.7,
        "cycle_max_mom": 0.95,
        "decay_step_size": decay_steps,
        "decay_lr_rate": 0.5,
        "decay_mom_rate": -0.01,
    }
    scheduler, second = _make(optimizer, "OneCycle", params), second or first
    for k in range(first + second + 15):
        beyond = k - first - second
        height = _cycle_height(k, first, second, stairs) if beyond < 0 else 0.0
        decayed = beyond / decay_steps if decay_steps and beyond > 0 else 0.0
        lrs = [(0.1 + (high - 0.1) * height) / (1 + 0.5 * decayed) for high in (0.9, 0.4)]
        momentum = (0.95 - (0.95 - 0.7) * height) * (1 - 0.01 * decayed)

        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(lrs), k
        for group in optimizer.param_groups:
            assert group["betas"] == pytest.approx((momentum, 0.75)), k
        optimizer.step()
        scheduler.step()


def test_one_cycle_moves_the_momentum_of_each_group_that_has_one_and_starts_none() -> None:
    """SGD and Muon call it momentum, Adam has betas; another would be another optimizer."""
    first, second = (nn.Parameter(torch.zeros(2)) for _ in "ab")
    sgd = torch.optim.SGD([first], lr=0.1, momentum=0.5)
    chained = ChainedOptimizer(sgd, torch.optim.Adam([second], betas=(0.5, 0.75)))
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}
    _make(chained, "OneCycle", params)
    assert sgd.param_groups[0]["momentum"] == 0.9
    assert chained.param_groups[1]["betas"] == (0.9, 0.75)

    for kind in (torch.optim.SGD, torch.optim.Adagrad):
        optimizer = _optimizer(kind)
        before = [group.get("momentum") for group in optimizer.param_groups]
        with pytest.warns(UserWarning, match=f"no param group of {kind.__name__} has betas"):
            _make(optimizer, "OneCycle", params)
        assert [group.get("momentum") for group in optimizer.param_groups] == before
        _make(optimizer, "OneCycle", params | {"cycle_momentum": False})  # of which nobody is told


SMALL = {
    "WarmupLR": {"warmup_num_steps": 6.0},  # as JSON may have it
    "WarmupDecayLR": {"warmup_num_steps": 6, "total_num_steps": 20},
    "WarmupCosineLR": {"warmup_num_steps": 6, "total_num_steps": 20},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 6},
    "LRRangeTest": {"lr_range_test_step_size": 6},
}


@pytest.mark.parametrize("type", SMALL)
def test_a_schedule_goes_on_where_its_state_was_taken_or_after_the_step_it_is_told(type) -> None:
    """A resumed run must not warm up again; the number of a step is DeepSpeed's way to resume."""
    optimizer, resumed_optimizer, later = _optimizer(), _optimizer(), _optimizer()
    scheduler = _make(optimizer, type, SMALL[type])
    _run(optimizer, scheduler, 9)
    resumed = _make(resumed_optimizer, type, SMALL[type])
    resumed.load_state_dict(scheduler.state_dict())
    resumed_optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
    told = _make(later, type, SMALL[type] | {"last_batch_iteration": 8})

    expected = _run(optimizer, scheduler, 15)
    assert _run(resumed_optimizer, resumed, 15) == expected
    assert _run(later, told, 15) == expected


@pytest.mark.parametrize(
    ("type", "params", "match"),
    [
        ("WarmupLr", {}, r"type: expected one of .* did you mean 'WarmupLR'"),
        (None, {}, r"type: .*got None"),
        ("WarmupLR", {"warmup_steps": 1}, r"params\.warmup_steps: unknown; did you mean"),
        ("WarmupDecayLR", {}, r"params\.total_num_steps: expected a value"),
        ("WarmupLR", {"warmup_num_steps": "auto"}, r"params\.warmup_num_steps: .*'auto'"),
        ("WarmupLR", {"warmup_min_lr": [1.0]}, r"params\.warmup_min_lr: .*of 2 param"),
        ("WarmupLR", {"warmup_min_lr": [1, "a"]}, r"params\.warmup_min_lr: .*'a'"),
    ],
)
def test_a_wrong_file_is_refused_by_the_full_name_of_the_key(
    type: Any, params: dict, match: str
) -> None:
    """Whoever reads the message has the file open, not this code."""
    optimizer = _optimizer()
    model = nn.ParameterList(p for group in optimizer.param_groups for p in group["params"])
    spec = NamedScheduler(type, params)
    config = EngineConfig(scheduler=spec, train_batch_size=1, micro_batch_size=1)
    given = {"model": model, "optimizer": optimizer, "config": config, "group": Group.solo()}

    with pytest.raises(ConfigError, match=rf"scheduler\.{match}"):
        zero_engine.initialize(**given)
