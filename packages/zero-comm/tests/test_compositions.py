"""Collectives on one flat buffer, as it is or encoded, against one process in rank order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate, pairwise, product
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transports import MESSAGES, READS, each_way, each_world, over
from zero_comm import (
    BACKENDS,
    CommError,
    Group,
    GroupMismatchError,
    Reduction,
    all_gather_flat,
    all_reduce_coalesced,
    all_reduce_flat,
    broadcast_flat,
    even_splits,
    gather_flat,
    parse_codec,
    record_traffic,
    reduce_scatter_flat,
)
from zero_comm.messages import Messages
from zero_comm.testing import assert_close, equal

# Even, uneven, with empty chunks first, last and between, around a codec's block, and nothing.
SPLITS = [
    *((0,), (7,)),
    *((600, 600), (257, 0), (0, 3), (0, 0)),
    *((4, 4, 4), (5, 0, 2), (255, 256, 1), (0, 0, 0)),
    *((3, 3, 3, 3), (1, 700, 0, 513), (0, 0, 9, 0)),
]
each_splits = each_way(SPLITS)
each_transport = pytest.mark.parametrize("transport", [READS, MESSAGES])
DTYPES = [torch.float32, torch.bfloat16, torch.int64]
FLOATS = [torch.float32, torch.bfloat16]
CODECS = ["none", "int8", "int4", "int8:8", "bf16", "fp32"]
# What travels as it is may be of any dtype.
GATHERED = [("none", torch.int64), *product(CODECS, FLOATS)]
REDUCED = list(product(CODECS, FLOATS, Reduction))


def _values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What `rank` puts in; any process can say what any rank has."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1000 + rank))
    return (values * 1000).to(dtype)


def _chunk(tensor: Tensor, splits: Sequence[int], rank: int) -> Tensor:
    return list(tensor.split(list(splits)))[rank]


def _arrived(codec: str, values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """What becomes of values that travel encoded; alone nothing travels, and all is exact."""
    how, out = parse_codec(codec), torch.empty_like(values, dtype=dtype)
    return out.copy_(values) if how is None else how.decode(how.encode(values), out)


def _reduced(
    splits: Sequence[int], dtype: torch.dtype, op: Reduction, codec: str = "none"
) -> Tensor:
    """The documented order: ((g0 + g1) + g2) + ..., then divided; in float32 of what was sent."""
    world_size, how = len(splits), codec if len(splits) > 1 else "none"
    sums = []
    for rank in range(world_size):
        chunks = [
            _chunk(_values(peer, sum(splits), dtype), splits, rank) for peer in range(world_size)
        ]
        if how == "none":
            total = chunks[0]
        else:
            chunks = [_arrived(how, chunk, torch.float32) for chunk in chunks]
            total = torch.zeros(splits[rank]) + chunks[0]
        for chunk in chunks[1:]:
            total = total + chunk
        sums.append((total / world_size if op is Reduction.MEAN else total).to(dtype))
    return torch.cat(sums)


# ---- All-gather ----


@each_splits
def test_all_gather_puts_each_shard_in_its_rank_s_chunk(
    group: Group, splits: Sequence[int], transport: str
) -> None:
    """Parameters are views of the buffer: one element off and every later one is another's.

    A rank's own chunk is rounded as its peers' are: else ranks would have different models.
    """
    group = over(group, transport)
    for (codec, dtype), how in product(GATHERED, ("in place", "from a shard", "from bytes")):
        if codec == "none" and how == "from bytes":
            continue
        full = _gather(group, splits, dtype, codec, how)
        shards = [_values(rank, numel, dtype) for rank, numel in enumerate(splits)]
        if group.world_size > 1 or how == "from bytes":  # else nothing travels
            shards = [_arrived(codec, shard) for shard in shards]
        assert equal(full, torch.cat(shards)), (codec, dtype, how)


def _gather(group: Group, splits: Sequence[int], dtype: torch.dtype, name: str, how: str) -> Tensor:
    codec, out = parse_codec(name), torch.full((sum(splits),), 77, dtype=dtype)
    exact = _values(group.rank, splits[group.rank], dtype)
    shard: Tensor | None = exact.clone()
    if how == "in place":
        _chunk(out, splits, group.rank).copy_(exact)
        shard = None
    elif how == "from bytes":
        assert codec is not None
        shard = codec.encode(exact)
    full = all_gather_flat(out, splits=splits, group=group, shard=shard, codec=codec).wait()

    assert full.data_ptr() == out.data_ptr()
    assert how != "from a shard" or equal(shard, exact), "masters are not written"
    return full


@each_world(2, 4)
def test_a_late_first_rank_moves_no_shard(group: Group, transport: str) -> None:
    """Chunks follow rank, not arrival."""
    group, splits = over(group, transport), (3,) * group.world_size
    if group.rank == 0:
        time.sleep(0.2)
    full = _gather(group, splits, torch.float32, "none", "in place")
    assert equal(full, torch.cat([_values(rank, 3) for rank in range(group.world_size)]))


# ---- Reductions ----


@each_splits
def test_reductions_add_what_was_sent_in_rank_order(
    group: Group, splits: Sequence[int], transport: str
) -> None:
    """Bit for bit, or a resumed or re-partitioned run is not the run that was saved.

    A rank's own contribution is rounded as its peers' are.
    """
    group = over(group, transport)
    for codec, dtype, op in REDUCED:
        _check_reductions(group, splits, dtype, op, codec)


def _check_reductions(
    group: Group, splits: Sequence[int], dtype: torch.dtype, op: Reduction, codec: str = "none"
) -> None:
    total, what = _reduced(splits, dtype, op, codec), (codec, dtype, op)
    sums = [_chunk(total, splits, peer) for peer in range(len(splits))]
    sent = "none" if len(splits) == 1 else codec
    how: dict[str, Any] = {"group": group, "op": op, "codec": parse_codec(codec)}
    mine = _values(group.rank, sum(splits), dtype)
    buffer, in_place, given = mine.clone(), mine.clone(), mine.clone()
    own = _chunk(in_place, splits, group.rank)
    scattered = reduce_scatter_flat(buffer, splits=splits, **how).wait()
    assert reduce_scatter_flat(in_place, splits=splits, out=own, **how).wait() is own
    assert all_reduce_flat(given, splits=splits, **how).wait() is given

    assert scattered.data_ptr() != _chunk(buffer, splits, group.rank).data_ptr() or not own.numel()
    assert equal(scattered, sums[group.rank]), what
    assert equal(own, sums[group.rank]), what
    assert equal(given, torch.cat([_arrived(sent, each) for each in sums])), what
    assert equal(buffer, mine), what
    if codec == "none":
        assert equal(all_reduce_flat(mine, **how).wait(), total), what


@each_world(1, 2, 3)
def test_integers_are_summed_exactly(group: Group, transport: str) -> None:
    """Counts and flags travel too; 2**53 + 1 does not survive a float."""
    group, buffer = over(group, transport), torch.full((1,), 2**53 + 1)
    total = all_reduce_flat(buffer, group=group, op=Reduction.SUM).wait()
    assert int(total) == group.world_size * (2**53 + 1)


@pytest.mark.slow
@each_world(2, 3)
def test_a_long_buffer_is_as_exact_as_a_short_one(group: Group, transport: str) -> None:
    """Long messages travel in pieces, and a piece too few or too many is a wrong gradient."""
    # More than a piece of either.
    splits = [600_000 + 1000 * rank for rank in range(group.world_size)]
    _check_reductions(over(group, transport), splits, torch.float32, Reduction.MEAN)


@each_world(1, 2, 3)
def test_the_default_is_the_mean(group: Group, transport: str) -> None:
    """Data-parallel gradients are means; a silent sum is a learning rate times world size."""
    group, mean = over(group, transport), (group.world_size - 1) / 2
    buffer = torch.full((group.world_size,), float(group.rank))
    scattered = reduce_scatter_flat(buffer, splits=[1] * group.world_size, group=group).wait()
    assert scattered.tolist() == [mean]
    assert all_reduce_flat(buffer, group=group).wait()[0] == mean


@each_world(2, 3)
@pytest.mark.parametrize("op", Reduction, ids=lambda op: op.value)
def test_a_backend_s_own_collectives_agree_with_ours(
    group: Group, transport: str, op: Reduction
) -> None:
    """A group on NCCL takes the other branch; this tries it as far as gloo can."""
    group = over(group, transport)
    builtin = attrs.evolve(
        group, backend=attrs.evolve(BACKENDS["nccl"], reason="for a test on gloo")
    )
    assert_close(_three_collectives(builtin, op), _three_collectives(group, op))


def _three_collectives(group: Group, op: Reduction) -> dict[str, Tensor]:
    splits = [4] * group.world_size
    mine = _values(group.rank, sum(splits), torch.float32)
    out = torch.zeros(sum(splits))
    return {
        "all_gather": all_gather_flat(out, splits=splits, group=group, shard=mine[:4]).wait(),
        "reduce_scatter": reduce_scatter_flat(mine, splits=splits, group=group, op=op).wait(),
        "all_reduce": all_reduce_flat(mine.clone(), group=group, op=op).wait(),
    }


# ---- Broadcast ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.ranks(1, 2, 3)
def test_broadcast_gives_everyone_the_source_s_values(group: Group, dtype: torch.dtype) -> None:
    """Replicas that start apart stay apart."""
    src, buffer = group.world_size - 1, _values(group.rank, 5, dtype)
    broadcast_flat(buffer[:0], src=src, group=group).wait()
    assert broadcast_flat(buffer, src=src, group=group).wait() is buffer
    assert equal(buffer, _values(src, 5, dtype))


# ---- Order ----


@each_transport
@pytest.mark.cpu_only("only gloo's messages have tags")
def test_tags_allow_another_order_on_another_rank(group: Group, transport: str) -> None:
    """A prefetch may run ahead on one rank; its bytes must not land in another unit's buffer."""
    group, handles = over(group, transport), {}
    for tag in [0, 1, 2] if group.rank == 0 else [2, 0, 1]:
        out = torch.full((2,), 10.0 * tag + group.rank)
        handles[tag] = all_gather_flat(out, splits=[1, 1], group=group, tag=tag)
    for tag in range(3):
        assert handles[tag].wait().tolist() == [10.0 * tag, 10.0 * tag + 1]


