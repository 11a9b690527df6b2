"""Reductions in two hops, against one process that takes them one after the other."""

from __future__ import annotations

from collections.abc import Sequence

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

NAMES = ["int4", "int8:8", "bf16", "none"]
FLOATS = [torch.float32, torch.bfloat16]
SPLITS = [(300, 300, 300, 300), (1, 700, 0, 513)]

each_node_size = pytest.mark.parametrize("size", [1, 2, 4])


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
@each_node_size
def test_each_hop_encodes_once_and_adds_in_order(ranks, splits: Sequence[int], size: int) -> None:
    """Which rank has which chunk, in which order sums are taken, and how often they are rounded."""
    results = ranks(4).run(_reduce_each, splits=splits, size=size)

    for name in NAMES:
        for dtype in FLOATS:
            oracle = _Oracle(parse_codec(name))
            oracle.dtype = dtype
            values = [_values(rank, sum(splits), dtype) for rank in range(4)]
            totals = oracle.reduce(values, splits, size)
            for rank, got in enumerate(results):
                assert torch.equal(got[name, dtype, "sum"], totals[rank].to(dtype)), (name, dtype)
                mean = (totals[rank] / 4).to(dtype)
                assert torch.equal(got[name, dtype, "mean"], mean), (name, dtype)
                assert torch.equal(got[name, dtype, "buffer"], values[rank]), (name, dtype)


def _reduce_each(group: Group, splits: Sequence[int], size: int) -> dict[tuple, Tensor]:
    levels, results = _levels(group, size), {}
    for name in NAMES:
        for dtype in FLOATS:
            buffer = _values(group.rank, sum(splits), dtype)
            how = {"splits": splits, "levels": levels, "codec": parse_codec(name)}
            total = reduce_scatter_by_levels(buffer, op=Reduction.SUM, **how).wait()
            in_place = buffer.clone()
            own = _chunk(in_place, splits, group.rank)
            assert reduce_scatter_by_levels(in_place, out=own, **how).wait() is own
            results[name, dtype, "sum"] = total
            results[name, dtype, "mean"] = own.clone()
            results[name, dtype, "buffer"] = buffer
    return results


@each_node_size
def test_without_a_codec_it_is_a_reduce_scatter(ranks, size: int) -> None:
    """Levels say which way values go, and not what comes out."""
    splits = SPLITS[1]
    for two_hops, one in ranks(4).run(_both, splits=splits, size=size):
        assert torch.allclose(two_hops, one, rtol=1e-5, atol=1e-6)


def _both(group: Group, splits: Sequence[int], size: int) -> tuple[Tensor, Tensor]:
    buffer = _values(group.rank, sum(splits))
    return (
        reduce_scatter_by_levels(buffer, splits=splits, levels=_levels(group, size)).wait(),
        reduce_scatter_flat(buffer, splits=splits, group=group).wait(),
    )


def test_alone_values_stay_exact() -> None:
    """Nothing travels, so nothing is rounded."""
    levels, values = Levels.of_nodes(Group.solo()), _values(0, 300)
    how = {"splits": (300,), "levels": levels, "codec": Blockwise(4), "errors": LocoErrors()}
    assert torch.equal(reduce_scatter_by_levels(values, **how).wait(), values)
    assert how["errors"].num_bytes == 0


# ---- Lists of tensors ----

SHAPES = [(40, 30), (7,), (3,), (5, 5, 5), (0,), ()]


