"""ZeroRedundancyOptimizer against plain DDP, and against torch's where both can do it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from redundancy import (
    ELEMENTWISE,
    WHOLE,
    Nested,
    assert_alike,
    give_grads,
    make_params,
    model_for,
    pair,
    params_of,
    same,
    step_alike,
    tensor_bytes,
    torchs_optimizer,
    train,
)
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from zero_comm import (
    AgreementError,
    Group,
    RankFailedError,
    all_gather_json,
    ddp_hook,
    record_traffic,
)
from zero_comm.testing import assert_close
from zero_partition import PartitionError, ZeroRedundancyOptimizer

# ---- The same training ----


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ELEMENTWISE, *WHOLE][::4])
def test_training_is_that_of_plain_ddp_bit_for_bit(group: Group, name: str) -> None:
    """Sharding state is about memory; whoever adds it in one line must not get another curve."""
    make, options = (ELEMENTWISE | WHOLE)[name]
    plain, *sharded = (DistributedDataParallel(model_for(name)) for _ in range(3))
    oracle = make(plain.parameters(), **options)
    train(plain, oracle, group.rank, range(8))
    for in_place, model in enumerate(sharded):
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), make, group, bool(in_place), **options
        )
        train(model, optimizer, group.rank, range(8))
        assert_alike(oracle, optimizer)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("in_place", [False, True])
def test_what_torch_s_can_do_comes_out_alike(group: Group, in_place: bool) -> None:
    """People come from there, with their schedulers, closures, groups and checkpoints."""
    found = []
    for kind in (torchs_optimizer(), ZeroRedundancyOptimizer):
        params, late = make_params((5, 3), (7,), (), (2, 9)), make_params((3, 3), (4,))
        groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:]}]
        optimizer: Any = kind(
            groups, torch.optim.AdamW, parameters_as_bucket_view=in_place, lr=0.01
        )
        scheduler = StepLR(optimizer, step_size=2, gamma=0.5)
        losses = []
        for step in range(8):
            if step == 3:
                optimizer.add_param_group({"params": late, "lr": 0.2})
                scheduler.base_lrs.append(0.2)
            if step == 5:
                params[1].requires_grad_(False)

            def closure(every: list = params_of(optimizer), step: int = step) -> float:  # noqa: B008
                give_grads(every, step)
                return float(step)

            losses.append(optimizer.step(closure if step % 2 else (closure(), None)[1]))
            scheduler.step()
            optimizer.zero_grad()
            assert all(param.grad is None for param in params_of(optimizer))
        optimizer.consolidate_state_dict(to=1)
        state = optimizer.state_dict() if group.rank == 1 else None
        rates = [entry["lr"] for entry in optimizer.param_groups]
        found.append(([p.detach() for p in params_of(optimizer)], losses, rates, state))
    assert same(*found)


def _reduce_into_other_memory(state, bucket):  # no annotations: DDP compares them with types
    return allreduce_hook(state, bucket).then(lambda reduced: reduced.value().clone())


@pytest.mark.ranks(3)
@pytest.mark.parametrize("in_place", [False, True])
def test_steps_within_backward_are_those_after_it(group: Group, in_place: bool) -> None:
    """Overlap is about time; torch's, in contrast, leaves out the first two or three steps."""
    many_buckets = {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": in_place}
    for reduce in (_reduce_into_other_memory, fp16_compress_hook, ddp_hook(group)):
        plain, sharded = (DistributedDataParallel(model_for(""), **many_buckets) for _ in range(2))
        plain.register_comm_hook(None, reduce)
        oracle = torch.optim.AdamW(plain.parameters(), lr=0.1)
        optimizer = ZeroRedundancyOptimizer(
            sharded.parameters(), torch.optim.AdamW, group, in_place, lr=0.1
        )
        optimizer.overlap_with_ddp(sharded, reduce)
        sides = [
            (model, each, StepLR(each, 2, 0.7))
            for model, each in ((plain, oracle), (sharded, optimizer))
        ]
        for step in range(4):
            for model, each, scheduler in sides:
                with model.no_sync():  # accumulation
                    model(torch.ones(4, 5)).sum().backward()
                train(model, each, group.rank, [step])
                scheduler.step()
            assert_alike(oracle, optimizer)
        with pytest.raises(RuntimeError, match="called before"):
            optimizer.overlap_with_ddp(sharded, reduce)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("in_place", [False, True])
def test_parameters_may_be_frozen_and_unfrozen_between_steps(group: Group, in_place: bool) -> None:
    """Gradual unfreezing is how people fine-tune."""
    params = make_params((4, 3), (5,), (2, 2), (6,))
    for param in params[:2]:
        param.requires_grad_(False)
    optimizers = pair(params, torch.optim.Adam, group, in_place, lr=0.1)
    for step in range(8):
        for optimizer in optimizers:
            each = params_of(optimizer)
            each[0].requires_grad_(step >= 2)
            each[1].requires_grad_(step in {3, 4, 7})
            each[3].requires_grad_(step != 4)
            give_grads(each, step)
            if step == 4:
                each[3].grad = torch.ones(6)  # frozen after backward: it steps all the same
            optimizer.step()
        assert_alike(*optimizers)
        for param in params_of(optimizers[1]):
            if param.grad is None:  # it does not travel, and keeps nobody else's memory
                assert param.untyped_storage().nbytes() == param.nbytes


def _of_all_kinds() -> list[nn.Parameter]:
    """Torch's refuses several dtypes, and makes a model that lies channels last contiguous."""
    image = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    return [
        *make_params((3, 2), (5,), (), (600, 700)),
        *make_params((7,), (2, 3), dtype=torch.bfloat16),
        *make_params((9,), dtype=torch.float64),
        *make_params((3,), dtype=torch.complex64),
        nn.Parameter(image.to(memory_format=torch.channels_last)),
        nn.Parameter(make_params((4, 6))[0].detach()[:, ::2]),  # does not fill its memory
    ]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("transport", ["reads", "messages"])
def test_parameters_of_any_kind_and_number_travel_together(group: Group, transport: str) -> None:
    """Ranks of one host read each other's memory, which hides what else there is."""
    if transport == "messages":
        with mock.patch.dict(os.environ, {"ZERO_COMM_PEER_MEMORY": "0"}):
            group = Group.from_process_group(dist.new_group())
        assert not group.exchanges.reads_peers
    for params in (
        _of_all_kinds(),
        make_params((3, 2), (0, 4)),  # fewer than ranks, and one has no elements
    ):
        strides = [param.stride() for param in params[:-1]]
        for in_place in (False, True):
            oracle, optimizer = pair(params, torch.optim.SGD, group, in_place, lr=0.1, momentum=0.9)
            with record_traffic(group) as traffic:
                step_alike(oracle, optimizer, range(3))
            if params[-1].numel():
                assert traffic.operations["all_gather"].calls == 3  # one for all dtypes
            assert [param.stride() for param in params[:-1]] == strides
            for to in (2, None):
                optimizer.consolidate_state_dict(to=to)
                if to in {None, group.rank}:
                    assert same(oracle.state_dict(), optimizer.state_dict())


# ---- What each rank has ----


@pytest.mark.ranks(2, 3)
def test_no_rank_has_more_state_than_its_part_and_one_parameter(group: Group) -> None:
    """The memory of the fullest rank is what a job needs."""
    rng = np.random.default_rng(group.world_size)
    for _ in range(5):
        numels = rng.integers(1, 200, size=rng.integers(1, 12)) ** 2 // 9 + 1
        params = make_params(*((int(numel),) for numel in numels))
        frozen = [p.requires_grad_(False) for p in make_params((200_000,), (1,))]  # weigh nothing
        optimizer = ZeroRedundancyOptimizer(params[:1], torch.optim.Adam, group, lr=0.1)
        optimizer.add_param_group({"params": [*params[1:], *frozen]})
        give_grads(params, 0)
        optimizer.step()

        moments = [[s["exp_avg"], s["exp_avg_sq"]] for s in optimizer.state.values()]
        held = all_gather_json(tensor_bytes(moments), group=group)
        state = [2 * param.nbytes for param in params]
        assert sum(held) == sum(state)
        fullest = held.index(max(held))
        dealt = [2 * p.nbytes for p in params[1:] if optimizer.owner_of(p) == fullest]
        # The least of those came last, when that rank had least of all.
        assert max(held) - min(dealt, default=max(held)) <= sum(state) / group.world_size
        sizes = list(optimizer.bytes_per_rank)
        for param in frozen:
            sizes[optimizer.owner_of(param)] -= param.nbytes
        assert [2 * size for size in sizes] == held


def test_parameters_in_place_are_views_of_one_memory_whatever_users_do(group: Group) -> None:
    """Model code assigns `param.data`; a stale view would send old weights for ever."""
    params = make_params((4, 3), (5,), (2, 2))
    optimizers = pair(params, torch.optim.SGD, group, True, lr=0.1)

    for step in range(3):
        assert len({param.untyped_storage().data_ptr() for param in params}) == 1
        for optimizer in optimizers:
            for param in params_of(optimizer):
                param.data = param.data * 0.5
            if step == 2:
                param.data = param.data.double()
        step_alike(*optimizers, [step])
    assert len({param.untyped_storage().data_ptr() for param in params}) == 1


# ---- What goes in ----


def test_generators_pairs_and_dicts_are_taken_and_never_changed() -> None:
    """A caller who builds two optimizers from one list of dicts must not find it edited."""
    params, group = make_params((2, 3), (4,), (5,)), Group.solo()
    given = [{"params": (p for p in params[:2]), "lr": 0.5}, {"params": params[2]}]
    late = {"params": make_params((3,))}

    optimizer = ZeroRedundancyOptimizer(given, torch.optim.Adam, group, lr=0.1)
    optimizer.add_param_group(late)

    assert [set(each) for each in (*given, late)] == [{"params", "lr"}, {"params"}, {"params"}]
    assert [len(each["params"]) for each in optimizer.param_groups] == [2, 1, 1]
    assert [each["lr"] for each in optimizer.param_groups] == [0.5, 0.1, 0.1]
    named = ZeroRedundancyOptimizer(
        (("weight", param) for param in params[:1]), torch.optim.SGD, group, lr=0.1
    )
    assert named.param_groups[0]["param_names"] == ["weight"]


def test_what_no_optimizer_takes_is_refused_as_plain_torch_does() -> None:
    """The type of the exception is what callers catch."""
    for params, error in ((torch.ones(2), TypeError), ([], ValueError), ([1], TypeError)):
        with pytest.raises(error):
            torch.optim.SGD(params, lr=0.1)
        with pytest.raises(error):
            ZeroRedundancyOptimizer(params, torch.optim.SGD, Group.solo(), lr=0.1)


def test_what_cannot_be_meant_is_told_with_what_can() -> None:
    """Options would reach the inner optimizer, whose message knows nothing of them."""
    meta = [("empty", nn.Parameter(torch.empty(2, device="meta")))]
    lazy = nn.LazyLinear(2).parameters()
    fine = make_params((2,))
    for params, options, error, says in (
        (fine, {"overlap_with_ddp": True}, TypeError, r"optimizer\.overlap_with_ddp\(ddp_model"),
        (fine, {"process_group": Group.solo()}, TypeError, "got both"),
        (meta, {}, PartitionError, r"'empty'.*on the meta device"),
        (lazy, {}, PartitionError, r"parameter 0.*lazy module.*forward"),
    ):
        with pytest.raises(error, match=says):
            ZeroRedundancyOptimizer(params, torch.optim.SGD, Group.solo(), lr=0.1, **options)


def test_param_groups_go_both_ways() -> None:
    """A scheduler writes to them, and so does an optimizer that adapts its own rate."""
    params = make_params((2,), (3,))
    optimizer = ZeroRedundancyOptimizer(params, Nested, Group.solo(), lr=0.1)
    give_grads(params, 0)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.7
    optimizer.step()

    assert optimizer.param_groups[0]["seen"] == 2
    assert optimizer.optim.param_groups[0]["lr"] == 0.7
    adam = ZeroRedundancyOptimizer(params, torch.optim.Adam, Group.solo())
    assert "betas" in OneCycleLR(adam, 0.1, total_steps=5).optimizer.defaults  # asked for there


def test_sparse_gradients_step() -> None:
    """An embedding with sparse gradients has an optimizer of its own."""
    optimizers = pair(make_params((6, 3)), torch.optim.SparseAdam, Group.solo(), lr=0.1)
    for optimizer in optimizers:
        nn.functional.embedding(
            torch.tensor([1, 4]), params_of(optimizer)[0], sparse=True
        ).sum().backward()
        optimizer.step()
    assert_alike(*optimizers)


# ---- What is refused ----


class CommonNorm(torch.optim.SGD):
    """Divides by the norm over all parameters."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # noqa: D102
        grads = [param.grad for param in params_of(self) if param.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads] or [torch.ones(())]).norm()
        for grad in grads:
            grad.div_(norm)
        super().step()


@pytest.mark.ranks(3)
def test_optimizers_that_couple_parameters_are_refused_everywhere(group: Group) -> None:
    """Each rank would see the norm, or search the line, of its own parameters only."""
    params = make_params((2, 3), (4,))  # fewer than ranks: one has nothing to look at

    says = "outside param_groups: it updates all|does not treat parameters one by one"
    with pytest.raises((PartitionError, AgreementError), match=f"LBFGS .*({says})"):
        ZeroRedundancyOptimizer(params, torch.optim.LBFGS, group)
    with pytest.raises(PartitionError, match="does not treat parameters one by one"):
        ZeroRedundancyOptimizer(params, CommonNorm, group, lr=0.1)


class Picky(torch.optim.SGD):
    """Looks at parameters when they are added."""

    needs_cut = "tensor"

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: D102
        super().add_param_group(param_group)
        if any(param.dim() != 2 for param in self.param_groups[-1]["params"]):
            raise ValueError("matrices only")


def test_what_one_rank_alone_cannot_do_ends_all(group: Group) -> None:
    """Its peers would wait for it."""
    params = make_params((9, 9), (3,))  # Muon takes no vector, and one rank has it

    with pytest.raises((ValueError, AgreementError), match="Muon only supports 2D") as caught:
        ZeroRedundancyOptimizer(params, torch.optim.Muon, group, lr=0.1)
    assert isinstance(caught.value, ValueError if group.rank == 1 else AgreementError)
    matrices = make_params((9, 9), (3, 3))
    optimizer = ZeroRedundancyOptimizer(matrices, Picky, group, lr=0.1)
    even = optimizer.bytes_per_rank
    with pytest.raises((ValueError, AgreementError), match="matrices only"):
        optimizer.add_param_group({"params": make_params((4,))})
    assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 1
    assert optimizer.bytes_per_rank == even
    give_grads(matrices, 0)
    optimizer.step()
    with pytest.raises(AgreementError, match=r"parameter 1 .*trains.*is frozen"):
        params[1].requires_grad_(group.rank == 0)
        ZeroRedundancyOptimizer(params, torch.optim.SGD, group, lr=0.1)


@pytest.mark.slow
def test_a_parameter_that_one_rank_alone_freezes_ends_all(ranks) -> None:
    """Weights would be received in the place of others."""
    with pytest.raises(RankFailedError, match="every rank"):
        ranks(2).run(_freeze_alone)


def _freeze_alone(group: Group) -> None:
    params = make_params((3, 3), (4,), (5,))
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, group, lr=0.1)
    params[2].requires_grad_(group.rank == 0)
    give_grads(params, 0)
    optimizer.step()


# ---- Uneven inputs ----


@pytest.mark.slow
def test_join_goes_on_with_ranks_that_have_inputs(group: Group) -> None:
    """As torch's tutorial of uneven inputs writes it, with the numbers of torch's optimizer."""
    found = []
    for make in (torchs_optimizer(), ZeroRedundancyOptimizer):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(5, 5) for _ in range(3))))
        optimizer = make(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        steps = 0
        with Join([model, optimizer]):
            for step in range(2 + 2 * group.rank):
                model(torch.ones(2, 5) * (step + 1) / 10).square().sum().backward()
                optimizer.step()
                steps += 1
        assert steps == 2 + 2 * group.rank
        found.append([param.detach().clone() for param in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


def test_a_sparse_parameter_is_refused_by_name(group: Group) -> None:
    """It has no bytes to send in one piece."""
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.eye(3).to_sparse())]
    with pytest.raises(
        PartitionError, match="expected a dense tensor with values, got one of layo"
    ):
        ZeroRedundancyOptimizer(params, torch.optim.SGD, group, lr=0.1)
