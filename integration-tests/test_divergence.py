"""Where gathers are collective, ranks on different ways end soon: with a unit and a remedy."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path

import parity
import pytest
import torch
import torch.distributed as dist
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from walks import saves_at_any_time
from zero_comm import DivergenceError, Group
from zero_comm.testing import equal, rely_on
from zero_partition import GatheredParameters, set_leaf_modules

PATIENCE_S = 0.25
SOON_S = 15.0  # the machine may be busy; the group's own timeout is longer by far
WIDTH = 4
STEPS = 3


class Mixture(nn.Module):
    """Experts of equal size, of which a call uses one: bytes of one would fit into another."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, chosen: int) -> Tensor:  # noqa: D102
        return x + self.experts[chosen](x).tanh()


class Experts(nn.Module):
    """A mixture between layers that every rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture()
        self.down = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, chosen: int) -> Tensor:  # noqa: D102
        return self.down(self.mixture(self.up(x), chosen)).square().mean()


def _loss(model: nn.Module, step: int, rank: int, *, chosen: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(2, WIDTH, generator=generator), chosen)


def _build(group: Group, stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    return parity.build_sharded(group, ZeroConfig(stage), make=Experts)


# ---- Ways that part ----


def _other_experts(group: Group) -> None:
    model, _ = _build(group, 3)
    _loss(model, 0, group.rank, chosen=group.rank).backward()


def _other_experts_later(group: Group) -> None:
    model, optimizer = _build(group, 3)
    for step in range(STEPS):
        _loss(model, step, group.rank, chosen=group.rank if step == STEPS - 1 else 0).backward()
        optimizer.step()
        optimizer.zero_grad()


def _a_batch_less(group: Group) -> None:
    model, optimizer = _build(group, 2)
    for micro in range(2 - group.rank):
        _loss(model, micro, group.rank, chosen=0).backward()
    optimizer.step()
    _loss(model, 2, group.rank, chosen=0).backward()
    optimizer.step()


def _a_micro_batch_less(group: Group) -> None:
    model, optimizer = _build(group, 3)
    for micro in range(3 - group.rank):
        _loss(model, micro, group.rank, chosen=0).backward()
    optimizer.step()
    optimizer.zero_grad()
    _loss(model, 3, group.rank, chosen=0).backward()


def _no_backward(group: Group) -> None:
    model, optimizer = _build(group, 3)
    loss = _loss(model, 0, group.rank, chosen=0)
    if group.rank == 0:
        loss.backward()
    optimizer.step()
    _loss(model, 1, group.rank, chosen=0)


def _clips_alone(group: Group) -> None:
    model, optimizer = _build(group, 1)
    _loss(model, 0, group.rank, chosen=0).backward()
    if group.rank == 0:
        zero_engine.clip_grad_norm_(model, 1.0)
    optimizer.step()


def _no_batch(group: Group) -> None:
    model, _ = _build(group, 3)
    if group.rank == 0:
        _loss(model, 0, group.rank, chosen=0).backward()
    else:
        zero_engine.backward_without_batch(model)


EXPERTS = (
    r"rank 0 waits for rank 1 in gathering unit 'mixture\.experts\.0' .*"
    r"rank 1 waits for rank 0 in gathering unit 'mixture\.experts\.1' .*set_leaf_modules"
)
HERE = r"at \S+test_divergence\.py:\d+ \(called from \S+test_divergence\.py:\d+\)"
GATHER = rf"waits for rank \d in gathering unit '.*' \(version \d\) {HERE}"
REDUCE = rf"waits for rank \d in reducing the gradients of unit '.*' {HERE}"
PARTINGS: dict[Callable[[Group], None], str] = {
    _other_experts: EXPERTS,
    _other_experts_later: rf"rank 0 {REDUCE}\n  rank 1 .*'mixture\.experts\.1' .*set_leaf_modules",
    _a_batch_less: rf"rank 0 {REDUCE}.*rank 1 .* in publishing unit .*backward_without_batch",
    _a_micro_batch_less: rf"rank 0 {REDUCE}\n  rank 1 .*\(version 1\).*same number of backwards",
    _no_backward: rf"rank 0 {REDUCE}\n  rank 1 .*same number of backwards and steps",
    _clips_alone: r"rank 0 waits for rank 1 in clip_grad_norm_\(\): agreeing on .* norm "
    rf"{HERE}\n  rank 1 .* publishing",
    _no_batch: rf"rank 0 {GATHER}\n  rank 1 {REDUCE}.*loss times zero",
}


# Where collectives meet in the order of their launches.
IN_ORDER: dict[Callable[[Group], None], str] = {
    _other_experts: r"rank 0 in .* 'mixture\.experts\.0' .*\n  rank 1 in .* 'mixture\.experts\.1' "
    r".*set_leaf_modules",
    _other_experts_later: r"rank 0 in reducing .*rank 1 in gathering unit 'mixture\.experts\.1' "
    r".*set_leaf_modules",
    _a_batch_less: r"rank 0 in reducing .*rank 1 in optimizer\.step\(\).*backward_without_batch",
    _a_micro_batch_less: r"rank 0 in (reducing|gathering unit) .*\n  rank 1 in optimizer\.step\(\)"
    r".*same number of backwards",
    _no_backward: r"rank 0 in reducing .*rank 1 in optimizer\.step\(\).*same number of backwards",
    _clips_alone: r"rank 0 in .* norm, .*\n  rank 1 in optimizer\.step\(\).*rank 0 is in "
    r"clip_grad_norm_\(\), which must be called on all ranks",
    _no_batch: r"rank 0 in gathering unit .*\n  rank 1 in reducing .*loss times zero",
}


# Where ranks read each other's memory, gathers need nobody there; reductions and steps do.
READS: dict[Callable[[Group], None], str] = {
    **{way: PARTINGS[way] for way in (_a_batch_less, _no_backward, _clips_alone)},
    _a_micro_batch_less: rf"rank 0 {REDUCE}\n  rank 1 .* in writing to the weights",
}


@pytest.mark.parametrize(
    ("way", "reads"),
    [
        *((way, False) for way in PARTINGS),
        *(pytest.param(way, True, marks=pytest.mark.cpu_only("of their memory")) for way in READS),
    ],
)
def test_each_rank_is_told_where_all_are_and_what_to_do(
    group: Group, way: Callable[[Group], None], reads: bool
) -> None:
    """It is the most frequent complaint about stage 3: a hang, and half an hour later a timeout."""
    is_in_order = not group.backend.composes_from_peers
    _part(group, way, (IN_ORDER if is_in_order else READS if reads else PARTINGS)[way], reads)


def _part(group: Group, way: Callable[[Group], None], message: str, reads: bool) -> None:
    if reads:
        assert group.exchanges.reads_peers
        group = Group.from_process_group(group.process_group, patience_s=PATIENCE_S)
    else:
        group = parity.by_messages(patience_s=PATIENCE_S)
    began = time.monotonic()

    with pytest.raises(DivergenceError, match=rf"(?s)seen on rank {group.rank};.*{message}"):
        way(group)
        rely_on(group)

    assert time.monotonic() - began < SOON_S


# ---- A call that one rank makes alone ----


def _full_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    zero_engine.full_state_dict(model)


def _clip_grad_norm_(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    zero_engine.clip_grad_norm_(model, 1.0)


def _save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    with saves_at_any_time():
        zero_engine.save(folder, model, optimizer, step=0)


def _load_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    full = {name: torch.zeros(each.shape) for name, each in model.named_parameters()}
    model.load_state_dict(full)


def _gathered_parameters(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    with GatheredParameters(model.parameters()):
        pass


def _in_barrier(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    dist.barrier()


def _in_next_forward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    _loss(model, 1, 1, chosen=0).backward()


ALONE = [
    (_full_state_dict, _in_barrier, True),
    (_full_state_dict, _in_next_forward, False),
    (_clip_grad_norm_, _in_barrier, False),
    (_clip_grad_norm_, _in_next_forward, True),
    (_save, _in_barrier, True),
    (_save, _in_next_forward, False),
    (_gathered_parameters, _in_barrier, True),
    (_gathered_parameters, _in_next_forward, False),
    (_load_state_dict, _in_barrier, True),
    (_load_state_dict, _in_next_forward, True),
]


@pytest.mark.parametrize(
    ("call", "elsewhere", "reads"),
    ALONE,
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_a_call_that_one_rank_makes_alone_is_named(
    group: Group,
    tmp_path: Path,
    call: Callable[..., None],
    elsewhere: Callable[..., None],
    reads: bool,
) -> None:
    """`if rank == 0: save(...)` is what everyone writes who comes from whole models."""
    if reads:
        group = Group.from_process_group(group.process_group, patience_s=PATIENCE_S)
    else:
        group = parity.by_messages(patience_s=PATIENCE_S)
    model, optimizer = _build(group, 3)
    _loss(model, 0, group.rank, chosen=0).backward()
    began = time.monotonic()

    if group.rank == 0:
        name = "GatheredParameters" if call is _gathered_parameters else f"{call.__name__[1:]}()"
        named = rf"rank 0 is in {re.escape(name)}, which must be called on all ranks"
        with pytest.raises(DivergenceError, match=named) as caught:
            call(model, optimizer, str(tmp_path / "run"))
        assert re.search(r"rank 1 (waits for rank 0 )?in ", str(caught.value))
        # Uneven batches look the same where the other rank trains on. On a device, that one is in
        # the comparison of its step, which says nothing more.
        both = (
            r"either rank 0 is .* steps on each\n  or all .* had fewer batches: every rank must run"
        )
        stays = call is _load_state_dict or not reads  # so that its peer waits in the model
        is_in_model = elsewhere is _in_next_forward and stays
        has_both = bool(re.search(both, str(caught.value)))
        assert has_both == is_in_model or not group.backend.composes_from_peers
        assert time.monotonic() - began < SOON_S
    with contextlib.suppress(RuntimeError):  # its peer cannot go on, and may hear it from torch
        if group.rank == 1:
            elsewhere(model, optimizer)
        elif elsewhere.__name__ == "_in_barrier":
            dist.barrier()


LONE_ROOTS = {"broadcast": {"src": 0}, "reduce": {"dst": 1}}


@pytest.mark.cpu_only("torch's collectives end there, as the host does not wait for a device")
@pytest.mark.parametrize("sanitize", [False, True])
@pytest.mark.parametrize("call", ["all_reduce", "broadcast", "reduce"])
def test_a_collective_of_torch_that_one_rank_calls_alone_is_named(
    group: Group, call: str, sanitize: bool
) -> None:
    """Also on the rank that only sends."""
    group = Group.from_process_group(group.process_group, patience_s=PATIENCE_S)
    model, _ = parity.build_sharded(group, ZeroConfig(3, sanitize=sanitize), make=Experts)
    if group.rank == 0:
        with contextlib.suppress(RuntimeError):  # its peer ends
            getattr(dist, call)(torch.ones(1), **LONE_ROOTS.get(call, {}))
    else:
        # First the likelier cause: programs end with a barrier or a sum.
        text = rf"either all ranks call it, (?s:.*)\n  or rank 0 is in .*{call}\(\), which must be"
        with pytest.raises(DivergenceError, match=text):
            _loss(model, 0, group.rank, chosen=0).backward()


@pytest.mark.cpu_only("on a device the call is a launch like others, and is named as it is made")
def test_a_call_that_one_rank_made_alone_and_ended_is_named(group: Group) -> None:
    """On one host it reads its peers' shards and ends; what ranks do next is no longer the same."""
    group = Group.from_process_group(group.process_group, patience_s=PATIENCE_S)
    model, optimizer = _build(group, 3)
    _loss(model, 0, group.rank, chosen=0).backward()
    if group.rank == 0:
        zero_engine.full_state_dict(model)
    named = r"rank 0 has called full_state_dict\(\) more often than rank 1: call it on all ranks"
    with pytest.raises(DivergenceError, match=named) as caught:
        for step in range(3):
            optimizer.step()
            _loss(model, step, group.rank, chosen=0).backward()
        rely_on(group)
    # Uneven batches look the same.
    text = str(caught.value)
    assert "without_batch" not in text.partition("more often")[0]


