"""Warnings point at the line of the program that made the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import zero_deepspeed
import zero_engine
from torch import nn
from zero_comm import Group
from zero_deepspeed import schedules
from zero_engine.engine import EngineConfig

FILE: Final[dict[str, Any]] = {"train_batch_size": 1}
UNKNOWN: Final = FILE | {"no_such_key": 1}


def _leaf(**section: Any) -> dict[str, Any]:
    return FILE | {"zero_optimization": {"stage": 3, "leaf_module": section}}


def _adamw(dtype: torch.dtype | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4, dtype=dtype)
    return model, torch.optim.AdamW(model.parameters())


def _sharded(group: Group, stage: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = _adamw()
    zero_engine.shard(model, optimizer, zero_engine.ZeroConfig(stage), group=group)
    return model, optimizer


def _engine(**options: Any) -> Any:
    config = FILE | {"gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2}}
    model, optimizer = _adamw()
    return zero_engine.initialize(model=model, optimizer=optimizer, config=config | options)[0]


# ---- Calls: the last line of each warns ----


def _unknown_key(group: Group, folder: Path) -> None:
    EngineConfig.from_deepspeed(UNKNOWN)


def _unknown_key_of_zero(group: Group, folder: Path) -> None:
    zero_engine.ZeroConfig.from_deepspeed(UNKNOWN)


def _unknown_key_of_an_engine(group: Group, folder: Path) -> None:
    model, optimizer = _adamw()
    zero_engine.initialize(model=model, optimizer=optimizer, config=UNKNOWN)


def _unknown_key_of_deepspeeds_names(group: Group, folder: Path) -> None:
    model, optimizer = _adamw()
    zero_deepspeed.initialize(model=model, optimizer=optimizer, config=UNKNOWN)


def _leaf_of_a_plain_loop(group: Group, folder: Path) -> None:
    zero_engine.ZeroConfig.from_deepspeed(_leaf(names=["first"]))


def _monitor_of_a_plain_loop(group: Group, folder: Path) -> None:
    zero_engine.ZeroConfig.from_deepspeed(FILE | {"tensorboard": {"enabled": True}})


def _leaf_that_fits_nothing(group: Group, folder: Path) -> None:
    model, optimizer = _adamw()
    zero_deepspeed.initialize(model=model, optimizer=optimizer, config=_leaf(names=["third"]))


def _cycle_without_momentum(group: Group, folder: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    schedules.OneCycle(optimizer, cycle_min_lr=0.1, cycle_max_lr=1.0)


def _warmup_that_does_not_end(group: Group, folder: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    schedules.WarmupDecayLR(optimizer, total_num_steps=3)


def _no_masters(group: Group, folder: Path) -> None:
    model, optimizer = _adamw(torch.bfloat16)
    zero_engine.shard(model, optimizer, zero_engine.ZeroConfig(2), group=group)


def _state_that_stays(group: Group, folder: Path) -> None:
    model, _ = _sharded(group)
    kept = model.weight.data  # noqa: F841
    zero_engine.offload_states(model)


def _engine_saves_in_the_middle(group: Group, folder: Path) -> None:
    engine = _engine(train_batch_size=2, gradient_accumulation_steps=2)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.save_checkpoint(folder)


def _nothing_to_load(group: Group, folder: Path) -> None:
    engine = _engine()
    engine.load_checkpoint(folder)


def _loss_without_scale(group: Group, folder: Path) -> None:
    engine = _engine(fp16={"enabled": True, "loss_scale": 256.0})
    engine(torch.ones(1, 4, dtype=torch.float16)).sum().backward()
    engine.step()


def _entry_that_cannot_be_saved(group: Group, folder: Path) -> None:
    model, optimizer = _sharded(group)
    optimizer.register_state_dict_post_hook(lambda _, state: state | {"own": {"odd": b""}})
    zero_engine.save(folder, model, optimizer, step=1)


CALLS: Final = tuple(
    value
    for name, value in list(globals().items())
    if inspect.isfunction(value) and [*inspect.signature(value).parameters] == ["group", "folder"]
)


@pytest.mark.ranks(1)
@pytest.mark.drawn(1)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__[1:])
def test_a_warning_points_at_the_users_line(
    group: Group, tmp_path: Path, call: Callable[[Group, Path], None]
) -> None:
    """A warning whose place is in a library, or in contextlib.py, hides the line to change."""
    with pytest.warns(UserWarning) as said:
        call(group, tmp_path)

    source, first = inspect.getsourcelines(call)
    last = first + len(source) - 1
    assert {(warning.filename, warning.lineno) for warning in said} == {(__file__, last)}
