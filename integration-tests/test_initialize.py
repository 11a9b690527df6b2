"""initialize(): whatever a script passes becomes the same engine, or an error it can act on."""

from __future__ import annotations

import json
import warnings
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zero_engine
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from zero_comm import Group
from zero_deepspeed.schedules import WarmupLR
from zero_engine import ConfigError, Engine, ZeroConfig
from zero_engine.engine import EngineConfig
from zero_offload import StoreError

pytestmark = pytest.mark.xdist_group("ranks")

SETTINGS = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0}
NAMED = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 0.02, "betas": [0.8, 0.9], "weight_decay": 0.1},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 5, "warmup_type": "linear"},
    },
}


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, betas=(0.8, 0.9), weight_decay=0.1)


def _warmup(optimizer: torch.optim.Optimizer) -> Any:
    return WarmupLR(optimizer, warmup_max_lr=0.02, warmup_num_steps=5, warmup_type="linear")


def _train(engine: Engine, num_steps: int = 3) -> dict[str, Tensor]:
    for step in range(num_steps):
        engine.backward(parity.loss_of(engine, parity.batch(step, 0, engine.group.rank)))
        engine.step()
    return zero_engine.full_state_dict(engine.module)


def _of_another(_: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(_adamw([torch.zeros(1)]), lambda k: k)


def _ways(model: nn.Module, folder: Path) -> dict[str, dict[str, Any]]:
    """What a script passes beside the model."""
    made = _adamw(model.parameters())
    (path := folder / "ds.json").write_text(json.dumps(SETTINGS | NAMED))
    functions = {"optimizer": _adamw, "lr_scheduler": _warmup}
    trained = (param for param in model.parameters() if param.requires_grad)
    return {
        "objects": {"optimizer": made, "lr_scheduler": _warmup(made), "config": SETTINGS},
        "functions": functions | {"config": SETTINGS},
        "names": {"model_parameters": trained, "config": SETTINGS | NAMED},
        "args": {"args": Namespace(deepspeed_config=str(path))},
        "our values": functions | {"config": ZeroConfig(0)},
    }


@pytest.mark.parametrize("way", ["objects", "functions", "names", "args", "our values"])
def test_every_way_to_say_it_trains_alike(tmp_path: Path, way: str) -> None:
    """Scripts pass objects, functions, names in a dict or a file; none may be second-rate."""
    model, expected = parity.build(parity.tiny_float32), parity.build(parity.tiny_float32)
    optimizer = _adamw(expected.parameters())
    scheduler = _warmup(optimizer)
    for step in range(3):
        parity.finish_step(parity.loss_of(expected, parity.batch(step, 0, 0)), optimizer)
        scheduler.step()

    engine, same, loader, _ = zero_engine.initialize(
        model=model, group=Group.solo(), **_ways(model, tmp_path)[way]
    )
    weights = _train(engine)

    assert engine.module is model and engine.optimizer is same and loader is None
    parity.assert_same_weights(weights, expected.state_dict(), what=way)
    assert engine.get_lr() == [optimizer.param_groups[0]["lr"]]
    assert engine.get_mom() == [optimizer.param_groups[0]["betas"]]


def test_a_scheduler_may_be_given_as_its_class() -> None:
    """A class has `step`, too, but nothing to step."""
    kind, model = torch.optim.lr_scheduler.ConstantLR, nn.Linear(1, 1)
    engine, _, _, scheduler = zero_engine.initialize(
        model=model, optimizer=_adamw, lr_scheduler=kind, config=SETTINGS
    )

    assert isinstance(scheduler, kind) and scheduler is engine.lr_scheduler


@pytest.mark.parametrize("is_mesh", [False, True], ids=["mpu", "mesh"])
def test_the_ranks_are_those_of_the_mpu(ranks, is_mesh: bool) -> None:
    """With tensor parallelism, replicas are a part of the job, and a norm is of the whole of it."""
    ranks(4).run(_train_in_a_grid, is_mesh=is_mesh)


def _mpu(data: Any, model: Any) -> Any:
    """As Megatron's: what its getters return, of a model that is split over two ranks."""
    return SimpleNamespace(
        get_data_parallel_group=lambda: data,
        get_model_parallel_group=lambda: model,
        get_model_parallel_world_size=lambda: 2,
    )


def _grid(rank: int) -> Any:
    """Two replicas of a model that is split over two ranks."""
    data = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    model = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    return _mpu(data[rank % 2], model[rank // 2])


def _mesh(*shape: int, names: tuple[str, ...] | None) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


_HALF = _mpu(None, None)  # of what Megatron's has
del _HALF.get_model_parallel_group


def _train_in_a_grid(group: Group, is_mesh: bool) -> None:
    mpu = _mesh(2, 2, names=("dp", "tp")) if is_mesh else _grid(group.rank)
    parts = [torch.full((4,), value) for value in (1.0, 2.0)]
    model = nn.Linear(4, 1, bias=False)
    model.weight.data[0] = parts[group.rank % 2]
    model.weight.model_parallel = True
    settings = SETTINGS | {"zero_optimization": {"stage": 2}}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = zero_engine.initialize(model=model, optimizer=optimizer, mpu=mpu, config=settings)

    loss = (model.weight**2).sum() / 2  # its gradient is the weight itself
    engine.backward(loss)
    engine.step()

    assert engine.world_size == 2
    assert engine.global_rank == group.rank
    whole = torch.cat(parts).norm().item()
    assert engine.get_global_grad_norm() == pytest.approx(whole)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": None}, r"expected model to be a torch\.nn\.Module, got None"),
        ({"config": None}, r"expected config to be a dict, a path"),
        ({"args": Namespace(deepspeed_config="a.json")}, r"expected one configuration"),
        ({"optimizer": "adam"}, r"expected optimizer to be a torch\.optim\.Optimizer.*'adam'"),
        ({"optimizer": lambda _: None}, r"or to return one when called with parameters, got None"),
        ({"optimizer": _adamw, "lr_scheduler": 3}, r"expected lr_scheduler to have step\(\)"),
        ({"optimizer": _adamw, "lr_scheduler": _of_another}, r"LambdaLR to be built from the opt"),
        ({"mpu": 3}, r"expected mpu to have get_data_parallel_group\(\), got 3; it is a device"),
        ({"mpu": _HALF}, r"expected mpu to have get_model_parallel_group\(\), got"),
        ({"group": 3}, r"expected group to be a zero_comm\.Group or a mesh, got 3"),
        ({"training_data": iter([])}, r"__getitem__"),
        ({"collate_fn": 3}, r"expected collate_fn to be a function, got 3"),
        ({"lr_scheduler": _warmup}, r"expected an optimizer for the scheduler, got none"),
        (
            {"model": nn.Linear(1, 1).requires_grad_(False), "optimizer": _adamw},
            r"expected a model to train, .* a Linear of 2 parameters, none of which requires",
        ),
        (
            {"model": nn.ReLU(), "config": SETTINGS | NAMED},
            r"expected a model to train, .* a ReLU of 0 parameters, none of which requires",
        ),
        (
            {"config": EngineConfig(train_batch_size=4, micro_batch_size=1)},
            r"EngineConfig\.train_batch_size: expected .* which is 1, got 4",
        ),
    ],
)
def test_a_wrong_argument_is_named(wrong: dict[str, Any], message: str) -> None:
    """Ten optional arguments: what is wrong must not be guessed, and the model is as it was."""
    given = {"model": nn.Linear(1, 1), "config": SETTINGS, "group": Group.solo()} | wrong

    with pytest.raises(ConfigError, match=message):
        zero_engine.initialize(**given)

    if "model" not in wrong:  # in a notebook the call is corrected, and run again
        engine, *_ = zero_engine.initialize(model=given["model"], optimizer=_adamw, config=SETTINGS)
        assert engine.module is given["model"]


def test_what_is_wrong_in_a_job_is_named_and_warned_of_once(group: Group) -> None:
    """What getters return is seen there only. A warning on each rank buries those that differ."""
    model = nn.Linear(1, 1)
    given = {"model": model, "optimizer": _adamw, "config": SETTINGS}
    for getter, mpu in (
        ("get_data_parallel_group", _mpu(3, group.process_group)),
        ("get_model_parallel_group", _mpu(group.process_group, 3)),
    ):
        with pytest.raises(ConfigError, match=rf"{getter}\(\): expected a process group .*got 3"):
            zero_engine.initialize(**given, mpu=mpu)
    for names in (None, ("tp", "pp"), ("dp", "data")):  # which axis has the data?
        with pytest.raises(ConfigError, match="of two with one named 'dp' or 'data' or 'data_par"):
            zero_engine.initialize(**given, mpu=_mesh(1, 2, names=names))

    given["config"] = SETTINGS | {"zero_allow_untested_optimizer": True}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine, *_ = zero_engine.initialize(**given)

    assert engine.module is model
    said = ["change nothing here" in str(each.message) for each in caught]
    assert sum(said) == (group.rank == 0)


def test_a_job_that_may_not_be_joined_is_missed(monkeypatch) -> None:
    """With dist_init_required=False the caller has joined; if not, each rank would train alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(ConfigError, match=r"WORLD_SIZE=2 processes were started"):
        zero_engine.initialize(model=nn.Linear(1, 1), config=SETTINGS, dist_init_required=False)


@pytest.mark.parametrize("is_blocked", [False, True], ids=["missing", "blocked"])
@pytest.mark.ranks(1)
def test_the_folder_on_nvme_is_made(group: Group, tmp_path: Path, is_blocked: bool) -> None:
    """DeepSpeed makes it, and files name one that is a job's own; what cannot be is still told."""
    folder = tmp_path / "of" / "this-job"
    if is_blocked:
        folder.parent.write_text("")
    config = {
        **SETTINGS,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)},
        },
    }
    model = parity.build(make=parity.tiny_float32)
    with pytest.raises(StoreError, match="is no folder") if is_blocked else nullcontext():
        engine, *_ = zero_engine.initialize(
            model=model, optimizer=_adamw, config=config, group=group
        )
        assert list(folder.iterdir())
        _train(engine, 1)
        zero_engine.unshard(model, engine.optimizer)


