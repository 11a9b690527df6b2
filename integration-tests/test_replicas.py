"""Replicas (MiCS, hybrid sharding): shards of a node, and gradients averaged over the nodes.

Four ranks are two nodes of two.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import parity
import pytest
import residences
import torch
import torch.distributed as dist
import zero_engine
from parity import Recipe, ZeroConfig
from torch import Tensor, nn
from zero_comm import DivergenceError, Group, Levels, all_gather_json, record_traffic
from zero_comm.testing import assert_close, equal
from zero_engine import ConfigError, Offload, Precision, Wire
from zero_engine.testing import MANIFEST, unsealed
from zero_partition import PartitionError

pytestmark = pytest.mark.drawn(2)

BLOCK = 64 * 64
NUM_BLOCKS = 4
PSI = NUM_BLOCKS * BLOCK  # parameters of parity.Chain
REPLICAS = Wire(levels=2, replicas=True)
STAGES = (1, 2, 3)

# ---- The same numbers ----


@pytest.mark.parametrize(
    ("ranks_per_node", "reduces_once"), [(1, True), (2, True), (2, False), (4, True)]
)
@pytest.mark.ranks(4)
def test_training_is_a_mean_of_means_in_rank_order(
    group: Group, ranks_per_node: int, reduces_once: bool
) -> None:
    """One process that adds as we document gets the same bits, and DDP the same weights.

    Data parallelism and plain sharding are the ends of one scale.
    """
    wire = Wire(levels=ranks_per_node, replicas=True)
    max_norm = 0.05 if reduces_once else None
    recipe = Recipe(num_micro_batches=2, reduces_once=reduces_once, max_norm=max_norm)
    alone = parity.train_alone_by_stage(group, recipe, ranks_per_node=ranks_per_node)
    for stage in STAGES if ranks_per_node == 2 else (3,):
        found = parity.train_sharded(group, recipe, ZeroConfig(stage, wire=wire))
        parity.assert_same(found, alone[stage], rank=group.rank, what=f"stage {stage}")

    recipe = Recipe(num_micro_batches=2, make=parity.tiny_float32, optimizer="sgd")
    expected = parity.train_ddp(group, recipe).weights
    found = parity.train_sharded(group, recipe, ZeroConfig(3, wire=wire)).weights
    for name, value in found.items():
        assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(4)
def test_replicas_stay_equal_to_the_last_bit(group: Group, stage: int) -> None:
    """Nothing would ever bring them together again."""
    model = parity.build(seed=group.rank)  # only rank 0's initial values count
    optimizer = parity.OPTIMIZERS["adamw"](parity.param_groups(model))
    zero_engine.shard(model, optimizer, ZeroConfig(stage, wire=REPLICAS), group=group)
    parity.run_steps(model, optimizer, range(3), rank=group.rank)
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, residences.parts_of(model, optimizer))

    residences.assert_same(everyone[group.rank], everyone[(group.rank + 2) % 4], "replicas")


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
@pytest.mark.ranks(4)
def test_what_one_rank_of_one_replica_has_counts_on_all(group: Group, stage: int) -> None:
    """A gradient, an overflow, a norm: a replica that does not know of it would part."""
    model = parity.build(Branching)
    optimizer = parity.adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(stage, wire=REPLICAS), group=group)
    x = torch.full((1, 4), 1.0 + group.rank)
    model(x, group.rank == 3).sum().backward()
    assert all(param.grad is not None for param in optimizer.param_groups[0]["params"])
    norms = all_gather_json(zero_engine.clip_grad_norm_(model, 1e9).item(), group=group)
    assert norms == [norms[0]] * 4
    optimizer.step()
    optimizer.zero_grad()
    (model(x, False).sum() * (float("inf") if group.rank == 2 else 1.0)).backward()
    assert not zero_engine.unscale_and_clip_(model).is_finite


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.ranks(4)
def test_other_choices_change_no_bit(group: Group, stage: int, tmp_path: Path) -> None:
    """By powers of two a sum is exact, so that divisions may come in any place."""
    on_disk = Offload(optimizer="disk", params="disk" if stage == 3 else "device", path=tmp_path)
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "cut between rows": {"cut": "row"},
        "divided first": {"precision": Precision(masters=None, predivide_factor=4.0)},
        "summed": {"precision": Precision(masters=None, reduces_mean=False)},
        "elsewhere": {"offload": on_disk},
    }
    if stage == 3:
        options |= {"small": {"small_param_numel": 13}, "no window": {"window": 1}}
    curves = {}
    for how, of in options.items():
        rate = 0.0625 if how == "summed" else 0.25
        recipe = Recipe(
            make=parity.tiny_float32,
            num_steps=2,
            optimizer=lambda model, rate=rate: torch.optim.SGD(
                [param for param in model.parameters() if param.requires_grad], lr=rate
            ),
        )
        curves[how] = parity.train_sharded(group, recipe, ZeroConfig(stage, wire=REPLICAS, **of))
        parity.assert_same(curves[how], curves["plain"], rank=group.rank, what=how)


# ---- What travels ----


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(4)
def test_only_shards_of_gradients_cross_to_other_nodes(group: Group, stage: int) -> None:
    """2M(W-L)/(W L) per rank: arXiv 2304.11277 rounds up to 2M(W-1)/(W L)."""
    config = ZeroConfig(stage, window=1, wire=REPLICAS)
    model, optimizer = parity.shard_chain(group, config)
    for _ in range(3):
        with record_traffic(group) as traffic:
            parity.step_chain(model, optimizer)
    sent = {
        name: (of.inside.payload_numel, of.across.payload_numel, of.padding_bytes)
        for name, of in traffic.operations.items()
        if name != "agree"
    }

    world_size, size = 4, 2
    gathered = PSI // 2 if stage < 3 else (2 * NUM_BLOCKS - 1) * BLOCK // 2
    assert sent == {
        "all_reduce": (0, 2 * PSI * (world_size - size) // (world_size * size), 0),
        "reduce_scatter": (PSI // 2, 0, 0),
        "all_gather": (gathered, 0, 0),
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
        assert equal(zero_engine.full_param(param), expected)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.ranks(4)
def test_one_replica_is_saved_and_loads_anywhere(group: Group, stage: int, tmp_path: Path) -> None:
    """A checkpoint holds every value once, however many ranks have it."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage, wire=REPLICAS))
    parity.run_steps(model, optimizer, range(2), rank=group.rank)
    report = zero_engine.save(tmp_path / "one", model, optimizer, step=2)
    with zero_engine.Saver(tmp_path / "two", model, optimizer) as saver:
        saver.save(step=2)
    expected = parity.run_steps(model, optimizer, range(2, 4), rank=group.rank)
    for name, wire in (("one", REPLICAS), ("two", REPLICAS), ("one", Wire())):
        other, stepper = parity.build_sharded(group, ZeroConfig(stage, wire=wire))
        assert zero_engine.load(tmp_path / name, other, stepper).restores_rngs
        losses = parity.run_steps(other, stepper, range(2, 4), rank=group.rank)
        if wire.replicas:
            assert losses == expected
        else:  # adds in another order
            assert_close(losses, expected, rtol=1e-4, atol=0)

    manifest = unsealed(tmp_path / "one" / report.path.name / MANIFEST)
    states = [state for of in manifest["optimizer"].values() for state in of.values()]
    for tensor in (*manifest["params"].values(), *(each for each in states if "pieces" in each)):
        pieces = sum(piece["stop"] - piece["start"] for piece in tensor["pieces"])
        assert pieces == math.prod(tensor["shape"])


