"""ZeroRedundancyOptimizer against plain DDP, and against torch's where both can do it."""

from __future__ import annotations

import math
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
    copies,
    give_grads,
    make_params,
    model_for,
    same,
    tensor_bytes,
    torchs_optimizer,
    train,
    under_ddp,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from zero_comm import AgreementError, Group, RankFailedError, ddp_hook, record_traffic
from zero_partition import PartitionError, ZeroRedundancyOptimizer

_IMPORT_S = 120.0  # the first step of some optimizers imports torch's compiler, on each rank


# ---- The same training ----


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_is_that_of_plain_ddp_bit_for_bit(ranks, world_size: int) -> None:
    """Sharding state is about memory; whoever adds it in one line must not get another curve."""
    names = list(ELEMENTWISE | WHOLE)[:: 1 if world_size == 2 else 3]
    for seen in ranks(world_size).run(_train_each, names=names, timeout_s=_IMPORT_S):
        assert seen == {}


def _train_each(group: Group, names: list[str]) -> dict[str, str]:
    differences = {}
    for index, name in enumerate(names):
        make, options = (ELEMENTWISE | WHOLE)[name]
        for in_place in (False, True) if index < 2 else (index % 2 == 0,):
            plain, sharded = (under_ddp(model_for(name), group) for _ in range(2))
            oracle = make(plain.parameters(), **options)
            optimizer = ZeroRedundancyOptimizer(
                sharded.parameters(), make, group, in_place, **options
            )
            train(plain, oracle, group.rank, range(20))
            train(sharded, optimizer, group.rank, range(20))
            pairs = zip(plain.named_parameters(), sharded.parameters(), strict=True)
            wrong = [key for (key, mine), theirs in pairs if not torch.equal(mine, theirs)]
            optimizer.consolidate_state_dict(to=group.world_size - 1)
            if group.rank == group.world_size - 1:
                for number, state in oracle.state_dict()["state"].items():
                    if not same(dict(state), dict(optimizer.state_dict()["state"][number])):
                        wrong.append(f"state of parameter {number}")
            if wrong:
                differences[f"{name}, in place: {in_place}"] = ", ".join(wrong)
    return differences


@pytest.mark.ranks(2, 3)
def test_what_torch_s_can_do_comes_out_alike(group: Group) -> None:
    """People come from there, with their schedulers, closures, groups and checkpoints."""
    for in_place in (False, True):
        theirs, ours = (make_params((5, 3), (7,), (), (2, 9)) for _ in range(2))
        late_theirs, late_ours = (make_params((3, 3), (4,)) for _ in range(2))
        found = []
        for kind, params, late in (
            (torchs_optimizer(), theirs, late_theirs),
            (ZeroRedundancyOptimizer, ours, late_ours),
        ):
            groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:]}]
            optimizer: Any = kind(
                groups,
                torch.optim.AdamW,
                parameters_as_bucket_view=in_place,
                lr=0.01,
            )
            scheduler = StepLR(optimizer, step_size=2, gamma=0.5)
            losses = []
            for step in range(8):
                if step == 3:
                    optimizer.add_param_group({"params": late, "lr": 0.2})
                    scheduler.base_lrs.append(0.2)
                if step == 5:
                    params[1].requires_grad_(False)
                every = [*params, *late] if step >= 3 else params

                def closure(every: list = every, step: int = step) -> float:
                    give_grads(every, step)
                    return float(step)

                losses.append(optimizer.step(closure if step % 2 else (closure(), None)[1]))
                scheduler.step()
                optimizer.zero_grad()
                assert all(param.grad is None for param in every)
            optimizer.consolidate_state_dict(to=1)
            state = optimizer.state_dict() if group.rank == 1 else None
            found.append((params, late, losses, state, [g["lr"] for g in optimizer.param_groups]))
        assert same(*[[p.detach() for p in (*params, *late)] for params, late, *_ in found])
        assert found[0][2] == found[1][2]
        assert found[0][4] == found[1][4]
        if group.rank == 1:
            assert same(found[0][3], found[1][3]), (found[0][3], found[1][3])


