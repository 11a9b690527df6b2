"""Modules that save and load by code of their own resume as they do in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import zero_engine
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import assert_close
from zero_engine import ZeroConfig
from zero_partition import LoadError

WIDTH: Final = 6


class _Body(nn.Module):
    """Two layers and what the classes below add; trains on ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class _GrowingByHook(_Body):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(0, WIDTH))
        self.register_load_state_dict_pre_hook(_grow)

    def forward(self, x: Tensor) -> Tensor:
        self.bank = torch.cat([self.bank, x[:1].detach()])
        return super().forward(x) + self.bank.sum()


def _grow(module: nn.Module, state: dict, prefix: str, *_: Any) -> None:
    module.bank = torch.zeros(state[prefix + "bank"].shape)


class _GrowingByOverride(_Body):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Bank()

    def forward(self, x: Tensor) -> Tensor:
        self.inner.bank = torch.cat([self.inner.bank, x[:1].detach()])
        return super().forward(x) * (1 + self.inner.bank.mean())


class _Bank(nn.Module):
    bank: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(0, WIDTH))

    def _load_from_state_dict(self, state: dict, prefix: str, *rest: Any) -> None:
        self.bank.resize_(state[prefix + "bank"].shape)
        super()._load_from_state_dict(state, prefix, *rest)


class _RebuildsCache(_Body):
    """Keeps what a buffer says once more, in an attribute."""

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(3))
        self.cached = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * (1 + self.cached)
        self.counts += 1
        self.cached = self.counts.sum().item()
        return y

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        found = super().load_state_dict(state, strict=strict, assign=assign)
        self.cached = self.counts.sum().item()
        return found


class _ExtraState(_Body):
    def __init__(self) -> None:
        super().__init__()
        self.scale = _Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(super().forward(x))


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.history, self.factor = [], torch.ones(2)

    def get_extra_state(self) -> Any:
        return {"history": self.history, "factor": self.factor}

    def set_extra_state(self, state: Any) -> None:
        self.history, self.factor = list(state["history"]), state["factor"].clone()

    def forward(self, x: Tensor) -> Tensor:
        self.history.append(float(len(self.history)))
        self.factor = self.factor * 1.1
        return x * self.factor + sum(self.history)


class _SavesMore(_Body):
    """As metrics do: values that are no buffers, in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return super().forward(x) * self.seen.sum()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "seen"] = self.seen

    def _load_from_state_dict(self, state: dict, prefix: str, *rest: Any) -> None:
        self.seen = state.pop(prefix + "seen").clone()
        super()._load_from_state_dict(state, prefix, *rest)


class _Quantized(_Body):
    """Saves scales that its loading does not take, as 4-bit layers of bitsandbytes do."""

    scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "first.weight.absmax"] = torch.full((3,), self.scale)


class _QuantizedOtherwise(_Quantized):
    scale = 0.25


class _Strips(_Body):
    """Other names outside than inside, both ways."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"model/{key}": value for key, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state: Any) -> None:  # type: ignore[override]
        super().load_state_dict({key.removeprefix("model/"): v for key, v in state.items()})


class _Versioned(_Body):
    """Weights of its first version were saved at twice their size."""

    _version = 2

    def _load_from_state_dict(self, state: dict, prefix: str, metadata: dict, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[prefix + "last.weight"] = state[prefix + "last.weight"] / 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class _HooksAfter(_Body):
    total: float

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(3))
        self.total = 0.0
        self.register_load_state_dict_post_hook(_sum_up)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * (1 + self.total)
        self.counts += 1
        _sum_up(self)
        return y


def _sum_up(module: Any, *_: Any) -> None:
    module.total = module.counts.sum().item()


class _Ties(_GrowingByHook):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.again(x))


class _Computes(_Body):
    """Its state dict has a value that no parameter or buffer has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_add_norm)

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        state = {key: value for key, value in state.items() if key != "norm"}
        return super().load_state_dict(state, strict=strict, assign=assign)


def _add_norm(module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
    state[prefix + "norm"] = state[prefix + "last.weight"].norm()


class _Renamed(_Body):
    """The same layers by other names; knows those of `_Body`."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.register_load_state_dict_pre_hook(_rename)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.enter(x)))


