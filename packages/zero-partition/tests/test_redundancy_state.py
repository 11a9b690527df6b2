"""The state of a ZeroRedundancyOptimizer: put together, saved, loaded elsewhere, and refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from redundancy import (
    ELEMENTWISE,
    WHOLE,
    Nested,
    copies,
    give_grads,
    make_params,
    same,
    tensor_bytes,
    torchs_optimizer,
)
from torch import Tensor, nn
from zero_comm import Group, record_traffic
from zero_partition import LoadError, StateError, ZeroRedundancyOptimizer

SHAPES = ((5, 3), (7, 2), (2, 9), (3, 3), (4, 11))
_IMPORT_S = 120.0


def _stepped(
    make: Any, group: Group | None, options: dict[str, Any], steps: range
) -> tuple[list[nn.Parameter], Any]:
    """Parameters and their optimizer after some steps; plain without a group."""
    params = make_params(*SHAPES)
    if group is None:
        optimizer = make(params, **options)
    else:
        optimizer = ZeroRedundancyOptimizer(params, make, group, **options)
    _step(params, optimizer, steps)
    return params, optimizer


def _step(params: list[nn.Parameter], optimizer: Any, steps: range) -> None:
    for step in steps:
        give_grads(params, step)
        optimizer.step()


# ---- To other optimizers, and from them ----


def test_state_goes_to_the_plain_optimizer_and_back_at_any_number_of_ranks(ranks) -> None:
    """A checkpoint must not tie a job to the ranks, or to the library, that wrote it."""
    cases = ELEMENTWISE | WHOLE
    saved = ranks(3).run(_save, names=list(cases), timeout_s=_IMPORT_S)[1]

    for (make, options), state in zip(cases.values(), saved, strict=True):
        params, plain = _stepped(make, None, options, range(3))
        assert same(plain.state_dict(), state)
        assert list(state["state"]) == sorted(state["state"])
        other = make(copies(params), **options)
        other.load_state_dict(copy.deepcopy(state))
        _step(other.param_groups[0]["params"], other, range(3, 5))
        _step(params, plain, range(3, 5))
        resumed = other.param_groups[0]["params"]
        assert same([p.detach() for p in params], [p.detach() for p in resumed])
    ranks(2).run(_load, names=list(cases), saved=saved, timeout_s=_IMPORT_S)


def _save(group: Group, names: list[str]) -> list[Any]:
    saved = []
    for name in names:
        make, options = (ELEMENTWISE | WHOLE)[name]
        _, optimizer = _stepped(make, group, options, range(3))
        optimizer.consolidate_state_dict(to=1)
        saved.append(optimizer.state_dict() if group.rank == 1 else None)
    return saved


def _load(group: Group, names: list[str], saved: list[Any]) -> None:
    for name, state in zip(names, saved, strict=True):
        make, options = (ELEMENTWISE | WHOLE)[name]
        before = copy.deepcopy(state)
        params, _ = _stepped(make, None, options, range(3))
        mine = copies(params)
        plain = make(params, **options)
        plain.load_state_dict(copy.deepcopy(state))
        optimizer = ZeroRedundancyOptimizer(mine, make, group, **{**options, "lr": 9.0})
        optimizer.load_state_dict(state)
        for each, each_optimizer in ((params, plain), (mine, optimizer)):
            _step(each, each_optimizer, range(3, 5))
        assert same([p.detach() for p in params], [p.detach() for p in mine]), name
        assert same(state, before), f"{name}: the caller's state was changed"
        owned = {p for p in mine if optimizer.owner_of(p) == group.rank}
        assert set(optimizer.state) <= owned
        optimizer.consolidate_state_dict(to=None)
        assert same(plain.state_dict(), optimizer.state_dict())


def test_state_of_torch_s_loads_here_and_ours_there(group: Group) -> None:
    """Nobody starts a run again to change the library."""
    options = {"lr": 0.1, "amsgrad": True}
    theirs, ours, plain = (make_params(*SHAPES) for _ in range(3))
    kind = torchs_optimizer()
    torchs = kind(theirs, torch.optim.Adam, **options)
    mine = ZeroRedundancyOptimizer(ours, torch.optim.Adam, group, **options)
    oracle = torch.optim.Adam(plain, **options)
    for optimizer, params in ((torchs, theirs), (mine, ours), (oracle, plain)):
        _step(params, optimizer, range(3))
    states = []
    for optimizer in (torchs, mine):
        for to in range(2):
            optimizer.consolidate_state_dict(to=to)
            if group.rank == to:
                states.append(copy.deepcopy(optimizer.state_dict()))
    torchs.load_state_dict(states[1])
    mine.load_state_dict(states[0])
    for optimizer, params in ((torchs, theirs), (mine, ours), (oracle, plain)):
        _step(params, optimizer, range(3, 6))
    assert same([p.detach() for p in theirs], [p.detach() for p in plain])
    assert same([p.detach() for p in ours], [p.detach() for p in plain])


# ---- Putting it together ----


def test_state_is_asked_for_in_vain_where_torch_s_is(group: Group) -> None:
    """Code that catches torch's RuntimeError goes on working."""
    for kind in (torchs_optimizer(), ZeroRedundancyOptimizer):
        params = make_params(*SHAPES)
        optimizer = kind(params, torch.optim.Adam, lr=0.1)
        says = "has not been consolidated on this rank"
        with pytest.raises(RuntimeError, match=says):
            optimizer.state_dict()
        optimizer.consolidate_state_dict(to=1)
        if group.rank == 1:
            assert optimizer.state_dict()["state"] == {}
        else:
            with pytest.raises(RuntimeError, match=says):
                optimizer.state_dict()
        _step(params, optimizer, range(1))
        optimizer.consolidate_state_dict()
        if group.rank == 1:  # no longer the target
            with pytest.raises(RuntimeError, match=says):
                optimizer.state_dict()
    says = "has not been consolidated" if group.rank else "expected a rank below 2, got 7"
    with pytest.raises(StateError, match=says):
        optimizer.rank_local_state_dict(7)


