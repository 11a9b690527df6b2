"""The ranks to shard over are said as torch says them: process groups and device meshes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zero_deepspeed
import zero_engine
import zero_partition
from attrs import evolve
from parity import Recipe, ZeroConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from zero_comm import CommError, Group, GroupMismatchError, Levels
from zero_comm.testing import RankPool, equal
from zero_engine import ConfigError, Wire
from zero_partition import PartitionError, ZeroRedundancyOptimizer
from zero_partition.seams import find_sharded

Ranks = Callable[[Group], Any]


def _mesh(group: Group, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh(group.device.type, shape, mesh_dim_names=names)


def _hybrid(group: Group) -> DeviceMesh:
    return _mesh(group, 2, 2, names=("replicate", "shard"))


# What names all four ranks, and the ranks of a node that follow.
WHOLE: dict[str, Ranks] = {
    "a Group": lambda group: group,
    "WORLD": lambda _: dist.group.WORLD,
    "a ProcessGroup": lambda _: dist.new_group(),
    "a mesh": lambda group: _mesh(group, 4),
    "a mesh with a name": lambda group: _mesh(group, 4, names=("data",)),
    "a mesh of one replica": lambda group: _mesh(group, 1, 4),
}
NAMED: dict[str, tuple[Ranks, int | None]] = {
    **{name: (ranks, None) for name, ranks in WHOLE.items()},
    "replicas and shards": (_hybrid, 2),
    "replicas of one rank": (lambda group: _mesh(group, 4, 1), 1),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", NAMED)
def test_a_model_is_sharded_over_what_a_mesh_says(group: Group, name: str) -> None:
    """As `fully_shard(mesh=)` reads it; bit for bit what the arithmetic that is promised says."""
    ranks_of, per_node = NAMED[name]
    recipe, ranks = Recipe(num_steps=2), ranks_of(group)
    expected = parity.train_alone_by_stage(group, recipe, ranks_per_node=per_node)
    expected[0] = parity.train_alone_by_stage(group, recipe)[0]  # every rank is a replica
    for stage in range(4):
        curve = parity.train_sharded(ranks, recipe, ZeroConfig(stage), rank=group.rank)
        parity.assert_same(curve, expected[stage], rank=group.rank, what=f"stage {stage}, {name}")


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", NAMED)
def test_a_rank_keeps_the_shard_that_a_mesh_says(group: Group, name: str) -> None:
    """A half of the model where there are two replicas of two ranks, a quarter of one of four."""
    ranks_of, per_node = NAMED[name]
    config = ZeroConfig(3, small_param_numel=0)
    model, _ = parity.build_sharded(ranks_of(group), config, make=parity.Chain)
    numel = sum(param.numel() for param in parity.Chain().parameters())
    held = sum(zero_engine.local_param(param).numel() for param in model.parameters())

    assert held == numel // (per_node or 4)


@pytest.mark.ranks(4)
def test_a_part_of_a_mesh_is_a_model_of_its_own(group: Group) -> None:
    """Two models, each over two ranks; every rank has one of them."""
    mesh = _hybrid(group)
    model, optimizer = parity.build_sharded(mesh["shard"], ZeroConfig(3))
    sharded = find_sharded(model)
    assert sharded is not None
    assert sharded.whole.world_size == 2
    losses = parity.run_steps(model, optimizer, range(2), rank=group.rank)
    plain, its = parity.build_with_optimizer()
    pair = mesh["shard"].get_group()
    ddp = DistributedDataParallel(plain, process_group=pair, find_unused_parameters=True)
    assert losses == parity.run_steps(ddp, its, range(2), rank=group.rank)


@pytest.mark.ranks(4)
def test_two_dimensions_of_a_larger_mesh_have_a_group_of_their_own(group: Group) -> None:
    """As where the third splits the model: nobody has made a group of those ranks before."""
    mesh = _mesh(group, 2, 1, 2, names=("replicate", "shard", "split"))
    chosen = mesh["replicate", "shard"]
    made = [Levels.from_mesh(chosen) for _ in range(2)]
    assert [each.whole.world_size for each in made] == [2, 2]
    assert made[0].whole.process_group is made[1].whole.process_group
    model, optimizer = parity.build_sharded(chosen, ZeroConfig(3))
    parity.run_steps(model, optimizer, range(2), rank=group.rank)


# ---- Each way in ----


def _same(model: nn.Module, expected: dict[str, torch.Tensor]) -> bool:
    found = {name: zero_engine.full_param(param) for name, param in model.named_parameters()}
    return all(equal(value, expected[name]) for name, value in found.items())


def _by_init(ranks: Any, config: ZeroConfig, _: Path) -> nn.Module:
    with zero_engine.Init(group=ranks, config=config):
        model = parity.build()
    return zero_engine.shard(model, None, config, group=ranks)[0]


def _by_partition_init(ranks: Any, config: ZeroConfig, _: Path) -> nn.Module:
    with zero_partition.Init(group=ranks):
        model = parity.build()
    zero_partition.partition(model, None, config.for_partition, group=ranks)
    return model


def _by_materialise(ranks: Any, config: ZeroConfig, folder: Path) -> nn.Module:
    with torch.device("meta"):
        model = parity.Tiny()
    zero_engine.load_pretrained(model, folder / "weights.pt", group=ranks)
    return zero_engine.shard(model, None, config, group=ranks)[0]


def _by_initialize(ranks: Any, config: ZeroConfig, _: Path) -> nn.Module:
    return zero_engine.initialize(model=parity.build(), config=config, group=ranks)[0].module


WAYS = {
    "Init": _by_init,
    "zero_partition.Init": _by_partition_init,
    "load_pretrained": _by_materialise,
    "initialize": _by_initialize,
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["WORLD", "a mesh", "replicas and shards"])
def test_each_way_in_takes_a_mesh(group: Group, tmp_path: Path, name: str, way: str) -> None:
    """They differ in where values come from, not in what the ranks may be."""
    expected = parity.build().state_dict()
    if group.rank == 0:
        torch.save(expected, tmp_path / "weights.pt")
    dist.barrier()
    ranks_of, per_node = NAMED[name]
    model = WAYS[way](ranks_of(group), ZeroConfig(3), tmp_path)
    sharded = find_sharded(model)
    assert sharded is not None
    assert sharded.group.world_size == (per_node or 4)
    assert _same(model, expected)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", NAMED)
def test_state_is_sharded_inside_and_equal_across(group: Group, name: str) -> None:
    """ZeroRedundancyOptimizer takes what `shard` takes; DDP averages over all ranks."""
    ranks_of, per_node = NAMED[name]
    plain = parity.train_ddp(group, Recipe(parity.adamw, num_steps=2, scheduler="none"))
    model = parity.build()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, group=ranks_of(group), lr=1e-2, fused=True
    )
    assert optimizer.group.world_size == (per_node or 4)
    parity.run_steps(parity.as_ddp(model, group), optimizer, range(2), rank=group.rank)
    parity.assert_same_weights(model.state_dict(), plain.weights, what=name)


@pytest.mark.ranks(4)
def test_a_run_over_a_mesh_is_saved_and_goes_on_over_another(group: Group, tmp_path: Path) -> None:
    """What is saved has no mesh."""
    expected, kept = [], parity.build_sharded(group, ZeroConfig(3))
    for ranks in (_hybrid(group), _mesh(group, 4), dist.group.WORLD):
        model, optimizer = parity.build_sharded(ranks, ZeroConfig(2))
        if expected:
            zero_engine.load(tmp_path, model, optimizer)
        step = len(expected)
        expected += parity.run_steps(*kept, [step], rank=group.rank)
        got = parity.run_steps(model, optimizer, [step], rank=group.rank)
        assert got == pytest.approx(expected[-1:], rel=1e-3)  # other orders of sums
        zero_engine.save(tmp_path, model, optimizer, step=step)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_plan_over_a_mesh_is_what_is_kept(
    group: Group, shape: tuple[int, ...], stage: int
) -> None:
    """The same bytes as the wire that the mesh stands for."""
    mesh, model = _mesh(group, *shape), parity.build(parity.Chain)
    wire = Wire(levels=shape[-1], replicas=True) if stage and len(shape) == 2 else Wire()
    said, meant = (
        zero_engine.plan(model, config, world_size=size, device="cpu", rank=group.rank)
        for size, config in (
            (mesh, ZeroConfig(stage)),
            (4, ZeroConfig(stage, wire=wire)),
        )
    )
    assert said.memory == meant.memory
    assert said.traffic == meant.traffic


# ---- What is no mesh for this model ----


def _of_three(group: Group) -> DeviceMesh:
    return _mesh(group, 1, 2, 2, names=("a", "b", "c"))


def _without(group: Group) -> DeviceMesh:
    """A mesh of ranks 0 and 1: made by all, as torch wants it."""
    return DeviceMesh(group.device.type, torch.tensor([0, 1], device="cpu"))


def _out_of_order(group: Group) -> DeviceMesh:
    ranks = torch.tensor([[0, 2], [1, 3]], device="cpu")
    return DeviceMesh(group.device.type, ranks)


REFUSED: dict[str, tuple[Ranks, Wire, type[Exception], str]] = {
    "three dimensions": (
        _of_three,
        Wire(),
        PartitionError,
        r"of one dimension, over which to shard, or of two.*mesh\['shard'\]",
    ),
    "another's": (_without, Wire(), CommError, "a mesh that this rank is in"),
    "ranks in another order": (_out_of_order, Wire(), GroupMismatchError, "in this order, got"),
    "levels besides": (_hybrid, Wire(levels=2), PartitionError, "leave one of them out"),
    "node copies besides": (_hybrid, Wire(secondary=True), PartitionError, "leave out secondary"),
    "a group of others": (
        lambda _: dist.new_group([2, 3]),
        Wire(),
        CommError,
        "that this one is among",
    ),
    "a number": (lambda _: 4, Wire(), ConfigError, "expected group to be a"),
    "ranks": (lambda _: [0, 1, 2, 3], Wire(), ConfigError, "expected group to be a"),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_model_can_be_sharded_over_is_refused(group: Group, name: str) -> None:
    """With what was expected, before anything is changed."""
    ranks_of, wire, kind, says = REFUSED[name]
    ranks = ranks_of(group)
    model, optimizer = parity.build_with_optimizer()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    if (name == "another's" and group.rank < 2) or (name == "a group of others" and group.rank > 1):
        return
    with pytest.raises(kind, match=says):
        zero_engine.shard(model, optimizer, evolve(ZeroConfig(3), wire=wire), group=ranks)
    assert find_sharded(model) is None
    assert all(equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_mesh_of_another_device_is_refused(ranks: Callable[[int], RankPool]) -> None:
    """It is the mesh that says where values travel."""
    if ranks(2).device == "cpu":
        pytest.skip("a machine with one kind of device has no other: see --device")
    ranks(2).run(_on_another_device)


def _on_another_device(_: Group) -> None:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises((PartitionError, CommError), match="cpu"):
        zero_engine.shard(parity.build(), None, ZeroConfig(3), group=mesh)


@pytest.fixture
def alone() -> Iterator[None]:
    """A job of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("shape", [(1,), (1, 1)], ids=str)