@pytest.mark.ranks(2, 4)
def test_steps_within_backward_are_those_after_it(group: Group) -> None:
    """Overlap is about time; torch's, in contrast, leaves out the first two or three steps."""
    for in_place in (False, True):
        for reduce in (allreduce_hook, fp16_compress_hook, ddp_hook(group)):
            plain, sharded = (
                under_ddp(
                    model_for(""),
                    group,
                    bucket_cap_mb=1e-4,  # many buckets
                    gradient_as_bucket_view=in_place,
                )
                for _ in range(2)
            )
            plain.register_comm_hook(None, reduce)
            oracle = torch.optim.AdamW(plain.parameters(), lr=0.1)
            optimizer = ZeroRedundancyOptimizer(
                sharded.parameters(), torch.optim.AdamW, group, in_place, lr=0.1
            )
            optimizer.overlap_with_ddp(sharded, reduce)
            schedulers = [StepLR(each, 2, 0.7) for each in (oracle, optimizer)]
            for step in range(6):
                with sharded.no_sync():  # accumulation
                    give = torch.Generator().manual_seed(7)
                    sharded(torch.randn(4, 5, generator=give)).backward()
                with plain.no_sync():
                    give = torch.Generator().manual_seed(7)
                    plain(torch.randn(4, 5, generator=give)).backward()
                train(plain, oracle, group.rank, [step])
                train(sharded, optimizer, group.rank, [step])
                for scheduler in schedulers:
                    scheduler.step()
                pairs = zip(plain.parameters(), sharded.parameters(), strict=True)
                assert all(torch.equal(mine, other) for mine, other in pairs), (step, in_place)
            with pytest.raises(RuntimeError, match="called before"):
                optimizer.overlap_with_ddp(sharded, reduce)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("in_place", [False, True])
def test_parameters_may_be_frozen_and_unfrozen_between_steps(group: Group, in_place: bool) -> None:
    """Gradual unfreezing is how people fine-tune."""
    params = make_params((4, 3), (5,), (2, 2), (6,))
    for param in params[:2]:
        param.requires_grad_(False)
    expected = copies(params)
    oracle = torch.optim.Adam(expected, lr=0.1)
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.Adam, group, in_place, lr=0.1)
    for step in range(8):
        for each in (params, expected):
            each[0].requires_grad_(step >= 2)
            each[1].requires_grad_(step in {3, 4, 7})
            each[3].requires_grad_(step != 4)
            give_grads(each, step)
            if step == 4:
                each[3].grad = torch.ones(6)  # frozen after backward: it steps all the same
        oracle.step()
        optimizer.step()
        assert same([p.detach() for p in params], [p.detach() for p in expected]), step


@pytest.mark.ranks(4)
def test_more_ranks_than_parameters_and_parameters_without_elements(group: Group) -> None:
    """Someone owns nothing, and must take part all the same."""
    for in_place in (False, True):
        params = make_params((3, 2), (0, 4))
        expected = copies(params)
        oracle = torch.optim.AdamW(expected, lr=0.1)
        optimizer = ZeroRedundancyOptimizer(params, torch.optim.AdamW, group, in_place, lr=0.1)
        for step in range(3):
            give_grads(params, step)
            give_grads(expected, step)
            oracle.step()
            optimizer.step()
        optimizer.consolidate_state_dict(to=None)
        assert same([p.detach() for p in params], [p.detach() for p in expected])
        assert same(oracle.state_dict(), optimizer.state_dict())


@pytest.mark.ranks(3)
def test_between_hosts_values_travel_by_messages(group: Group) -> None:
    """Ranks of one host read each other's memory, which hides what else there is."""
    with mock.patch.dict(os.environ, {"ZERO_COMM_PEER_MEMORY": "0"}):
        process_group = dist.new_group()
        group = Group.from_process_group(process_group)
    assert group.peers is None
    for in_place in (False, True):
        params = make_params((600, 700), (7,), (5, 3), ())
        expected = copies(params)
        oracle = torch.optim.AdamW(expected, lr=0.1)
        optimizer = ZeroRedundancyOptimizer(
            params,
            torch.optim.AdamW,
            parameters_as_bucket_view=in_place,
            process_group=process_group,
            lr=0.1,
        )
        assert optimizer.group.peers is None
        for step in range(3):
            give_grads(params, step)
            give_grads(expected, step)
            oracle.step()
            optimizer.step()
        for to in (2, None):
            optimizer.consolidate_state_dict(to=to)
            if to in {None, group.rank}:
                assert same(oracle.state_dict(), optimizer.state_dict())
        assert same([p.detach() for p in params], [p.detach() for p in expected])


@pytest.mark.parametrize("in_place", [False, True])
def test_several_dtypes_and_strides_travel_together(group: Group, in_place: bool) -> None:
    """Torch's refuses the one, and makes a model that lies channels last contiguous."""
    params = [
        *make_params((3, 2), (5,)),
        *make_params((7,), (2, 3), dtype=torch.bfloat16),
        *make_params((9,), dtype=torch.float64),
        *make_params((3,), dtype=torch.complex64),
    ]
    image = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    params.append(nn.Parameter(image.to(memory_format=torch.channels_last)))
    params.append(nn.Parameter(make_params((4, 6))[0].detach()[:, ::2]))  # does not fill its memory
    strides = [param.stride() for param in params[:-1]]
    expected = copies(params)
    oracle = torch.optim.SGD(expected, lr=0.1, momentum=0.9)
    optimizer = ZeroRedundancyOptimizer(
        params, torch.optim.SGD, group, in_place, lr=0.1, momentum=0.9
    )
    with record_traffic(group) as traffic:
        for step in range(4):
            give_grads(params, step)
            give_grads(expected, step)
            oracle.step()
            optimizer.step()

    assert traffic.operations["all_gather"].calls == 4  # one for all dtypes
    assert same([p.detach() for p in params], [p.detach() for p in expected])
    assert [param.stride() for param in params[:-1]] == strides