@pytest.mark.ranks(3)
def test_any_rank_or_all_receive_and_each_rank_s_own_is_told_apart(group: Group) -> None:
    """Each rank may write its part, or one the whole."""
    params, optimizer = _stepped(Nested, group, {"lr": 0.1}, range(2))
    _, plain = _stepped(Nested, None, {"lr": 0.1}, range(2))
    for to in (0, 1, 2, None):
        optimizer.consolidate_state_dict(to=to)
        if to in {None, group.rank}:
            assert same(plain.state_dict(), optimizer.state_dict())
            own = optimizer.rank_local_state_dict(group.rank)
            assert same(own, optimizer.local_state_dict())
            parts = [optimizer.rank_local_state_dict(rank) for rank in range(3)]
            assert sum(len(part["state"]) for part in parts) == len(params)
    with pytest.raises(StateError, match="expected a rank below 3, or None"):
        optimizer.consolidate_state_dict(to=3)


def test_what_was_put_together_stays_of_one_moment(group: Group) -> None:
    """Torch's goes on with this rank's part and not with the others': a checkpoint of two steps."""
    params, optimizer = _stepped(Nested, group, {"lr": 0.1}, range(2))
    _, plain = _stepped(Nested, None, {"lr": 0.1}, range(2))
    optimizer.consolidate_state_dict(to=None)
    held = optimizer.state_dict()["state"]
    own = [p for p in params if optimizer.owner_of(p) == group.rank]
    number = next(i for i, param in enumerate(params) if param is own[0])
    shared = optimizer.state_dict()["state"][number]["factors"][0]

    assert shared is optimizer.state[own[0]]["factors"][0]  # no copy, until it steps
    _step(params, optimizer, range(2, 4))
    assert same(plain.state_dict()["state"], held)
    assert same(plain.state_dict()["state"], optimizer.state_dict()["state"])


def test_state_travels_once_as_tensors_to_whom_it_is_for(ranks) -> None:
    """Torch's pickles all of a rank's state, and sends it to everyone."""
    first, second = ranks(2).run(_count_traffic)
    (sent_by_first, state_of_first), (sent_by_second, state_of_second) = first, second

    assert sent_by_second == state_of_second > 0
    assert sent_by_first == 0 < state_of_first


def _count_traffic(group: Group) -> tuple[int, int]:
    params = make_params((600, 700), (500, 600), (64, 64))  # alone and packed
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, group, lr=0.1, momentum=0.9)
    _step(params, optimizer, range(1))

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was pickled")

    with (
        record_traffic(group) as traffic,
        mock.patch.object(pickle, "dumps", refuse),
        mock.patch.object(pickle, "Pickler", refuse),
    ):
        optimizer.consolidate_state_dict(to=0)
    assert set(traffic.operations) == {"gather", "agree"}
    sent = traffic.operations["gather"].payload_bytes
    return sent, tensor_bytes(dict(optimizer.state))


class Opaque(torch.optim.SGD):
    """Keeps an object of its own class."""

    def step(self, closure: Any = None) -> None:  # noqa: D102
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["memo"] = object()


