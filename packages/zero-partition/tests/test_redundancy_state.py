"""The state of a ZeroRedundancyOptimizer: put together, saved, loaded elsewhere, and refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from redundancy import (
    ELEMENTWISE,
    WHOLE,
    Nested,
    assert_alike,
    give_grads,
    make_params,
    pair,
    params_of,
    same,
    step_alike,
    tensor_bytes,
    torchs_optimizer,
)
from torch import Tensor
from zero_comm import Group, record_traffic
from zero_comm.testing import equal
from zero_partition import LoadError, StateError, ZeroRedundancyOptimizer

SHAPES = ((5, 3), (7, 2), (2, 9), (3, 3), (4, 11))
_IMPORT_S = 120.0  # the first step of some optimizers imports torch's compiler, on each rank


def _pair(group: Group, make: Any, **options: Any) -> tuple[Any, Any]:
    """The plain optimizer, and ours."""
    return pair(make_params(*SHAPES), make, group, **options)


def _step(optimizer: Any, steps: range) -> None:
    for step in steps:
        give_grads(params_of(optimizer), step)
        optimizer.step()


# ---- To other optimizers, and from them ----


@pytest.mark.slow
def test_state_goes_to_the_plain_optimizer_and_back_at_any_number_of_ranks(ranks) -> None:
    """A checkpoint must not tie a job to the ranks, or to the library, that wrote it."""
    saved = ranks(3).run(_save, timeout_s=_IMPORT_S)[1]
    ranks(2).run(_load, saved=saved, timeout_s=_IMPORT_S)


def _save(group: Group) -> list[Any]:
    saved = []
    for make, options in (ELEMENTWISE | WHOLE).values():
        oracle, optimizer = _pair(group, make, **options)
        step_alike(oracle, optimizer, range(3))
        optimizer.consolidate_state_dict(to=1)
        saved.append(optimizer.state_dict() if group.rank == 1 else None)
        assert group.rank != 1 or same(oracle.state_dict(), saved[-1])
    return saved


def _load(group: Group, saved: list[Any]) -> None:
    for (name, (make, options)), state in zip((ELEMENTWISE | WHOLE).items(), saved, strict=True):
        before = copy.deepcopy(state)
        never, _ = _pair(group, make, **options)
        _step(never, range(3))
        resumed = [copy.deepcopy(param) for param in params_of(never)]
        plain, mine = pair(resumed, make, group, **{**options, "lr": 9.0})
        plain.load_state_dict(copy.deepcopy(state))
        mine.load_state_dict(state)
        _step(never, range(3, 5))
        for optimizer in (plain, mine):
            _step(optimizer, range(3, 5))
            assert_alike(never, optimizer)
        assert same(state, before), f"{name}: the caller's state was changed"
        assert all(mine.owner_of(param) == group.rank for param in mine.state)
        mine.consolidate_state_dict(to=None)
        assert same(plain.state_dict(), mine.state_dict()), name
        assert list(mine.state_dict()["state"]) == sorted(mine.state_dict()["state"])


# ---- Putting it together ----


def test_state_is_asked_for_in_vain_where_torch_s_is(group: Group) -> None:
    """Code that catches torch's RuntimeError goes on working."""
    says = "has not been consolidated on this rank"
    for kind in (torchs_optimizer(), ZeroRedundancyOptimizer):
        optimizer = kind(make_params(*SHAPES), torch.optim.Adam, lr=0.1)
        for to in (None, 1, 0):
            if to is not None:
                optimizer.consolidate_state_dict(to=to)
            if group.rank == to:
                assert bool(optimizer.state_dict()["state"]) == (to == 0)
            else:
                with pytest.raises(RuntimeError, match=says):
                    optimizer.state_dict()
            if to == 1:  # until now there is none
                _step(optimizer, range(1))
    says = "has not been consolidated" if group.rank else "expected a rank below 2, got 7"
    with pytest.raises(StateError, match=says):
        optimizer.rank_local_state_dict(7)


@pytest.mark.ranks(3)
def test_any_rank_or_all_receive_what_stays_of_one_moment(group: Group) -> None:
    """Torch's goes on with this rank's part and not with the others': a checkpoint of two steps."""
    oracle, optimizer = _pair(group, Nested, lr=0.1)
    for turn, to in enumerate((0, 1, 2, None)):
        step_alike(oracle, optimizer, [turn])
        optimizer.consolidate_state_dict(to=to)
        if to in {None, group.rank}:
            assert same(oracle.state_dict(), optimizer.state_dict())
            own = optimizer.rank_local_state_dict(group.rank)
            assert same(own, optimizer.local_state_dict())
            parts = [optimizer.rank_local_state_dict(rank) for rank in range(3)]
            assert sum(len(part["state"]) for part in parts) == len(SHAPES)
    with pytest.raises(StateError, match="expected a rank below 3, or None"):
        optimizer.consolidate_state_dict(to=3)

    before, held = copy.deepcopy(oracle.state_dict()["state"]), optimizer.state_dict()["state"]
    number, param = next(
        (number, param)
        for number, param in enumerate(params_of(optimizer))
        if optimizer.owner_of(param) == group.rank
    )
    if group.device.type == "cpu":  # no copy, until it steps
        assert held[number]["factors"][0] is optimizer.state[param]["factors"][0]
    step_alike(oracle, optimizer, range(4, 6))
    assert same(before, held)
    assert same(before, optimizer.state_dict()["state"])


