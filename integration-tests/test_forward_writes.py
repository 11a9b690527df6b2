"""A forward that writes to its own parameters: followed, or refused by name, and never lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import parity
import pytest
import torch
import zero_engine
from torch import Tensor, nn
from torch.nn.utils import parametrize
from zero_comm import Group
from zero_comm.testing import assert_close, equal
from zero_engine import Precision, ZeroConfig
from zero_partition import StateError

WIDTH: Final = 16  # each rank has a part of each weight


def _assign(weight: nn.Parameter) -> None:
    weight.data = weight.data * 0.5


WRITES: Final[dict[str, Callable[[nn.Parameter], object]]] = {
    "copy_": lambda w: w.data.copy_(nn.functional.normalize(w.data, dim=1)),
    "mul_": lambda w: w.data.mul_(0.5),
    "clamp_": lambda w: w.data.clamp_(min=0),
    "detach": lambda w: w.detach().mul_(0.5),
    "under no_grad": lambda w: torch.no_grad()(w.mul_)(0.5),
    "=": _assign,
}


def _assign_same_if_frozen(weight: nn.Parameter) -> None:
    if not weight.requires_grad:
        weight.data = weight.data.clone()  # as bitsandbytes does with 8-bit weights


HARMLESS: Final[dict[str, Callable[[nn.Parameter], object]]] = {
    "= the same": _assign_same_if_frozen,
    "set_": lambda w: torch.no_grad()(w.set_)(w),
    "mul_(1)": lambda w: torch.no_grad()(w.mul_)(1),
    "data.clamp_": lambda w: w.data.clamp_(min=-100),
}


class Writes(nn.Module):
    """A codebook, a positive weight, a cosine head."""

    def __init__(self, write: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        self.write = write
        is_frozen = write is _assign_same_if_frozen
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=not is_frozen)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """(n, WIDTH) to the same."""
        self.write(self.weight)
        return x @ self.weight.t() * self.scale


class Doubled(nn.Module):
    """A parametrization that comes and goes in each forward, as adapters of peft do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(n, WIDTH) to the same."""
        parametrize.register_parametrization(self.linear, "weight", nn.Identity())
        y = self.linear(x)
        parametrize.remove_parametrizations(self.linear, "weight", leave_parametrized=False)
        return y.tanh()


def _losses(model: nn.Module, optimizer: Any, rank: int) -> list[float]:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        return model(torch.ones(2, WIDTH) * (step + rank + 1) / 10).square().mean()

    losses = []
    for step in range(3):
        loss = loss_of(model, step)
        parity.finish_step(loss, optimizer)
        losses.append(loss.item())
    return losses


def _sharded(group: Group, make: Callable[[], nn.Module], stage: int) -> tuple[nn.Module, Any]:
    model = parity.build(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero_engine.shard(model, optimizer, ZeroConfig(stage, min_unit_bytes=0), group=group)
    return model, optimizer


@pytest.mark.parametrize("name", WRITES)
def test_a_write_in_forward_is_followed_below_stage_3_and_refused_there(
    group: Group, name: str
) -> None:
    """Through `data` it bumps no version, and was lost: the next gather brought the old values."""

    def make() -> nn.Module:
        return nn.Sequential(*(Writes(WRITES[name]) for _ in range(2)))

    plain = parity.build(make)
    its_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = _losses(parity.as_ddp(plain, group), its_optimizer, group.rank)
    for stage in (0, 1, 2):
        assert _losses(*_sharded(group, make, stage), group.rank) == expected, stage
    model, optimizer = _sharded(group, make, 3)
    with pytest.raises(StateError, match=r"parameter '\d\.weight'|rank \d"):
        _losses(model, optimizer, 0)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", WRITES)
def test_alone_a_write_in_forward_is_what_plain_torch_makes_of_it(group: Group, name: str) -> None:
    """Parameters rest whole on one rank, at every stage."""

    def make() -> nn.Module:
        return nn.Sequential(*(Writes(WRITES[name]) for _ in range(2)))

    plain = parity.build(make)
    expected = _losses(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 0)
    for stage in (0, 1, 2, 3):
        assert _losses(*_sharded(group, make, stage), 0) == expected


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("masters", [False, True], ids=["as they are", "with masters"])
def test_other_values_may_stand_in_a_parameter_for_a_while(
    group: Group, tmp_path: Path, stage: int, masters: bool
) -> None:
    """Averages, perturbed weights: what is swapped in is used, what is swapped out is not lost."""
    if masters and not stage:
        return
    precision = Precision(params=torch.bfloat16, masters=torch.float32) if masters else None

    def run(model: nn.Module, optimizer: Any, *, is_sharded: bool) -> list[float]:
        losses = []
        for step in range(3):
            kept = [param.data for param in model.parameters()]
            for param in model.parameters():
                param.data = param.data * 0.5
            losses.append(model(torch.ones(2, WIDTH)).square().mean().item())
            first = next(model.parameters())
            others: list[Callable[[], object]] = [
                lambda: zero_engine.save(tmp_path, model, optimizer, step=0),
                lambda: zero_engine.full_param(first),  # noqa: B023
                lambda: zero_engine.local_param(first),  # noqa: B023
                lambda: zero_engine.set_full_param(first, torch.ones(WIDTH, WIDTH)),  # noqa: B023
            ]
            for use in others if is_sharded else ():  # of the parameter's own memory
                with pytest.raises(StateError, match=r"memory was replaced.*copy_\(value\)"):
                    use()
            if step != 1:  # else the optimizer steps what is there
                for param, data in zip(model.parameters(), kept, strict=True):
                    param.data = data
            del kept
            loss = model(torch.ones(2, WIDTH) * (step + 1) / 10).square().mean()
            parity.finish_step(loss, optimizer)
            losses.append(loss.item())
        return losses

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))

    plain = parity.build(make)
    expected = run(plain, torch.optim.SGD(plain.parameters(), lr=0.1), is_sharded=False)
    model = parity.build(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = ZeroConfig(stage, min_unit_bytes=0, precision=precision)
    zero_engine.shard(model, optimizer, config, group=group)
    found = run(model, optimizer, is_sharded=True)
    assert_close(found, expected, rtol=0.1 if masters else 1e-6, atol=1e-6)
    zero_engine.save(tmp_path, model, optimizer, step=3)
    for param in model.parameters():
        param.data = torch.full_like(param, 3.0)
    zero_engine.unshard(model, optimizer)
    assert all((param == 3.0).all() for param in model.parameters())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_of_another_shape_is_refused(group: Group, stage: int) -> None:
    """It could not be copied to where the step writes."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero_engine.shard(model, optimizer, ZeroConfig(stage, min_unit_bytes=0), group=group)
    model[1].weight.data = torch.ones(2 * WIDTH, WIDTH)
    shape = rf"\({2 * WIDTH}, {WIDTH}\)"
    with pytest.raises(StateError, match=rf"'1\.weight'.*memory was replaced \(shape {shape}"):
        model(torch.ones(2, WIDTH))


