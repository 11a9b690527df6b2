"""Inputs split over ranks: each keeps a shard, and all compute what they would without."""

from __future__ import annotations

import gc
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from zero_ckpt import Checkpointer, PackedSaver
from zero_ckpt.testing import late
from zero_comm import DivergenceError, Group, even_splits, record_traffic

pytestmark = pytest.mark.xdist_group("ranks")

CPU = torch.device("cpu")
NUMEL = 7354  # of which half is the size of nothing else
OPTIONS: list[dict[str, Any]] = [
    {},
    {"moves": True},
    {"num_slots": 3},
    {"moves": True, "num_slots": 3},
]


def _saver(group: Group, *, moves: bool = False, num_slots: int | None = None) -> PackedSaver:
    saver = PackedSaver(group=group, on_host=moves, num_slots=num_slots)
    if moves:
        late(saver)
    return saver


# ---- The law ----


@pytest.mark.ranks(2, 4)
def test_inputs_come_back_as_they_were(group: Group) -> None:
    """Odd sizes, other dtypes, strides: nothing that a model may pass is refused."""
    whole = torch.randn(7, 9)
    inputs = [
        whole.t(),
        whole[:, 2:9:2],
        torch.randn(6, 1).expand(6, 10),
        torch.randn(31).unfold(0, 5, 2),
        torch.randn(11),
        torch.randn(13, dtype=torch.float64),
        torch.randn(world_size_minus_one := group.world_size - 1),
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.arange(40),
        torch.randn(5, 5, dtype=torch.complex64),
    ]
    before = [tensor.clone() for tensor in inputs]
    for options in OPTIONS:
        saver = _saver(group, **options)
        kept = saver.save(inputs, "it")
        for _ in range(2):
            with record_traffic(group) as traffic:
                restored = kept.restore()

            assert traffic.operations["all_gather"].calls == 2  # float32 and float64
            for found, tensor, old in zip(restored, inputs, before, strict=True):
                assert found.dtype == tensor.dtype
                assert torch.equal(found, old)
                assert torch.equal(tensor, old)
                assert found.stride() == tensor.stride() or tensor is inputs[1]
    assert restored[6].shape == (world_size_minus_one,)


# ---- What is kept ----


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("numel", [64, 37, 3], ids=lambda numel: f"{numel} elements")
def test_each_rank_keeps_its_shard(ranks: Any, world_size: int, numel: int) -> None:
    """One over N is what the option is for; odd sizes cost an element at most."""
    found = ranks(world_size).run(_bytes_of_layers, numel=numel)

    splits = even_splits(numel, world_size) if numel >= world_size else (numel,) * world_size
    assert found == [3 * 4 * split for split in splits]


def _bytes_of_layers(group: Group, numel: int) -> int:
    for options in reversed(OPTIONS):
        saver = _saver(group, **options)
        run = Checkpointer(saver=saver).checkpoint
        storages = []
        x = torch.randn(numel) * torch.ones(1, requires_grad=True)
        for _ in range(3):
            storages.append(StorageWeakRef(x.untyped_storage()))
            x = run(torch.tanh, x)
        saver.save([], "the next")  # lets go of what was copied away last
        kept_bytes = saver.kept_bytes()[CPU]
        is_whole = not options and numel < group.world_size

        assert [storage.expired() for storage in storages] == [not is_whole] * 3
        x.sum().backward()
        del x
        assert saver.kept_bytes() == {}
    return kept_bytes


def test_an_enclosing_checkpoint_drops_what_inner_ones_keep(group: Group) -> None:
    """Shards of inner inputs would pile up until backward: one for each layer of every segment."""
    saver = _saver(group)
    run = Checkpointer(saver=saver).checkpoint

    def num_shards() -> int:
        return sum(type(t) is Tensor and t.shape == (NUMEL // 2,) for t in gc.get_objects())

    def deep(y: Tensor) -> Tensor:
        for _ in range(4):
            y = run(torch.tanh, y * 2)
        return y

    x = torch.randn(NUMEL, requires_grad=True)
    output = run(deep, run(deep, x))

    assert num_shards() == 2  # and not those of the eight inner calls
    assert saver.kept_bytes() == {CPU: 2 * NUMEL // 2 * 4}
    output.sum().backward()
    assert num_shards() == 0


def test_one_message_carries_all_inputs_of_a_call(ranks: Any) -> None:
    """A message per tensor costs its latency each."""
    assert ranks(2).run(_messages) == [(1, 13 + 10), (1, 12 + 10)]


def _messages(group: Group) -> tuple[int, int]:
    saver = _saver(group)
    kept = saver.save([torch.randn(5, 5), torch.randn(20), torch.arange(9)], "it")
    with record_traffic(group) as traffic:
        kept.restore()
    return traffic.operations["all_gather"].calls, traffic.payload_numel()


# ---- Ranks that differ, exceptions ----


def test_ranks_that_go_backward_through_other_calls_are_told(group: Group) -> None:
    """Values of one layer taken for those of another would be gradients of nothing."""
    group = Group.from_process_group(group.process_group, patience_s=0.4)
    run = Checkpointer(saver=_saver(group)).checkpoint
    x = torch.randn(8, requires_grad=True)
    outputs = [run(torch.sin, x), run(torch.cos, x)]

    with pytest.raises(
        DivergenceError, match=r"gathering the inputs of the checkpoint of .*(sin|cos)"
    ):
        outputs[group.rank].sum().backward()


@pytest.mark.parametrize("reads", [True, False], ids=["reads", "messages"])
def test_ranks_that_were_called_with_other_sizes_are_told(group: Group, reads: bool) -> None:
    """Split inputs are the same on all ranks: a batch of its own on each is a mistake."""
    with mock.patch.dict(os.environ, {} if reads else {"ZERO_COMM_PEER_MEMORY": "0"}):
        group = Group.from_process_group(dist.new_group(), patience_s=0.4)
    assert (group.peers is not None) == reads
    x = torch.randn(8 + 2 * group.rank, requires_grad=True)
    output = Checkpointer(saver=_saver(group)).checkpoint(torch.sin, x)

    with pytest.raises(DivergenceError, match=r"elements: 8 of .*elements: 10 of .*same inputs"):
        output.sum().backward()


def test_an_exception_in_the_second_run_leaves_the_ranks_in_step(group: Group) -> None:
    """Who catches it on every rank goes on."""
    for options in OPTIONS:
        saver = _saver(group, **options)
        run = Checkpointer(saver=saver).checkpoint
        runs = [0]

        def fails(x: Tensor, runs: list[int] = runs) -> Tensor:
            runs[0] += 1
            if runs[0] == 2:
                raise KeyError("a bad batch")
            return x.sin()

        x = torch.randn(9, requires_grad=True)
        output = run(fails, x)
        with pytest.raises(KeyError):
            output.sum().backward()
        output.sum().backward()
        assert torch.equal(x.grad, x.detach().cos())  # type: ignore[arg-type]
        assert saver.kept_bytes() == {}
