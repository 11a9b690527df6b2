"""Nodes and what goes between them: groups, order, and bytes of each level."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from zero_comm import (
    AgreementError,
    Group,
    GroupMismatchError,
    Levels,
    Purpose,
    Reduction,
    Sent,
    all_gather_flat,
    all_reduce_flat,
    broadcast_flat,
    expose,
    gather_flat,
    record_traffic,
    reduce_scatter_flat,
)
from zero_comm.testing import equal

each_node_size = pytest.mark.parametrize("size", [1, 2, 4])

# ---- Which ranks ----


@pytest.mark.ranks(4)
@each_node_size
@pytest.mark.parametrize("how", ["of_nodes", "from_mesh", "torchrun"])
def test_rank_is_node_times_size_plus_local(group: Group, how: str, size: int) -> None:
    """Layouts of a level are computed from this alone, without asking anyone."""
    levels, (node, local) = _levels(group, how, size), divmod(group.rank, size)
    mates, counterparts = range(node * size, (node + 1) * size), range(local, 4, size)

    assert levels.whole.rank == group.rank
    for level, rank, members in (
        (levels.inside, local, mates),
        (levels.across, node, counterparts),
    ):
        out = torch.empty(level.world_size, dtype=torch.int64)
        mine = torch.tensor([group.rank])
        all_gather_flat(out, splits=[1] * len(out), group=level, shard=mine).wait()
        assert (level.rank, out.tolist()) == (rank, list(members))


def _levels(group: Group, how: str, size: int) -> Levels:
    if how == "of_nodes":
        return Levels.of_nodes(group, size)
    if how == "from_mesh":
        shape = (group.world_size // size, size)
        names = ("nodes", "ranks")
        mesh = init_device_mesh(group.device.type, shape, mesh_dim_names=names)
        return Levels.from_mesh(mesh)
    environment = {"RANK": str(group.rank), "LOCAL_WORLD_SIZE": str(size)}
    with mock.patch.dict(os.environ, environment):
        return Levels.of_nodes(group)


@pytest.mark.ranks(4)
def test_levels_of_a_part_of_the_job_ask_no_other_rank(group: Group) -> None:
    """Two models on halves of one job must not wait for each other."""
    half = dist.new_group([0, 1])
    if group.rank < 2:
        assert Levels.of_nodes(Group.from_process_group(half), 1).num_nodes == 2


def test_groups_are_made_once(group: Group) -> None:
    """Connections are dear: every model of a job uses the same."""
    first, second = Levels.of_nodes(group, 2), Levels.of_nodes(group, 2)
    assert first.inside.process_group is second.inside.process_group


def test_one_rank_is_a_node_of_its_own() -> None:
    """What runs on one rank runs without levels."""
    levels = Levels.of_nodes(Group.solo())

    assert (levels.inside.world_size, levels.num_nodes) == (1, 1)


def _give_3(group: Group) -> None:
    Levels.of_nodes(group, 3)


def _give_different(group: Group) -> None:
    Levels.of_nodes(group, 1 + group.rank % 2)


def _give_nothing(group: Group) -> None:
    hidden = {key: value for key, value in os.environ.items() if key != "LOCAL_WORLD_SIZE"}
    with mock.patch.dict(os.environ, hidden, clear=True):
        Levels.of_nodes(group)


def _alternate(group: Group) -> None:
    environment = {"RANK": str(group.rank % 2), "LOCAL_WORLD_SIZE": "1"}
    with mock.patch.dict(os.environ, environment):
        Levels.of_nodes(group)


def _be_uneven(group: Group) -> None:
    environment = {"RANK": str(int(group.rank == 3)), "LOCAL_WORLD_SIZE": "1"}
    with mock.patch.dict(os.environ, environment):
        Levels.of_nodes(group)


def _swap(group: Group) -> None:
    levels = Levels.of_nodes(group, 2)
    Levels.of(group, levels.across, levels.inside)


def _take_three_axes(group: Group) -> None:
    Levels.from_mesh(init_device_mesh(group.device.type, (2, 1, 2)))


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("act", "error", "text"),
    [
        (_give_3, GroupMismatchError, "divide the 4 ranks of the group, got 3"),
        (_give_different, AgreementError, "ranks of a node: rank 0 has 1, rank 1 has 2"),
        (_give_nothing, GroupMismatchError, "LOCAL_WORLD_SIZE is not set.*torchrun"),
        (_alternate, GroupMismatchError, r"got ranks on nodes \[0, 1, 0, 1\]"),
        (_be_uneven, GroupMismatchError, r"got ranks on nodes \[0, 0, 0, 1\]"),
        (_swap, GroupMismatchError, r"'inside' to be the ranks.*got \[(0, 2|1, 3)\]"),
        (_take_three_axes, GroupMismatchError, "a mesh of two axes"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_no_grid_of_ranks_is_refused_everywhere(
    group: Group, act: Callable[[Group], None], error: type[Exception], text: str
) -> None:
    """Wrong levels would give right sums to the wrong ranks."""
    with pytest.raises(error, match=text):
        act(group)


# ---- What travels, and where ----


@pytest.mark.ranks(4)
@pytest.mark.parametrize("splits", [(3, 3, 3, 3), (5, 0, 1, 2)], ids=str)
@each_node_size
def test_each_level_sends_what_its_formula_says(
    group: Group, splits: Sequence[int], size: int
) -> None:
    """M(W-1)/W splits into M(L-1)/W inside and M(W-L)/W across, W ranks and L to a node."""
    whole, buffer, rank = Levels.of_nodes(group, size).whole, torch.zeros(sum(splits)), group.rank
    with record_traffic(group) as traffic:
        all_gather_flat(buffer, splits=splits, group=whole).wait()
        reduce_scatter_flat(buffer, splits=splits, group=whole).wait()
        all_reduce_flat(buffer, group=whole, splits=splits).wait()
        broadcast_flat(buffer, src=3, group=whole).wait()
        gather_flat(torch.zeros(splits[rank]), splits=splits, to=0, group=whole).wait()

    node = range(rank - rank % size, rank - rank % size + size)
    mates, others = size - 1, 4 - size
    of_node, of_all, own = sum(splits[peer] for peer in node), sum(splits), splits[rank]
    expected = {
        "all_gather": (mates * own, others * own),
        "reduce_scatter": (of_node - own, of_all - of_node),
        "all_reduce": (mates * own + of_node - own, others * own + of_all - of_node),
        "broadcast": (of_all * mates, of_all * others) if rank == 3 else (0, 0),
        "gather": (own if rank != 0 and 0 in node else 0, own if 0 not in node else 0),
    }
    assert traffic.operations.keys() == expected.keys()
    for name, (inside, across) in expected.items():
        operation = traffic.operations[name]
        assert operation.inside == Sent(inside, 4 * inside), name
        assert operation.across == Sent(across, 4 * across), name
        assert operation.sent == operation.inside + operation.across


@pytest.mark.ranks(4)
def test_a_record_of_the_whole_sees_both_levels(group: Group) -> None:
    """A user asks what a step sends, not what each of three groups does."""
    levels = Levels.of_nodes(group, 2)
    with record_traffic(group) as traffic:
        all_gather_flat(torch.zeros(24), splits=[12, 12], group=levels.inside).wait()
        half = torch.zeros(14, dtype=torch.bfloat16)
        all_gather_flat(half, splits=[7, 7], payload=[6, 6], group=levels.across).wait()
    assert group.recorders == []
    assert traffic.inside() == Sent(12, 48)
    assert traffic.across() == Sent(6, 12, 2)


@pytest.mark.ranks(1, 2)
def test_traffic_is_told_apart_by_what_it_was_for(group: Group) -> None:
    """Which unit costs the network so much is the question that follows the total."""
    group.explain({7: Purpose("gathering", subject="blocks.0"), 8: Purpose("it", "", "blocks.1")})
    size = group.world_size
    with record_traffic(group) as traffic:
        for tag, numel in ((7, 1), (7, 2), (8, 6), (9, 1)):
            buffer = torch.zeros(numel * size)
            all_gather_flat(buffer, splits=[numel] * size, group=group, tag=tag).wait()
    found = {
        subject: sum(operation.payload_numel for operation in operations.values())
        for subject, operations in traffic.subjects.items()
    }
    sent = size - 1
    assert found == {"blocks.0": 3 * sent, "blocks.1": 6 * sent, "": sent}


# ---- How it travels ----


@pytest.mark.ranks(2, 4)
@pytest.mark.cpu_only("ranks of one node read each other's memory on CPUs only")
def test_ranks_of_different_nodes_exchange_messages(group: Group) -> None:
    """Levels are believed: what is said to cross a network must cross it in a trial on one host."""
    levels, is_one_node = Levels.of_nodes(group, 2), group.world_size == 2
    assert levels.inside.exchanges.reads_peers
    assert not levels.across.exchanges.reads_peers
    assert levels.whole.exchanges.reads_peers == is_one_node
    assert (expose([torch.zeros(2)], group=levels.whole) is not None) == is_one_node


@pytest.mark.ranks(4)
@each_node_size
def test_sums_of_both_levels_are_the_sum_of_the_whole(group: Group, size: int) -> None:
    """Reduce inside, then across, is how replicas of shards agree."""
    levels, values = Levels.of_nodes(group, size), torch.arange(8) + float(group.rank)
    how = {"splits": [8 // size] * size, "group": levels.inside, "op": Reduction.SUM}
    shard = reduce_scatter_flat(values, **how).wait()
    all_reduce_flat(shard, group=levels.across, op=Reduction.SUM).wait()

    expected = torch.arange(8) * 4 + 6.0  # of rank + element
    assert equal(shard, expected.chunk(size)[levels.inside.rank])
