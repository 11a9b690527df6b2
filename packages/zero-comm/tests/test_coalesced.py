"""Collectives on lists, against plain torch in one process."""

from __future__ import annotations

import random
import time
from math import prod

import pytest
import torch
from torch import Tensor, nn
from zero_comm import (
    BACKENDS,
    Group,
    GroupMismatchError,
    Reduction,
    all_gather_coalesced,
    all_reduce_coalesced,
    broadcast_coalesced,
    record_traffic,
    reduce_scatter_coalesced,
)
from zero_comm.messages import Messages
from zero_comm.testing import equal

COLLECTIVES = [
    all_gather_coalesced,
    reduce_scatter_coalesced,
    all_reduce_coalesced,
    broadcast_coalesced,
]
each_world = pytest.mark.ranks(1, 2, 3, 4)
each_op = pytest.mark.parametrize("op", Reduction, ids=lambda op: op.value)
each_out = pytest.mark.parametrize("with_out", [False, True], ids=["allocated", "out given"])
# Several sizes of several dtypes, mixed; nothing at all among them; more than one dimension.
SHAPES = [
    ((3,), torch.float32),
    ((2, 2), torch.bfloat16),
    ((0,), torch.float32),
    ((5,), torch.int64),
    ((1, 4), torch.float32),
    ((0,), torch.int64),
    ((7,), torch.bfloat16),
]
FLOAT_SHAPES = [row for row in SHAPES if row[1].is_floating_point]


def _list(rank: int, rows: int = 1, *, with_integers: bool = True) -> list[Tensor]:
    """What `rank` puts in; the first dimension is `rows` times as long."""
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(rows * shape[0], *shape[1:], generator=generator) * 1000).to(dtype)
        for shape, dtype in (SHAPES if with_integers else FLOAT_SHAPES)
    ]


def _reduced(lists: list[list[Tensor]], op: Reduction) -> list[Tensor]:
    totals = []
    for tensors in zip(*lists, strict=True):
        total = tensors[0]
        for tensor in tensors[1:]:
            total = total + tensor
        totals.append(total / len(lists) if op is Reduction.MEAN else total)
    return totals


def _assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    assert [tensor.dtype for tensor in got] == [tensor.dtype for tensor in expected]
    assert [tensor.shape for tensor in got] == [tensor.shape for tensor in expected]
    assert all(equal(a, b) for a, b in zip(got, expected, strict=True))


@each_world
@each_out
def test_all_gather_concatenates_in_rank_order(group: Group, with_out: bool) -> None:
    """Each tensor by itself, whatever travelled beside it."""
    lists = [_list(rank) for rank in range(group.world_size)]
    expected = [torch.cat([t.reshape(-1) for t in column]) for column in zip(*lists, strict=True)]
    shards, out = _list(group.rank), [torch.ones_like(each) for each in expected]
    full = all_gather_coalesced(shards, group=group, out=out if with_out else None).wait()

    assert not with_out or all(a is b for a, b in zip(full, out, strict=True))
    _assert_same(shards, lists[group.rank])
    _assert_same(full, expected)


@each_world
@each_op
@each_out
def test_reduce_scatter_keeps_this_rank_s_rows(group: Group, op: Reduction, with_out: bool) -> None:
    """Bit for bit the sum in rank order, and the inputs stay what they were."""
    world_size, with_integers = group.world_size, op is Reduction.SUM
    lists = [_list(rank, world_size, with_integers=with_integers) for rank in range(world_size)]
    expected = [total.reshape(world_size, -1)[group.rank] for total in _reduced(lists, op)]
    tensors = [tensor.clone() for tensor in lists[group.rank]]
    out = [torch.ones_like(each) for each in expected] if with_out else None
    shards = reduce_scatter_coalesced(tensors, group=group, op=op, out=out).wait()

    assert out is None or all(a is b for a, b in zip(shards, out, strict=True))
    _assert_same(tensors, lists[group.rank])
    _assert_same(shards, expected)


