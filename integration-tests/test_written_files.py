"""Files that an earlier version wrote load: a job goes on after the library was updated.

`written-files/` are the only recorded outputs of ours in the tests. Two ranks wrote them, by
`integration-tests/written.py` of commit a72b1ff5, with the packages of the commit that is the
reference in docs/decisions/0043-the-new-house.md. What they must hold follows from names alone:
see `_value_of`.
"""

from __future__ import annotations

import random
import shutil
import zlib
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import zero_engine
import zero_engine.planning
from safetensors.torch import load_file
from torch import Tensor, nn
from zero_comm import Group, Loco
from zero_comm.testing import equal
from zero_engine import Precision, Wire, ZeroConfig
from zero_offload import DiskStore, OffloadedOptimizer
from zero_partition import ZeroRedundancyOptimizer

FILES: Final = Path(__file__).parent / "written-files"
STEP: Final = 3
EXTRA: Final = {"position": 17, "order": [2, 0, 1], "seen": "é", "seed": torch.arange(3)}
LR: Final = 0.125
ENTRIES: Final = {"sgd": ["momentum_buffer"], "adamw": ["exp_avg", "exp_avg_sq"]}
CHECKPOINTS: Final = {  # the stage and optimizer by folder
    "stage-0": (0, "adamw"),
    "stage-1": (1, "sgd"),
    "stage-2-masters": (2, "adamw"),  # of bf16 parameters
    "stage-3-row": (3, "adamw"),  # cut by rows
    "stage-3-coded": (3, "sgd"),  # by the wire below
    "stage-3-disk": (3, "adamw"),  # where parameters and state rested
}
WIRE: Final = Wire(params="int8:16", gradients="int4:16", levels=2, loco=Loco())


class _Model(nn.Module):
    """Tied, frozen and one-element parameters, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.block = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6))
        self.frozen = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.scale = nn.Parameter(torch.zeros(1))
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("counts", torch.zeros(4))


def _value_of(name: str, shape: torch.Size) -> Tensor:
    """Float32 multiples of 1/64 between 1 and 4, never negative, as moments must be."""
    start = zlib.crc32(name.encode()) % 64
    steps = torch.arange(shape.numel()) % 100
    return 1 + (start + steps).reshape(shape) / 64


def _weights() -> dict[str, Tensor]:
    """Of the model, by the names of its state dict."""
    found = {name: _value_of(name, value.shape) for name, value in _Model().state_dict().items()}
    return found | {"head.weight": found["embed.weight"]}


def _state_of(name: str, entry: str) -> Tensor:
    """An entry of the optimizer's state of one parameter."""
    return _value_of(f"{name}.{entry}", _weights()[name].shape)


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those with optimizer state."""
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def _build(
    stage: int, optimizer: str, group: Group, **settings: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Sharded, with other values and no state yet."""
    kinds: Any = {"sgd": partial(torch.optim.SGD, momentum=0.75), "adamw": torch.optim.AdamW}
    model = _Model()
    stepper = kinds[optimizer](_trained(model).values(), lr=1.0)
    config = ZeroConfig(stage, min_unit_bytes=0, **settings)
    return zero_engine.shard(model, stepper, config, group=group)


def _check_model(model: nn.Module, optimizer: str, *, has_frozen: bool = True) -> None:
    """Every value. Collective."""
    expected, found = _weights(), zero_engine.full_state_dict(model)
    if not has_frozen:
        del expected["frozen"]
    for name, value in expected.items() if found else ():
        assert equal(found[name].float(), value), name
    for name, param in _trained(model).items():
        _check_state(name, param, optimizer)


def _check_state(name: str, param: nn.Parameter, optimizer: str) -> None:
    for entry in ENTRIES[optimizer]:
        found = zero_engine.full_optimizer_state(param, entry)
        assert equal(found, _state_of(name, entry)), (name, entry)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_loads(name: str) -> None:
    """At another stage and world size; saved by two ranks."""
    stage, optimizer = CHECKPOINTS[name]
    model, stepper = _build((stage + 1) % 4, optimizer, Group.solo())
    scheduler = torch.optim.lr_scheduler.StepLR(stepper, step_size=5, gamma=0.25)

    report = zero_engine.load(FILES / name, model, stepper, scheduler=scheduler)

    assert report is not None
    assert report.step == STEP
    assert str(report.extra) == str(EXTRA)
    assert (scheduler.step_size, scheduler.gamma) == (2, 0.5)
    assert stepper.param_groups[0]["lr"] == LR
    _check_model(model, optimizer)
    if optimizer == "adamw":
        state = zero_engine.full_optimizer_state_dict(model)["state"]
        assert {float(of_param["step"]) for of_param in state.values()} == {STEP}


def test_a_checkpoint_goes_on_where_it_was(group: Group) -> None:
    """With as many ranks and the same wire, nothing begins anew: random numbers, codec's errors."""
    model, stepper = _build(3, "sgd", group, wire=WIRE)

    report = zero_engine.load(FILES / "stage-3-coded", model, stepper)

    assert report is not None
    assert report.begins_anew == ()
    assert report.restores_rngs
    drawn = (torch.rand(3, device="cpu"), random.random(), np.random.rand())
    torch.manual_seed(100 + group.rank)
    random.seed(200 + group.rank)
    np.random.seed(300 + group.rank)
    assert equal(drawn[0], torch.rand(3, device="cpu"))
    assert drawn[1:] == (random.random(), np.random.rand())
    _check_model(model, "sgd")


