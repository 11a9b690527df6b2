"""What else a codec changes: masters, overflows, lists, traffic, refusals; values are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transports import MESSAGES, READS, over
from zero_comm import (
    AbstractCodec,
    CodecError,
    Group,
    GroupMismatchError,
    OperationTraffic,
    all_gather_coalesced,
    all_gather_flat,
    all_reduce_flat,
    parse_codec,
    record_traffic,
    reduce_scatter_coalesced,
    reduce_scatter_flat,
)


def _codec(name: str) -> AbstractCodec:
    codec = parse_codec(name)
    assert codec is not None
    return codec


def _values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What `rank` puts in; any process can say what any rank has."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return (torch.randn(numel, generator=generator) * 1000).to(dtype)


def _there_and_back(
    codec: AbstractCodec, values: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    return codec.decode(codec.encode(values), torch.empty_like(values, dtype=dtype))


@pytest.mark.parametrize("transport", [READS, MESSAGES])
def test_a_shard_may_have_more_bits_than_what_is_gathered(ranks, transport: str) -> None:
    """Masters in float32 are gathered as bfloat16, and rounded once where twice is worse."""
    results = ranks(2).run(_gather_from_masters, transport=transport)
    shards = [_there_and_back(_codec("int8"), _values(r, 300), torch.bfloat16) for r in (0, 1)]

    for full in results:
        assert torch.equal(full, torch.cat(shards))


def _gather_from_masters(group: Group, transport: str) -> Tensor:
    group, codec = over(group, transport), _codec("int8")
    out = torch.empty(600, dtype=torch.bfloat16)
    shard = _values(group.rank, 300)
    return all_gather_flat(out, splits=(300, 300), group=group, shard=shard, codec=codec).wait()


@pytest.mark.parametrize("transport", [READS, MESSAGES])
def test_an_overflow_on_one_rank_reaches_whom_it_concerns(ranks, transport: str) -> None:
    """A step is skipped by what arrives: inf that became a large number would be applied."""
    first, second = ranks(2).run(_reduce_an_inf, transport=transport)

    assert first.isfinite().all()
    assert second[256:512].isnan().all()
    assert second[:256].isfinite().all()
    assert second[512:].isfinite().all()


def _reduce_an_inf(group: Group, transport: str) -> Tensor:
    group, buffer = over(group, transport), torch.ones(2000)
    if group.rank == 0:
        buffer[1000 + 300] = torch.inf
    return reduce_scatter_flat(
        buffer, splits=(1000, 1000), group=group, codec=_codec("int4")
    ).wait()


# ---- Lists ----


def test_lists_travel_encoded_too(ranks) -> None:
    """Tensors of a dtype end to end, as they travel, so blocks may reach over their seams."""
    for rank, (gathered, scattered) in enumerate(ranks(2).run(_lists)):
        codec = _codec("int8")
        for index, (dtype, start, numel) in enumerate(
            [(torch.float32, 0, 100), (torch.bfloat16, 0, 300), (torch.float32, 100, 300)]
        ):
            total = 400 if dtype == torch.float32 else 300
            sent = [_there_and_back(codec, _values(r, total, dtype), dtype) for r in (0, 1)]
            parts = [each[start : start + numel] for each in sent]
            assert torch.equal(gathered[index], torch.cat(parts))

            rows = [_values(r, 2 * total, dtype).chunk(2)[rank] for r in (0, 1)]
            mean = sum(_there_and_back(codec, row) for row in rows) / 2
            assert torch.equal(scattered[index], mean[start : start + numel].to(dtype))


def _lists(group: Group) -> tuple[list[Tensor], list[Tensor]]:
    codec = _codec("int8")
    floats, halves = _values(group.rank, 400), _values(group.rank, 300, torch.bfloat16)
    shards = [floats[:100], halves, floats[100:]]
    # Such that what goes to one rank, end to end, is a chunk of `_values`.
    rows = _values(group.rank, 800).view(2, 400)
    tensors = [
        rows[:, :100].contiguous(),
        _values(group.rank, 600, torch.bfloat16),
        rows[:, 100:].contiguous(),
    ]
    return (
        all_gather_coalesced(shards, group=group, codec=codec).wait(),
        reduce_scatter_coalesced(tensors, group=group, codec=codec).wait(),
    )


# ---- Traffic, and what is refused ----


@pytest.mark.parametrize("splits", [(600, 600), (5, 0, 257)], ids=str)
def test_integers_scales_and_padding_are_counted_apart(ranks, splits: Sequence[int]) -> None:
    """Published volumes count integers; scales and padding are what they cost on top."""
    world_size, payload = len(splits), [max(0, numel - 3) for numel in splits]
    for rank, counts in enumerate(ranks(world_size).run(_count, splits=splits, payload=payload)):
        for name, value_bytes in [("int8", lambda n: n), ("int4", lambda n: (n + 1) // 2)]:

            def sent(chunks: Sequence[int], calls: int, value_bytes=value_bytes):
                values = sum(value_bytes(payload[c]) for c in chunks)
                integers = sum(value_bytes(splits[c]) + -value_bytes(splits[c]) % 4 for c in chunks)
                scales = sum(4 * -(-splits[c] // 256) for c in chunks)
                numel = sum(payload[c] for c in chunks)
                return OperationTraffic(calls, numel, values, integers - values, scales)

            own, others = [rank] * (world_size - 1), [r for r in range(world_size) if r != rank]
            assert counts[name] == {
                "all_gather": sent(own, 1),
                "reduce_scatter": sent(others, 1),
                "all_reduce": sent([*own, *others], 1),
            }


def _count(
    group: Group, splits: Sequence[int], payload: Sequence[int]
) -> dict[str, dict[str, OperationTraffic]]:
    counts = {}
    for name in ("int8", "int4"):
        how = {"splits": splits, "group": group, "payload": payload, "codec": _codec(name)}
        with record_traffic(group) as traffic:
            all_gather_flat(torch.zeros(sum(splits)), **how).wait()
            reduce_scatter_flat(torch.zeros(sum(splits)), **how).wait()
            all_reduce_flat(torch.zeros(sum(splits)), **how).wait()
        counts[name] = traffic.operations
    return counts


@pytest.mark.ranks(1, 2)
def test_what_a_codec_does_not_take_is_refused(group: Group) -> None:
    """On every number of ranks alike, and before anything travels."""
    splits, codec = (4,) * group.world_size, _codec("int8")
    numel = sum(splits)
    how = {"group": group, "codec": codec}
    takes = r"int8 encodes float32, bfloat16 and float16, got torch\.float64"
    double, floats = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel)
    with pytest.raises(CodecError, match=takes):
        all_gather_flat(double, splits=splits, **how)
    with pytest.raises(CodecError, match=takes):
        all_gather_flat(floats, splits=splits, shard=double[:4].clone(), **how)
    with pytest.raises(CodecError, match=takes):
        reduce_scatter_flat(double, splits=splits, **how)
    with pytest.raises(CodecError, match=takes):
        all_reduce_flat(double, **how)
    with pytest.raises(CodecError, match=takes):
        all_gather_coalesced([floats, double], **how)
    with pytest.raises(CodecError, match=takes):
        reduce_scatter_coalesced([floats, double], **how)
    with pytest.raises(GroupMismatchError, match=r"expected shard .* with 4 elements"):
        all_gather_flat(floats, splits=splits, shard=torch.zeros(3), **how)
    with pytest.raises(GroupMismatchError, match=r"expected shard .* with 8 elements"):
        wire = torch.zeros(7, dtype=torch.uint8)
        all_gather_flat(floats, splits=splits, shard=wire, **how)
