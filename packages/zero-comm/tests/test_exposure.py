"""Shards that peers read when they like: what they see, and when they wait."""

from __future__ import annotations

import threading
import time
from multiprocessing import util
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transports import READS, over
from zero_comm import (
    AgreementError,
    CommError,
    Exposure,
    Group,
    GroupMismatchError,
    expose,
    record_traffic,
)
from zero_comm.shared_host.shards import _ALIVE, HAS_LEFT, SharedShardLifetime
from zero_comm.testing import equal, lingering

pytestmark = pytest.mark.cpu_only("ranks read each other's host memory")

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


@pytest.mark.ranks(3)
def test_one_rank_reads_all_shards_while_the_others_do_nothing(group: Group) -> None:
    """A rank may need what its peers skip."""
    exposure, shard = _expose(group)
    if group.rank == 1:
        assert equal(_gather(exposure, shard), _whole())


@pytest.mark.ranks(3)
def test_a_part_of_each_shard_can_be_read(group: Group) -> None:
    """One parameter lies somewhere in the shards of several ranks."""
    exposure, shard = _expose(group)
    out = torch.zeros(3)
    exposure.gather(shard, out, splits=(2, 0, 1), starts=(1, 0, 3))
    assert out.tolist() == [1.0, 2.0, 23.0]


@pytest.mark.ranks(3)
def test_nobody_sees_a_shard_half_written(group: Group) -> None:
    """A step begins when all have read, and is read when it has ended, on every rank."""
    exposure, shard = _expose(group)
    for version in range(20):
        if (version + group.rank) % 3 == 0:
            time.sleep(0.002)  # another rank is late each time
        assert equal(_gather(exposure, shard), _whole(version)), version
        exposure.begin_write()
        for i in range(shard.numel()):  # slowly
            shard[i] += 100
        exposure.end_write()


def test_a_rank_that_does_not_write_is_an_error_in_time(group: Group) -> None:
    """optimizer.step() on one rank only would otherwise wait for ever."""
    shard = torch.ones(2)
    exposure = expose([shard], group=group)
    if group.rank == 0:
        with pytest.raises(CommError, match=r"rank 1 did not reach it within 0\.2 s.*step\(\)"):
            exposure.begin_write(timeout_s=0.2)
    _meet(group)


def test_shards_outlive_their_owner_s_interest(group: Group) -> None:
    """A rank that is done with its model must not pull it from under the others."""
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
        with pytest.raises(CommError, match=r"rank 0 has deleted its model .*as many steps on ev"):
            exposure.gather(shard, out, splits=(1000, 1000))
    else:
        assert len(noise) == 50
    _meet(group)


@pytest.mark.ranks(3)
def test_what_is_read_is_counted_as_an_all_gather(group: Group) -> None:
    """The traffic of a step is the formula's, however the bytes travel."""
    exposure, shard = _expose(group)
    with record_traffic(group) as traffic:
        _gather(exposure, shard)
    assert traffic.payload_numel("all_gather") == 2 * SPLITS[group.rank]


# ---- Bad input ----


@pytest.mark.ranks(3)
def test_what_would_read_or_write_other_memory_is_refused(group: Group) -> None:
    """The kernel copies to and from addresses: it knows no strides, dtypes or ends of tensors."""
    exposure, shard = _expose(group)
    for error, choose in (
        (r"expected one of the 1 tensors that were exposed", {"shard": shard.clone()}),
        (r"1-D, dense and contiguous with 7 .*strides \(2,\)", {"out": torch.zeros(14)[::2]}),
        (r"contiguous with 7 elements, got .*shape \(6,\)", {"out": torch.zeros(6)}),
        (r"contiguous with 7 elements, got .*shape \(1, 7\)", {"out": torch.zeros(1, 7)}),
        (r"out to be torch\.float32.*got torch\.float64", {"out": torch.zeros(7).double()}),
        (r"out on cpu.*got meta", {"out": torch.zeros(7, device="meta")}),
        (r"one split and one start per rank, 3 each, got 2 and 2", {"splits": (3, 4)}),
        (r"3 each, got 3 and 2", {"starts": (0, 0)}),
        (r"4 elements of shard 0 of rank 2, got 5 elements from 0 on", {"splits": (2, 0, 5)}),
        (r"4 elements of shard 0 of rank 2, got 4 elements from 1 on", {"starts": (0, 0, 1)}),
        (r"3 elements of shard 0 of rank 0, got 3 elements from -1 on", {"starts": (-1, 0, 0)}),
    ):
        given = {"shard": shard, "out": torch.zeros(7), "splits": SPLITS} | choose
        with pytest.raises(GroupMismatchError, match=error):
            exposure.gather(**given)
    assert equal(_gather(exposure, shard), _whole())
    _meet(group)