def _rename(module: nn.Module, state: dict, prefix: str, *_: Any) -> None:
    for before, after in (("first", "enter"), ("last", "leave")):
        for key in ("weight", "bias"):
            if f"{prefix}{before}.{key}" in state:
                state[f"{prefix}{after}.{key}"] = state.pop(f"{prefix}{before}.{key}")


class _Raises(_GrowingByHook):
    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        super().load_state_dict(state, strict=strict, assign=assign)
        raise KeyError("not here")


class _Larger(_GrowingByHook):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 3)


class _NoPickle(_Body):
    def get_extra_state(self) -> Any:
        return [len]

    def set_extra_state(self, state: Any) -> None:
        pass


def _kinds_of(kind: type[nn.Module]) -> list[type[nn.Module]]:
    return [kind, *(inner for each in kind.__subclasses__() for inner in _kinds_of(each))]


ROUND_TRIPS: Final = (
    *("_GrowingByHook", "_GrowingByOverride", "_RebuildsCache", "_ExtraState", "_SavesMore"),
    *("_Strips", "_Versioned", "_HooksAfter", "_Ties"),
)
KINDS: Final = {kind.__name__: kind for kind in _kinds_of(_Body)}


def _make(kind: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = kind()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> list[float]:
    losses = []
    for step in range(num_steps):
        loss = model(torch.ones(3, WIDTH) * (step + 1) / 4).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _expected(before: Callable[[], nn.Module], after: Callable[[], nn.Module]) -> list[float]:
    """Losses of plain torch that trains, saves, loads into another model and goes on."""
    model, optimizer = _make(before, 0)
    _steps(model, optimizer, 2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model, optimizer = _make(after, 1)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return _steps(model, optimizer, 3)


def _trained(
    before: Callable[[], nn.Module], folder: Path, group: Group, stage: int
) -> list[float]:
    model, optimizer = _make(before, 0)
    zero_engine.shard(model, optimizer, ZeroConfig(stage, min_unit_bytes=0), group=group)
    losses = _steps(model, optimizer, 2)
    zero_engine.save(folder, model, optimizer, step=2)
    return losses


def _resumed(after: Callable[[], nn.Module], folder: Path, group: Group, stage: int) -> list[float]:
    model, optimizer = _make(after, 1)
    zero_engine.shard(model, optimizer, ZeroConfig(stage, min_unit_bytes=0), group=group)
    zero_engine.load(folder, model, optimizer)
    return _steps(model, optimizer, 3)


STAGES: Final = ((0, 3), (3, 1), (2, 2), (3, 3))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ROUND_TRIPS)
def test_what_a_module_saves_and_loads_itself_comes_back(
    group: Group, tmp_path: Path, kind: str
) -> None:
    expected = _expected(KINDS[kind], KINDS[kind])
    for before, after in STAGES:
        folder = tmp_path / f"{before}-{after}"
        _trained(KINDS[kind], folder, group, before)
        found = _resumed(KINDS[kind], folder, group, after)
        assert_close(found, expected, msg=f"stages {before} and {after}")


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["_Renamed", "_Versioned"])
def test_a_module_takes_what_an_older_class_has_saved(
    group: Group, tmp_path: Path, kind: str
) -> None:
    """State of the optimizer follows a parameter to its new name."""
    after = KINDS[kind]
    expected = _expected(_Body, after)
    for stage, later in STAGES:
        folder = tmp_path / f"{stage}-{later}"
        _trained(_Body, folder, group, stage)
        assert_close(_resumed(after, folder, group, later), expected)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [None, 0, 1, 3])