def test_a_mesh_of_one_rank_is_a_job_of_one(shape: tuple[int, ...]) -> None:
    """As on a laptop, with the script of the cluster."""
    mesh = init_device_mesh("cpu", shape)
    model, optimizer = parity.build_with_optimizer()
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=mesh)
    losses = parity.run_steps(model, optimizer, range(2), rank=0)
    assert losses == parity.run_steps(*parity.build_with_optimizer(), range(2), rank=0)


# ---- Ranks that share a sequence ----


class Megatron:
    """An mpu of Megatron-DeepSpeed's kind: two ranks share a sequence, and two have other ones."""

    def __init__(self, group: Group) -> None:
        self.mesh = _mesh(group, 2, 2, names=("data", "sequence"))

    def get_data_parallel_group(self) -> Any:  # noqa: D102
        return self.mesh.get_group("data")

    def get_sequence_parallel_world_size(self) -> int:  # noqa: D102
        return self.mesh.size(1)

    def get_sequence_data_parallel_group(self) -> Any:  # noqa: D102
        return dist.group.WORLD


def _as_zero_engine(model: nn.Module, mpu: Any, settings: dict[str, Any]) -> Any:
    return zero_engine.initialize(model=model, config=settings, mpu=mpu)


SHARED: dict[str, Callable[[Group, nn.Module, dict[str, Any]], Any]] = {
    "mesh_param": lambda _, model, settings: zero_deepspeed.initialize(
        model=model, config=settings, mesh_param=(2, 2)
    ),
    "a mesh": lambda group, model, settings: _as_zero_engine(
        model, _mesh(group, 2, 2, names=("dp", "sp")), settings
    ),
    "an mpu": lambda group, model, settings: _as_zero_engine(model, Megatron(group), settings),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("way", SHARED)
def test_gradients_of_ranks_that_share_a_sequence_are_added_up(
    group: Group, way: str, stage: int
) -> None:
    """The model is sharded over all ranks; a batch counts once for those that share it.

    Each rank has the loss of its part of a sequence, so that their sum is the whole one's.
    """
    settings = {
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "gradient_clipping": 0.0,
    }
    plain = nn.Linear(2, 1, bias=False)
    nn.init.ones_(plain.weight)
    model = nn.Linear(2, 1, bias=False)
    model.load_state_dict(plain.state_dict())
    engine, *_ = SHARED[way](group, model, settings)
    sharded = find_sharded(engine.module)
    assert sharded is not None
    assert sharded.group.world_size == 4
    assert engine.train_batch_size() == 3 * 2

    parts = torch.arange(8.0).view(4, 1, 2)  # of each rank, its part of a sequence
    engine.backward(engine(parts[group.rank]).sum())
    engine.step()
    (sum(plain(part).sum() for part in parts) / 2).backward()  # the mean over two samples
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    found = zero_engine.full_param(engine.module.weight)
    assert equal(found, plain.weight), f"{found} and not {plain.weight}"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("sizes", "mpu"), [((2, 2), None), (2, None), ((0, 2), None), ((2, 1), "an mpu")], ids=str
)
def test_sizes_that_are_no_mesh_of_this_job_are_refused(group: Group, sizes: Any, mpu: Any) -> None:
    """With what was expected."""
    assert group.world_size == 2
    with pytest.raises(ConfigError, match="whose product is the world size 2, and no mpu"):
        zero_deepspeed.initialize(
            model=nn.Linear(1, 1), config={"train_batch_size": 2}, mesh_param=sizes, mpu=mpu
        )