def test_state_travels_once_as_tensors_to_whom_it_is_for(group: Group) -> None:
    """Torch's pickles all of a rank's state, and sends it to everyone."""
    params = make_params((600, 700), (500, 600), (64, 64))  # alone and packed
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, group, lr=0.1, momentum=0.9)
    _step(optimizer, range(1))
    refuse = mock.Mock(side_effect=AssertionError("something was pickled"))
    with (
        record_traffic(group) as traffic,
        mock.patch.object(pickle, "dumps", refuse),
        mock.patch.object(pickle, "Pickler", refuse),
    ):
        optimizer.consolidate_state_dict(to=0)
    own = tensor_bytes(dict(optimizer.state))

    assert own > 0
    assert set(traffic.operations) == {"gather", "agree"}
    assert traffic.operations["gather"].payload_bytes == (own if group.rank else 0)


class Average:
    """An object that is its attributes."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.count = value, 1


class Averaging(torch.optim.SGD):
    """Keeps an object with a tensor for each parameter."""

    def step(self, closure: Any = None) -> None:  # noqa: D102
        super().step(closure)
        for param in params_of(self):
            self.state[param].setdefault("average", Average(param.detach().clone()))


def test_objects_in_state_arrive_as_objects_of_their_class(group: Group) -> None:
    """The plain optimizer, which loads the state, uses their attributes."""
    oracle, optimizer = _pair(group, Averaging, lr=0.1)
    step_alike(oracle, optimizer, range(2))
    optimizer.consolidate_state_dict(to=None)
    whole = optimizer.state_dict()["state"]
    for number, expected in oracle.state_dict()["state"].items():
        assert type(whole[number]["average"]) is Average
        assert same(vars(whole[number]["average"]), vars(expected["average"]))


class Opaque(torch.optim.SGD):
    """Keeps an object of its own class."""

    def step(self, closure: Any = None) -> None:  # noqa: D102
        super().step(closure)
        for param in params_of(self):
            self.state[param]["memo"] = object()


def test_state_that_would_have_to_be_pickled_is_refused_on_every_rank(group: Group) -> None:
    """Unpickling runs code, and a rank that raises alone leaves the others waiting."""
    _, optimizer = _pair(group, Opaque, lr=0.1)
    if group.rank == 1:
        optimizer.optim.step()
    with pytest.raises(StateError, match=r"on rank 1: expected tensors.* got a object"):
        optimizer.consolidate_state_dict(to=0)


# ---- Loading ----

REFUSED: dict[str, Callable[[dict[Any, Any], dict[str, Any]], Any]] = {
    "parameter 'w1': 'exp_avg_sq' is missing": lambda of, _: of[1].pop("exp_avg_sq"),
    "parameter 'w2': 'memo' is unexpected": lambda of, _: of[2].update(memo=torch.ones(2)),
    r"'w3': expected 'exp_avg' of shape \(3, 3\), got \(2, 2\)": (
        lambda of, _: of[3].update(exp_avg=torch.ones(2, 2))
    ),
    r"'w3': expected 'exp_avg' of shape \(3, 3\), got float": (
        lambda of, _: of[3].update(exp_avg=1.0)
    ),
    r"parameters \[9\], which are in no param group": lambda of, _: of.update({9: of[0]}),
    r"expected param groups of \[5\] parameters.* got \[4\]": (
        lambda _, state: state["param_groups"][0]["params"].pop()
    ),
    r"with 'state' and 'param_groups', got \['state'\]": (
        lambda _, state: state.pop("param_groups")
    ),
}


def test_state_that_does_not_fit_is_refused_by_name_on_every_rank(group: Group) -> None:
    """Torch's takes it, and fails in some later step, or trains on in silence."""
    named = [(f"w{index}", param) for index, param in enumerate(make_params(*SHAPES))]
    optimizer = ZeroRedundancyOptimizer(named, torch.optim.AdamW, group, lr=0.1)
    _step(optimizer, range(2))
    optimizer.consolidate_state_dict(to=None)
    good = copy.deepcopy(optimizer.state_dict())
    random = torch.get_rng_state()
    for says, spoil in REFUSED.items():
        state = copy.deepcopy(good)
        spoil(state["state"], state)
        with pytest.raises(LoadError, match=says):
            optimizer.load_state_dict(state)
    optimizer.consolidate_state_dict(to=None)

    assert same(optimizer.state_dict(), good)  # nothing was written
    optimizer.load_state_dict(good)
    assert equal(torch.get_rng_state(), random)


def test_a_parameter_without_state_begins_anew_as_in_the_plain_optimizer() -> None:
    """It may have been frozen, or unused, so far."""
    oracle, optimizer = _pair(Group.solo(), torch.optim.Adam, lr=0.1)
    step_alike(oracle, optimizer, range(2))
    state = copy.deepcopy(oracle.state_dict())
    del state["state"][2]

    optimizer.load_state_dict(copy.deepcopy(state))
    oracle.load_state_dict(state)
    step_alike(oracle, optimizer, range(2, 4))


def test_hooks_see_whole_state_dicts_and_what_they_return_is_loaded() -> None:
    """Trainers add keys of their own there."""
    _, optimizer = _pair(Group.solo(), torch.optim.SGD, lr=0.1, momentum=0.9)
    _step(optimizer, range(1))
    loaded: list[int] = []
    optimizer.register_state_dict_post_hook(
        lambda _, state: {**state, "epoch": len(state["state"])}
    )
    optimizer.register_load_state_dict_pre_hook(lambda _, state: loaded.append(state["epoch"]))
    optimizer.consolidate_state_dict()
    optimizer.load_state_dict(optimizer.state_dict())

    assert loaded == [len(SHAPES)]
    assert all(isinstance(s["momentum_buffer"], Tensor) for s in optimizer.state.values())
