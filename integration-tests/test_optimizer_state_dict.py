"""An optimizer's state as torch writes it: whole on one rank, from any sharding and into any."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from residences import Blocks, config_of
from structured import muon_and_adamw
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from zero_comm import Group
from zero_engine import Precision
from zero_partition import LoadError, StateError, ZeroRedundancyOptimizer, unpartition

pytestmark = pytest.mark.xdist_group("ranks")

_KINDS = {
    "replicated": {"stage": 0},
    "state sharded": {"stage": 1},
    "gradients too, by rows": {"stage": 2, "cut": "row"},
    "parameters too": {"stage": 3},
    "whole tensors": {"stage": 3, "cut": "tensor"},
    "on disk": {"stage": 3, "offload": ("disk", "disk")},
    "state on the host": {"stage": 1, "offload": ("host", "device")},
}


def _name(config: ZeroConfig) -> str:
    """Adam is stepped by other kernels where its state rests elsewhere, SGD by torch's."""
    return "adamw" if config.offload is None else "sgd"


def _build(group: Group, config: ZeroConfig, make: Any = parity.tiny_float32) -> tuple[Any, Any]:
    return parity.build_sharded(group, config, _name(config), make)


def _plain(config: ZeroConfig, make: Any = parity.tiny_float32) -> tuple[Any, Any]:
    return parity.build_with_optimizer(_name(config), make)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """The same data on every rank, so that their mean is what one process computes."""
    for step in steps:
        parity.finish_step(parity.loss_of(model, parity.batch(step, 0, 0)), optimizer)


