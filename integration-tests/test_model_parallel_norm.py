"""The norm of a model that is split over another group besides."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import assert_close

HIDDEN = 8


class _Split(nn.Module):
    """Its rank's columns of one matrix, and a bias that every rank of the model has whole."""

    def __init__(self, matrix: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.matrix = nn.Parameter(matrix.clone())
        self.matrix.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.bias = nn.Parameter(bias.clone())

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.matrix).square().sum() + (x * self.bias).square().sum()


@pytest.mark.parametrize(
    ("stage", "norm_type"), [(0, float("inf")), (1, 2.0), (3, 2.0), (3, float("inf"))]
)
@pytest.mark.ranks(4)
def test_the_norm_covers_the_model_and_counts_what_is_replicated_once(
    group: Group, stage: int, norm_type: float
) -> None:
    """Else each rank of the model would clip by another factor, and its parts drift apart."""
    data = _group_of(group, [[0, 2], [1, 3]])  # the model is split over the other pairs
    model_group = _group_of(group, [[0, 1], [2, 3]])
    torch.manual_seed(0)
    whole = _Split(torch.randn(HIDDEN, HIDDEN), torch.randn(HIDDEN))
    x = torch.randn(2, HIDDEN)
    model = _Split(whole.matrix.detach().chunk(2, dim=1)[model_group.rank], whole.bias.detach())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=data)
    model(x[data.rank]).backward()
    for row in x:
        (whole(row) / 2).backward()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 1.0, norm_type=norm_type)

    norm = zero_engine.clip_grad_norm_(model, 1.0, norm_type=norm_type, across=model_group)

    assert_close(norm, expected)
    grad = zero_engine.full_grad(model.matrix)
    assert_close(grad, whole.matrix.grad.chunk(2, dim=1)[model_group.rank])


def test_parts_of_other_sizes_agree_on_a_norm(group: Group) -> None:
    """Stages of a pipeline have different numbers of buffers, so that their own tags differ."""
    torch.manual_seed(0)
    stages = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth))) for depth in (1, 3)]
    for stage in stages:
        stage(torch.ones(1, 4)).sum().backward()
    expected = nn.utils.get_total_norm([p.grad for stage in stages for p in stage.parameters()])

    model, alone = stages[group.rank], Group.solo(group.device)
    model.zero_grad()
    for param in model.parameters():
        param.tensor_model_parallel = True  # type: ignore[attr-defined]
    zero_engine.shard(model, None, ZeroConfig(1), group=alone)
    model(torch.ones(1, 4)).sum().backward()
    across = group.by_messages("this test asks for it")
    assert_close(zero_engine.clip_grad_norm_(model, 1e9, across=across), expected)


def test_a_rank_that_has_the_model_alone_counts_all_of_it(group: Group) -> None:
    """With one rank of tensor parallelism nothing is marked as split, and all is the norm's."""
    alone = Group.solo(group.device)
    model = nn.Linear(4, 4)
    zero_engine.shard(model, None, ZeroConfig(0), group=alone)
    model(torch.ones(1, 4)).sum().backward()
    expected = nn.utils.get_total_norm([param.grad for param in model.parameters()])
    assert_close(zero_engine.clip_grad_norm_(model, 1e9, across=alone), expected)


def test_an_overflow_in_what_one_rank_counts_is_seen_in_every_copy(group: Group) -> None:
    """Ranks of one model that disagree about a step hold parts that do not fit from there on."""
    for culprit in range(2):
        model = _Split(torch.ones(HIDDEN, HIDDEN), torch.ones(HIDDEN))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        zero_engine.shard(model, optimizer, ZeroConfig(0), group=Group.solo(group.device))
        factor = float("inf") if group.rank == culprit else 1.0
        (model.bias.sum() * factor).backward()

        report = zero_engine.unscale_and_clip_(model, max_norm=1.0, across=group)

        assert not report.is_finite


def _group_of(group: Group, all_ranks: list[list[int]]) -> Group:
    made = [dist.new_group(members) for members in all_ranks]  # every rank makes every group
    mine = next(i for i, members in enumerate(all_ranks) if group.rank in members)
    return Group.from_process_group(made[mine])