@pytest.mark.ranks(1)
def test_a_scale_of_a_file_at_stage_0_needs_scaled_losses(group: Group) -> None:
    """What trains there is stage 1; DeepSpeed takes a direct backward at its own, and not at 0."""
    config = {**SETTINGS, "fp16": {"enabled": True, "loss_scale": 8}}
    x = torch.ones(2, 3, dtype=torch.float16)
    for stage in (0, 1):
        engine, *_ = zero_engine.initialize(
            model=nn.Linear(3, 1),
            optimizer=_adamw,
            config={**config, "zero_optimization": {"stage": stage}},
            group=group,
        )
        with nullcontext() if stage else pytest.raises(RuntimeError, match=r"engine\.scale\(loss"):
            engine(x).sum().backward()


def test_an_engine_without_an_optimizer_is_for_inference() -> None:
    """DeepSpeed's evaluation scripts pass a model and a configuration, no more."""
    engine, optimizer, *_ = zero_engine.initialize(
        model=nn.Linear(2, 1), config=SETTINGS, group=Group.solo()
    )

    assert engine(torch.ones(3, 2)).shape == (3, 1)
    assert optimizer is None and engine.get_lr() == []
    with pytest.raises(zero_engine.ConfigError, match="the engine has no optimizer"):
        engine.step()
