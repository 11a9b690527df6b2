"""Checkpoints of models that torch has split by DTensor: on any mesh again, and on none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_engine
from parity import ZeroConfig
from split_models import PLANS, Model, adamw, build_split, mesh_of, train_split
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from zero_comm import Group
from zero_comm.testing import equal
from zero_engine import FileError, Offload, Precision
from zero_partition import LoadError, StateError

pytestmark = pytest.mark.drawn(2)

MOMENTS = "exp_avg", "exp_avg_sq"


def _sharded(
    plan: str | None, mesh: DeviceMesh, stage: int, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of other values than `build_split` gives; not split where there is no plan."""
    if plan is None:
        model: nn.Module = Model()
        optimizer = adamw(model)
    else:
        model, optimizer = build_split(plan, mesh)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    ranks = mesh["data"] if plan is not None else None
    zero_engine.shard(model, optimizer, ZeroConfig(stage, **options), group=ranks)
    return model, optimizer


def _wholes(model: nn.Module) -> dict[str, Tensor]:
    """All values and state of a model, whole."""
    found = {}
    for name, param in model.named_parameters():
        found[name] = zero_engine.full_param(param).clone()
        for key in MOMENTS:
            found[f"{name}: {key}"] = zero_engine.full_optimizer_state(param, key).clone()
        found[f"{name}: step"] = torch.as_tensor(zero_engine.full_optimizer_state(param, "step"))
    return found


def _check_equal(model: nn.Module, expected: dict[str, Tensor]) -> None:
    found = _wholes(model)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert equal(found[name], value), name


def _saved(
    folder: Path, group: Group, plan: str, stage: int, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, DeviceMesh]:
    """A model after three steps on two times two ranks, which is saved."""
    mesh = mesh_of(group)
    model, optimizer = build_split(plan, mesh)
    config = ZeroConfig(stage, **options)
    zero_engine.shard(model, optimizer, config, group=mesh["data"])
    train_split(model, optimizer, mesh)
    zero_engine.save(folder, model, optimizer, step=3)
    return model, optimizer, mesh


@pytest.mark.ranks(4)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.drawn(3)
def test_a_run_goes_on_on_any_mesh(group: Group, plan: str, stage: int, tmp_path: Path) -> None:
    """All values and state are what they were, whatever the parts, the ranks of each, the stage."""
    model, _, _ = _saved(tmp_path, group, plan, stage)
    expected = _wholes(model)
    for tensor, other in ((2, stage), (4, 3 - stage), (1, stage), (2, 3 - stage)):
        mesh = mesh_of(group, tensor)
        found, optimizer = _sharded(plan, mesh, other)
        report = zero_engine.load(tmp_path, found, optimizer)
        assert report is not None
        assert (report.step, report.missing, report.restores_rngs) == (3, (), tensor == 2)
        _check_equal(found, expected)
    unsplit, optimizer = _sharded(None, mesh_of(group), stage)
    zero_engine.load(tmp_path, unsplit, optimizer)
    _check_equal(unsplit, expected)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_that_was_split_later_goes_on(
    group: Group, plan: str, stage: int, tmp_path: Path
) -> None:
    """Files of an unsplit model are what they always were."""
    model = Model()
    optimizer = adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(stage))
    train_split(model, optimizer, mesh_of(group, 1))
    zero_engine.save(tmp_path, model, optimizer, step=3)
    for tensor in (2, 4):
        mesh = mesh_of(group, tensor)
        found, its_optimizer = _sharded(plan, mesh, 3 - stage)
        zero_engine.load(tmp_path, found, its_optimizer)
        _check_equal(found, _wholes(model))