# ---- What each rank has ----


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_no_rank_has_more_state_than_its_part_and_one_parameter(
    ranks, world_size: int, seed: int
) -> None:
    """The memory of the fullest rank is what a job needs."""
    rng = np.random.default_rng(seed)
    shapes = [(int(n),) for n in rng.integers(1, 200, size=rng.integers(1, 12)) ** 2 // 9 + 1]
    held = ranks(world_size).run(_count_state, shapes=shapes)

    state = [2 * 4 * math.prod(shape) for shape in shapes]
    assert sum(of_rank for of_rank, _ in held) == sum(state)
    assert max(of_rank for of_rank, _ in held) <= sum(state) / world_size + max(state)
    assert [2 * size for size in held[0][1]] == [of_rank for of_rank, _ in held]


def _count_state(group: Group, shapes: list[tuple[int, ...]]) -> tuple[int, tuple[int, ...]]:
    params = make_params(*shapes)
    params += [p.requires_grad_(False) for p in make_params((200_000,), (1,))]  # weigh nothing
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.Adam, group, lr=0.1)
    give_grads(params, 0)
    optimizer.step()
    moments = [
        {key: value for key, value in state.items() if key != "step"}
        for state in optimizer.state.values()
    ]
    frozen = [optimizer.owner_of(param) for param in params[-2:]]
    sizes = list(optimizer.bytes_per_rank)
    for rank, param in zip(frozen, params[-2:], strict=True):
        sizes[rank] -= 4 * param.numel()
    return tensor_bytes(moments), tuple(sizes)


def test_parameters_in_place_are_views_of_one_memory_that_outlive_what_users_do(
    group: Group,
) -> None:
    """Model code assigns `param.data`; a stale view would send old weights for ever."""
    params = make_params((4, 3), (5,), (2, 2))
    expected = copies(params)
    oracle = torch.optim.SGD(expected, lr=0.1)
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, group, True, lr=0.1)

    assert len({param.untyped_storage().data_ptr() for param in params}) == 1
    for step in range(3):
        for each in (params, expected):
            for param in each:
                param.data = param.data * 0.5
            give_grads(each, step)
        optimizer.step()
        oracle.step()
        assert same([p.detach() for p in params], [p.detach() for p in expected])
    for each in (params, expected):
        each[1].data = each[1].data.double()
        give_grads(each, 9)
    optimizer.step()
    oracle.step()
    assert same([p.detach() for p in params], [p.detach() for p in expected])
    assert len({param.untyped_storage().data_ptr() for param in params}) == 1


# ---- What goes in ----


def test_generators_pairs_and_dicts_are_taken_and_never_changed() -> None:
    """A caller who builds two optimizers from one list of dicts must not find it edited."""
    params = make_params((2, 3), (4,), (5,))
    group = Group.solo()
    given = [{"params": (p for p in params[:2]), "lr": 0.5}, {"params": params[2]}]
    keys = [set(each) for each in given]

    optimizer = ZeroRedundancyOptimizer(given, torch.optim.Adam, group, lr=0.1)
    late = {"params": make_params((3,))}
    optimizer.add_param_group(late)

    assert [set(each) for each in given] == keys
    assert set(late) == {"params"}
    assert [len(each["params"]) for each in optimizer.param_groups] == [2, 1, 1]
    assert [each["lr"] for each in optimizer.param_groups] == [0.5, 0.1, 0.1]
    named = ZeroRedundancyOptimizer(
        (("weight", param) for param in params[:1]), torch.optim.SGD, group, lr=0.1
    )
    assert named.state_dict if named.param_groups[0]["param_names"] == ["weight"] else None
    assert ZeroRedundancyOptimizer(iter(params), torch.optim.SGD, group, lr=1.0).bytes_per_rank


@pytest.mark.parametrize(
    ("params", "error"), [(torch.ones(2), TypeError), ([], ValueError), ([1], TypeError)]
)
def test_what_no_optimizer_takes_is_refused_as_plain_torch_does(params, error: type) -> None:
    """The type of the exception is what callers catch."""
    with pytest.raises(error):
        torch.optim.SGD(params, lr=0.1)

    with pytest.raises(error):
        ZeroRedundancyOptimizer(params, torch.optim.SGD, Group.solo(), lr=0.1)