@each_node_size
def test_tensors_that_do_not_divide_are_cut_unevenly(ranks, size: int) -> None:
    """Biases and odd vocabularies exist; to fall back to an exact reduction is to hide the cost."""
    codec = Blockwise(4)
    results = ranks(4).run(_reduce_lists, size=size)

    for index, shape in enumerate(SHAPES):
        numel = torch.Size(shape).numel()
        step = -(-numel // 4)
        splits = [max(0, min(step, numel - rank * step)) for rank in range(4)]
        dtype = FLOATS[index % 2]
        values = [_values(rank, numel, dtype, index) for rank in range(4)]
        totals = _Oracle(codec).reduce(values, splits, size)
        for rank, parts in enumerate(results):
            assert torch.equal(parts[index], (totals[rank] / 4).to(dtype)), (shape, rank)


def _reduce_lists(group: Group, size: int) -> list[Tensor]:
    tensors = [
        _values(group.rank, torch.Size(shape).numel(), FLOATS[index % 2], index).view(shape)
        for index, shape in enumerate(SHAPES)
    ]
    return all_to_all_quant_reduce(tensors, _levels(group, size)).wait()


# ---- Errors that are fed back ----


@pytest.mark.parametrize("kept", [None, Blockwise(8)], ids=str)
@each_node_size
def test_errors_are_fed_back_in_each_hop(ranks, size: int, kept: AbstractCodec | None) -> None:
    """Bit for bit over several steps and a reset, so that what is kept is what the paper keeps."""
    splits, loco = SPLITS[1], Loco(err_beta=0.8, reset_T=3, kept=kept)
    oracle = _Oracle(Blockwise(4), loco)
    results = ranks(4).run(_reduce_often, splits=splits, size=size, loco=loco, num_steps=5)

    for step in range(5):
        values = [_values(rank, sum(splits), step=step) for rank in range(4)]
        totals = oracle.reduce(values, splits, size)
        for rank, got in enumerate(results):
            assert torch.equal(got[step], totals[rank] / 4), (step, rank)


def _reduce_often(
    group: Group, splits: Sequence[int], size: int, loco: Loco, num_steps: int
) -> list[Tensor]:
    levels, errors, tensors_errors = _levels(group, size), LocoErrors(loco), LocoErrors(loco)
    results = []
    for step in range(num_steps):
        values = _values(group.rank, sum(splits), step=step)
        how = {"splits": splits, "levels": levels, "codec": Blockwise(4), "errors": errors}
        results.append(reduce_scatter_by_levels(values, **how).wait())
        # Lists keep theirs just so; with an even cut the two are the same.
        (part,) = all_to_all_loco_quant_reduce([values[:1200]], levels, tensors_errors).wait()
        assert part.numel() == 300
    return results


@pytest.mark.slow
@pytest.mark.parametrize("kept", [None, Blockwise(8)], ids=str)
def test_the_mean_over_many_reductions_becomes_exact(ranks, kept: AbstractCodec | None) -> None:
    """That is what error feedback is for: what 4 bits lose now, they gain later."""
    num_steps = 64
    results = ranks(4).run(_reduce_the_same, kept=kept, num_steps=num_steps)
    exact = sum(_values(rank, 1200) for rank in range(4)) / 4

    for rank, (plain, fed_back) in enumerate(results):
        wanted = exact[rank * 300 : (rank + 1) * 300]
        # The largest value of a block is some 3.5, so half a scale is 0.25; 5 of them per hop are
        # spread over all steps, and what keeping errors in 8 bits loses comes on top.
        allowed = 2 * 5 * 0.3 / num_steps + (0 if kept is None else 0.005)
        assert (fed_back - wanted).abs().max() < allowed
        assert (fed_back - wanted).norm() < (plain - wanted).norm() / 10


def _reduce_the_same(
    group: Group, kept: AbstractCodec | None, num_steps: int
) -> tuple[Tensor, Tensor]:
    levels, values = _levels(group, 2), _values(group.rank, 1200)
    errors = LocoErrors(Loco(kept=kept))
    how = {"splits": (300,) * 4, "levels": levels, "codec": Blockwise(4)}
    plain, fed_back = torch.zeros(2, 300)
    for _ in range(num_steps):
        plain += reduce_scatter_by_levels(values, **how).wait() / num_steps
        fed_back += reduce_scatter_by_levels(values, errors=errors, **how).wait() / num_steps
    return plain, fed_back


def test_an_overflow_is_seen_once(ranks) -> None:
    """A nan among the errors would spoil every later step, until a reset."""
    for spoilt, later in ranks(2).run(_reduce_an_inf):
        assert spoilt.isnan().any()
        assert later.isfinite().all()


def _reduce_an_inf(group: Group) -> tuple[Tensor, Tensor]:
    levels, errors = _levels(group, 2), LocoErrors(Loco(kept=None))
    how = {"splits": (300, 300), "levels": levels, "codec": Blockwise(4), "errors": errors}
    values = _values(group.rank, 600)
    bad = values.clone()
    bad[[10, 400]] = torch.inf
    return (
        reduce_scatter_by_levels(bad, **how).wait(),
        reduce_scatter_by_levels(values, **how).wait(),
    )


def test_errors_cost_what_they_are_kept_in(ranks) -> None:
    """A plan adds them up before anything is allocated: all chunks, and own chunks across nodes."""
    for rank, (first, second) in enumerate(ranks(4).run(_errors_bytes)):
        wire = Blockwise(8).wire_bytes
        splits = SPLITS[1]
        assert first == sum(map(wire, splits)) + sum(map(wire, splits[rank % 2 :: 2]))
        assert second == 0


def _errors_bytes(group: Group) -> tuple[int, int]:
    errors, splits = LocoErrors(), SPLITS[1]
    how = {"splits": splits, "levels": _levels(group, 2), "codec": Blockwise(4), "errors": errors}
    reduce_scatter_by_levels(torch.zeros(sum(splits)), **how).wait()
    first = errors.num_bytes
    errors.reset()
    return first, errors.num_bytes


@pytest.mark.ranks(4)
@each_node_size
@pytest.mark.parametrize("kept", [None, Blockwise(8)], ids=str)
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
        assert torch.equal(mine, theirs)
    without = reduce(LocoErrors(loco), range(3, 4))[0]
    assert not torch.equal(without, expected[0])


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


@each_node_size
def test_traffic_is_what_the_two_hops_send(ranks, size: int) -> None:
    """ZeRO++'s quarter of M across nodes, exactly; integers, scales and padding apart."""
    splits, payload = SPLITS[1], (1, 690, 0, 500)
    for rank, operation in enumerate(
        ranks(4).run(_count, splits=splits, payload=payload, size=size)
    ):
        node, local = divmod(rank, size)
        mates = [r for r in range(4) if r % size != local]  # who gets what goes inside
        counterparts = [r for r in range(4) if r % size == local and r // size != node]

        assert operation.calls == 1
        assert operation.inside == _sent(mates, splits, payload)
        assert operation.across == _sent(counterparts, splits, payload)


def _sent(chunks: Sequence[int], splits: Sequence[int], payload: Sequence[int]) -> Sent:
    numel, values = sum(payload[c] for c in chunks), sum((payload[c] + 1) // 2 for c in chunks)
    packed = [(splits[c] + 1) // 2 for c in chunks]
    integers = sum(each + -each % 4 for each in packed)
    scales = sum(4 * -(-splits[c] // 256) for c in chunks)
    return Sent(numel, values, integers - values, scales)


def _count(group: Group, splits: Sequence[int], payload: Sequence[int], size: int):
    levels = _levels(group, size)
    how = {"splits": splits, "levels": levels, "codec": Blockwise(4), "payload": payload}
    with record_traffic(levels.whole) as traffic:
        reduce_scatter_by_levels(torch.zeros(sum(splits)), **how).wait()
    assert list(traffic.operations) == ["reduce_scatter"]
    return traffic.operations["reduce_scatter"]


def test_what_does_not_fit_is_refused(ranks) -> None:
    """Before anything travels, on every rank."""
    ranks(2).run(_refuse)
    with pytest.raises(CodecError, match=r"err_beta in \[0, 1\), got 1"):
        Loco(err_beta=1)
    with pytest.raises(CodecError, match="at least 1 reduction, got 0"):
        Loco(reset_T=0)


def _refuse(group: Group) -> None:
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

    assert torch.equal(*found)