@each_transport
@pytest.mark.ranks(3)
def test_handles_may_be_waited_on_in_any_order(group: Group, transport: str) -> None:
    """Backward and prefetch wait in the order they need things, not in that of the launches."""
    group = over(group, transport)
    mine, how = float(group.rank), {"splits": [1, 1, 1], "group": group}
    given = torch.tensor([1.0, 2.0, 3.0])
    expected = [
        (all_gather_flat(torch.full((3,), mine), tag=0, **how), [0.0, 1.0, 2.0]),
        (reduce_scatter_flat(given, op=Reduction.SUM, tag=1, **how), [3.0 + 3 * mine]),
        (all_reduce_flat(torch.full((1,), 12.0 + mine), group=group, tag=2), [13.0]),
    ]
    for shift in range(3):
        handle, values = expected[(group.rank + shift) % 3]
        assert handle.wait().tolist() == values


@each_transport
def test_an_all_reduce_waited_on_late_takes_no_other_s_bytes(group: Group, transport: str) -> None:
    """Its second half is launched in `wait`, which ranks reach before or after other launches."""
    group = over(group, transport)
    reduction = all_reduce_flat(torch.full((2,), 2.0 * group.rank), group=group)
    out = torch.full((2,), 10.0 + group.rank)
    if group.rank == 0:
        reduced = reduction.wait()
    gather = all_gather_flat(out, splits=[1, 1], group=group)
    if group.rank == 1:
        reduced = reduction.wait()
    assert gather.wait().tolist() == [10.0, 11.0]
    assert reduced.tolist() == [1.0, 1.0]


