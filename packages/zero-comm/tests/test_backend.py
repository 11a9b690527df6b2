"""The table of what backends can do, tried instead of believed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from zero_comm import (
    BACKENDS,
    Group,
    Reduction,
    all_gather_flat,
    all_reduce_flat,
    reduce_scatter_flat,
)


def test_gloo_can_do_what_its_row_says(ranks) -> None:
    """Messages are matched by tag and not by order, which compositions rely on."""
    assert all(ranks(2).run(_sends_by_tag)) >= BACKENDS["gloo"].composes_from_peers


def _sends_by_tag(group: Group) -> bool:
    """Two messages sent in the other order than they are asked for."""
    peer = 1 - group.rank
    out = [torch.zeros(1), torch.zeros(1)]
    works = [dist.irecv(out[tag], peer, tag=tag) for tag in (0, 1)]
    works += [dist.isend(torch.full((1,), float(tag)), peer, tag=tag) for tag in (1, 0)]
    for work in works:
        work.wait()
    return [tensor.item() for tensor in out] == [0.0, 1.0]


def test_torch_s_own_collectives_are_found_under_either_name(ranks) -> None:
    """Torch 2.13 renames them and warns: `all_gather_single` was `all_gather_into_tensor`."""
    for gathered, scattered in ranks(2).run(_call_torch_s):
        assert gathered == [0.0, 1.0]
        assert scattered == [1.0]


def _call_torch_s(group: Group) -> tuple[list[float], list[float]]:
    """As on nccl, which composes nothing; of gloo's own, a sum is what both know."""
    group = evolve(group, backend=evolve(BACKENDS["nccl"], name="gloo"))
    gathered = torch.full((2,), float(group.rank))
    all_gather_flat(gathered, splits=[1, 1], group=group).wait()
    mine = torch.full((2,), float(group.rank))
    scattered = reduce_scatter_flat(mine, splits=[1, 1], group=group, op=Reduction.SUM).wait()
    return gathered.tolist(), scattered.tolist()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_choice_can_be_asked_about(name: str) -> None:
    """A fallback that cannot say why is a slow run nobody understands."""
    assert BACKENDS[name].name == name
    assert BACKENDS[name].reason


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_solo_group_on_a_gpu_takes_its_tensors() -> None:
    """`cuda` and `cuda:0` are one device and two values."""
    group = Group.solo("cuda")
    buffer = torch.ones(3, device="cuda")

    assert all_reduce_flat(buffer, group=group, op=Reduction.SUM).wait().tolist() == [1, 1, 1]
