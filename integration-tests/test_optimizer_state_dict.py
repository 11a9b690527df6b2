"""An optimizer's state as torch writes it: whole on one rank, from any sharding and into any."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from residences import Blocks, assert_same, config_of
from structured import muon_and_adamw
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from zero_comm import Group
from zero_comm.testing import equal
from zero_engine import Precision
from zero_partition import LoadError, StateError, ZeroRedundancyOptimizer, unpartition

_KINDS = {
    "replicated": {"stage": 0},
    "state sharded": {"stage": 1},
    "gradients too, by rows": {"stage": 2, "cut": "row"},
    "parameters too": {"stage": 3},
    "whole tensors": {"stage": 3, "cut": "tensor"},
    "on disk": {"stage": 3, "offload": ("disk", "disk")},
    "state on the host": {"stage": 1, "offload": ("host", "device")},
}


def _pair(group: Group, config: ZeroConfig) -> tuple[Any, Any, Any, Any]:
    """A plain model and its optimizer, and the same two sharded.

    Adam is stepped by other kernels where its state rests elsewhere, SGD by torch's.
    """
    name, make = "adamw" if config.offload is None else "sgd", parity.tiny_float32
    plain = parity.build_with_optimizer(name, make)
    return *plain, *parity.build_sharded(group, config, name, make)


def _step(steps: range, *pairs: Any) -> None:
    """Models and their optimizers, each with the same data on every rank, as one process has it."""
    for model, optimizer in zip(pairs[::2], pairs[1::2], strict=True):
        parity.run_steps(model, optimizer, steps, rank=0)


@pytest.mark.parametrize("kind", _KINDS)
def test_the_whole_state_is_what_the_plain_optimizer_has(
    group: Group, tmp_path: Path, kind: str
) -> None:
    """Whoever trains on without us, or looks at moments by hand, finds torch's own format."""
    plain, its, model, optimizer = _pair(group, config_of(tmp_path, **_KINDS[kind]))
    _step(range(2), plain, its, model, optimizer)
    found = zero_engine.full_optimizer_state_dict(model)
    if group.rank:
        assert found == {}
    else:
        assert_same(found, its.state_dict(), kind)
        assert all(v.device.type == "cpu" for of in found["state"].values() for v in of.values())
        its.load_state_dict(copy.deepcopy(found))
    given = copy.deepcopy(found)
    _step(range(2, 3), plain, its, model, optimizer)
    assert_same(found, given, f"{kind}: what was given away is no memory of ours")
    zero_engine.unshard(model, optimizer)


@pytest.mark.parametrize("kind", ["gradients too, by rows", "on disk"])
def test_training_goes_on_at_any_world_size(ranks, tmp_path: Path, kind: str) -> None:
    """From two ranks to one and back, through files of torch; the curve is the plain one's."""
    path = tmp_path / "state.pt"
    name = "sgd" if kind == "on disk" else "adamw"
    plain, its = parity.build_with_optimizer(name, parity.tiny_float32)
    _step(range(1), plain, its)
    torch.save((plain.state_dict(), its.state_dict()), path)
    for start, world_size in ((1, 2), (2, 1), (3, 2)):
        ranks(world_size).run(_go_on, path=path, start=start, kind=kind)
    _step(range(1, 4), plain, its)
    weights, state = torch.load(path)
    assert_same(weights, plain.state_dict(), "weights")
    assert_same(state, its.state_dict(), "state")


def _go_on(group: Group, path: Path, start: int, kind: str) -> None:
    weights, state = torch.load(path)
    _, _, model, optimizer = _pair(group, config_of(path.parent, **_KINDS[kind]))
    _step(range(8, 10), model, optimizer)  # which is forgotten
    for param_group in optimizer.param_groups:
        param_group["lr"] = 7.0
    model.load_state_dict(weights)
    zero_engine.load_full_optimizer_state_dict(model, {} if group.rank else state)
    _step(range(start, start + 1), model, optimizer)
    saved = [f(model) for f in (zero_engine.full_state_dict, zero_engine.full_optimizer_state_dict)]
    if not group.rank:
        torch.save(saved, path)
    zero_engine.unshard(model, optimizer)


