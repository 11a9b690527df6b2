"""Replicas (MiCS, hybrid sharding): shards of a node, and gradients averaged over the nodes.

Four ranks are two nodes of two.
"""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zero_engine
from parity import Recipe, ZeroConfig
from torch import Tensor, nn
from zero_comm import DivergenceError, Group, Levels, record_traffic
from zero_engine import ConfigError, Offload, Precision, Wire
from zero_engine.testing import MANIFEST, read_manifest
from zero_partition import PartitionError, StateError

BLOCK = 64 * 64
NUM_BLOCKS = 4
PSI = NUM_BLOCKS * BLOCK  # parameters of parity.Chain
REPLICAS = Wire(levels=2, replicas=True)
STAGES = (1, 2, 3)

# ---- The same numbers ----

HOW: dict[str, dict[str, Any]] = {
    "reduced once": {"num_micro_batches": 2, "max_norm": 0.05},
    "reduced each time": {"num_micro_batches": 2, "reduces_once": False},
}


@pytest.mark.parametrize("how", HOW)
def test_training_is_a_mean_of_means_in_rank_order(ranks, how: str) -> None:
    """One process that adds as we document gets the same bits, and DDP the same weights."""
    ranks(4).run(_equals_both_oracles, **HOW[how])


def _equals_both_oracles(group: Group, **settings: Any) -> None:
    recipe = Recipe(**settings)
    close = Recipe(**settings, make=parity.tiny_float32, optimizer="sgd")
    ddp = parity.train_ddp(group, close)
    by_stage = parity.train_alone_by_stage(group, recipe, ranks_per_node=2)
    for stage in STAGES:
        alone = by_stage[stage]
        config = ZeroConfig(stage, wire=REPLICAS)
        found = parity.train_sharded(group, recipe, config)

        parity.assert_same(found, alone, rank=group.rank, what=f"stage {stage}")

    found = parity.train_sharded(group, close, ZeroConfig(3, wire=REPLICAS))
    if group.rank == 0:
        for name, value in found.weights.items():
            torch.testing.assert_close(value, ddp.weights[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks_per_node", [1, 4])
@pytest.mark.ranks(4)
def test_nodes_of_one_and_one_node_of_all_are_no_special_case(
    group: Group, ranks_per_node: int
) -> None:
    """Data parallelism and plain sharding are the ends of one scale."""
    size = ranks_per_node
    recipe = Recipe(max_norm=0.05)
    work = partial(parity.train_alone, recipe, world_size=4, stage=3, ranks_per_node=size)
    alone = parity.by_rank_0(group, work)[group.rank]
    config = ZeroConfig(3, wire=Wire(levels=size, replicas=True))
    found = parity.train_sharded(group, recipe, config)

    parity.assert_same(found, alone, rank=group.rank, what=f"nodes of {size}")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(4)
def test_replicas_stay_equal_to_the_last_bit(group: Group, stage: int) -> None:
    """Nothing would ever bring them together again."""
    torch.manual_seed(group.rank)  # only rank 0's initial values count
    model = parity.Tiny()
    optimizer = parity.OPTIMIZERS["adamw"](parity.param_groups(model))
    zero_engine.shard(model, optimizer, ZeroConfig(stage, wire=REPLICAS), group=group)
    parity.run_steps(model, optimizer, range(3), rank=group.rank)
    mine = {
        (name, key): part
        for name, param in model.named_parameters()
        for key, part in _local_values(param).items()
    }
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, mine)

    counterpart = everyone[(group.rank + 2) % 4]
    assert mine.keys() == counterpart.keys()
    for key, part in mine.items():
        assert torch.equal(part.nan_to_num(), counterpart[key].nan_to_num()), key


def _local_values(param: nn.Parameter) -> dict[str, Tensor]:
    values = {"value": zero_engine.local_param(param).clone()}
    for key in ("exp_avg", "exp_avg_sq"):
        try:
            values[key] = zero_engine.local_optimizer_state(param, key).clone()
        except StateError:
            continue
    return values


class Branching(nn.Module):
    """A branch that few ranks take."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(4, 4)
        self.rare = nn.Linear(4, 4)

    def forward(self, x: Tensor, is_rare: bool) -> Tensor:  # noqa: D102
        x = self.common(x)
        return self.rare(x) if is_rare else x


@pytest.mark.parametrize("stage", STAGES)
def test_what_one_rank_of_one_replica_has_counts_on_all(ranks, stage: int) -> None:
    """A gradient, an overflow, a norm: a replica that does not know of it would part."""
    reports = ranks(4).run(_one_rank_has_it, stage=stage)

    assert len({report[0] for report in reports}) == 1
    assert all(report == reports[0] for report in reports)
    assert reports[0][1:] == (True, False)


def _one_rank_has_it(group: Group, stage: int) -> tuple[float, bool, bool]:
    model = parity.build(Branching)
    optimizer = parity.adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(stage, wire=REPLICAS), group=group)
    x = torch.full((1, 4), 1.0 + group.rank)
    model(x, group.rank == 3).sum().backward()
    has_rare = all(param.grad is not None for param in optimizer.param_groups[0]["params"])
    norm = zero_engine.clip_grad_norm_(model, 1e9)
    optimizer.step()
    optimizer.zero_grad()
    (model(x, False).sum() * (float("inf") if group.rank == 2 else 1.0)).backward()
    return norm.item(), has_rare, zero_engine.unscale_and_clip_(model).is_finite


OPTIONS: dict[str, dict[str, Any]] = {
    "cut between rows": {"cut": "row"},
    "small ones whole": {"small_param_numel": 13},
    "no window": {"window": 1, "prefetch_numel": 0},
    "divided first": {"precision": Precision(masters=None, predivide_factor=4.0)},
    "summed": {"precision": Precision(masters=None, reduces_mean=False)},
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.ranks(4)
def test_other_choices_change_no_bit(group: Group, stage: int) -> None:
    """By powers of two a sum is exact, so that divisions may come in any place."""

    def train(rate: float, **options: Any) -> parity.Curve:
        recipe = Recipe(
            make=parity.tiny_float32,
            num_steps=2,
            optimizer=lambda model: torch.optim.SGD(
                [param for param in model.parameters() if param.requires_grad], lr=rate
            ),
        )
        return parity.train_sharded(group, recipe, ZeroConfig(stage, wire=REPLICAS, **options))

    expected = train(0.25)
    for how, options in [*OPTIONS.items()][stage % 2 :: 2]:
        found = train(0.0625 if how == "summed" else 0.25, **options)
        parity.assert_same(found, expected, rank=group.rank, what=how)


@pytest.mark.ranks(4)
def test_what_is_elsewhere_changes_no_bit(group: Group, tmp_path: Path) -> None:
    """Each replica offloads its own; DeepSpeed's MiCS cannot."""
    recipe = Recipe(make=parity.tiny_float32, num_steps=2)
    on_host, on_disk = (
        Offload(optimizer=place, params=place, path=path)
        for place, path in (("host", None), ("disk", tmp_path))
    )
    expected, *found = (
        parity.train_sharded(group, recipe, ZeroConfig(3, wire=REPLICAS, offload=offload)).losses
        for offload in (None, on_host, on_disk)
    )

    assert found == [expected, expected]


# ---- What travels ----


@pytest.mark.parametrize("stage", STAGES)
def test_only_shards_of_gradients_cross_to_other_nodes(ranks, stage: int) -> None:
    """2M(W-L)/(W L) per rank: arXiv 2304.11277 rounds up to 2M(W-1)/(W L)."""
    for found in ranks(4).run(_sent_in_a_step, stage=stage):
        world_size, size = 4, 2
        assert found.pop("all_reduce") == (
            0,
            2 * PSI * (world_size - size) // (world_size * size),
        )
        assert found.pop("reduce_scatter") == (PSI // 2, 0)
        gathered, crossed = found.pop("all_gather")
        assert crossed == 0
        assert gathered == (PSI // 2 if stage < 3 else (2 * NUM_BLOCKS - 1) * BLOCK // 2)
        assert not found


def _sent_in_a_step(group: Group, stage: int) -> dict[str, tuple[int, int]]:
    model = parity.build(partial(parity.Chain, NUM_BLOCKS))
    config = ZeroConfig(stage, window=1, wire=REPLICAS)
    _, optimizer = zero_engine.shard(model, parity.adamw(model), config, group=group)
    for _ in range(3):
        with record_traffic(group) as traffic:
            parity.finish_step(model(torch.ones(1, 64)).sum(), optimizer)
    operations = {name: of for name, of in traffic.operations.items() if name != "agree"}
    for operation in operations.values():
        assert operation.padding_bytes == 0
    return {
        name: (operation.inside.payload_numel, operation.across.payload_numel)
        for name, operation in operations.items()
    }


# ---- Whole values, in and out ----


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.ranks(4)
def test_ranks_are_those_of_the_job(group: Group, stage: int) -> None:
    """Whoever writes `if rank == 3:` means the job's rank 3, of which there is one."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage, wire=REPLICAS))
    parity.run_steps(model, optimizer, range(1), rank=group.rank)
    weight = model.blocks[1].up.weight

    with zero_engine.GatheredParameters(weight, modifier_rank=3):
        if group.rank == 3:
            weight.data.fill_(3.0)
    assert zero_engine.full_param(weight).eq(3.0).all()

    given = torch.full(weight.shape, 2.0) if group.rank == 2 else torch.zeros(weight.shape)
    zero_engine.set_full_param(weight, given, from_rank=2)
    found = zero_engine.full_param(weight, to_rank=3)
    assert (found is not None) == (group.rank == 3)
    assert found is None or found.eq(2.0).all()

    zero_engine.set_full_optimizer_state(
        weight, "exp_avg", torch.full(weight.shape, float(group.rank)), from_rank=1
    )
    assert zero_engine.full_optimizer_state(weight, "exp_avg").eq(1.0).all()

    whole = zero_engine.full_state_dict(model)
    assert bool(whole) == (group.rank == 0)
    model.load_state_dict({"blocks.1.up.weight": torch.ones(weight.shape)}, strict=False)
    assert zero_engine.full_param(weight).eq(1.0).all()


@pytest.mark.ranks(4)
def test_a_model_that_is_built_in_parts_is_replicated(group: Group) -> None:
    """Init knows nothing of replicas: its shards are those of all ranks."""
    plain = parity.build()
    with zero_engine.Init(group=group, config=ZeroConfig(3)):
        model = parity.build()
    zero_engine.shard(model, None, ZeroConfig(3, wire=REPLICAS), group=group)
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(zero_engine.full_param(param), expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_one_replica_is_saved_and_loads_anywhere(ranks, stage: int, tmp_path: Path) -> None:
    """A checkpoint holds every value once, however many ranks have it."""
    assert min(ranks(4).run(_save_and_load, stage=stage, folder=tmp_path)) > 10


def _save_and_load(group: Group, stage: int, folder: Path) -> int:
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage, wire=REPLICAS))
    parity.run_steps(model, optimizer, range(2), rank=group.rank)
    report = zero_engine.save(folder / "one", model, optimizer, step=2)
    with zero_engine.Saver(folder / "two", model, optimizer) as saver:
        saver.save(step=2)
    expected = parity.run_steps(model, optimizer, range(2, 4), rank=group.rank)
    for name, wire in (("one", REPLICAS), ("two", REPLICAS), ("one", Wire())):
        other, stepper = parity.build_sharded(group, ZeroConfig(stage, wire=wire))
        found = zero_engine.load(folder / name, other, stepper)
        assert found.restores_rngs
        losses = parity.run_steps(other, stepper, range(2, 4), rank=group.rank)
        if wire.replicas:
            assert losses == expected
        else:  # adds in another order
            torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0)

    manifest = read_manifest(folder / "one" / report.path.name / MANIFEST)
    states = [state for of in manifest["optimizer"].values() for state in of.values()]
    tensors = [*manifest["params"].values(), *(state for state in states if "pieces" in state)]
    for tensor in tensors:
        pieces = sum(piece["stop"] - piece["start"] for piece in tensor["pieces"])
        assert pieces == math.prod(tensor["shape"])
    return len(tensors)


# ---- What goes wrong ----


@pytest.mark.ranks(4)
def test_a_circle_through_several_groups_is_found(group: Group) -> None:
    """A rank waits in its node, its neighbour for the other node: no group sees all of it."""
    group = Group.from_process_group(group.process_group, patience_s=0.5)
    model = parity.build(partial(parity.Chain, 2))
    config = ZeroConfig(2, wire=REPLICAS)
    _, optimizer = zero_engine.shard(model, parity.adamw(model), config, group=group)
    began = time.monotonic()
    with pytest.raises(DivergenceError, match=r"rank 0 waits for rank \d in .*rank 1 waits for"):
        for _ in range(2 if group.rank == 0 else 1):
            model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        zero_engine.clip_grad_norm_(model, 1.0)
        _go_on(model, optimizer)
    assert time.monotonic() - began < 15


def _go_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Go on as if nothing were wrong."""
    for _ in range(2):
        parity.finish_step(model(torch.ones(1, 64)).sum(), optimizer)


def test_stage_0_has_no_shards_to_replicate() -> None:
    """It would be data parallelism in two steps, which is another feature."""
    with pytest.raises(ConfigError, match="at stage 0 every rank is a replica; use stage 1"):
        ZeroConfig(0, wire=Wire(replicas=True))


@pytest.mark.ranks(4)
def test_other_levels_on_other_ranks_are_refused(group: Group) -> None:
    """Half of the ranks would wait for shards that nobody has."""
    levels = [Levels.of_nodes(group, size) for size in (1, 2)]
    wire = Wire(levels=levels[group.rank % 2], replicas=True)
    model = parity.build(partial(parity.Chain, 2))
    with pytest.raises((PartitionError, RuntimeError), match="ranks disagree"):
        zero_engine.shard(model, None, ZeroConfig(3, wire=wire), group=group)