@pytest.mark.ranks(1, 2)
def test_any_list_comes_back_as_it_was_in_one_message_per_dtype(group: Group) -> None:
    """For any sizes and shapes, an empty tensor anywhere among them included."""
    rng = random.Random(0)
    for _ in range(60):
        sent = []
        for _ in range(rng.randrange(10)):
            shape = [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
            dtype = rng.choice([torch.float32, torch.bfloat16, torch.int64, torch.uint8])
            sent.append(torch.tensor([rng.randrange(99) for _ in range(prod(shape))]).to(dtype))
            sent[-1] = sent[-1].reshape(shape)
        last = group.world_size - 1
        tensors = [t.clone() if group.rank == last else torch.full_like(t, 77) for t in sent]
        with record_traffic(group) as traffic:
            broadcast_coalesced(tensors, src=last, group=group).wait()

        _assert_same(tensors, sent)
        if group.world_size > 1:
            calls = sum(operation.calls for operation in traffic.operations.values())
            assert calls == len({tensor.dtype for tensor in sent})


@pytest.mark.parametrize("num_tensors", [1, 2])
def test_tensors_may_be_written_as_soon_as_a_collective_was_launched(
    group: Group, num_tensors: int
) -> None:
    """What travels is a copy: it is the wait that writes the result over them."""
    for launch, expected in (
        (lambda tensors: all_reduce_coalesced(tensors, group=group, op=Reduction.SUM), 3.0),
        (lambda tensors: broadcast_coalesced(tensors, src=0, group=group), 1.0),
    ):
        tensors = [torch.full((3,), 1.0 + group.rank) for _ in range(num_tensors)]
        if group.rank == 1:
            time.sleep(0.1)  # until the other has written
        handle = launch(tensors)
        for tensor in tensors:
            tensor.fill_(-7)
        handle.wait()
        _assert_same(tensors, [torch.full((3,), expected)] * num_tensors)


@each_world
def test_one_tensor_alone_is_copied_like_many(group: Group) -> None:
    """A short cut that lends or scales the caller's gradient changes what the caller reads."""
    mine = torch.full((3 * group.world_size,), 1.0 + group.rank)
    handle = reduce_scatter_coalesced([mine], group=group)
    assert equal(mine, torch.full_like(mine, 1.0 + group.rank))
    mine.fill_(-7)  # the caller's own again
    (shard,) = handle.wait()
    assert equal(mine, torch.full_like(mine, -7))
    assert equal(shard, torch.full((3,), (1 + group.world_size) / 2))


@each_world
@each_op
def test_all_reduce_is_the_same_sum_everywhere(group: Group, op: Reduction) -> None:
    """In place, in rank order, for every shape and dtype of the list."""
    with_integers = op is Reduction.SUM
    lists = [_list(rank, with_integers=with_integers) for rank in range(group.world_size)]
    tensors = [tensor.clone() for tensor in lists[group.rank]]
    reduced = all_reduce_coalesced(tensors, group=group, op=op).wait()

    assert all(a is b for a, b in zip(reduced, tensors, strict=True))
    _assert_same(tensors, _reduced(lists, op))


@each_world
def test_broadcast_overwrites_with_the_source_s(group: Group) -> None:
    """Every rank's list becomes that of position `src`, in place."""
    tensors, src = _list(group.rank), group.world_size - 1
    sent = broadcast_coalesced(tensors, group=group, src=src).wait()

    assert all(a is b for a, b in zip(sent, tensors, strict=True))
    _assert_same(tensors, _list(src))


def test_parameters_can_be_handed_in_as_they_are(group: Group) -> None:
    """`model.parameters()` is what users have; autograd must neither record nor object."""
    torch.manual_seed(group.rank)
    params = list(nn.Linear(2, 2).parameters())
    broadcast_coalesced(params, group=group).wait()
    all_reduce_coalesced(params, group=group).wait()
    results = reduce_scatter_coalesced(params, group=group).wait()
    results += all_gather_coalesced(params, group=group).wait()
    first = nn.utils.parameters_to_vector(params).detach()
    copies = all_gather_coalesced([first], group=group).wait()[0].chunk(2)

    assert equal(*copies)
    assert all(param.is_leaf and param.requires_grad for param in params)
    assert not any(result.requires_grad for result in results)


@pytest.mark.ranks(1, 2)
def test_nothing_to_send_is_fine(group: Group) -> None:
    """A stage with no trainable parameters still calls every collective."""
    for collective in COLLECTIVES:
        assert collective([], group=group).wait() == []


# ---- Misuse ----


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.zeros(2, device="meta"), "tensor 1: .* on cpu, .* got meta"),
        (lambda: torch.zeros(2, 4).t(), r"tensor 1: .*contiguous.* strides \(1, 4\)"),
        (lambda: torch.zeros(2).to_sparse(), "tensor 1: .*dense .* torch.sparse_coo"),
    ],
    ids=["other device", "not contiguous", "sparse"],
)
def test_a_tensor_that_does_not_fit_is_named(collective, make, text: str) -> None:
    """Which of hundreds, what is wrong and on which rank; and before anything travels."""
    with pytest.raises(GroupMismatchError, match=text + r".*\(rank 0\)"):
        collective([torch.zeros(2), make()], group=_first_of_two())


def _first_of_two() -> Group:
    """Refusals are local: a group that never started is enough."""
    return Group(None, 0, 2, torch.device("cpu"), BACKENDS["gloo"], Messages(None, 0, 2))


def test_a_numel_that_does_not_divide_is_named() -> None:
    """Padding is the caller's decision; rounding down would lose gradients."""
    with pytest.raises(GroupMismatchError, match=r"tensor 1: .* by world size 2, got 3 \(rank 0\)"):
        reduce_scatter_coalesced([torch.zeros(2), torch.zeros(3)], group=_first_of_two())


@pytest.mark.parametrize(
    "out",
    [[torch.zeros(3)], [torch.zeros(4).int()], [torch.zeros(2, 2)], []],
    ids=["numel", "dtype", "shape", "length"],
)
@pytest.mark.parametrize("collective", [all_gather_coalesced, reduce_scatter_coalesced])
def test_an_out_that_does_not_fit_is_refused(collective, out: list[Tensor]) -> None:
    """Else results would be cut, cast or left unwritten."""
    numel = 2 if collective is all_gather_coalesced else 8

    with pytest.raises(GroupMismatchError, match=r"expected out to be 1-D tensors of .*\(4,\)"):
        collective([torch.zeros(numel)], group=_first_of_two(), out=out)


def test_a_source_outside_the_group_is_refused() -> None:
    """Positions count in the group, and a global rank is an easy mistake."""
    with pytest.raises(GroupMismatchError, match=r"src in 0..1, .*, got 2 \(rank 0\)"):
        broadcast_coalesced([torch.zeros(1)], group=_first_of_two(), src=2)