def test_state_that_would_have_to_be_pickled_is_refused_on_every_rank(group: Group) -> None:
    """Unpickling runs code, and a rank that raises alone leaves the others waiting."""
    params, optimizer = _stepped(Opaque, group, {"lr": 0.1}, range(0))
    if group.rank == 1:
        give_grads(params, 0)
        optimizer.optim.step()
    with pytest.raises(StateError, match=r"on rank 1: expected tensors.* got a object"):
        optimizer.consolidate_state_dict(to=0)


# ---- Loading ----


def _break(state: dict[str, Any], how: str) -> dict[str, Any]:
    state = copy.deepcopy(state)
    of_params = state["state"]
    if how == "missing":
        del of_params[1]["exp_avg_sq"]
    elif how == "extra":
        of_params[2]["memo"] = torch.ones(2)
    elif how == "misshapen":
        of_params[3]["exp_avg"] = torch.ones(2, 2)
    elif how == "no tensor":
        of_params[3]["exp_avg"] = 1.0
    elif how == "no parameter's":
        of_params[9] = of_params[0]
    elif how == "fewer parameters":
        del state["param_groups"][0]["params"][-1]
    elif how == "no groups":
        del state["param_groups"]
    return state


REFUSED = {
    "missing": "parameter 'w1': 'exp_avg_sq' is missing",
    "extra": "parameter 'w2': 'memo' is unexpected",
    "misshapen": r"parameter 'w3': expected 'exp_avg' of shape \(3, 3\), got \(2, 2\)",
    "no tensor": r"parameter 'w3': expected 'exp_avg' of shape \(3, 3\), got float",
    "no parameter's": r"parameters \[9\], which are in no param group",
    "fewer parameters": r"expected param groups of \[5\] parameters.* got \[4\]",
    "no groups": r"with 'state' and 'param_groups', got \['state'\]",
}


def test_state_that_does_not_fit_is_refused_by_name_on_every_rank(group: Group) -> None:
    """Torch's takes it, and fails in some later step, or trains on in silence."""
    params = make_params(*SHAPES)
    named = [(f"w{index}", param) for index, param in enumerate(params)]
    optimizer = ZeroRedundancyOptimizer(named, torch.optim.AdamW, group, lr=0.1)
    _step(params, optimizer, range(2))
    optimizer.consolidate_state_dict(to=None)
    good = copy.deepcopy(optimizer.state_dict())
    random = torch.get_rng_state()
    for how, says in REFUSED.items():
        with pytest.raises(LoadError, match=says):
            optimizer.load_state_dict(_break(good, how))
    optimizer.consolidate_state_dict(to=None)

    assert same(optimizer.state_dict(), good)  # nothing was written
    optimizer.load_state_dict(good)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_parameter_without_state_begins_anew_as_in_the_plain_optimizer() -> None:
    """It may have been frozen, or unused, so far."""
    params, plain = _stepped(torch.optim.Adam, None, {"lr": 0.1}, range(2))
    state = plain.state_dict()
    del state["state"][2]
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.Adam, Group.solo(), lr=0.1)
    expected = copies(params)
    oracle = torch.optim.Adam(expected, lr=0.1)

    optimizer.load_state_dict(copy.deepcopy(state))
    oracle.load_state_dict(copy.deepcopy(state))
    for each, each_optimizer in ((params, optimizer), (expected, oracle)):
        _step(each, each_optimizer, range(2, 4))

    assert same([p.detach() for p in params], [p.detach() for p in expected])


def test_hooks_see_whole_state_dicts_and_what_they_return_is_loaded() -> None:
    """Trainers add keys of their own there."""
    _, optimizer = _stepped(torch.optim.SGD, Group.solo(), {"lr": 0.1, "momentum": 0.9}, range(1))
    optimizer.register_state_dict_post_hook(
        lambda _, state: {**state, "epoch": len(state["state"])}
    )
    loaded = []

    def add(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "epoch": len(state["state"])}

    def note(_: Any, state: dict[str, Any]) -> None:
        loaded.append(state["epoch"])

    optimizer.register_state_dict_post_hook(add)
    optimizer.register_load_state_dict_pre_hook(note)
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)

    assert state["epoch"] == len(SHAPES)
    assert loaded == [len(SHAPES)]
    assert isinstance(optimizer.state[optimizer.param_groups[0]["params"][0]], dict)
    assert all(isinstance(s["momentum_buffer"], Tensor) for s in optimizer.state.values())