# Fields of ZeroConfig of the run that is saved, and of the one that goes on.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32 masters": ({"precision": Precision()}, {"precision": Precision()}),
    "of the optimizer's host": ({"offload": Offload(optimizer="host")}, {}),
    "onto the host": ({}, {"offload": Offload(optimizer="host", params="host")}),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_both_runs_are_free(group: Group, name: str, tmp_path: Path) -> None:
    """Wherever state rests, a reader and a writer of parts are asked for runs."""
    before, after = OPTIONS[name]
    model, _, _ = _saved(tmp_path, group, "sequence", 3, **before)
    expected = _wholes(model)
    for tensor in (2, 4):
        found, optimizer = _sharded("sequence", mesh_of(group, tensor), 3, **after)
        zero_engine.load(tmp_path, found, optimizer)
        _check_equal(found, expected)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_on_the_same_mesh_has_never_ended(group: Group, stage: int, tmp_path: Path) -> None:
    """Bit for bit the losses that the run has which was saved."""
    model, optimizer, mesh = _saved(tmp_path, group, "tensor", stage)
    expected = train_split(model, optimizer, mesh)
    again, its_optimizer = _sharded("tensor", mesh, stage)
    zero_engine.load(tmp_path, again, its_optimizer)
    assert train_split(again, its_optimizer, mesh) == expected


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [0, 3])
def test_every_element_is_written_once(group: Group, stage: int, tmp_path: Path) -> None:
    """What ranks have together, as what only some of them have: the bytes of an unsplit run."""
    _saved(tmp_path, group, "tensor", stage)
    said = json.loads((tmp_path / "step-3" / "manifest.json").read_text())
    said = said.get("content", said)
    plain = Model()
    shapes = {name: list(param.shape) for name, param in plain.named_parameters()}
    tensors = list(said["params"].items())
    tensors += [(n, e[key]) for n, e in said["optimizer"].items() for key in MOMENTS]
    for name, tensor in tensors:
        assert tensor["shape"] == shapes[name]
        pieces = tensor.get("parts", tensor)["pieces"]
        assert sum(p["stop"] - p["start"] for p in pieces) == plain.get_parameter(name).numel()
    split = {name for name, tensor in said["params"].items() if "parts" in tensor}
    assert split == {
        f"blocks.{block}.{name}"
        for block in range(2)
        for name in (
            *("query.weight", "query.bias", "value.weight", "value.bias"),
            *("out.weight", "up.weight", "up.bias", "down.weight"),
        )
    }


@pytest.mark.ranks(4)
def test_a_checkpoint_is_exported_whole(group: Group, tmp_path: Path) -> None:
    """By one process, as of any model; and read again by what is split, sharded or not."""
    model, _, mesh = _saved(tmp_path / "saved", group, "sequence", 3)
    expected = {name: zero_engine.full_param(p).clone() for name, p in model.named_parameters()}
    out = tmp_path / "out"
    if group.rank == 0:
        zero_engine.export(tmp_path / "saved", out)
    torch.distributed.barrier()
    plain = Model()
    zero_engine.load_pretrained(plain, out)
    for name, param in plain.named_parameters():
        assert equal(param, expected[name]), name
    for stage in (1, 3):
        found, _ = _sharded("tensor", mesh, stage)
        zero_engine.load_pretrained(found, out)
        for name, param in found.named_parameters():
            assert equal(zero_engine.full_param(param), expected[name]), name
    split, _ = build_split("tensor", mesh)
    zero_engine.load_pretrained(split, out, group=mesh["data"])
    for name, param in split.named_parameters():
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        assert equal(whole, expected[name]), name


@pytest.mark.ranks(4)
@pytest.mark.parametrize("tensor", [2, 4])
def test_an_average_goes_on(group: Group, tensor: int, tmp_path: Path) -> None:
    """It is saved as the parameters are."""
    mesh = mesh_of(group)
    model, optimizer = build_split("tensor", mesh)
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=mesh["data"])
    average = zero_engine.ShardedAverage(model, decay=0.5)
    for _ in range(2):
        train_split(model, optimizer, mesh)
        average.update()
    zero_engine.save(tmp_path, model, optimizer, step=2, average=average)
    expected = average.full_state_dict()

    mesh = mesh_of(group, tensor)
    found, its_optimizer = _sharded("tensor", mesh, 1)
    other = zero_engine.ShardedAverage(found, decay=0.5)
    zero_engine.load(tmp_path, found, its_optimizer, average=other)
    assert other.num_updates == 2
    whole = other.full_state_dict()
    if group.rank == 0:
        assert all(equal(whole[name], value) for name, value in expected.items())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizers_state_dict_is_whole(group: Group, stage: int) -> None:
    """Of the optimizer, whole on the first rank."""
    mesh = mesh_of(group)
    model, optimizer = build_split("tensor", mesh)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=mesh["data"])
    train_split(model, optimizer, mesh)
    expected = _wholes(model)
    state = zero_engine.full_optimizer_state_dict(model)
    if group.rank == 0:
        for number, name in enumerate(dict(Model().named_parameters())):
            for key in MOMENTS:
                assert equal(state["state"][number][key], expected[f"{name}: {key}"]), (name, key)
    for tensor in (2, 4):
        other = mesh_of(group, tensor)
        found, _ = _sharded("tensor", other, 3)
        with torch.no_grad():
            for name, param in found.named_parameters():
                zero_engine.set_full_param(param, expected[name])
        zero_engine.load_full_optimizer_state_dict(found, state if group.rank == 0 else {})
        _check_equal(found, expected)


