"""How often a steady step makes the host wait; the table is in `docs/how/stores.md`."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import zero_ckpt
import zero_engine
from torch import nn
from zero_comm import Group
from zero_engine import Offload, Precision, ZeroConfig

pytestmark = pytest.mark.skipif(
    "config.getoption('device') != 'sim'", reason="counts the waits of a simulated device"
)

NUM_STEPS: Final = 4
NUM_MICROS: Final = 2
WIDTH: Final = 64
STATE_BYTES: Final = WIDTH * WIDTH * 12 // 2  # Adam's and masters, of a unit, on each of two ranks


def _waits(
    group: Group,
    config: ZeroConfig,
    num_units: int = 4,
    *,
    scales: bool = True,
    prepare: Callable[[nn.Module], object] = lambda model: None,
) -> dict[str, float]:
    """Return host waits of a step, by kind, after steps that begin."""
    import simulated_device  # only it counts

    units = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_units)]
    model = nn.Sequential(*units)
    prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zero_engine.shard(model, optimizer, config, group=group)
    data = torch.randn(8, WIDTH)

    def step() -> None:
        for _ in range(NUM_MICROS):
            model(data).float().square().mean().backward()
        if scales:
            zero_engine.unscale_and_clip_(model, scale=2.0, max_norm=1.0)
        else:
            zero_engine.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    zero_engine.finish_update(model)
    gc.collect()  # memory of models before this one
    torch.accelerator.synchronize()
    simulated_device.take_host_waits()
    for _ in range(NUM_STEPS):
        step()
    zero_engine.finish_update(model)
    return {kind: n / NUM_STEPS for kind, n in simulated_device.take_host_waits().items()}


DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS: Final = {"fp32": None, "bf16": Precision(params=torch.bfloat16)}


@pytest.mark.parametrize("scales", [True, False])
@pytest.mark.parametrize(
    ("stage", "precision"),
    [(stage, name) for stage in range(4) for name in PRECISIONS if stage or name == "fp32"],
)
def test_with_all_on_the_device_the_host_never_waits(
    group: Group, stage: int, precision: str, scales: bool
) -> None:
    """Whether gradients are unscaled and clipped or clipped alone."""
    config = ZeroConfig(stage, min_unit_bytes=0, precision=PRECISIONS[precision])
    assert _waits(group, config, scales=scales) == {}


@pytest.mark.parametrize("stage", [0, 3])
def test_inputs_kept_on_the_host_are_not_waited_for(group: Group, stage: int) -> None:
    """They leave and return beside the computation."""

    def prepare(model: nn.Module) -> None:
        checkpointer = zero_ckpt.Checkpointer(saver=zero_ckpt.PackedSaver(on_host=True))
        zero_ckpt.checkpoint_modules(model, zero_ckpt.by_name("*"), checkpointer=checkpointer)

    config = ZeroConfig(stage, min_unit_bytes=0)
    assert _waits(group, config, prepare=prepare) == {}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("fused", [True, False])
def test_an_engine_waits_for_no_more_than_whether_a_step_is_applied(
    group: Group, stage: int, precision: str, fused: bool
) -> None:
    """A fused optimizer skips a step on the device, and the host learns of it later."""
    import simulated_device  # only it counts

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": NUM_MICROS,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "fused": fused}},
        "zero_optimization": {"stage": stage},
        precision: {"enabled": True},
    }
    engine, *_ = zero_engine.initialize(model=model, config=config, group=group)
    data = torch.randn(8, WIDTH).to(DTYPES[precision])

    def steps() -> None:
        for _ in range(NUM_STEPS * NUM_MICROS):
            engine.backward(engine(data).float().square().mean())
            engine.step()

    steps()
    gc.collect()
    torch.accelerator.synchronize()
    simulated_device.take_host_waits()
    steps()
    waits, late = simulated_device.take_host_waits(), {"event.synchronize": NUM_STEPS}
    assert waits == (late if fused else {"item": NUM_STEPS}), waits


# By place: stage, options, and waits of a step for so many units and sub-groups.
Formula = Callable[[int, int], dict[str, float]]
PLACES: Final[dict[str, tuple[int, dict[str, Any], Formula]]] = {
    "parameters": (3, {"params": "host"}, lambda units, subgroups: {}),
    "optimizer": (
        2,
        {"optimizer": "host"},
        lambda units, subgroups: {
            "event.synchronize": units * NUM_MICROS + subgroups,  # gradients, and slots
            "copy D2H": 1,  # the norm
        },
    ),
    "both": (
        3,
        {"params": "host", "optimizer": "host"},
        lambda units, subgroups: {
            "event.synchronize": units * NUM_MICROS + units,  # gradients, and shards
            "copy D2H": 1,
        },
    ),
    "half": (  # gradients stay on the device, as long as any of the state does
        2,
        {"optimizer": "host", "fraction": 0.5},
        lambda units, subgroups: {
            "stream.synchronize": math.ceil(subgroups / 2),
            "event.synchronize": math.ceil(subgroups / 2),
        },
    ),
    "delayed": (
        2,
        {"optimizer": "host", "delayed_update": True},
        lambda units, subgroups: {
            "event.synchronize": units * NUM_MICROS + subgroups,
            "copy D2H": 1,
            "stream.synchronize": 1,  # the update's
        },
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_16_bits_are_not_waited_for_more_often(group: Group, place: str) -> None:
    """What is converted is converted where it is, before it is copied."""
    stage, options, formula = PLACES[place]
    config = ZeroConfig(
        stage, min_unit_bytes=0, precision=PRECISIONS["bf16"], offload=Offload(**options)
    )
    found, expected = _waits(group, config), formula(4, 1)
    assert found == expected, f"{found} != {expected}"


@pytest.mark.parametrize("num_units", [2, 6])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_with_state_on_the_host_it_waits_for_what_it_reads_and_overwrites(
    group: Group, place: str, num_units: int, split: bool
) -> None:
    """By a formula of units, backwards and sub-groups."""
    stage, options, formula = PLACES[place]
    size = {"subgroup_bytes": STATE_BYTES} if split else {}
    config = ZeroConfig(stage, min_unit_bytes=0, offload=Offload(**options, **size))
    expected = formula(num_units, num_units if split else 1)
    found = _waits(group, config, num_units)
    assert found == expected, f"{found} != {expected}"


@pytest.mark.parametrize("options", [{}, {"optimizer": "disk"}])
def test_with_parameters_on_disk_it_waits_for_no_more_than_each_shard(
    group: Group, tmp_path: Path, options: dict[str, str]
) -> None:
    """Shards wait for slots: how often depends on the disk. New values come by the host."""
    num_units = 6
    offload = Offload(params="disk", path=tmp_path, **options)
    waits = _waits(group, ZeroConfig(3, min_unit_bytes=0, offload=offload), num_units)
    reads = 2 * num_units * NUM_MICROS
    landing = num_units * NUM_MICROS if options else 0
    assert waits.keys() <= {"event.synchronize", "copy D2H"}
    assert waits["copy D2H"] == (1 if options else num_units)
    assert waits.get("event.synchronize", 0) <= reads + landing
