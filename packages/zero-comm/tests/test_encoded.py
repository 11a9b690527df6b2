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
from zero_comm.testing import equal

each_transport = pytest.mark.parametrize("transport", [READS, MESSAGES])


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


@each_transport
def test_a_shard_may_have_more_bits_than_what_is_gathered(group: Group, transport: str) -> None:
    """Masters in float32 are gathered as bfloat16, and rounded once where twice is worse."""
    how = {"splits": (300, 300), "group": over(group, transport), "codec": _codec("int8")}
    shards = [_values(rank, 300) for rank in (0, 1)]
    out = torch.empty(600, dtype=torch.bfloat16)
    full = all_gather_flat(out, shard=shards[group.rank], **how).wait()
    rounded = [_there_and_back(how["codec"], shard, torch.bfloat16) for shard in shards]
    assert equal(full, torch.cat(rounded))


@each_transport
def test_an_overflow_on_one_rank_reaches_whom_it_concerns(group: Group, transport: str) -> None:
    """A step is skipped by what arrives: inf that became a large number would be applied."""
    how = {"splits": (1000, 1000), "group": over(group, transport), "codec": _codec("int4")}
    buffer = torch.ones(2000)
    if group.rank == 0:
        buffer[1000 + 300] = torch.inf
    found = reduce_scatter_flat(buffer, **how).wait()
    spoilt = torch.zeros(1000, dtype=torch.bool)
    spoilt[256:512] = group.rank == 1  # a block
    assert equal(found.isnan(), spoilt)
    assert equal(found.isfinite(), ~spoilt)


# ---- Lists ----


def test_lists_travel_encoded_too(group: Group) -> None:
    """Tensors of a dtype end to end, as they travel, so blocks may reach over their seams."""
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
    gathered = all_gather_coalesced(shards, group=group, codec=codec).wait()
    scattered = reduce_scatter_coalesced(tensors, group=group, codec=codec).wait()

    for index, (dtype, start, numel) in enumerate(
        [(torch.float32, 0, 100), (torch.bfloat16, 0, 300), (torch.float32, 100, 300)]
    ):
        total = 400 if dtype == torch.float32 else 300
        sent = [_there_and_back(codec, _values(r, total, dtype), dtype) for r in (0, 1)]
        parts = [each[start : start + numel] for each in sent]
        assert equal(gathered[index], torch.cat(parts))

        mine = [_values(r, 2 * total, dtype).chunk(2)[group.rank] for r in (0, 1)]
        mean = sum(_there_and_back(codec, row) for row in mine) / 2
        assert equal(scattered[index], mean[start : start + numel].to(dtype))


# ---- Traffic, and what is refused ----


@pytest.mark.parametrize(
    ("group", "splits"), [(2, (600, 600)), (3, (5, 0, 257))], indirect=["group"], ids=str
)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_integers_scales_and_padding_are_counted_apart(
    group: Group, splits: Sequence[int], name: str
) -> None:
    """Published volumes count integers; scales and padding are what they cost on top."""
    payload = [max(0, numel - 3) for numel in splits]
    how = {"splits": splits, "group": group, "payload": payload, "codec": _codec(name)}
    with record_traffic(group) as traffic:
        all_gather_flat(torch.zeros(sum(splits)), **how).wait()
        reduce_scatter_flat(torch.zeros(sum(splits)), **how).wait()
        all_reduce_flat(torch.zeros(sum(splits)), **how).wait()

    def value_bytes(numel: int) -> int:
        return numel if name == "int8" else (numel + 1) // 2

    def sent(chunks: Sequence[int]) -> OperationTraffic:
        values = sum(value_bytes(payload[c]) for c in chunks)
        integers = sum(value_bytes(splits[c]) + -value_bytes(splits[c]) % 4 for c in chunks)
        scales = sum(4 * -(-splits[c] // 256) for c in chunks)
        numel = sum(payload[c] for c in chunks)
        return OperationTraffic(1, numel, values, integers - values, scales)

    others = [rank for rank in range(len(splits)) if rank != group.rank]
    own = [group.rank] * len(others)
    assert traffic.operations == {
        "all_gather": sent(own),
        "reduce_scatter": sent(others),
        "all_reduce": sent([*own, *others]),
    }


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