# ---- What goes wrong ----


@pytest.mark.ranks(4)
def test_a_circle_through_several_groups_is_found(group: Group) -> None:
    """A rank waits in its node, its neighbour for the other node: no group sees all of it."""
    group = Group.from_process_group(group.process_group, patience_s=0.5)
    model, optimizer = parity.shard_chain(group, ZeroConfig(2, wire=REPLICAS), 2)
    began = time.monotonic()
    with pytest.raises(
        DivergenceError, match=r"rank \d (waits for rank \d )?in .*\n  rank \d (waits|in)"
    ):
        for _ in range(2 if group.rank == 0 else 1):
            model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        zero_engine.clip_grad_norm_(model, 1.0)
        for _ in range(2):  # as if nothing were wrong
            parity.step_chain(model, optimizer)
    assert time.monotonic() - began < 15


def test_stage_0_has_no_shards_to_replicate() -> None:
    """It would be data parallelism in two steps, which is another feature."""
    with pytest.raises(ConfigError, match="at stage 0 every rank is a replica; use stage 1"):
        ZeroConfig(0, wire=Wire(replicas=True))


@pytest.mark.ranks(4)
def test_other_levels_on_other_ranks_are_refused(group: Group) -> None:
    """Half of the ranks would wait for shards that nobody has."""
    levels = [Levels.of_nodes(group, size) for size in (1, 2)]
    wire = Wire(levels=levels[group.rank % 2], replicas=True)
    with pytest.raises((PartitionError, RuntimeError), match="ranks disagree"):
        parity.shard_chain(group, ZeroConfig(3, wire=wire), 2)