@pytest.mark.ranks(4)
def test_a_state_dict_of_dtensors_is_loaded(group: Group) -> None:
    """As torch's own gives it, of the same split; one of other tensors is refused, as by torch."""
    mesh = mesh_of(group)
    split, _ = build_split("tensor", mesh)
    for stage in range(4):
        found, _ = _sharded("tensor", mesh, stage)
        found.load_state_dict(split.state_dict())
        for name, param in split.named_parameters():
            whole = param.full_tensor() if isinstance(param, DTensor) else param
            value = zero_engine.full_param(found.get_parameter(name))
            assert equal(value, whole), (stage, name)
        with pytest.raises(RuntimeError, match="DTensor"):
            found.load_state_dict(Model().state_dict())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizers_own_state_dict_is_whole(group: Group, stage: int) -> None:
    """Where it is asked for; it takes one of whole tensors, and one of DTensors, as torch's."""
    mesh = mesh_of(group)
    split, its_optimizer = build_split("tensor", mesh)
    its_optimizer.param_groups[0]["foreach"] = False  # torch's takes no DTensors beside others
    train_split(split, its_optimizer, mesh_of(group, 4))  # the same batches on all ranks
    _, optimizer = _sharded("tensor", mesh, stage)
    with pytest.raises(StateError, match=f"sharded over {4 if stage else 2} ranks"):
        optimizer.state_dict()
    whole, optimizer = _sharded("tensor", mesh_of(group, 1), 0)  # of one part, which ranks have
    assert len(optimizer.state_dict()["param_groups"][0]["params"]) == len([*whole.parameters()])
    _, optimizer = _sharded("tensor", mesh, stage, state_dict="gather")
    optimizer.load_state_dict(its_optimizer.state_dict())
    state = optimizer.state_dict()
    _, other = _sharded("tensor", mesh, 3 - stage, state_dict="gather")
    other.load_state_dict(state)
    for found in (state, other.state_dict()):
        for number, plain in enumerate(split.parameters()):
            for key in MOMENTS:
                moment = its_optimizer.state[plain][key]
                whole = moment.full_tensor() if isinstance(moment, DTensor) else moment
                assert equal(found["state"][number][key], whole)


class _OwnStateDict(Model):
    """Has a buffer in what is split, and an entry that its own methods add and take."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].up.register_buffer("scale", torch.ones(3))
        self.register_state_dict_post_hook(_add_entry)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Without that entry."""
        state = {key: value for key, value in state_dict.items() if key != "added"}
        return super().load_state_dict(state, *args, **kwargs)


def _add_entry(module: nn.Module, state: dict, prefix: str, metadata: Any) -> None:
    state[f"{prefix}added"] = torch.tensor(3.0)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [1, 3])
def test_buffers_and_own_entries_go_on(group: Group, stage: int, tmp_path: Path) -> None:
    """parallelize_module makes DTensors of buffers as well, each rank's with all values."""
    found = []
    for tensor, value in ((2, 5.0), (4, 0.0)):
        mesh = mesh_of(group, tensor)
        torch.manual_seed(0)
        model = PLANS["tensor"](_OwnStateDict(), mesh["tensor"])
        optimizer = adamw(model)
        scale = model.blocks[0].up.scale
        assert isinstance(scale, DTensor)
        scale.to_local().fill_(value)
        zero_engine.shard(model, optimizer, ZeroConfig(stage), group=mesh["data"])
        if not found:
            train_split(model, optimizer, mesh)
            zero_engine.save(tmp_path, model, optimizer, step=3)
        else:
            zero_engine.load(tmp_path, model, optimizer)
        assert model.blocks[0].up.scale is scale
        found.append(_wholes(model) | {"scale": scale.to_local().clone()})
    assert found[1]["scale"].tolist() == [5.0, 5.0, 5.0]
    assert all(equal(found[1][name], value) for name, value in found[0].items())


@pytest.mark.ranks(4)
def test_what_does_not_fit_says_the_whole_shape(group: Group, tmp_path: Path) -> None:
    """Users know no other; nothing is written."""
    _saved(tmp_path, group, "tensor", 3)
    mesh = mesh_of(group)
    model, optimizer = _sharded("tensor", mesh, 3)
    other = Model()
    other.head = nn.Linear(16, 30, bias=False)
    its_optimizer = adamw(other)
    zero_engine.shard(other, its_optimizer, ZeroConfig(1))
    with pytest.raises(LoadError, match=r"'head\.weight': expected shape \(30, 16\), got \(24,"):
        zero_engine.load(tmp_path, other, its_optimizer)
    for name in ("frozen-00000-00.safetensors", "rank-00000-00.safetensors"):
        path = tmp_path / "step-3" / name
        if group.rank == 0 and path.exists():
            path.write_bytes(path.read_bytes()[:-1])
    torch.distributed.barrier()
    with pytest.raises(FileError, match="rank-00000-00"):
        zero_engine.load(tmp_path, model, optimizer)
    assert not any(zero_engine.full_param(param).any() for param in model.parameters())
