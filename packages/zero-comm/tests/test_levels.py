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

# ---- Which ranks ----


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
@pytest.mark.parametrize("how", ["of_nodes", "from_mesh", "torchrun"])
def test_rank_is_node_times_size_plus_local(ranks, how: str, ranks_per_node: int) -> None:
    """Layouts of a level are computed from this alone, without asking anyone."""
    for rank, said in enumerate(ranks(4).run(_places, how=how, size=ranks_per_node)):
        node, local = divmod(rank, ranks_per_node)
        mates = [node * ranks_per_node + i for i in range(ranks_per_node)]
        counterparts = list(range(local, 4, ranks_per_node))
        assert said == (rank, local, node, mates, counterparts)


def _places(group: Group, how: str, size: int) -> tuple[int, int, int, list[int], list[int]]:
    levels = _levels(group, how, size)
    mine = torch.tensor([group.rank])
    inside, across = (
        all_gather_flat(
            torch.empty(level.world_size, dtype=torch.int64),
            splits=[1] * level.world_size,
            group=level,
            shard=mine,
        ).wait()
        for level in (levels.inside, levels.across)
    )
    places = levels.whole.rank, levels.inside.rank, levels.across.rank
    return *places, inside.tolist(), across.tolist()


def _levels(group: Group, how: str, size: int) -> Levels:
    if how == "of_nodes":
        return Levels.of_nodes(group, size)
    if how == "from_mesh":
        shape = (group.world_size // size, size)
        return Levels.from_mesh(init_device_mesh("cpu", shape, mesh_dim_names=("nodes", "ranks")))
    environment = {"RANK": str(group.rank), "LOCAL_WORLD_SIZE": str(size)}
    with mock.patch.dict(os.environ, environment):
        return Levels.of_nodes(group)


def test_levels_of_a_part_of_the_job_ask_no_other_rank(ranks) -> None:
    """Two models on halves of one job must not wait for each other."""
    assert ranks(4).run(_levels_of_a_half) == [2, 2, None, None]


def _levels_of_a_half(group: Group) -> int | None:
    half = dist.new_group([0, 1])
    if group.rank > 1:
        return None
    return Levels.of_nodes(Group.from_process_group(half), 1).num_nodes


def test_groups_are_made_once(ranks) -> None:
    """Connections are dear: every model of a job uses the same."""
    assert all(ranks(2).run(_make_twice))


def _make_twice(group: Group) -> bool:
    first, second = Levels.of_nodes(group, 2), Levels.of_nodes(group, 2)
    return first.inside.process_group is second.inside.process_group


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


def _take_three_axes(_: Group) -> None:
    Levels.from_mesh(init_device_mesh("cpu", (2, 1, 2)))


@pytest.mark.parametrize(
    ("body", "error", "text"),
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
    ranks, body: Callable[[Group], None], error: type[Exception], text: str
) -> None:
    """Wrong levels would give right sums to the wrong ranks."""
    ranks(4).run(_expect, act=body.__name__, error=error, text=text)


def _expect(group: Group, act: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        globals()[act](group)


# ---- What travels, and where ----


@pytest.mark.parametrize("splits", [(3, 3, 3, 3), (5, 0, 1, 2)], ids=str)
@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_each_level_sends_what_its_formula_says(
    ranks, splits: Sequence[int], ranks_per_node: int
) -> None:
    """M(W-1)/W splits into M(L-1)/W inside and M(W-L)/W across, W ranks and L to a node."""
    counts = ranks(4).run(_one_of_each, splits=splits, size=ranks_per_node)

    for rank, traffic in enumerate(counts):
        node = range(rank - rank % ranks_per_node, rank - rank % ranks_per_node + ranks_per_node)
        mates, others = len(node) - 1, 4 - len(node)
        of_node, of_all = sum(splits[peer] for peer in node), sum(splits)
        inside = {
            "all_gather": mates * splits[rank],
            "reduce_scatter": of_node - splits[rank],
            "all_reduce": mates * splits[rank] + of_node - splits[rank],
            "broadcast": of_all * mates if rank == 3 else 0,
            "gather": splits[rank] if rank != 0 and 0 in node else 0,
        }
        across = {
            "all_gather": others * splits[rank],
            "reduce_scatter": of_all - of_node,
            "all_reduce": others * splits[rank] + of_all - of_node,
            "broadcast": of_all * others if rank == 3 else 0,
            "gather": splits[rank] if 0 not in node else 0,
        }
        assert traffic == {name: (inside[name], across[name]) for name in inside}

    even = len(set(splits)) == 1
    for traffic in counts if even else ():
        numel = sum(splits)
        assert traffic["all_gather"] == (
            numel * (ranks_per_node - 1) // 4,
            numel * (4 - ranks_per_node) // 4,
        )


def _one_of_each(group: Group, splits: Sequence[int], size: int) -> dict[str, tuple[int, int]]:
    whole, buffer = Levels.of_nodes(group, size).whole, torch.zeros(sum(splits))
    with record_traffic(group) as traffic:
        all_gather_flat(buffer, splits=splits, group=whole).wait()
        reduce_scatter_flat(buffer, splits=splits, group=whole).wait()
        all_reduce_flat(buffer, group=whole, splits=splits).wait()
        broadcast_flat(buffer, src=3, group=whole).wait()
        gather_flat(torch.zeros(splits[group.rank]), splits=splits, to=0, group=whole).wait()
    found = {}
    for name, operation in traffic.operations.items():
        inside, across = operation.inside, operation.across
        assert inside == Sent(inside.payload_numel, 4 * inside.payload_numel)
        assert across == Sent(across.payload_numel, 4 * across.payload_numel)
        assert operation.sent == inside + across
        found[name] = inside.payload_numel, across.payload_numel
    return found


def test_a_record_of_the_whole_sees_both_levels(ranks) -> None:
    """A user asks what a step sends, not what each of three groups does."""
    for inside, across in ranks(4).run(_use_both_levels):
        assert inside == Sent(12, 48)
        assert across == Sent(6, 12, 2)


def _use_both_levels(group: Group) -> tuple[Sent, Sent]:
    levels = Levels.of_nodes(group, 2)
    with record_traffic(group) as traffic:
        all_gather_flat(torch.zeros(24), splits=[12, 12], group=levels.inside).wait()
        half = torch.zeros(14, dtype=torch.bfloat16)
        all_gather_flat(half, splits=[7, 7], payload=[6, 6], group=levels.across).wait()
    assert group.recorders == []
    return traffic.inside(), traffic.across()


def test_traffic_is_told_apart_by_what_it_was_for(ranks) -> None:
    """Which unit costs the network so much is the question that follows the total."""
    for found in ranks(2).run(_use_purposes):
        assert found == {"blocks.0": 3, "blocks.1": 6, "": 1}
    assert _use_purposes(Group.solo()) == {"blocks.0": 0, "blocks.1": 0, "": 0}


def _use_purposes(group: Group) -> dict[str, int]:
    group.explain({7: Purpose("gathering", subject="blocks.0"), 8: Purpose("it", "", "blocks.1")})
    size = group.world_size
    with record_traffic(group) as traffic:
        for tag, numel in ((7, 1), (7, 2), (8, 6), (9, 1)):
            buffer = torch.zeros(numel * size)
            all_gather_flat(buffer, splits=[numel] * size, group=group, tag=tag).wait()
    return {
        subject: sum(operation.payload_numel for operation in operations.values())
        for subject, operations in traffic.subjects.items()
    }


# ---- How it travels ----


def test_ranks_of_different_nodes_exchange_messages(ranks) -> None:
    """Levels are believed: what is said to cross a network must cross it in a trial on one host."""
    for said in ranks(4).run(_transports, size=2):
        assert said == (True, False, False, True)
    for said in ranks(2).run(_transports, size=2):
        assert said == (True, True, False, False)


def _transports(group: Group, size: int) -> tuple[bool, bool, bool, bool]:
    levels = Levels.of_nodes(group, size)
    reads = [level.peers is not None for level in (levels.inside, levels.whole, levels.across)]
    exposure = expose([torch.zeros(2)], group=levels.whole)
    return reads[0], reads[1], reads[2], exposure is None


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_sums_of_both_levels_are_the_sum_of_the_whole(ranks, ranks_per_node: int) -> None:
    """Reduce inside, then across, is how replicas of shards agree."""
    expected = torch.arange(8) * 4 + 6.0  # of rank + element
    for mine in ranks(4).run(_sum_by_levels, size=ranks_per_node):
        start, values = mine
        torch.testing.assert_close(values, expected[start : start + len(values)], rtol=0, atol=0)


def _sum_by_levels(group: Group, size: int) -> tuple[int, torch.Tensor]:
    levels = Levels.of_nodes(group, size)
    numel = 8 // size
    shard = reduce_scatter_flat(
        torch.arange(8) + float(group.rank),
        splits=[numel] * size,
        group=levels.inside,
        op=Reduction.SUM,
    ).wait()
    return levels.inside.rank * numel, all_reduce_flat(
        shard, group=levels.across, op=Reduction.SUM
    ).wait()