@pytest.mark.parametrize("stage", [1, 3])
def test_masters_come_along(group: Group, tmp_path: Path, stage: int) -> None:
    """Weights are rounded: without masters the next small updates would start somewhere else."""

    def build(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        precision = Precision(params=torch.bfloat16)
        config = config_of(tmp_path, precision=precision, **options)
        return parity.build_sharded(group, config, "sgd", Blocks)

    expected, its = build(stage=stage, offload=("host", "device"))
    _step(range(2), expected, its)
    if stage == 1:
        state = zero_engine.full_optimizer_state_dict(expected)
    else:  # by names
        state = get_optimizer_state_dict(
            expected, its, options=StateDictOptions(full_state_dict=True)
        )
    whole = zero_engine.full_state_dict(expected)
    weights = parity.by_rank_0(group, lambda: whole)
    if not group.rank and stage == 1:
        _, optimizer = parity.build_with_optimizer("sgd", Blocks)
        optimizer.load_state_dict(state)  # which overlooks them
        assert "masters" not in optimizer.state_dict()
    model, optimizer = build(stage=4 - stage, offload=("disk", "device"))
    model.load_state_dict(weights)
    zero_engine.load_full_optimizer_state_dict(model, state)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert equal(zero_engine.full_param(ours), zero_engine.full_param(theirs))
    _step(range(2, 5), model, optimizer, expected, its)
    found, state = map(zero_engine.full_optimizer_state_dict, (model, expected))
    assert_same(found, state, "state and masters")
    zero_engine.unshard(model, optimizer)


def test_a_part_never_passes_for_the_whole(group: Group) -> None:
    """`if rank == 0: torch.save(optimizer.state_dict())` would lose what the others have."""
    _, blank, model, optimizer = _pair(group, ZeroConfig(1))
    with pytest.raises(StateError, match=r"2 ranks.*rank \d.*full_optimizer_state_dict\(model\)"):
        optimizer.state_dict()
    with pytest.raises(StateError, match=r"load_full_optimizer_state_dict\(model, state_dict\)"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    state = blank.state_dict()
    lacking = {**state, "param_groups": state["param_groups"][:1]}
    _step(range(1), model, optimizer)
    before = zero_engine.full_optimizer_state_dict(model)
    misfit = copy.deepcopy(before)
    if not group.rank:
        misfit["state"][1]["exp_avg"] = torch.zeros(3, 5)
    for given, match in (
        (lacking, r"expected param groups of \[\d+, \d+\] parameters.*got \[\d+\]"),
        ({"exp_avg": 1}, r"'state' and 'param_groups'.*full_optimizer_state_dict"),
        ({"state": object()}, r"on rank 0.*seen on rank"),
        (misfit, r"nothing was written.*'exp_avg' has shape \(3, 5\)"),
    ):
        with pytest.raises(LoadError, match=match):
            zero_engine.load_full_optimizer_state_dict(model, given if not group.rank else {})
    assert_same(zero_engine.full_optimizer_state_dict(model), before, "as it was")
    zero_engine.load_full_optimizer_state_dict(model, state)
    assert zero_engine.full_optimizer_state_dict(model).get("state", {}) == {}
    bare, _ = zero_engine.shard(parity.build(parity.Block), None, ZeroConfig(1), group=group)
    with pytest.raises(StateError, match="without an optimizer"):
        zero_engine.full_optimizer_state_dict(bare)


@pytest.mark.parametrize("options", [{}, {"offload": ("disk", "device")}])
@pytest.mark.ranks(1, 2)
def test_the_optimizer_gathers_where_the_configuration_says_so(
    group: Group, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Trainers call the optimizer's own methods, on every rank."""
    way = "gather" if group.world_size > 1 else "names"  # one rank has the whole in any case
    config = config_of(tmp_path, stage=2, state_dict=way, **options)
    plain, its, model, optimizer = _pair(group, config)
    for trained, by in ((plain, its), (model, optimizer)):
        scheduler = parity.scheduler_for(by)
        _step(range(1), trained, by)
        saved = copy.deepcopy(by.state_dict())
        weights = {name: p.detach().clone() for name, p in trained.named_parameters()}
        _step(range(1, 3), trained, by)
        trained.load_state_dict(weights, strict=False)
        by.load_state_dict(saved)
        scheduler.step()
        _step(range(1, 2), trained, by)
    assert_same(optimizer.state_dict(), its.state_dict(), "state")
    zero_engine.unshard(model, optimizer)
    _step(range(2, 3), model, optimizer, plain, its)
    assert_same(model.state_dict(), plain.state_dict(), "weights")


@pytest.mark.parametrize("way", ["names", "gather"])
def test_chained_optimizers_have_one_state_each(group: Group, way: str) -> None:
    """As the plain chain has: a list of theirs."""
    plain, model = (parity.build(parity.tiny_float32) for _ in range(2))
    its, optimizer = muon_and_adamw(plain), muon_and_adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(2, state_dict=way), group=group)
    _step(range(2), plain, its, model, optimizer)
    expected = {"state": its.state_dict()}
    found = zero_engine.full_optimizer_state_dict(model)
    if not group.rank:
        assert_same({"state": found}, expected, way)
    _step(range(4, 5), model, optimizer)
    if way == "names":
        with pytest.raises(StateError, match="full_optimizer_state_dict"):
            optimizer.state_dict()
        zero_engine.load_full_optimizer_state_dict(model, found)
    else:
        optimizer.load_state_dict(its.state_dict())
        assert_same({"state": optimizer.state_dict()}, expected, way)
    again = zero_engine.full_optimizer_state_dict(model)
    if not group.rank:
        assert_same({"state": again}, expected, way)


@pytest.mark.parametrize("kind", ["state sharded", "parameters too", "on disk"])
def test_torchs_checkpoint_functions_give_the_whole(
    group: Group, tmp_path: Path, kind: str
) -> None:
    """Frameworks call them, by StateDictOptions(full_state_dict=True), for any kind of sharding."""
    config = config_of(tmp_path, **_KINDS[kind])
    plain, its, model, optimizer = _pair(group, config)
    full = StateDictOptions(full_state_dict=True)
    on_host = StateDictOptions(full_state_dict=True, cpu_offload=True)
    blank = get_optimizer_state_dict(model, optimizer, options=full)
    assert blank["state"] == {}  # no rank takes a step, such as torch's, alone
    _step(range(2), plain, its, model, optimizer)
    expected = get_state_dict(plain, its, options=full)
    for options in (full, on_host):
        weights, state = get_state_dict(model, optimizer, options=options)
        if options is full or not group.rank:
            assert_same(weights, expected[0], kind)
            assert_same(state, expected[1], kind)
        else:
            assert not weights and not state
    flat = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    assert_same(
        get_optimizer_state_dict(model, optimizer, options=flat),
        get_optimizer_state_dict(plain, its, options=flat),
        "flat",
    )

    with pytest.raises(StateError, match=r"full_state_dict=True.*full_optimizer_state_dict\(model"):
        get_optimizer_state_dict(model, optimizer)
    if config.stage == 3:
        with pytest.raises(StateError, match=r"(?s)full_state_dict\(model.*full_state_dict=True"):
            get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    with pytest.raises(StateError, match="load_full_optimizer_state_dict"):
        set_optimizer_state_dict(model, optimizer, expected[1], options=full)

    _step(range(5, 7), model, optimizer)
    set_model_state_dict(model, expected[0], options=full)
    zero_engine.load_full_optimizer_state_dict(model, expected[1])
    _step(range(2, 4), plain, its, model, optimizer)
    weights, state = get_state_dict(model, optimizer, options=full)
    assert_same(weights, plain.state_dict(), kind)
    assert_same(state, get_optimizer_state_dict(plain, its, options=full), kind)
    zero_engine.unshard(model, optimizer)


# ---- ZeroRedundancyOptimizer ----


def test_either_goes_on_where_the_other_stopped(group: Group) -> None:
    """Who outgrows the one line takes the run along, and may come back."""
    plain, model = (parity.build(parity.tiny_float32) for _ in range(2))
    adamw, options = torch.optim.AdamW, {"lr": 0.01, "foreach": False}
    make_plain = partial(adamw, **options)
    make_ours = partial(ZeroRedundancyOptimizer, optimizer_class=adamw, group=group, **options)
    run = partial(parity.run_steps, rank=group.rank)

    ours = make_ours(model.parameters())
    run(parity.as_ddp(model, group), ours, range(2))
    ours.consolidate_state_dict(to=None)
    optimizer = make_plain(model.parameters())
    optimizer.load_state_dict(ours.state_dict())
    zero_engine.shard(model, optimizer, ZeroConfig(1), group=group)
    run(model, optimizer, range(2, 4))
    unpartition(model)
    ours = make_ours(model.parameters())
    ours.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(parity.as_ddp(model, group), ours, range(4, 6))
    run(parity.as_ddp(plain, group), make_plain(plain.parameters()), range(6))

    for (name, mine), theirs in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert equal(mine, theirs), name