def test_options_of_torch_s_that_are_other_here_say_what_is_meant() -> None:
    """They would reach the inner optimizer, whose message knows nothing of them."""
    params = make_params((2,))

    with pytest.raises(TypeError, match=r"optimizer\.overlap_with_ddp\(ddp_model"):
        ZeroRedundancyOptimizer(
            params, torch.optim.SGD, Group.solo(), lr=0.1, overlap_with_ddp=True
        )
    with pytest.raises(TypeError, match="got both"):
        ZeroRedundancyOptimizer(
            params, torch.optim.SGD, Group.solo(), process_group=Group.solo(), lr=0.1
        )


def test_param_groups_go_both_ways() -> None:
    """A scheduler writes to them, and so does an optimizer that adapts its own rate."""
    params = make_params((2,), (3,))
    optimizer = ZeroRedundancyOptimizer(params, Nested, Group.solo(), lr=0.1)
    one_cycle = OneCycleLR(
        ZeroRedundancyOptimizer(params, torch.optim.Adam, Group.solo()), 0.1, total_steps=5
    )

    for step in range(3):
        give_grads(params, step)
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.7
    optimizer.step()

    assert optimizer.param_groups[0]["seen"] == 4
    assert optimizer.optim.param_groups[0]["lr"] == 0.7
    assert "betas" in one_cycle.optimizer.defaults  # which it asks for


def test_scaled_gradients_step_as_with_the_plain_optimizer() -> None:
    """Mixed precision unscales through param_groups, and leaves a step out after an overflow."""
    found = []
    for make in (torch.optim.Adam, None):
        params = make_params((4, 3), (5,))
        optimizer: Any = ZeroRedundancyOptimizer(params, torch.optim.Adam, Group.solo(), lr=0.1)
        if make is not None:
            optimizer = make(params, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            scaler.scale(torch.ones(()))
            give_grads(params, step)
            if step == 1:
                params[0].grad[0, 0] = float("inf")  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
        found.append([param.detach() for param in params])

    assert same(*found)


# ---- What is refused ----


class CommonNorm(torch.optim.SGD):
    """Divides by the norm over all parameters."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # noqa: D102
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([g.norm() for g in grads if g is not None] or [torch.ones(())]).norm()
        for grad in grads:
            if grad is not None:
                grad.div_(norm)
        super().step()


@pytest.mark.ranks(1, 3)
def test_optimizers_that_couple_parameters_are_refused_everywhere(group: Group) -> None:
    """Each rank would see the norm, or search the line, of its own parameters only."""
    params = make_params((2, 3), (4,))  # fewer than ranks: one has nothing to look at

    says = "outside param_groups: it updates all|does not treat parameters one by one"
    with pytest.raises((PartitionError, AgreementError), match=f"a LBFGS .*({says})"):
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


@pytest.mark.parametrize("in_place", [False, True])
def test_a_parameter_that_one_rank_alone_freezes_ends_all(ranks, in_place: bool) -> None:
    """Weights would be received in the place of others."""
    with pytest.raises(RankFailedError, match="every rank"):
        ranks(2).run(_freeze_alone, in_place=in_place)


def _freeze_alone(group: Group, in_place: bool) -> None:
    params = make_params((3, 3), (4,), (5,))
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, group, in_place, lr=0.1)
    params[2].requires_grad_(group.rank == 0)
    give_grads(params, 0)
    optimizer.step()


def test_parameters_without_values_are_refused_by_name() -> None:
    """They could not be sent."""
    params = [
        ("fine", make_params((2,))[0]),
        ("empty", nn.Parameter(torch.empty(2, device="meta"))),
    ]

    with pytest.raises(PartitionError, match=r"'empty'.*on the meta device"):
        ZeroRedundancyOptimizer(params, torch.optim.SGD, Group.solo(), lr=0.1)


def test_sparse_gradients_step() -> None:
    """An embedding with sparse gradients has an optimizer of its own."""
    found = []
    for make in (
        lambda params: torch.optim.SparseAdam(params, lr=0.1),
        lambda params: ZeroRedundancyOptimizer(
            params, torch.optim.SparseAdam, Group.solo(), lr=0.1
        ),
    ):
        torch.manual_seed(0)
        embedding = nn.Embedding(6, 3, sparse=True)
        optimizer = make(embedding.parameters())
        embedding(torch.tensor([1, 4])).sum().backward()
        optimizer.step()
        found.append(embedding.weight.detach())
    first, second = found

    assert torch.equal(first, second)
    assert isinstance(first, Tensor)