@pytest.mark.ranks(3)
def test_shards_that_have_moved_are_read_where_they_lie_now(group: Group) -> None:
    """Memory that was given back between phases comes back elsewhere."""
    exposure, shard = _expose(group)
    with pytest.raises(CommError, match="begin_write"):
        exposure.move()
    for version in (1, 2):
        exposure.begin_write()
        assert exposure.is_writing
        former = shard.data
        shard.data = _shard(group.rank, version)  # the same object, other memory
        former.fill_(-7)
        exposure.move()
        exposure.end_write()

        assert not exposure.is_writing
        assert equal(_gather(exposure, shard), _whole(version))
    _meet(group)


def test_only_shards_that_lie_in_one_piece_are_exposed(group: Group) -> None:
    """Peers read from an address on; of every other element they would take its neighbour too."""
    for wrong in (torch.zeros(4)[::2], torch.zeros(2, 2), torch.zeros(2, device="meta")):
        with pytest.raises(GroupMismatchError, match="expected shard 1"):
            expose([torch.zeros(2), wrong], group=group)


def test_ranks_that_expose_different_shards_are_told(group: Group) -> None:
    """The index of a shard is all that ranks tell each other of it."""
    shards = [torch.zeros(2), torch.zeros(2)]
    with pytest.raises(AgreementError, match="exposed shards"):
        expose(shards[: 1 + group.rank], group=group)
    with pytest.raises(AgreementError, match="exposed shards"):
        expose([torch.zeros(2).to([torch.int32, torch.int64][group.rank])], group=group)


def _meet(group: Group) -> None:
    torch.distributed.barrier(group.process_group)


# ---- A process that ends ----


LINGER_S = 0.4
ERRORS = {
    "": None,
    "an error": ZeroDivisionError(),
    "exit with an error": SystemExit(1),
    "Ctrl-C": KeyboardInterrupt(),
    "exit": SystemExit(0),
}


@pytest.mark.parametrize("by", ERRORS)
def test_a_process_lingers_once_and_not_after_an_error(ranks, by: str) -> None:
    """A job whose last rank hangs should be over in a minute, not in several.

    Of an error torch.multiprocessing.spawn hears only when the process has ended.
    """
    took_s, _ = ranks(2).run(_end, by=by, peer_leaves=False)

    if by in ("", "exit"):  # sys.exit() is an exception too
        assert LINGER_S <= took_s < 2 * LINGER_S
    else:
        assert took_s < LINGER_S


def test_a_process_whose_peers_have_left_ends_at_once(ranks) -> None:
    """The usual end of a script."""
    took_s, _ = ranks(2).run(_end, by="", peer_leaves=True)

    assert took_s < LINGER_S


def _end(group: Group, by: str, peer_leaves: bool) -> float:
    """How long it takes rank 0 to end, of which its peer knows when it has."""
    group, took_s = over(group, READS), 0.0
    with mock.patch.dict(util._finalizer_registry, clear=True):  # as in a process just forked
        exposures = [_expose_alone(group) for _ in range(3)]
        if group.rank == 1 and peer_leaves:
            exposures.clear()
        dist.barrier()  # which reads no peer's memory
        if group.rank == 0:
            took_s = _run_finalizers(ERRORS[by])
        dist.barrier()
    return took_s


def _expose_alone(group: Group) -> Exposure:
    exposure = expose([torch.ones(2)], group=group)
    assert exposure is not None
    return exposure


def _run_finalizers(error: BaseException | None) -> float:
    """What the end of a process of multiprocessing runs, while an error is being handled."""
    took_s = 0.0
    try:
        try:
            if error is not None:
                raise error
        finally:
            started = time.monotonic()
            with lingering(LINGER_S):
                util._run_finalizers(0)
            took_s = time.monotonic() - started
    except BaseException as raised:
        assert raised is error
    return took_s


def test_the_end_of_a_process_and_its_thread_may_ask_for_the_same_peer() -> None:
    """Either took a peer off the list that the other had just taken off: a bare KeyError."""
    peers = mock.Mock()
    remains = SharedShardLifetime((), mock.Mock(), peers, {1: 0})
    found: list[bool] = []
    other = threading.Thread(target=lambda: found.append(remains.are_needed()))

    def read_word(rank: int, address: int) -> int:
        if not other.ident:  # while the first looks, the second does
            other.start()
            other.join(timeout=0.2)
        return HAS_LEFT

    peers.read_word = read_word
    try:
        found.append(remains.are_needed())
        other.join()
    finally:
        _ALIVE.remove(remains)

    assert found == [False, False]