def _write_and_fail(weight: nn.Parameter) -> None:
    weight.data.mul_(0.5)
    raise KeyError("of the model")


def test_a_forward_that_writes_and_fails_raises_its_own_error(group: Group) -> None:
    """At stage 3 the write alone would be refused, by an error that hides the cause."""
    model, _ = _sharded(group, lambda: nn.Sequential(Writes(_write_and_fail)), 3)
    with pytest.raises(KeyError, match="of the model"):
        model(torch.ones(2, WIDTH))


def test_a_write_of_a_failed_forward_is_named_by_the_next(group: Group) -> None:
    """A loop that catches the error, for less memory say, would go on without the write."""
    model, _ = _sharded(group, lambda: nn.Sequential(Writes(WRITES["under no_grad"])), 3)
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|same reduction dim"):
        model(torch.ones(2, WIDTH + 1))
    with pytest.raises(StateError, match=r"'0\.weight'.*changed in place, and the change is lost"):
        model(torch.ones(2, WIDTH))


def _double_if_frozen(weight: nn.Parameter) -> None:
    if not weight.requires_grad:
        weight.data = weight.data * 2


def _narrow_if_frozen(weight: nn.Parameter) -> None:
    if not weight.requires_grad:
        weight.data = weight.data.to(torch.float16)


@pytest.mark.parametrize(
    ("write", "dtype"), [(_double_if_frozen, torch.float32), (_narrow_if_frozen, torch.bfloat16)]
)
def test_other_memory_of_a_frozen_parameter_has_the_same_values_or_is_refused(
    group: Group, write: Callable[[nn.Parameter], None], dtype: torch.dtype
) -> None:
    """A forward computes with what it put there, and the next one with what rests."""
    model = nn.Sequential(*(Writes(write) for _ in range(2)))
    for module in model:
        module.weight = nn.Parameter(module.weight.data.zero_().to(dtype), requires_grad=False)
        module.forward = partial(_with_bias, module)
    if dtype is torch.float32:
        for module in model:
            module.weight.data.fill_(1)
    zero_engine.shard(model, None, ZeroConfig(3, min_unit_bytes=0), group=group)
    with pytest.raises(StateError, match=r"'0\.weight'"):
        model(torch.ones(2, WIDTH))


def test_other_memory_of_a_trained_parameter_is_refused_whatever_is_in_it(group: Group) -> None:
    """Of a frozen one the values are looked at, as bitsandbytes puts them elsewhere."""
    model = nn.Sequential(*(Writes(_replace_by_a_copy) for _ in range(2)))
    zero_engine.shard(model, None, ZeroConfig(3, min_unit_bytes=0), group=group)
    with pytest.raises(StateError, match=r"'0\.weight'"):
        model(torch.ones(2, WIDTH))


def _replace_by_a_copy(weight: nn.Parameter) -> None:
    weight.data = weight.data.clone()


