"""State of any kind is saved, resumed in another layout, made whole and given back."""

from __future__ import annotations

import copy
import enum
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import assert_close
from zero_engine import Offload
from zero_engine.testing import edit_manifest
from zero_partition import LoadError, StateError

WIDTH: Final = 6
NUM_STEPS: Final = 2  # before and after


class Side(enum.Enum):
    """Of an object in state."""

    LEFT = 0
    RIGHT = 1


class Inner:
    """An object inside another."""

    def __init__(self, like: Tensor) -> None:
        self.history = [torch.zeros_like(like), 0]


class Projector:
    """As GaLore keeps one for each matrix."""

    def __init__(self, like: Tensor) -> None:
        self.basis = torch.ones_like(like)
        self.side, self.rank, self.shape, self.scale = Side.LEFT, 2, like.shape, None
        self.inner = Inner(like)

    def __call__(self, grad: Tensor) -> Tensor:  # noqa: D102
        self.basis.add_(grad.abs())
        self.inner.history[0].add_(grad)
        self.inner.history[1] += 1
        self.side = Side.RIGHT if self.side is Side.LEFT else Side.LEFT
        factor = 1.0 if self.side is Side.RIGHT else 0.5
        return self.inner.history[0] / self.basis / self.inner.history[1] * factor


def _by_object(grad: Tensor, state: dict) -> Tensor:
    return state.setdefault("projector", Projector(grad))(grad)


def _by_list(grad: Tensor, state: dict) -> Tensor:
    moments = state.setdefault("moments", [torch.zeros_like(grad), {"of": (grad * 0, 0)}])
    moments[0].add_(grad)
    moments[1]["of"] = (moments[1]["of"][0] + grad.square(), moments[1]["of"][1] + 1)
    return moments[0] / (1 + moments[1]["of"][0]) / moments[1]["of"][1]


def _by_nested_dicts(grad: Tensor, state: dict) -> Tensor:
    of_view = state.setdefault(0, {"exp_avg": torch.zeros_like(grad), "inner": {1: {"step": 0}}})
    of_view["exp_avg"].lerp_(grad, 0.3)
    of_view["inner"][1]["step"] += 1
    return of_view["exp_avg"] / of_view["inner"][1]["step"]


def _by_int_keys(grad: Tensor, state: dict) -> Tensor:
    state.setdefault(7, torch.zeros_like(grad)).add_(grad)
    state.setdefault("[odd", torch.zeros_like(grad)).sub_(grad * 0.5)
    return state[7] + state["[odd"]


def _by_plain_values(grad: Tensor, state: dict) -> Tensor:
    state.setdefault("shape", (2, (3, "x")))
    state.setdefault("seen", set()).add(len(state["seen"]))
    state["dtype"] = torch.bfloat16
    return grad / len(state["seen"])


def _by_skipping(grad: Tensor, state: dict) -> Tensor:
    if not grad.numel():  # as heavyball does
        return grad
    return state.setdefault("momentum", torch.zeros_like(grad)).mul_(0.5).add_(grad)


KINDS: Final[dict[str, Callable[[Tensor, dict], Tensor]]] = {
    "object": _by_object,
    "list": _by_list,
    "nested-dicts": _by_nested_dicts,
    "int-keys": _by_int_keys,
    "plain-values": _by_plain_values,
    "none-of-empty": _by_skipping,
}
NEED_TENSORS: Final = {"object", "list"}  # a shard of what they hold is nobody's


class _Keeps(parity.PerParameter):
    """Has state of one of these kinds, a count that is of no parameter, and one in an attribute."""

    kind: str
    num_calls = 0

    def step(self, closure: Any = None) -> Any:
        self.state["num_steps"] = {"of": self.state.get("num_steps", {"of": 0})["of"] + 1}
        self.num_calls += 1
        return super().step(closure)

    def update(self, param: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        slower = self.state["num_steps"]["of"] * (1 + 0.1 * self.num_calls)
        param.sub_(KINDS[self.kind](grad, state) * group["lr"] / slower)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "own": {"num_calls": {0: self.num_calls}}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.num_calls = state_dict["own"]["num_calls"][0]


class _KeepsByParameter(_Keeps):
    """Has no state of no parameter, which cannot rest elsewhere."""

    def step(self, closure: Any = None) -> Any:
        self.num_calls += 1
        return parity.PerParameter.step(self, closure)

    def update(self, param: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        param.sub_(KINDS[self.kind](grad, state) * group["lr"] / (1 + 0.1 * self.num_calls))


def _build(kind: str, place: str = "device") -> tuple[nn.Module, _Keeps]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH))
    optimizer = {"device": _Keeps, "host": _KeepsByParameter}[place](model.parameters(), lr=0.1)
    optimizer.kind = kind
    return model, optimizer