LAUNCHES = {
    "all_gather": lambda group: all_gather_flat(torch.zeros(2), splits=[1, 1], group=group),
    "reduce_scatter": lambda group: reduce_scatter_flat(torch.zeros(2), splits=[1, 1], group=group),
    "all_reduce": lambda group: all_reduce_flat(torch.zeros(2), group=group),
    "all_reduce_coalesced": lambda group: all_reduce_coalesced([torch.zeros(2)], group=group),
    "broadcast": lambda group: broadcast_flat(torch.zeros(2), src=1, group=group),
}


@each_transport
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_missing_peer_is_an_error_in_time(group: Group, name: str, transport: str) -> None:
    """A hang without a word costs an afternoon."""
    group, started = over(group, transport), time.monotonic()
    if group.rank == 0:
        handle = LAUNCHES[name](group)
        with pytest.raises(CommError, match=r"did not finish within 0.3 s.*\n.*first error"):
            handle.wait(timeout_s=0.3)
    assert time.monotonic() - started < 10


# ---- Misuse ----


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: torch.zeros(2, 2),
            r"to be 1-D, dense and contiguous with 4 elements, got .*\(2, 2\)",
        ),
        (lambda: torch.zeros(5), r"with 4 elements, got .* of shape \(5,\)"),
        (lambda: torch.zeros(8)[::2], r"with strides \(2,\)"),
        (lambda: torch.zeros(4).to_sparse(), r"torch.sparse_coo of shape \(4,\)"),
        (
            lambda: torch.zeros(4, device="meta"),
            r"on cpu, where this group .*, got meta \(rank 0\)",
        ),
        (lambda: torch.zeros(4, dtype=torch.complex64).conj(), r"lazily conjugated .*\(rank 0\)"),
    ],
    ids=["not flat", "wrong numel", "strided", "sparse", "other device", "conjugated"],
)
def test_a_buffer_that_does_not_fit_is_refused(make, text: str) -> None:
    """Before anything travels, so that no peer is left waiting."""
    group = _first_of_two()
    launches = [
        lambda bad: all_gather_flat(bad, splits=[2, 2], group=group),
        lambda bad: all_gather_flat(torch.zeros(6), splits=[4, 2], group=group, shard=bad),
        lambda bad: reduce_scatter_flat(bad, splits=[2, 2], group=group),
        lambda bad: reduce_scatter_flat(torch.zeros(6), splits=[4, 2], group=group, out=bad),
        lambda bad: all_reduce_flat(bad, group=group, splits=[2, 2]),
    ]

    for launch in launches:
        with pytest.raises(GroupMismatchError, match=text):
            launch(make())