def _with_bias(module: Writes, x: Tensor) -> Tensor:
    module.write(module.weight)
    return x * module.scale + module.weight.sum().float()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_changes_nothing_passes(group: Group, stage: int) -> None:
    """Versions count calls; `p.set_(p)` and parametrizations that come and go change no value."""
    makes: dict[str, Callable[[], nn.Module]] = {
        name: lambda write=write: nn.Sequential(*(Writes(write) for _ in range(2)))  # type: ignore[misc]
        for name, write in HARMLESS.items()
    }
    makes["parametrized"] = lambda: nn.Sequential(Doubled(), Doubled())
    for name, make in makes.items():
        plain = parity.build(make)
        expected = _losses(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 0)
        model, optimizer = _sharded(group, make, stage)
        assert _losses(model, optimizer, 0) == expected, name
        with torch.no_grad():
            for param in model.parameters():
                param.set_(param)
        _losses(model, optimizer, 0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adapters_may_be_switched_around_an_evaluation(group: Group, stage: int) -> None:
    """Preference training evaluates a frozen reference: peft's `set_adapter` thaws it meanwhile."""

    def make() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        return model.requires_grad_(True)

    def run(model: nn.Module, optimizer: Any) -> list[float]:
        losses = []
        for _ in range(3):
            model[0].requires_grad_(False)
            model[1].requires_grad_(True)
            with torch.no_grad():
                reference = model(torch.ones(2, WIDTH))
            model[0].requires_grad_(True)
            model[1].requires_grad_(False)
            loss = (model(torch.ones(2, WIDTH)) - 0.5 * reference).square().mean()
            losses.append(loss.item())
            parity.finish_step(loss, optimizer)
        return losses

    found = []
    for is_sharded in (False, True):
        model = parity.build(make)
        model[1].requires_grad_(False)
        params = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.SGD(params, lr=0.1)
        if is_sharded:
            config = ZeroConfig(stage, min_unit_bytes=0)
            zero_engine.shard(model, optimizer, config, group=group)
        found.append(run(model, optimizer))
    assert found[0] == found[1]


ACCESSES: Final[dict[str, Callable[[nn.Module], object]]] = {
    "full_state_dict": zero_engine.full_state_dict,
    "full_param": lambda m: zero_engine.full_param(m[0].weight),
    "forward": lambda m: m(torch.ones(2, WIDTH)),
    "set_full_param": lambda m: zero_engine.set_full_param(m[0].weight, torch.ones(WIDTH, WIDTH)),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_first_used_in_inference_mode_trains_afterwards(group: Group, stage: int) -> None:
    """Memory that is made there is no good for autograd, and one rank alone found out."""
    for name, access in ACCESSES.items():
        model, optimizer = _sharded(
            group, lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), stage
        )
        with torch.inference_mode():
            access(model)
        assert all(loss >= 0 for loss in _losses(model, optimizer, group.rank)), name


@pytest.mark.parametrize("stage", [1, 3])
def test_a_forward_under_no_grad_may_share_its_autocast(group: Group, stage: int) -> None:
    """Autocast remembers casts of parameters, and their gradients arrived after their unit's."""
    found = []
    for is_sharded in (False, True):

        def make() -> nn.Module:
            return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

        model = parity.build(make)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if is_sharded:
            model, optimizer = _sharded(group, make, stage)
        losses = []
        for _ in range(3):
            with torch.autocast(torch.get_default_device().type, torch.bfloat16):
                with torch.no_grad():
                    reference = model(torch.ones(2, WIDTH))
                loss = (model(torch.ones(2, WIDTH)) - 0.5 * reference).float().square().mean()
            losses.append(loss.item())
            parity.finish_step(loss, optimizer)
        found.append(losses)
    assert found[0] == found[1]


def test_values_set_within_autocast_are_those_of_the_next_forward(group: Group) -> None:
    """Autocast remembers casts of parameters until it ends. Those of gathered values are dropped.

    They would also take memory for a cast of every unit.
    """
    model, _ = _sharded(group, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH)), 3)
    x, kind = torch.ones(2, WIDTH), torch.get_default_device().type
    with torch.autocast(kind, torch.bfloat16):
        model(x)
        zero_engine.set_full_param(model[0].weight, torch.ones(WIDTH, WIDTH))
        found = model(x)
    with torch.autocast(kind, torch.bfloat16):
        assert equal(found, model(x))


class _Adjoint(torch.autograd.Function):
    """Gradients of parameters that a backward inside of a backward has computed."""

    @staticmethod
    def forward(ctx: Any, f: nn.Module, x: Tensor, *params: Tensor) -> Tensor:
        ctx.f = f
        ctx.save_for_backward(x)
        with torch.no_grad():
            return f(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.f(x), [x, *ctx.f.parameters()], grad)


class _Solver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(n, WIDTH) to the same."""
        return self.head(_Adjoint.apply(self.f, x, *self.f.parameters()))


@pytest.mark.parametrize("stage", [1, 3])
def test_an_adjoint_may_be_taken_over_units(group: Group, stage: int) -> None:
    """Solvers of differential equations do so: gradients arrive when their units rest again."""
    plain = parity.build(_Solver)
    expected = _losses(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 0)

    assert _losses(*_sharded(group, _Solver, stage), 0) == expected
