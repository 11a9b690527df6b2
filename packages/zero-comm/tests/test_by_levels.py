"""Reductions in two hops, against one process that takes them one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor
from zero_comm import (
    AbstractCodec,
    Blockwise,
    CodecError,
    Group,
    GroupMismatchError,
    Levels,
    Loco,
    LocoErrors,
    Reduction,
    Sent,
    all_to_all_loco_quant_reduce,
    all_to_all_quant_reduce,
    parse_codec,
    record_traffic,
    reduce_scatter_by_levels,
    reduce_scatter_flat,
)
from zero_comm.testing import equal

NAMES = ["int4", "int8:8", "bf16", "none"]
FLOATS = [torch.float32, torch.bfloat16]
SPLITS = [(300, 300, 300, 300), (1, 700, 0, 513)]

each_node_size = pytest.mark.parametrize("size", [1, 2, 4])
each_kept = pytest.mark.parametrize("kept", [None, Blockwise(8)], ids=str)


def _values(rank: int, numel: int, dtype: torch.dtype = torch.float32, step: int = 0) -> Tensor:
    """What `rank` puts in; any process can say what any rank has."""
    generator = torch.Generator().manual_seed(1000 + rank + 100 * step)
    return torch.randn(numel, generator=generator).to(dtype)


def _chunk(tensor: Tensor, splits: Sequence[int], rank: int) -> Tensor:
    return list(tensor.split(list(splits)))[rank]


def _levels(group: Group, size: int) -> Levels:
    return Levels.of_nodes(group, size)


class _Oracle:
    """All ranks in one process: what each encodes for each, in both hops, with what it kept."""

    def __init__(self, codec: AbstractCodec | None, loco: Loco | None = None) -> None:
        self.codec, self.loco, self.errors, self.step = codec, loco, {}, 0

    def reduce(self, values: Sequence[Tensor], splits: Sequence[int], size: int) -> list[Tensor]:
        """The sums, by rank."""
        if self.loco is not None and self.step % self.loco.reset_T == 0:
            self.errors = {}
        self.step += 1
        world_size = len(values)
        totals = []
        for rank in range(world_size):
            sums = []
            for node in range(world_size // size):
                peers = range(node * size, (node + 1) * size)
                chunks = [_chunk(values[p], splits, rank) for p in peers]
                sent = [
                    self._sent(chunk, ("inside", peer, rank), size > 1)
                    for chunk, peer in zip(chunks, peers, strict=True)
                ]
                sums.append(_sum(sent))
            across = [
                self._sent(each, ("across", node, rank), len(sums) > 1)
                for node, each in enumerate(sums)
            ]
            totals.append(_sum(across))
        return totals

    def _sent(self, values: Tensor, key: tuple[str, int, int], travels: bool) -> Tensor:
        if not travels:
            return values.float()
        if self.codec is None:  # across nodes too, values have the dtype that they came in
            self.dtype = values.dtype if key[0] == "inside" else self.dtype
            return values.to(self.dtype).float()
        if self.loco is None:
            return _there_and_back(self.codec, values)
        error = self.errors.get(key, torch.zeros(values.numel()))
        wanted = values + error
        sent = _there_and_back(self.codec, wanted)
        beta = self.loco.err_beta
        error = (beta * error + (1 - beta) * (wanted - sent)).nan_to_num(0, 0, 0)
        if self.loco.kept is not None:
            error = _there_and_back(self.loco.kept, error)
        self.errors[key] = error
        return sent


def _sum(rows: Sequence[Tensor]) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total = total + row
    return total


def _there_and_back(codec: AbstractCodec, values: Tensor) -> Tensor:
    return codec.decode(codec.encode(values), torch.empty(values.numel()))


# ---- Two hops ----


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.ranks(4)
@each_node_size
def test_each_hop_encodes_once_and_adds_in_order(
    group: Group, splits: Sequence[int], size: int
) -> None:
    """Which rank has which chunk, in which order sums are taken, and how often they are rounded."""
    levels = _levels(group, size)
    for name, dtype in product(NAMES, FLOATS):
        oracle = _Oracle(parse_codec(name))
        oracle.dtype = dtype
        values = [_values(rank, sum(splits), dtype) for rank in range(4)]
        expected = oracle.reduce(values, splits, size)[group.rank]
        how = {"splits": splits, "levels": levels, "codec": parse_codec(name)}
        buffer, in_place = (values[group.rank].clone() for _ in range(2))
        own = _chunk(in_place, splits, group.rank)
        total = reduce_scatter_by_levels(buffer, op=Reduction.SUM, **how).wait()

        assert reduce_scatter_by_levels(in_place, out=own, **how).wait() is own
        assert equal(total, expected.to(dtype)), (name, dtype)
        assert equal(own, (expected / 4).to(dtype)), (name, dtype)
        assert equal(buffer, values[group.rank]), (name, dtype)


@pytest.mark.ranks(4)
@each_node_size
def test_without_a_codec_it_is_a_reduce_scatter(group: Group, size: int) -> None:
    """Levels say which way values go, and not what comes out."""
    splits, buffer = SPLITS[1], _values(group.rank, sum(SPLITS[1]))
    two_hops = reduce_scatter_by_levels(buffer, splits=splits, levels=_levels(group, size)).wait()
    one = reduce_scatter_flat(buffer, splits=splits, group=group).wait()
    assert torch.allclose(two_hops, one, rtol=1e-5, atol=1e-6)


def test_alone_values_stay_exact() -> None:
    """Nothing travels, so nothing is rounded."""
    levels, values = Levels.of_nodes(Group.solo()), _values(0, 300)
    how = {"splits": (300,), "levels": levels, "codec": Blockwise(4), "errors": LocoErrors()}
    assert equal(reduce_scatter_by_levels(values, **how).wait(), values)
    assert how["errors"].num_bytes == 0


# ---- Lists of tensors ----

SHAPES = [(40, 30), (7,), (3,), (5, 5, 5), (0,), ()]


@pytest.mark.ranks(4)
@each_node_size
def test_tensors_that_do_not_divide_are_cut_unevenly(group: Group, size: int) -> None:
    """Biases and odd vocabularies exist; to fall back to an exact reduction is to hide the cost."""
    tensors, totals = [], []
    for index, shape in enumerate(SHAPES):
        numel, dtype = torch.Size(shape).numel(), FLOATS[index % 2]
        step = -(-numel // 4)
        splits = [max(0, min(step, numel - rank * step)) for rank in range(4)]
        values = [_values(rank, numel, dtype, index) for rank in range(4)]
        tensors.append(values[group.rank].view(shape))
        totals.append(_Oracle(Blockwise(4)).reduce(values, splits, size)[group.rank])
    parts = all_to_all_quant_reduce(tensors, _levels(group, size)).wait()

    for shape, tensor, part, total in zip(SHAPES, tensors, parts, totals, strict=True):
        assert equal(part, (total / 4).to(tensor.dtype)), shape


# ---- Errors that are fed back ----


@pytest.mark.ranks(4)
@each_kept
@each_node_size
def test_errors_are_fed_back_in_each_hop(
    group: Group, size: int, kept: AbstractCodec | None
) -> None:
    """Bit for bit over several steps and a reset, so that what is kept is what the paper keeps."""
    splits, loco = SPLITS[1], Loco(err_beta=0.8, reset_T=3, kept=kept)
    oracle, levels = _Oracle(Blockwise(4), loco), _levels(group, size)
    errors, errors_of_lists = LocoErrors(loco), LocoErrors(loco)
    for step in range(5):
        values = [_values(rank, sum(splits), step=step) for rank in range(4)]
        mine, total = values[group.rank], oracle.reduce(values, splits, size)[group.rank]
        how = {"splits": splits, "levels": levels, "codec": Blockwise(4), "errors": errors}
        assert equal(reduce_scatter_by_levels(mine, **how).wait(), total / 4), step
        (part,) = all_to_all_loco_quant_reduce([mine[:1200]], levels, errors_of_lists).wait()
        assert part.numel() == 300


@pytest.mark.slow
@pytest.mark.ranks(4)
@each_kept
def test_the_mean_over_many_reductions_becomes_exact(
    group: Group, kept: AbstractCodec | None
) -> None:
    """That is what error feedback is for: what 4 bits lose now, they gain later."""
    num_steps, levels, values = 64, _levels(group, 2), _values(group.rank, 1200)
    how = {"splits": (300,) * 4, "levels": levels, "codec": Blockwise(4)}
    errors, (plain, fed_back) = LocoErrors(Loco(kept=kept)), torch.zeros(2, 300)
    for _ in range(num_steps):
        plain += reduce_scatter_by_levels(values, **how).wait() / num_steps
        fed_back += reduce_scatter_by_levels(values, errors=errors, **how).wait() / num_steps

    wanted = (sum(_values(rank, 1200) for rank in range(4)) / 4).chunk(4)[group.rank]
    # The largest value of a block is some 3.5, so half a scale is 0.25; 5 of them per hop are
    # spread over all steps, and what keeping errors in 8 bits loses comes on top.
    allowed = 2 * 5 * 0.3 / num_steps + (0 if kept is None else 0.005)
    assert (fed_back - wanted).abs().max() < allowed
    assert (fed_back - wanted).norm() < (plain - wanted).norm() / 10


def test_an_overflow_is_seen_once(group: Group) -> None:
    """A nan among the errors would spoil every later step, until a reset."""
    levels, errors = _levels(group, 2), LocoErrors(Loco(kept=None))
    how = {"splits": (300, 300), "levels": levels, "codec": Blockwise(4), "errors": errors}
    values = _values(group.rank, 600)
    bad = values.clone()
    bad[[10, 400]] = torch.inf
    assert reduce_scatter_by_levels(bad, **how).wait().isnan().any()
    assert reduce_scatter_by_levels(values, **how).wait().isfinite().all()


@pytest.mark.ranks(4)
def test_errors_cost_what_they_are_kept_in(group: Group) -> None:
    """A plan adds them up before anything is allocated: all chunks, and own chunks across nodes."""
    errors, splits, wire = LocoErrors(), SPLITS[1], Blockwise(8).wire_bytes
    how = {"splits": splits, "levels": _levels(group, 2), "codec": Blockwise(4), "errors": errors}
    reduce_scatter_by_levels(torch.zeros(sum(splits)), **how).wait()
    assert errors.num_bytes == sum(map(wire, (*splits, *splits[group.rank % 2 :: 2])))
    errors.reset()
    assert errors.num_bytes == 0


@pytest.mark.ranks(4)
@each_node_size
@each_kept
def test_reductions_go_on_from_errors_that_were_saved(
    group: Group, size: int, kept: AbstractCodec | None
) -> None:
    """A run that goes on from a file must get the bits of one that was not ended."""
    loco = Loco(kept=kept, reset_T=5)  # a number that is lost would move the reset
    levels, splits = _levels(group, size), SPLITS[0]

    def reduce(errors: LocoErrors, steps: range) -> list[Tensor]:
        how = {"splits": splits, "levels": levels, "codec": Blockwise(4), "errors": errors}
        numel = sum(splits)
        values = [_values(group.rank, numel, step=step) for step in steps]
        return [reduce_scatter_by_levels(each, **how).wait() for each in values]

    errors = LocoErrors(loco)
    reduce(errors, range(3))
    state = {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in errors.state_dict().items()
    }
    expected = reduce(errors, range(3, 8))
    again = LocoErrors(loco)
    again.load_state_dict(state)

    for mine, theirs in zip(reduce(again, range(3, 8)), expected, strict=True):
        assert equal(mine, theirs)
    without = reduce(LocoErrors(loco), range(3, 4))[0]
    assert not equal(without, expected[0])


def test_errors_of_another_buffer_are_refused(group: Group) -> None:
    """Fed back elsewhere they would be noise, and nobody would see it."""
    errors = LocoErrors()
    with pytest.raises(CodecError, match=r"'inside' to be 1-D and torch.uint8.*got torch.float32"):
        errors.load_state_dict({"num_reductions": 1, "inside": torch.zeros(3)})
    errors.load_state_dict({"num_reductions": 1, "inside": torch.zeros(3, dtype=torch.uint8)})
    how = {"splits": (4, 4), "levels": _levels(group, 2), "codec": Blockwise(4), "errors": errors}
    with pytest.raises(CodecError, match=r"got 3: what was loaded is of another buffer"):
        reduce_scatter_by_levels(torch.zeros(8), **how)


# ---- Traffic, and what is refused ----


@pytest.mark.ranks(4)
@each_node_size
def test_traffic_is_what_the_two_hops_send(group: Group, size: int) -> None:
    """ZeRO++'s quarter of M across nodes, exactly; integers, scales and padding apart."""
    splits, payload, levels = SPLITS[1], (1, 690, 0, 500), _levels(group, size)
    how = {"splits": splits, "levels": levels, "codec": Blockwise(4), "payload": payload}
    with record_traffic(levels.whole) as traffic:
        reduce_scatter_by_levels(torch.zeros(sum(splits)), **how).wait()

    node, local = divmod(group.rank, size)
    mates = [r for r in range(4) if r % size != local]  # who gets what goes inside
    counterparts = [r for r in range(4) if r % size == local and r // size != node]
    ((name, operation),) = traffic.operations.items()
    assert (name, operation.calls) == ("reduce_scatter", 1)
    assert operation.inside == _sent(mates, splits, payload)
    assert operation.across == _sent(counterparts, splits, payload)


def _sent(chunks: Sequence[int], splits: Sequence[int], payload: Sequence[int]) -> Sent:
    numel, values = sum(payload[c] for c in chunks), sum((payload[c] + 1) // 2 for c in chunks)
    packed = [(splits[c] + 1) // 2 for c in chunks]
    integers = sum(each + -each % 4 for each in packed)
    scales = sum(4 * -(-splits[c] // 256) for c in chunks)
    return Sent(numel, values, integers - values, scales)


def test_what_does_not_fit_is_refused(group: Group) -> None:
    """Before anything travels, on every rank."""
    with pytest.raises(CodecError, match=r"err_beta in \[0, 1\), got 1"):
        Loco(err_beta=1)
    with pytest.raises(CodecError, match="at least 1 reduction, got 0"):
        Loco(reset_T=0)
    levels, errors = _levels(group, 2), LocoErrors()
    how = {"levels": levels, "codec": Blockwise(4)}
    with pytest.raises(CodecError, match=r"int4 encodes .* got torch\.int64"):
        reduce_scatter_by_levels(torch.zeros(4).long(), splits=(2, 2), op=Reduction.SUM, **how)
    with pytest.raises(CodecError, match=r"int4 encodes .* got torch\.float64"):
        all_to_all_quant_reduce([torch.zeros(4), torch.zeros(4).double()], levels)
    with pytest.raises(GroupMismatchError, match=r"tensor 0: expected a dense contiguous"):
        all_to_all_quant_reduce([torch.zeros(4, 4).t()], levels)
    with pytest.raises(GroupMismatchError, match=r"expected out .* with 2 elements"):
        reduce_scatter_by_levels(torch.zeros(4), splits=(2, 2), out=torch.zeros(3), **how)
    reduce_scatter_by_levels(torch.zeros(4), splits=(2, 2), errors=errors, **how).wait()
    with pytest.raises(CodecError, match="a LocoErrors of its own"):
        reduce_scatter_by_levels(torch.zeros(8), splits=(4, 4), errors=errors, **how)


@pytest.mark.ranks(4)
@each_node_size
@pytest.mark.parametrize("name", ["int4", "none"])
def test_the_buffer_is_free_when_the_second_hop_has_begun(
    group: Group, size: int, name: str
) -> None:
    """A reduction slot is given to another unit then, whose gradients must not be added."""
    levels, splits = _levels(group, size), SPLITS[1]
    found = []
    for overwrites in (False, True):
        buffer = _values(group.rank, sum(splits))
        how = {"splits": splits, "levels": levels, "codec": parse_codec(name)}
        handle = reduce_scatter_by_levels(buffer, **how)
        assert handle.advance() == (size == 2)  # else there is one hop
        if overwrites and size == 2:
            buffer.fill_(torch.nan)
        found.append(handle.wait())

    assert equal(*found)