def _first_of_two() -> Group:
    """Refusals are local: a group that never started is enough."""
    return Group(None, 0, 2, torch.device("cpu"), BACKENDS["gloo"], Messages(None, 0, 2))


def test_one_split_per_rank_is_asked_for() -> None:
    """A forgotten rank would shift every later chunk."""
    with pytest.raises(GroupMismatchError, match="one split per rank, 2 in all, got 3"):
        all_gather_flat(torch.zeros(3), splits=[1, 1, 1], group=_first_of_two())


def test_values_are_never_converted_on_the_way() -> None:
    """A shard of another dtype would be cast here, and read as other bytes there."""
    group = _first_of_two()
    half = torch.zeros(2, dtype=torch.bfloat16)

    with pytest.raises(
        GroupMismatchError, match=r"shard to be torch.float32 .* got torch.bfloat16"
    ):
        all_gather_flat(torch.zeros(4), splits=[2, 2], group=group, shard=half)
    with pytest.raises(GroupMismatchError, match=r"out to be torch.float32 .* got torch.bfloat16"):
        reduce_scatter_flat(torch.zeros(4), splits=[2, 2], group=group, out=half)


def test_a_mean_of_integers_is_refused() -> None:
    """Torch divides integers into floats, which no longer fit the buffer."""
    group = _first_of_two()
    counts = torch.zeros(2, dtype=torch.int64)

    with pytest.raises(GroupMismatchError, match=r"dtype for a mean, got torch.int64 .*SUM"):
        all_reduce_flat(counts, group=group)
    with pytest.raises(GroupMismatchError, match=r"dtype for a mean, got torch.int64 .*SUM"):
        reduce_scatter_flat(counts, splits=[1, 1], group=group)


