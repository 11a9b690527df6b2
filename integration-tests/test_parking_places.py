"""offload_states() and reload_states(): host and disk, by our names and by DeepSpeed's."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import engines
import parity
import parking
import pytest
import torch
import zero_engine
import zero_partition
from high_water import give_back_free_memory, resident_bytes
from parity import ZeroConfig
from torch import nn
from zero_comm import Group
from zero_engine import ConfigError, Offload, Precision
from zero_engine.compat.deepspeed.runtime.zero.offload_config import (
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
)
from zero_offload import BudgetError, StoreError, host_memory, set_host_budget
from zero_partition import StateError, memory_report


@pytest.mark.parametrize("to", ["host", "disk"])
def test_state_that_was_elsewhere_trains_on_with_the_same_bits(ranks, tmp_path, to: str) -> None:
    """The stores that users get are as exact as those of tests."""
    ranks(2).run(_park_in, to=to, path=str(tmp_path) if to == "disk" else None)
    assert not list(tmp_path.iterdir()), "nothing is left on the disk"


def _park_in(group: Group, to: Any, path: str | None) -> None:
    def disturb(model: nn.Module) -> None:
        zero_engine.offload_states(model, to=to, path=path)
        zero_engine.reload_states(model)

    for stage in (1, 3):
        config = ZeroConfig(stage)
        expected = parking.train(*parking.build(group, config, parity.Tiny), group)
        losses, weights = parking.train(*parking.build(group, config, parity.Tiny), group, disturb)
        assert losses == expected[0]
        parity.assert_same_weights(weights, expected[1], what=f"stage {stage}, {to}")


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


def test_memory_of_the_process_falls_by_what_went_to_disk(tmp_path) -> None:
    """The promise, as the kernel counts it: and then training goes on."""
    width, num_blocks = 1024, 8
    numel = width * width * num_blocks

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = parity.build(lambda: parity.Chain(num_blocks, width))
        optimizer = parity.adamw(model)
        zero_engine.shard(model, optimizer, ZeroConfig(2))
        return model, optimizer

    def forward_backward(model: nn.Module) -> float:
        loss = model(torch.linspace(-1, 1, 2 * width).view(2, width)).square().mean()
        loss.backward()
        return loss.item()

    model, optimizer = build()
    forward_backward(model)
    optimizer.step()
    optimizer.zero_grad()
    forward_backward(model)
    zero_engine.release_buffers(model)
    gc.collect()
    give_back_free_memory()
    before = resident_bytes()
    zero_engine.offload_states(model, to="disk", path=tmp_path)
    fall = before - resident_bytes()
    formula = (4 + 4 + 8) * numel  # parameters, gradients, two moments

    assert zero_partition.memory_report(model).parked_bytes == formula
    assert formula - 2**24 < fall < formula + 2**24, f"{fall} for {formula}"
    assert sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file()) >= formula

    zero_engine.reload_states(model)
    optimizer.step()
    optimizer.zero_grad()
    loss = forward_backward(model)
    del model, optimizer
    plain, plain_optimizer = build()
    for _ in range(2):
        forward_backward(plain)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    assert loss == forward_backward(plain)


def test_host_memory_is_taken_from_the_budget_and_given_back() -> None:
    """Parked state is host memory like any other, and where there is none nothing is lost."""
    model = parity.build(parity.Chain)
    optimizer = parity.adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(1))
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
    ("options", "text"),
    [
        ({"include": ["optimizer"]}, "did you mean"),
        ({"include": "params"}, "collection"),
        ({"to": "nvme"}, "to='disk'"),
        ({"to": "disk"}, "path"),
        ({"path": "."}, "path"),
        ({"to": "disk", "path": ".", "non_blocking": True}, "non_blocking"),
        ({"pin": 1}, "expected true or false"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], text: str) -> None:
    """An option that is accepted and then ignored is a lie."""
    model = parity.build(parity.Chain)
    zero_engine.shard(model, None, ZeroConfig(1))
    with pytest.raises(ConfigError, match=text):
        zero_engine.offload_states(model, **options)


def test_an_engine_says_where_else_state_can_go() -> None:
    """DeepSpeed raises ValueError for nvme; so does ours, and names what can do it."""
    group = Group.solo(torch.device("cpu"))
    engine = engines.build_engine(group, engines.engine_config(group, 1))
    with pytest.raises(ValueError, match="to='disk'"):
        engine.offload_states(device=OffloadDeviceEnum.nvme)
    with pytest.raises(ConfigError, match="hp_params"):
        engine.offload_states(include=["masters"])


def test_a_disk_that_is_not_there_is_an_error_that_leaves_all_as_it_was(tmp_path: Path) -> None:
    """A typing error in a path must not cost the run."""
    model = parity.build(parity.Chain)
    zero_engine.shard(model, None, ZeroConfig(1))
    with pytest.raises(StoreError):
        zero_engine.offload_states(model, to="disk", path=tmp_path / "nowhere")
    model(torch.ones(1, 64))


# ---- A model of which a part rests elsewhere already ----


CONFIGS = {
    "state on the host": (1, {"optimizer": "host"}),
    "all on disk": (3, {"optimizer": "disk", "params": "disk"}),
    "a part of the state on the device": (3, {"optimizer": "host", "fraction": 0.4}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_with_offload_is_parked_and_goes_on(ranks, name: str, tmp_path: Path) -> None:
    """What steps elsewhere may not hold on to parameters, or no memory would come back."""
    stage, options = CONFIGS[name]
    ranks(2).run(_compare, stage=stage, options=options, folder=str(tmp_path))


def _compare(group: Group, stage: int, options: dict, folder: str) -> None:
    for precision in (None, Precision(params=torch.bfloat16)):
        offload = Offload(**options, path=folder if "disk" in options.values() else None)
        config = ZeroConfig(stage, precision=precision, offload=offload)
        expected = _train(group, config, parks_to=None)
        assert _train(group, config, parks_to=folder) == expected


def _train(group: Group, config: ZeroConfig, *, parks_to: str | None) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero_engine.shard(model, optimizer, config, group=group)
    dtype = torch.float32 if config.precision is None else torch.bfloat16
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(group.rank)).to(dtype)
    losses = []
    for step in range(4):
        loss = model(x).float().square().mean()
        loss.backward()
        if parks_to is not None and step == 1:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # nothing stays in memory because of a view of it
                zero_engine.offload_states(model, to="disk", path=parks_to)
            report = memory_report(model)
            assert report.params_bytes == report.gradients_bytes == 0
            assert report.parked_bytes > 0
            zero_engine.reload_states(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    zero_engine.unshard(model, optimizer)
    return losses
