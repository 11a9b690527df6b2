"""Who writes to the optimizer's parameters outside of its step is followed, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import zero_engine
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import assert_close, equal
from zero_engine import Offload, Precision, ZeroConfig
from zero_partition import StateError

WIDTH: Final = 5

Params = list[nn.Parameter]


class Averaging(torch.optim.SGD):
    """Evaluates with an average of the weights, as schedule-free optimizers do: it swaps them."""

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and average."""
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            other = state.setdefault("average", param.detach() * 0.5)
            kept = param.clone()
            param.copy_(other)
            other.copy_(kept)


def _x() -> Tensor:
    return torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)


def _params(optimizer: torch.optim.Optimizer) -> Params:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _each(write: Callable[[Tensor], object]) -> Callable[[Averaging], None]:
    def write_all(optimizer: Averaging) -> None:
        with torch.no_grad():
            for param in _params(optimizer):
                write(param)

    return write_all


def _foreach(optimizer: Averaging) -> None:
    with torch.no_grad():
        torch._foreach_mul_(_params(optimizer), 0.9)


WRITES: Final[dict[str, Callable[[Averaging], object]]] = {
    "clamp": _each(lambda p: p.clamp_(-0.1, 0.1)),
    "data": _each(lambda p: p.data.clamp_(-0.1, 0.1)),
    "a view": _each(lambda p: p.view(-1).mul_(0.5)),
    "out": _each(lambda p: torch.mul(p, 0.5, out=p)),
    "decay": _foreach,
    "first one only": lambda o: _params(o)[0].detach().mul_(0.5),
    "replaced memory": _each(lambda p: setattr(p, "data", p.detach() * 0.5)),
    "swapped": Averaging.swap,
}


# Who reads first after a write: no call of the model says so.
READERS: Final[dict[str, Callable[[Any, Tensor], Tensor]]] = {
    "the model": lambda model, x: model(x),
    "a unit": lambda model, x: model[1](x),
    "forward itself": lambda model, x: model.forward(x),
    "a unit's": lambda model, x: model[1].forward(x) * 1,
}