@pytest.mark.parametrize("src", [-1, 2])
def test_a_source_outside_the_group_is_refused(src: int) -> None:
    """Positions count in the group, and a global rank is an easy mistake."""
    with pytest.raises(GroupMismatchError, match=rf"src in 0..1, .*, got {src} \(rank 0\)"):
        broadcast_flat(torch.zeros(1), src=src, group=_first_of_two())


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 1000])
def test_even_splits_cover_and_differ_by_one_at_most(numel: int, world_size: int) -> None:
    """The slowest rank of a reduction is the one that adds up most."""
    splits = even_splits(numel, world_size)

    assert len(splits) == world_size
    assert sum(splits) == numel
    assert max(splits) - min(splits) <= 1
    assert all(stop >= start for start, stop in pairwise(accumulate(splits, initial=0)))


@each_transport
@pytest.mark.cpu_only("only gloo's messages have tags")
def test_a_user_s_own_messages_do_not_meet_ours(group: Group, transport: str) -> None:
    """The group may be in use for plain send and recv, whose tags start at 0."""
    group = over(group, transport)
    received, peer = torch.zeros(1), 1 - group.rank
    work = dist.irecv(received, peer, group=group.process_group)
    out = torch.full((2,), float(group.rank))
    assert all_gather_flat(out, splits=[1, 1], group=group).wait().tolist() == [0.0, 1.0]
    dist.send(torch.tensor([5.0]), peer, group=group.process_group)
    work.wait()
    assert received.item() == 5.0


# ---- On one rank alone ----


@each_splits
def test_one_rank_has_all_values_in_rank_order_and_no_other_any(
    group: Group, splits: Sequence[int], transport: str
) -> None:
    """State that is put together on one rank must not cost the others its memory."""
    group, shard = over(group, transport), _values(group.rank, splits[group.rank])
    expected = torch.cat([_values(rank, numel) for rank, numel in enumerate(splits)])
    for to in range(group.world_size):
        for out in (torch.full((sum(splits),), 77.0) if to == group.rank else None, None):
            full = gather_flat(shard, splits=splits, to=to, group=group, out=out).wait()
            assert (full is None) == (to != group.rank)
            assert full is None or equal(full, expected)


@each_world(2)
def test_only_senders_count_what_travels(group: Group, transport: str) -> None:
    """Bytes on the wire are what a user plans with."""
    group = over(group, transport)
    with record_traffic(group) as traffic:
        gather_flat(torch.ones(5), splits=(5, 5), to=0, group=group).wait()
    assert traffic.operations["gather"].payload_bytes == 5 * 4 * group.rank


def test_what_does_not_fit_is_refused() -> None:
    """A target beyond the group would leave everyone waiting."""
    group = Group.solo()

    with pytest.raises(GroupMismatchError, match=r"expected `to` in 0\.\.0"):
        gather_flat(torch.ones(2), splits=(2,), to=1, group=group)
    with pytest.raises(GroupMismatchError, match="expected shard to be 1-D"):
        gather_flat(torch.ones(3), splits=(2,), to=0, group=group)
    with pytest.raises(GroupMismatchError, match="expected out to be 1-D"):
        gather_flat(torch.ones(2), splits=(2,), to=0, group=group, out=torch.ones(3))