# ---- Ways that do not ----


@pytest.mark.parametrize("how", ["leaf", "whole-model"])
def test_a_leaf_module_lets_ranks_choose_over_messages(group: Group, how: str) -> None:
    """The remedy that the error names must be one."""
    plain = parity.build(Experts)
    plain_optimizer = parity.adamw(plain)
    ddp = parity.as_ddp(plain, group)
    model = parity.build(Experts)
    optimizer = parity.adamw(model)
    config = ZeroConfig(3, units=()) if how == "whole-model" else ZeroConfig(3)
    if how == "leaf":
        set_leaf_modules(model, Mixture)
    zero_engine.shard(model, optimizer, config, group=parity.by_messages(patience_s=PATIENCE_S))

    for step in range(STEPS):
        chosen = (step + group.rank) % 4
        expected = _loss(ddp, step, group.rank, chosen=chosen)
        loss = _loss(model, step, group.rank, chosen=chosen)
        assert equal(loss, expected), f"step {step}"
        parity.finish_step(expected, plain_optimizer)
        parity.finish_step(loss, optimizer)

    whole = zero_engine.full_state_dict(model)
    if group.rank == 0:
        parity.assert_same_weights(whole, plain.state_dict(), what=how)


def test_a_rank_that_computes_for_long_is_waited_for(group: Group) -> None:
    """Slow storage, a long sample, a checkpoint: nobody has diverged."""
    alone, slow = (_build(parity.by_messages(patience_s=PATIENCE_S), 3) for _ in range(2))
    losses: list[list[Tensor]] = [[], []]
    for kept, (model, optimizer), pause_s in zip(
        losses, (alone, slow), (0.0, 3 * PATIENCE_S), strict=True
    ):
        for step in range(2):
            if group.rank == step:
                time.sleep(pause_s)
            loss = _loss(model, step, group.rank, chosen=step)
            if group.rank != step:
                time.sleep(pause_s)
            loss.backward()
            kept.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
    assert losses[0] == losses[1]
