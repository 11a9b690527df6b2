"""offload_states() and reload_states(): host and disk, by our names and by DeepSpeed's."""

from __future__ import annotations

import gc
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import engines
import parity
import parking
import pytest
import torch
import zero_engine
from high_water import give_back_free_memory, resident_bytes
from one_dtype import OneDtype
from parity import ZeroConfig
from torch import nn
from zero_comm import Group
from zero_deepspeed.runtime.zero.offload_config import (
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
)
from zero_engine import ConfigError, Offload, Precision
from zero_offload import BudgetError, StoreError, host_memory, set_host_budget
from zero_partition import StateError, memory_report

# What rests elsewhere already.
CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {"stage": 3},
    "state on the host": {"stage": 1, "offload": {"optimizer": "host"}},
    "all on disk": {"stage": 3, "offload": {"optimizer": "disk", "params": "disk"}},
    "part of the state": {"stage": 3, "offload": {"optimizer": "host", "fraction": 0.4}},
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_parked_wherever_its_parts_rest_and_goes_on(
    ranks, tmp_path: Path, name: str
) -> None:
    """What steps elsewhere may not hold on to parameters, or no memory would come back."""
    ranks(2).run(_park, name=name, folder=tmp_path)

    assert not list(tmp_path.iterdir()), "nothing is left on the disk"


def _park(group: Group, name: str, folder: Path) -> None:
    options = dict(CONFIGS[name])
    if "offload" in options:
        path = folder if "disk" in options["offload"].values() else None
        options["offload"] = Offload(**options["offload"], path=path)

    def disturb(model: nn.Module, place: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing stays in memory because of a view of it
            zero_engine.offload_states(model, **place)
        report = memory_report(model)
        assert report.params_bytes == report.gradients_bytes == 0
        assert report.parked_bytes > 0 or name == "all on disk"  # all but what a backward leaves
        zero_engine.reload_states(model)

    places = ({"to": "disk", "path": folder}, {"to": "host"})
    for precision in (None, Precision(params=torch.bfloat16)):
        config = ZeroConfig(**options, precision=precision)
        build = partial(parity.build_sharded, group, config, "adamw", OneDtype)
        parking.assert_same_bits(group, build, *(partial(disturb, place=at) for at in places))
    gc.collect()


def test_an_engine_parks_by_deepspeeds_names(group: Group) -> None:
    """Scripts of RLHF libraries call it between generation and training, micro-batches included."""
    enums = OffloadStateTypeEnum
    calls: list[dict[str, Any]] = [
        {},
        {"include": [enums.optim_states, enums.hp_params], "device": OffloadDeviceEnum.cpu},
        {"include": {"lp_params", "lp_grads", "contiguous_grad_buffer"}, "non_blocking": True},
        {"pin_memory": False},
    ]
    for stage in (1, 2, 3):
        config = engines.engine_config(group, stage, accumulation_steps=2)
        plain, engine = engines.build_engine(group, config), engines.build_engine(group, config)
        for index in range(4):
            expected = engines.run_micro_batch(plain, index)
            engine.offload_states(**calls[index])
            engine.reload_states(non_blocking=index % 2 == 0)
            assert engines.run_micro_batch(engine, index) == expected
        engine.offload_states(include=["optim_states"])
        with pytest.raises(StateError, match="reload_states"):
            for index in range(4, 6):
                engines.run_micro_batch(engine, index)
        engine.zero_grad()
        engine.reload_states()
        engine.reload_states()
        engines.assert_weights(engine, engines.weights_of(plain))


def _solo(stage: int, **sizes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = parity.build(partial(parity.Chain, **sizes))
    optimizer = parity.adamw(model)
    return zero_engine.shard(model, optimizer, ZeroConfig(stage))


def test_memory_of_the_process_falls_by_what_went_to_disk(tmp_path: Path) -> None:
    """The promise, as the kernel counts it."""
    width, num_blocks = 1024, 8
    model, optimizer = _solo(2, num_blocks=num_blocks, width=width)
    x = torch.linspace(-1, 1, 2 * width).view(2, width)
    parity.finish_step(model(x).square().mean(), optimizer)
    model(x).square().mean().backward()
    zero_engine.release_buffers(model)
    gc.collect()
    give_back_free_memory()
    before = resident_bytes()
    zero_engine.offload_states(model, to="disk", path=tmp_path)
    fall = before - resident_bytes()
    formula = (4 + 4 + 8) * width * width * num_blocks  # parameters, gradients, two moments

    assert memory_report(model).parked_bytes == formula
    assert formula - 2**24 < fall < formula + 2**24, f"{fall} for {formula}"
    assert sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file()) >= formula


def test_host_memory_is_taken_from_the_budget_and_given_back() -> None:
    """Parked state is host memory like any other, and where there is none nothing is lost."""
    model, optimizer = _solo(1)
    parity.finish_step(model(torch.ones(1, 64)).square().mean(), optimizer)
    before = sum(host_memory().values())
    zero_engine.offload_states(model)
    assert sum(host_memory().values()) - before >= 12 * 4 * 64 * 64
    zero_engine.reload_states(model)
    assert sum(host_memory().values()) == before

    set_host_budget(before + 1000)
    try:
        with pytest.raises(BudgetError, match="parked training state"):
            zero_engine.offload_states(model)
    finally:
        set_host_budget(None)
    parity.finish_step(model(torch.ones(1, 64)).square().mean(), optimizer)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"include": ["optimizer"]}, ConfigError, "did you mean"),
        ({"include": "params"}, ConfigError, "collection"),
        ({"to": "nvme"}, ConfigError, "to='disk'"),
        ({"to": "disk"}, ConfigError, "path"),
        ({"path": "."}, ConfigError, "path"),
        ({"to": "disk", "path": ".", "non_blocking": True}, ConfigError, "non_blocking"),
        ({"to": "disk", "path": "/nowhere/at/all"}, StoreError, "no folder"),
        ({"pin": 1}, ConfigError, "expected true or false"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_all_is_as_it_was(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    """An option that is accepted and then ignored is a lie."""
    model, _ = _solo(1)
    with pytest.raises(error, match=text):
        zero_engine.offload_states(model, **options)
    model(torch.ones(1, 64))


def test_an_engine_says_where_else_state_can_go() -> None:
    """DeepSpeed raises ValueError for nvme; so does ours, and names what can do it."""
    group = Group.solo(torch.device("cpu"))
    engine = engines.build_engine(group, engines.engine_config(group, 1))
    with pytest.raises(ValueError, match="to='disk'"):
        engine.offload_states(device=OffloadDeviceEnum.nvme)
    with pytest.raises(ConfigError, match="hp_params"):
        engine.offload_states(include=["masters"])
