"""Shards that peers read when they like: what they see, and when they wait."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor
from zero_comm import CommError, Exposure, Group, expose, record_traffic

SPLITS = (3, 0, 4)


def _shard(rank: int, version: int = 0) -> Tensor:
    return torch.arange(SPLITS[rank], dtype=torch.float32) + 10 * rank + 100 * version


def _whole(version: int = 0) -> Tensor:
    return torch.cat([_shard(rank, version) for rank in range(len(SPLITS))])


def _expose(group: Group) -> tuple[Exposure, Tensor]:
    shard = _shard(group.rank)
    exposure = expose([shard], group=group)
    assert exposure is not None
    return exposure, shard


def _gather(exposure: Exposure, shard: Tensor, **options: float) -> Tensor:
    out = torch.full((sum(SPLITS),), -1.0)
    exposure.gather(shard, out, splits=SPLITS, **options)
    return out


def test_one_rank_reads_all_shards_while_the_others_do_nothing(ranks) -> None:
    """A rank may need what its peers skip."""
    _, got, _ = ranks(3).run(_read_alone)

    assert torch.equal(got, _whole())


def _read_alone(group: Group) -> Tensor | None:
    exposure, shard = _expose(group)
    return _gather(exposure, shard) if group.rank == 1 else None


def test_a_part_of_each_shard_can_be_read(ranks) -> None:
    """One parameter lies somewhere in the shards of several ranks."""
    for got in ranks(3).run(_read_parts):
        assert torch.equal(got, torch.tensor([1.0, 2.0, 23.0]))


def _read_parts(group: Group) -> Tensor:
    exposure, shard = _expose(group)
    out = torch.zeros(3)
    exposure.gather(shard, out, splits=(2, 0, 1), starts=(1, 0, 3))
    return out


def test_nobody_sees_a_shard_half_written(ranks) -> None:
    """A step begins when all have read, and is read when it has ended, on every rank."""
    for versions in ranks(3).run(_write_and_read):
        for version, got in enumerate(versions):
            assert torch.equal(got, _whole(version)), version


def _write_and_read(group: Group) -> list[Tensor]:
    exposure, shard = _expose(group)
    seen = []
    for version in range(20):
        if (version + group.rank) % 3 == 0:
            time.sleep(0.002)  # another rank is late each time
        seen.append(_gather(exposure, shard))
        exposure.begin_write()
        for i in range(shard.numel()):  # slowly
            shard[i] += 100
        exposure.end_write()
    return seen


def test_a_rank_that_does_not_write_is_an_error_in_time(ranks) -> None:
    """optimizer.step() on one rank only would otherwise wait for ever."""
    ranks(2).run(_write_alone)


def _write_alone(group: Group) -> None:
    shard = torch.ones(2)
    exposure = expose([shard], group=group)
    if group.rank == 0:
        with pytest.raises(CommError, match=r"rank 1 did not reach it within 0\.2 s.*step\(\)"):
            exposure.begin_write(timeout_s=0.2)
    _meet(group)


def test_shards_outlive_their_owner_s_interest(ranks) -> None:
    """A rank that is done with its model must not pull it from under the others."""
    ranks(2).run(_leave_early)


def _leave_early(group: Group) -> None:
    shard = torch.full((1000,), float(group.rank))
    exposure = expose([shard], group=group)
    _meet(group)
    if group.rank == 0:
        del exposure, shard
        noise = [torch.full((1000,), 9.0) for _ in range(50)]  # would take the freed memory
    _meet(group)
    if group.rank == 1:
        out = torch.empty(2000)
        exposure.gather(shard, out, splits=(1000, 1000))
        assert out[:1000].eq(0).all()
        exposure.begin_write()
        exposure.end_write()
        with pytest.raises(CommError, match=r"rank 0 has ended or has deleted its model"):
            exposure.gather(shard, out, splits=(1000, 1000))
    else:
        assert len(noise) == 50
    _meet(group)


def test_what_is_read_is_counted_as_an_all_gather(ranks) -> None:
    """The traffic of a step is the formula's, however the bytes travel."""
    assert ranks(3).run(_count) == [3 * 2, 0, 4 * 2]


def _count(group: Group) -> int:
    exposure, shard = _expose(group)
    with record_traffic(group) as traffic:
        _gather(exposure, shard)
    return traffic.payload_numel("all_gather")


def _meet(group: Group) -> None:
    torch.distributed.barrier(group.process_group)