def _steps(model: nn.Module, optimizer: Any, first: int) -> list[float]:
    losses = []
    for step in range(first, first + NUM_STEPS):
        loss = model(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH) * (step + 1)).square().mean()
        parity.finish_step(loss, optimizer)
        losses.append(loss.item())
    return losses


def _sharded(
    kind: str, group: Group, stage: int, place: str = "device", **config: Any
) -> tuple[nn.Module, _Keeps]:
    model, optimizer = _build(kind, place)
    config |= {"cut": "tensor"} if kind in NEED_TENSORS else {}
    zero_engine.shard(model, optimizer, ZeroConfig(stage, **config), group=group)
    return model, optimizer


def _forms(value: Any) -> Any:
    """Types and shapes of state, and what is plain in it."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return {key: _forms(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [_forms(item) for item in value]
    if isinstance(value, Projector | Inner):
        return type(value), _forms(vars(value))
    return value


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.drawn(3)
def test_state_of_any_kind_resumes_in_another_layout(
    group: Group, tmp_path: Path, kind: str, place: str
) -> None:
    """As in plain torch that was never interrupted."""
    model, optimizer = _build(kind, place)
    expected = _steps(model, optimizer, 0), _steps(model, optimizer, NUM_STEPS)
    config: dict[str, Any] = {"offload": Offload(optimizer="host")} if place == "host" else {}
    stages = (1, 2, 3) if place == "host" else parity.STAGES
    for turn, stage in enumerate(stages):
        folder = tmp_path / str(stage)
        model, optimizer = _sharded(kind, group, stage, place, **config)
        assert_close(_steps(model, optimizer, 0), expected[0])
        zero_engine.save(folder, model, optimizer, step=NUM_STEPS)
        model, optimizer = _sharded(kind, group, parity.STAGES[turn - 2], place)
        report = zero_engine.load(folder, model, optimizer)
        assert report is not None
        assert not report.begins_anew
        assert_close(_steps(model, optimizer, NUM_STEPS), expected[1])


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", KINDS)
def test_state_of_any_kind_is_given_back(group: Group, kind: str) -> None:
    """By `unshard`, by another layout on the way, and whole in a state dict."""
    plain_model, plain = _build(kind)
    _steps(plain_model, plain, 0)
    forms = copy.deepcopy([_forms(plain.state[param]) for param in plain_model.parameters()])
    expected = _steps(plain_model, plain, NUM_STEPS)
    for stage in parity.STAGES:
        model, optimizer = _sharded(kind, group, stage)
        _steps(model, optimizer, 0)
        whole = zero_engine.full_optimizer_state_dict(model)
        if group.rank == 0:
            assert whole["own"] == {"num_calls": {0: NUM_STEPS}}
            *of_params, shared = whole["state"].values()
            assert shared == {"of": NUM_STEPS}
            found = [_forms(state) for state in of_params]
            assert found == forms, f"stage {stage}: {found} != {forms}"
        other, other_optimizer = _sharded(kind, group, 3 - stage)
        weights = zero_engine.full_state_dict(model)
        zero_engine.load_full_optimizer_state_dict(other, whole)
        other.load_state_dict(parity.by_rank_0(group, lambda weights=weights: weights))
        assert_close(_steps(other, other_optimizer, NUM_STEPS), expected)

        config = {"cut": "tensor"} if kind in NEED_TENSORS else {}
        zero_engine.shard(model, optimizer, ZeroConfig(3 - stage, **config), group=group)
        zero_engine.unshard(model, optimizer)
        found = [_forms(optimizer.state[param]) for param in model.parameters()]
        assert found == forms, f"stage {stage}: {found} != {forms}"
        assert_close(_steps(model, optimizer, NUM_STEPS), expected)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", KINDS)
def test_state_of_any_kind_moves_to_the_host_and_back(group: Group, kind: str) -> None:
    """The optimizer finds all of its tensors where it steps."""
    plain_model, plain = _build(kind, "host")
    model, optimizer = _build(kind, "host")
    offload = Offload(optimizer="host")
    config: dict[str, Any] = {"cut": "tensor"} if kind in NEED_TENSORS else {}
    for turn, where in enumerate([offload, None, offload, None, offload]):
        zero_engine.shard(
            model, optimizer, ZeroConfig(turn % 3 + 1, offload=where, **config), group=group
        )
        first = turn * NUM_STEPS
        assert_close(_steps(model, optimizer, first), _steps(plain_model, plain, first))
    zero_engine.unshard(model, optimizer)
    assert_close(_steps(model, optimizer, 0), _steps(plain_model, plain, 0))


def _name_a_foreign_class(said: dict[str, Any]) -> None:
    text = json.dumps(said["own_said"])
    changed = text.replace(f'["{__name__}", "Inner"]', '["tempfile", "_TemporaryFileCloser"]')
    assert changed != text
    said["own_said"] = json.loads(changed)


def test_a_file_makes_objects_of_the_optimizers_own_package_only(
    group: Group, tmp_path: Path
) -> None:
    """Some classes of the standard library delete files when their objects go."""
    model, optimizer = _sharded("object", group, 3)
    _steps(model, optimizer, 0)
    zero_engine.save(tmp_path, model, optimizer, step=1)
    if group.rank == 0:
        edit_manifest(next(tmp_path.glob("step-*")), _name_a_foreign_class)
    parity.by_rank_0(group, lambda: None)
    with pytest.raises(
        LoadError, match=r"made of a tempfile\._TemporaryFileCloser, of another pack"
    ):
        zero_engine.load(tmp_path, model, optimizer)


class _Hooked(_Keeps):
    """Saves by hooks, and something that is pickled, as heavyball does."""

    secret = "here"

    def state_dict(self) -> dict[str, Any]:
        return parity.PerParameter.state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        parity.PerParameter.load_state_dict(self, state_dict)


def _store(optimizer: _Hooked, said: dict[str, Any]) -> None:
    own = {"num_calls": optimizer.num_calls, "secret": pickle.dumps(optimizer.secret)}
    said["own"] = own


def _restore(optimizer: _Hooked, said: dict[str, Any]) -> None:
    optimizer.num_calls = said["own"]["num_calls"]
    optimizer.secret = pickle.loads(said["own"]["secret"])


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", parity.STAGES)
def test_what_hooks_of_a_state_dict_save_comes_back(
    group: Group, tmp_path: Path, stage: int
) -> None:
    """But for bytes, which the optimizer would unpickle: these are what it has by itself."""

    def build() -> tuple[nn.Module, _Hooked]:
        model, _ = _build("int-keys")
        optimizer = _Hooked(model.parameters(), lr=0.1)
        optimizer.kind = "int-keys"
        optimizer.register_state_dict_post_hook(_store)
        optimizer.register_load_state_dict_pre_hook(_restore)
        return model, optimizer

    plain = build()
    expected = _steps(*plain, 0) and _steps(*plain, NUM_STEPS)
    model, optimizer = build()
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
    _steps(model, optimizer, 0)
    optimizer.secret = "only in bytes"
    with pytest.warns(UserWarning, match=r"without optimizer.state_dict\(\)\['own'\]\['secret'\]"):
        zero_engine.save(tmp_path, model, optimizer, step=1)
    model, optimizer = build()
    zero_engine.shard(model, optimizer, ZeroConfig(3 - stage), group=group)
    zero_engine.load(tmp_path, model, optimizer)
    assert optimizer.secret == "here"
    assert_close(_steps(model, optimizer, NUM_STEPS), expected)


def test_keys_without_a_name_are_refused_on_every_rank(group: Group, tmp_path: Path) -> None:
    """A tensor as a key has no name in a file."""
    model, optimizer = _sharded("plain-values", group, 1)
    _steps(model, optimizer, 0)
    if group.rank == 0:
        next(state for key, state in optimizer.state.items() if key != "num_steps")[3.5] = 1
    with pytest.raises(StateError, match=r"neither strings nor ints, 3\.5 for one"):
        zero_engine.save(tmp_path, model, optimizer, step=1)