@pytest.mark.parametrize("kind", ["_Renamed", "_Versioned", "_GrowingByHook"])
def test_weights_alone_go_through_the_same_code(
    group: Group, tmp_path: Path, kind: str, stage: int | None
) -> None:
    """`load_pretrained` of a sharded model, and of a plain one."""
    after = KINDS[kind]
    before, _ = _make(_GrowingByHook if after is _GrowingByHook else _Body, 0)
    before(torch.ones(3, WIDTH))
    file = tmp_path / f"weights-{group.rank}.pt"  # the same on every rank
    torch.save(before.state_dict(), file)
    plain, _ = _make(after, 1)
    # `_Versioned` sees no version in files of weights: neither do torch's users of safetensors.
    plain.load_state_dict(dict(before.state_dict()))
    model, optimizer = _make(after, 2)
    if stage is not None:
        zero_engine.shard(model, optimizer, ZeroConfig(stage, min_unit_bytes=0), group=group)
    zero_engine.load_pretrained(model, file, group=group)
    if stage is None:
        zero_engine.shard(model, None, ZeroConfig(3), group=group)
    whole = zero_engine.full_state_dict(model)
    if group.rank == 0:
        assert_close(whole, dict(plain.state_dict()))


@pytest.mark.ranks(1, 2)
def test_what_computes_with_values_is_said_and_resumes(group: Group, tmp_path: Path) -> None:
    expected = _expected(_Computes, _Computes)
    for stage, later in STAGES:
        folder = tmp_path / f"{stage}-{later}"
        with pytest.warns(UserWarning, match="_Computes computes with values"):
            _trained(_Computes, folder, group, stage)
        assert_close(_resumed(_Computes, folder, group, later), expected)


@pytest.mark.ranks(1, 2)
def test_what_a_module_saves_and_does_not_load_is_in_every_model_of_it(
    group: Group, tmp_path: Path
) -> None:
    """In plain torch such a state dict loads with `strict=False` only."""
    model, optimizer = _make(_Quantized, 0)
    expected = _steps(model, optimizer, 2) and _steps(model, optimizer, 3)
    for stage, later in STAGES:
        folder = tmp_path / f"{stage}-{later}"
        _trained(_Quantized, folder, group, stage)
        assert_close(_resumed(_Quantized, folder, group, later), expected)
        model, _ = _make(_Quantized, 0)
        zero_engine.shard(model, None, ZeroConfig(stage, min_unit_bytes=0), group=group)
        whole = zero_engine.full_state_dict(model)
        assert group.rank or whole["first.weight.absmax"].tolist() == [0.5] * 3


@contextmanager
def _nothing_changes(model: nn.Module, group: Group) -> Iterator[None]:
    before = zero_engine.full_state_dict(model)
    yield
    after = zero_engine.full_state_dict(model)
    if group.rank == 0:
        assert_close(after, before)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("_Larger", r"'last.weight': expected shape \(3, 6\), got \(2, 6\)"),
        ("_Raises", "load_state_dict.. of _Raises: KeyError: 'not here'"),
        ("_Body", "unexpected: 'bank'"),
        ("_ExtraState", "missing: 'scale._extra_state'"),
        ("_QuantizedOtherwise", "'first.weight.absmax' differs from that of the model, which make"),
    ],
)
def test_what_does_not_fit_leaves_all_as_it_was(
    group: Group, tmp_path: Path, kind: str, message: str, stage: int
) -> None:
    before = _Quantized if kind.startswith("_Quantized") else _GrowingByHook
    _trained(before, tmp_path, group, stage)
    model, optimizer = _make(KINDS[kind], 1)
    zero_engine.shard(model, optimizer, ZeroConfig(stage, min_unit_bytes=0), group=group)
    with _nothing_changes(model, group), pytest.raises(LoadError, match=message):
        zero_engine.load(tmp_path, model, optimizer)


def test_extra_state_that_would_have_to_be_pickled_is_named(group: Group, tmp_path: Path) -> None:
    with pytest.raises(
        zero_engine.ConfigError, match=r"state_dict\(\)\['_extra_state'\].*a builtin_function"
    ):
        _trained(_NoPickle, tmp_path, group, 1)
