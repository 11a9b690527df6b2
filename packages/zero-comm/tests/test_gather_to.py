"""Every rank's values on one rank alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transports import each_way, over, worlds
from zero_comm import Group, GroupMismatchError, gather_flat, record_traffic

SPLITS = [(0,), (7,), (4, 4), (0, 3), (3, 0), (0, 0), (5, 0, 2), (1, 5, 0, 2)]


def _values(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 + rank))


@pytest.mark.parametrize(("splits", "transport"), each_way(SPLITS), ids=str)
def test_one_rank_has_all_values_in_rank_order_and_no_other_any(
    ranks, splits: Sequence[int], transport: str
) -> None:
    """State that is put together on one rank must not cost the others its memory."""
    expected = torch.cat([_values(rank, numel) for rank, numel in enumerate(splits)])

    for rank, results in enumerate(
        ranks(len(splits)).run(_gather_to_each, splits=splits, transport=transport)
    ):
        for to, (given, allocated) in enumerate(results):
            if to == rank:
                assert torch.equal(given, expected)
                assert torch.equal(allocated, expected)
            else:
                assert given is None
                assert allocated is None


def _gather_to_each(
    group: Group, splits: Sequence[int], transport: str
) -> list[tuple[Tensor | None, Tensor | None]]:
    group = over(group, transport)
    shard = _values(group.rank, splits[group.rank])
    results = []
    for to in range(group.world_size):
        out = torch.full((sum(splits),), 77.0) if to == group.rank else None
        given = gather_flat(shard, splits=splits, to=to, group=group, out=out).wait()
        results.append((given, gather_flat(shard, splits=splits, to=to, group=group).wait()))
    return results


@pytest.mark.parametrize(("world_size", "transport"), worlds(2))
def test_only_senders_count_what_travels(ranks, world_size: int, transport: str) -> None:
    """Bytes on the wire are what a user plans with."""
    first, second = ranks(world_size).run(_count, transport=transport)

    assert (first, second) == (0, 5 * 4)


def _count(group: Group, transport: str) -> int:
    group = over(group, transport)
    with record_traffic(group) as traffic:
        gather_flat(torch.ones(5), splits=(5, 5), to=0, group=group).wait()
    return traffic.operations["gather"].payload_bytes


def test_what_does_not_fit_is_refused() -> None:
    """A target beyond the group would leave everyone waiting."""
    group = Group.solo()

    with pytest.raises(GroupMismatchError, match=r"expected `to` in 0\.\.0"):
        gather_flat(torch.ones(2), splits=(2,), to=1, group=group)
    with pytest.raises(GroupMismatchError, match="expected shard to be 1-D"):
        gather_flat(torch.ones(3), splits=(2,), to=0, group=group)
    with pytest.raises(GroupMismatchError, match="expected out to be 1-D"):
        gather_flat(torch.ones(2), splits=(2,), to=0, group=group, out=torch.ones(3))