def _assert_same(found: Any, expected: Any, what: str) -> None:
    if isinstance(expected, Tensor):
        assert found.device.type == "cpu" and found.dtype == expected.dtype, what
        assert torch.equal(found, expected), what
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{what}: {list(found)} != {list(expected)}"
        for key, value in expected.items():
            _assert_same(found[key], value, f"{what} {key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), what
        for index, value in enumerate(expected):
            _assert_same(found[index], value, f"{what} {index}")
    else:
        assert found == expected, what


@pytest.mark.parametrize("kind", _KINDS)
def test_the_whole_state_is_what_the_plain_optimizer_has(
    group: Group, tmp_path: Path, kind: str
) -> None:
    """Whoever trains on without us, or looks at moments by hand, finds torch's own format."""
    config = config_of(tmp_path, **_KINDS[kind])
    plain, its = _plain(config)
    model, optimizer = _build(group, config)
    _step(plain, its, range(2))
    _step(model, optimizer, range(2))
    found = zero_engine.full_optimizer_state_dict(model)
    if group.rank:
        assert found == {}
    else:
        _assert_same(found, its.state_dict(), kind)
        its.load_state_dict(found)
    _step(model, optimizer, range(2, 3))  # what was given away is no memory of ours
    if not group.rank:
        _assert_same(found, its.state_dict(), kind)
    zero_engine.unshard(model, optimizer)


@pytest.mark.parametrize("kind", ["gradients too, by rows", "on disk"])
def test_training_goes_on_at_any_world_size(ranks, tmp_path: Path, kind: str) -> None:
    """From two ranks to one and back, through files of torch; the curve is the plain one's."""
    path = tmp_path / "state.pt"
    plain, its = _plain(config_of(tmp_path, **_KINDS[kind]))
    _step(plain, its, range(1))
    torch.save((plain.state_dict(), its.state_dict()), path)
    for start, world_size in ((1, 2), (2, 1), (3, 2)):
        ranks(world_size).run(_go_on, path=path, start=start, kind=kind)
    _step(plain, its, range(1, 4))
    weights, state = torch.load(path)
    _assert_same(weights, dict(plain.state_dict()), "weights")
    _assert_same(state, its.state_dict(), "state")


def _go_on(group: Group, path: Path, start: int, kind: str) -> None:
    weights, state = torch.load(path)
    model, optimizer = _build(group, config_of(path.parent, **_KINDS[kind]))
    _step(model, optimizer, range(8, 10))  # which is forgotten
    for param_group in optimizer.param_groups:
        param_group["lr"] = 7.0
    model.load_state_dict(weights)
    zero_engine.load_full_optimizer_state_dict(model, {} if group.rank else state)
    _step(model, optimizer, range(start, start + 1))
    saved = (
        zero_engine.full_state_dict(model),
        zero_engine.full_optimizer_state_dict(model),
    )
    if not group.rank:
        torch.save(saved, path)
    zero_engine.unshard(model, optimizer)


@pytest.mark.parametrize("stage", [1, 3])
def test_masters_come_along(group: Group, tmp_path: Path, stage: int) -> None:
    """Weights are rounded: without masters the next small updates would start somewhere else."""

    def build(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        precision = Precision(params=torch.bfloat16)
        return _build(group, config_of(tmp_path, precision=precision, **options), Blocks)

    expected, its = build(stage=stage, offload=("host", "device"))
    _step(expected, its, range(2))
    if stage == 1:
        state = zero_engine.full_optimizer_state_dict(expected)
    else:  # by names
        state = get_optimizer_state_dict(
            expected, its, options=StateDictOptions(full_state_dict=True)
        )
    given = [zero_engine.full_state_dict(expected)]
    torch.distributed.broadcast_object_list(given, src=0, group=group.process_group)
    weights = given[0]
    if not group.rank and stage == 1:
        _, optimizer = parity.build_with_optimizer("sgd", Blocks)
        optimizer.load_state_dict(state)  # which overlooks them
        assert "masters" not in optimizer.state_dict()
    model, optimizer = build(stage=4 - stage, offload=("disk", "device"))
    model.load_state_dict(weights)
    zero_engine.load_full_optimizer_state_dict(model, state)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(zero_engine.full_param(ours), zero_engine.full_param(theirs))
    _step(model, optimizer, range(2, 5))
    _step(expected, its, range(2, 5))
    found, whole = map(zero_engine.full_optimizer_state_dict, (model, expected))
    _assert_same(found, whole, "state and masters")
    zero_engine.unshard(model, optimizer)


def test_a_part_never_passes_for_the_whole(group: Group) -> None:
    """`if rank == 0: torch.save(optimizer.state_dict())` would lose what the others have."""
    model, optimizer = _build(group, ZeroConfig(1))
    with pytest.raises(StateError, match=r"2 ranks.*rank \d.*full_optimizer_state_dict\(model\)"):
        optimizer.state_dict()
    with pytest.raises(StateError, match=r"load_full_optimizer_state_dict\(model, state_dict\)"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    _, blank = _plain(ZeroConfig())
    state = blank.state_dict()
    lacking = {**state, "param_groups": state["param_groups"][:1]}
    _step(model, optimizer, range(1))
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
    _assert_same(zero_engine.full_optimizer_state_dict(model), before, "as it was")
    zero_engine.load_full_optimizer_state_dict(model, state)
    assert zero_engine.full_optimizer_state_dict(model).get("state", {}) == {}
    bare, _ = zero_engine.shard(parity.build(parity.Block), None, ZeroConfig(1), group=group)
    with pytest.raises(StateError, match="without an optimizer"):
        zero_engine.full_optimizer_state_dict(bare)


@pytest.mark.parametrize("options", [{}, {"offload": ("disk", "device")}])
def test_the_optimizer_gathers_where_the_configuration_says_so(
    ranks, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Trainers call the optimizer's own methods, on every rank."""
    ranks(2).run(_gather, folder=tmp_path, options=options)
    ranks(1).run(_gather, folder=tmp_path, options=options)


def _gather(group: Group, folder: Path, options: dict[str, Any]) -> None:
    way = "gather" if group.world_size > 1 else "raise"  # one rank has the whole in any case
    config = config_of(folder, stage=2, state_dict=way, **options)
    plain, its = _plain(config)
    model, optimizer = _build(group, config)
    for trained, by in ((plain, its), (model, optimizer)):
        scheduler = parity.scheduler_for(by)
        _step(trained, by, range(1))
        saved = copy.deepcopy(by.state_dict())
        weights = {name: p.detach().clone() for name, p in trained.named_parameters()}
        _step(trained, by, range(1, 3))
        trained.load_state_dict(weights, strict=False)
        by.load_state_dict(saved)
        scheduler.step()
        _step(trained, by, range(1, 2))
    _assert_same(optimizer.state_dict(), its.state_dict(), "state")
    zero_engine.unshard(model, optimizer)
    _step(model, optimizer, range(2, 3))
    _step(plain, its, range(2, 3))
    _assert_same(dict(model.state_dict()), dict(plain.state_dict()), "weights")


@pytest.mark.parametrize("way", ["raise", "gather"])
def test_chained_optimizers_have_one_state_each(group: Group, way: str) -> None:
    """As the plain chain has: a list of theirs."""
    plain = parity.build(parity.tiny_float32)
    its = muon_and_adamw(plain)
    model = parity.build(parity.tiny_float32)
    optimizer = muon_and_adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(2, state_dict=way), group=group)
    _step(plain, its, range(2))
    _step(model, optimizer, range(2))
    found = zero_engine.full_optimizer_state_dict(model)
    if not group.rank:
        _assert_same(found, its.state_dict(), way)
    _step(model, optimizer, range(4, 5))
    if way == "raise":
        with pytest.raises(StateError, match="full_optimizer_state_dict"):
            optimizer.state_dict()
        zero_engine.load_full_optimizer_state_dict(model, found)
    else:
        optimizer.load_state_dict(its.state_dict())
        _assert_same(optimizer.state_dict(), its.state_dict(), way)
    again = zero_engine.full_optimizer_state_dict(model)
    if not group.rank:
        _assert_same(again, its.state_dict(), way)


@pytest.mark.parametrize("kind", ["state sharded", "parameters too", "on disk"])
def test_torchs_checkpoint_functions_give_the_whole(
    group: Group, tmp_path: Path, kind: str
) -> None:
    """Frameworks call them, by StateDictOptions(full_state_dict=True), for any kind of sharding."""
    config = config_of(tmp_path, **_KINDS[kind])
    plain, its = _plain(config)
    model, optimizer = _build(group, config)
    full = StateDictOptions(full_state_dict=True)
    on_host = StateDictOptions(full_state_dict=True, cpu_offload=True)
    blank = get_optimizer_state_dict(model, optimizer, options=full)
    assert blank["state"] == {}  # no rank takes a step, such as torch's, alone
    _step(plain, its, range(2))
    _step(model, optimizer, range(2))
    expected = get_state_dict(plain, its, options=full)
    for options in (full, on_host):
        weights, state = get_state_dict(model, optimizer, options=options)
        if options is full or not group.rank:
            _assert_same(weights, expected[0], kind)
            _assert_same(state, expected[1], kind)
        else:
            assert not weights and not state
    flat = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    _assert_same(
        get_optimizer_state_dict(model, optimizer, options=flat),
        get_optimizer_state_dict(plain, its, options=flat),
        "flat",
    )

    part = r"full_state_dict=True\).*zero_engine\.full_%sstate_dict\(model\)"
    with pytest.raises(StateError, match=part % "optimizer_"):
        get_optimizer_state_dict(model, optimizer)
    if config.stage == 3:
        with pytest.raises(StateError, match=part % ""):
            get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    with pytest.raises(StateError, match="load_full_optimizer_state_dict"):
        set_optimizer_state_dict(model, optimizer, expected[1], options=full)

    _step(model, optimizer, range(5, 7))
    set_model_state_dict(model, expected[0], options=full)
    zero_engine.load_full_optimizer_state_dict(model, expected[1])
    _step(plain, its, range(2, 4))
    _step(model, optimizer, range(2, 4))
    weights, state = get_state_dict(model, optimizer, options=full)
    _assert_same(weights, plain.state_dict(), kind)
    _assert_same(state, get_optimizer_state_dict(plain, its, options=full), kind)
    zero_engine.unshard(model, optimizer)


# ---- ZeroRedundancyOptimizer ----


def test_either_goes_on_where_the_other_stopped(group: Group) -> None:
    """Who outgrows the one line takes the run along, and may come back."""
    plain, model = (parity.build(parity.tiny_float32) for _ in range(2))
    oracle = torch.optim.AdamW(plain.parameters(), lr=0.01, foreach=False)
    replica = DistributedDataParallel(plain, find_unused_parameters=True)

    def make_ours() -> ZeroRedundancyOptimizer:
        params = model.parameters()
        return ZeroRedundancyOptimizer(params, torch.optim.AdamW, group, lr=0.01, foreach=False)

    ours = make_ours()
    _train(DistributedDataParallel(model, find_unused_parameters=True), ours, group, range(2))
    ours.consolidate_state_dict(to=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    optimizer.load_state_dict(ours.state_dict())
    zero_engine.shard(model, optimizer, ZeroConfig(1), group=group)
    _train(model, optimizer, group, range(2, 4))
    unpartition(model)
    ours = make_ours()
    ours.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _train(DistributedDataParallel(model, find_unused_parameters=True), ours, group, range(4, 6))
    _train(replica, oracle, group, range(6))

    for (name, mine), theirs in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, steps: range) -> None:
    for step in steps:
        parity.loss_of(model, parity.batch(step, 0, group.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