def _loop(model: nn.Module, optimizer: Averaging, write: Any, when: str) -> list[Tensor]:
    if when == "hook":
        optimizer.register_step_post_hook(lambda *_: write(optimizer))
    outputs = []
    for _ in range(3):
        model(_x().to(next(model.parameters()).dtype)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if when == "after the step":
            write(optimizer)
        for read in READERS.values():
            if when == "after the step":
                write(optimizer)
            outputs.append(read(model, _x().to(next(model.parameters()).dtype)).detach().float())
        if when == "after evaluation":
            write(optimizer)
    return outputs


def _build() -> tuple[nn.Module, Averaging]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model[1].weight.requires_grad_(False)  # in the optimizer's groups all the same
    return model, Averaging(model.parameters(), lr=0.1, momentum=0.5)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.drawn(2)
def test_a_write_outside_the_step_is_everybodys(group: Group, stage: int) -> None:
    """The other ranks' copies never saw it: a clamp, decay by hand, a hook, a swap of weights."""
    for name, write in WRITES.items():
        for when in ("after the step", "after evaluation", "hook"):
            plain, its_optimizer = _build()
            expected = _loop(plain, its_optimizer, write, when)
            model, optimizer = _build()
            config = ZeroConfig(stage, min_unit_bytes=0)
            zero_engine.shard(model, optimizer, config, group=group)

            found = _loop(model, optimizer, write, when)

            for value, other in zip(found, expected, strict=True):
                assert_close(value, other, msg=lambda m: f"{name}, {when}: {m}")  # noqa: B023
            weights = zero_engine.full_state_dict(model)
            for key, value in weights.items():
                assert_close(value, plain.state_dict()[key])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_write_to_what_is_offloaded_is_refused(group: Group, stage: int) -> None:
    """The optimizer's parameters are without values then, and a write went nowhere."""
    model, optimizer = _build()
    config = ZeroConfig(
        stage,
        min_unit_bytes=0,
        precision=Precision(params=torch.bfloat16),
        offload=Offload(optimizer="host"),
    )
    zero_engine.shard(model, optimizer, config, group=group)
    before = zero_engine.full_param(model[0].weight)
    # Offloaded state cannot be written, so there is no average to swap.
    for name in WRITES.keys() - {"swapped"}:
        with pytest.raises(StateError, match=r"offloaded.*state.*set_full_param\(param, value\)"):
            WRITES[name](optimizer)
            raise AssertionError(name)
    assert equal(zero_engine.full_param(model[0].weight), before)
    model(_x().bfloat16()).float().square().sum().backward()
    optimizer.step()


READS: Final[dict[str, Callable[[nn.Parameter], object]]] = {
    "norm": lambda p: p.norm(),
    "vector_norm": torch.linalg.vector_norm,
    "sum": torch.sum,
    "max": lambda p: p.data.max(),
    "mean of a view": lambda p: p.detach().mean(),
    "foreach_norm": lambda p: torch._foreach_norm([p]),
}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_would_be_of_this_ranks_elements_only_is_refused(group: Group, stage: int) -> None:
    """A norm of weights in a log was that of one rank's part, without a word."""
    model, optimizer = _build()
    zero_engine.shard(model, optimizer, ZeroConfig(stage, min_unit_bytes=0), group=group)
    for param in _params(optimizer):
        for name, read in READS.items():
            with pytest.raises(StateError, match=r"full_param\(param\).*as_subclass"):
                read(param)
                raise AssertionError(name)
        assert param.as_subclass(Tensor).sum() == param.detach().clone().sum()
        assert type(param.detach() * 1) is Tensor
    model(_x()).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_write_while_the_model_runs_is_refused(group: Group, stage: int) -> None:
    """It would change what this forward or its backward reads, on some ranks sooner than others."""
    model, optimizer = _build()
    zero_engine.shard(model, optimizer, ZeroConfig(stage, min_unit_bytes=0), group=group)
    before = zero_engine.full_state_dict(model)

    def write(*_: object) -> None:
        with pytest.raises(StateError, match="a write to the optimizer's parameters"):
            _foreach(optimizer)

    handle = model[1].register_forward_hook(write)
    model(_x()).sum().backward()
    handle.remove()
    with zero_engine.unsharded(model):
        write()
    for name, value in zero_engine.full_state_dict(model).items():
        assert equal(value, before[name])


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("first", [0, 1])
def test_parameters_written_through_data_are_what_masters_become(
    group: Group, stage: int, first: int
) -> None:
    """`p.data.clamp_()` after each step bumps no version: the masters undid it in the next one.

    It is looked for in the first three steps, and followed from then on.
    """
    found = []
    for through in ("data", "no_grad"):
        model, optimizer = _build()
        precision = Precision(params=torch.bfloat16)
        zero_engine.shard(model, optimizer, ZeroConfig(stage, precision=precision), group=group)
        for step in range(6):
            model(_x().bfloat16()).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for param in model.parameters() if step >= first else ():
                if through == "data":
                    param.data.clamp_(-0.1, 0.1)
                else:
                    with torch.no_grad():
                        param.clamp_(-0.1, 0.1)
        model(_x().bfloat16()).float().square().sum().backward()
        optimizer.step()
        found.append(zero_engine.full_state_dict(model))

    for name, value in found[0].items():  # a version tells of a parameter, values of each element
        assert_close(value, found[1][name], rtol=0.02, atol=5e-3)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("num_before", [0, 1])
def test_one_write_through_data_is_kept_by_the_next_step(
    group: Group, stage: int, num_before: int
) -> None:
    """Weights that are set once are the start of all that follows."""
    found = []
    for through in ("data", "no_grad"):
        model, optimizer = _build()
        precision = Precision(params=torch.bfloat16)
        zero_engine.shard(model, optimizer, ZeroConfig(stage, precision=precision), group=group)
        for step in range(num_before + 1):
            if step == num_before:
                for param in model.parameters():
                    with torch.no_grad():
                        (param.data if through == "data" else param).fill_(0.375)
            model(_x().bfloat16()).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(zero_engine.full_state_dict(model))

    for name, value in found[0].items():
        assert equal(value, found[1][name])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_write_to_masters_reaches_what_the_model_computes_with(group: Group, stage: int) -> None:
    """Parameters of 16 bits are made of masters, and would stay what the step has made."""
    for name, write in WRITES.items():
        model, optimizer = _build()
        precision = Precision(params=torch.bfloat16)
        config = ZeroConfig(stage, min_unit_bytes=0, precision=precision)
        zero_engine.shard(model, optimizer, config, group=group)
        _loop(model, optimizer, write, "after the step")
        write(optimizer)

        found = model(_x().bfloat16())
        weights = zero_engine.full_state_dict(model)

        plain, _ = _build()
        if group.rank == 0:
            plain.load_state_dict(weights)
            plain.bfloat16()
            assert equal(plain(_x().bfloat16()), found), name