def test_what_was_saved_in_the_background_loads() -> None:
    """With an average, and without what is frozen."""
    model, stepper = _build(1, "adamw", Group.solo())
    average = zero_engine.ShardedAverage(model, decay=0.5)

    zero_engine.load(FILES / "background", model, stepper, average=average)

    _check_model(model, "adamw", has_frozen=False)
    assert average.num_updates == 1
    with average.swap():
        weights = zero_engine.full_state_dict(model)
    for name in _trained(model):
        assert equal(weights[name], _weights()[name]), name


def test_an_engines_checkpoint_loads() -> None:
    """With its counters, scheduler, loss scale and what the user gave."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW"},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "fp16": {"enabled": True},
    }
    engine, *_ = zero_engine.initialize(model=_Model(), config=config, group=Group.solo())

    path, client_state = engine.load_checkpoint(str(FILES / "engine"))

    assert Path(str(path)).name == f"global_step{STEP}"
    assert client_state == {"position": 17}
    assert (engine.global_steps, engine.skipped_steps, engine.cur_scale) == (STEP, 0, 16)
    assert engine.lr_scheduler.last_epoch == STEP
    for name, param in _trained(engine.module).items():
        assert equal(zero_engine.full_param(param), _weights()[name].half()), name
        _check_state(name, param, "adamw")


@pytest.mark.parametrize("source", ["exported", "exported-16", "engine-16", "weights.pt"])
def test_weights_load(source: str) -> None:
    """Into a sharded model; what is safetensors, that library reads as well."""
    model, _ = _build(3, "sgd", Group.solo())

    zero_engine.load_pretrained(model, FILES / source)

    found, expected = zero_engine.full_state_dict(model), _weights()
    dtype = {"engine-16": torch.float16, "exported": torch.float32}.get(source, torch.bfloat16)
    for name, value in expected.items():
        rounded = value if name == "counts" and source != "exported-16" else value.to(dtype)
        assert equal(found[name], rounded.float()), name
    for file in (FILES / source).glob("*.safetensors"):
        for name, value in load_file(file).items():
            assert equal(value.float(), found[name]), (file, name)


def test_an_optimizers_whole_state_dict_loads() -> None:
    """That torch.save wrote, with masters of bf16 parameters."""
    masters = Precision(params=torch.bfloat16)
    model, _ = _build(2, "adamw", Group.solo(), precision=masters)
    zero_engine.load_pretrained(model, FILES / "weights.pt")
    state = torch.load(FILES / "optimizer.pt", weights_only=True)

    zero_engine.load_full_optimizer_state_dict(model, state)

    for name, param in _trained(model).items():
        assert equal(zero_engine.local_param(param), _weights()[name].flatten())
        _check_state(name, param, "adamw")


def test_state_dicts_of_optimizers_by_themselves_load() -> None:
    """Of ZeroRedundancyOptimizer, whole, and of OffloadedOptimizer: plain torch gave the same."""
    for file, kind, options in (
        ("redundancy.pt", torch.optim.AdamW, {}),
        ("offloaded.pt", torch.optim.SGD, {"momentum": 0.75}),
    ):
        plain = _Model()
        params = list(_trained(plain).values())
        expected = kind(params, lr=LR, **options)
        for param in params:
            param.grad = torch.ones_like(param)
        expected.step()
        divides = kind is torch.optim.AdamW
        make = ZeroRedundancyOptimizer if divides else OffloadedOptimizer
        group = {"group": Group.solo()} if divides else {}
        optimizer = make(params, kind, lr=1.0, **group, **options)

        optimizer.load_state_dict(torch.load(FILES / file, weights_only=True))

        if divides:
            optimizer.consolidate_state_dict(to=0)
        found = optimizer.state_dict()
        assert found["param_groups"][0]["lr"] == LR
        for index, state in expected.state_dict()["state"].items():
            for entry, value in state.items():
                assert equal(torch.as_tensor(found["state"][index][entry]), value), entry


def test_what_a_killed_job_left_on_the_disk_is_removed(tmp_path: Path) -> None:
    """No process reads another's swap files; the next one here deletes what nobody holds."""
    folder = shutil.copytree(FILES / "swap-left", tmp_path / "swap")
    left = set(folder.iterdir())
    assert len(left) == 2

    DiskStore(folder).close()

    assert not left & set(folder.iterdir())


def test_a_checkpoint_is_exported(tmp_path: Path) -> None:
    """Long after training."""
    zero_engine.export(FILES / "stage-1", tmp_path / "out", dtype=torch.bfloat16)

    found = load_file(tmp_path / "out" / "model.safetensors")
    assert len(found) == len(_weights()) - 1  # tied ones once
    for name, value in found.items():
        assert equal(value, _weights()[name].bfloat16()), name
