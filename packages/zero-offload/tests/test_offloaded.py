"""Where the state rests changes no bit of a training, and no line of its loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from offloaded_training import CUT, HOMES, Outcome, assert_equal, loss_of, make_model, train
from torch import nn
from torch.optim import Optimizer
from zero_offload import (
    CPUAdagrad,
    CPUAdam,
    CPULion,
    OffloadedOptimizer,
    OffloadError,
    UnsupportedOptimizerError,
    UnsupportedTensorError,
)
from zero_offload.testing import elsewhere

Make = Callable[[Iterable[nn.Parameter]], Optimizer]

# Class, arguments, and the same kernels in memory; without any it is the class itself, as it is.
CLASSES: Final[dict[str, tuple[type[Optimizer], dict[str, Any], Make | None]]] = {
    "AdamW": (
        torch.optim.AdamW,
        {"lr": 1e-2},
        lambda p: CPUAdam(p, lr=1e-2, weight_decay=1e-2),
    ),
    "Adam, amsgrad": (
        torch.optim.Adam,
        {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True},
        lambda p: CPUAdam(p, lr=1e-2, weight_decay=0.1, amsgrad=True, decoupled_weight_decay=False),
    ),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}, lambda p: CPUAdagrad(p, lr=1e-2)),
    "CPULion": (CPULion, {"lr": 1e-3}, lambda p: CPULion(p, lr=1e-3)),
    "CPUAdam, bf16 moments": (
        CPUAdam,
        {"lr": 1e-2, "state_dtype": torch.bfloat16},
        lambda p: CPUAdam(p, lr=1e-2, state_dtype=torch.bfloat16),
    ),
    "SGD": (torch.optim.SGD, {"lr": 0.1}, None),
    "SGD, momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, None),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "centered": True, "momentum": 0.5}, None),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}, None),
    "Rprop": (torch.optim.Rprop, {}, None),
    "NAdam": (torch.optim.NAdam, {}, None),
    "ASGD": (torch.optim.ASGD, {}, None),
}


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("name", CLASSES)
def test_residence_changes_no_bit_of_a_step(name: str, home: str, tmp_path: Path) -> None:
    """Offloading is for memory; a training that diverges by it compares with no other."""
    optimizer, arguments, in_memory = CLASSES[name]
    for dtype in (torch.float32, torch.bfloat16) if in_memory else (torch.float32,):
        expected = _train(dtype, in_memory or partial(optimizer, **arguments))
        options = {**HOMES[home](tmp_path), **arguments}
        actual = _train(dtype, partial(OffloadedOptimizer, optimizer=optimizer, **options))
        assert_equal(actual, expected)


@pytest.mark.parametrize("max_norm", [None, 0.3])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad"])
def test_native_steps_are_those_of_torch(name: str, max_norm: float | None, tmp_path: Path) -> None:
    """One line turns offloading on, and not the training into another, clipped or not."""
    make = partial(getattr(torch.optim, name), lr=1e-2, weight_decay=0.1)
    expected = _train(torch.float32, make, max_norm)

    arguments = {**make.keywords, **HOMES["disk"](tmp_path)}
    offloaded = partial(OffloadedOptimizer, optimizer=make.func, **arguments)
    actual = _train(torch.float32, offloaded, max_norm)

    torch.testing.assert_close(actual.params, expected.params, rtol=1e-6, atol=1e-6)


def test_bf16_parameters_are_stepped_as_fp32_masters(tmp_path: Path) -> None:
    """A step of 1e-4 is lost in bf16 where the value is 1: without a master nothing is learnt."""
    model = nn.Linear(3, 2, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    offloaded = OffloadedOptimizer(
        model.parameters(), torch.optim.SGD, lr=1e-4, weight_decay=0.0, **HOMES["disk"](tmp_path)
    )

    plain = nn.Parameter(torch.ones(2, 3))
    expected = torch.optim.SGD([plain], lr=1e-4, weight_decay=0.0)

    for _ in range(80):
        model.weight.grad, plain.grad = torch.ones_like(model.weight), torch.ones_like(plain)
        offloaded.step()
        expected.step()

    assert (model.weight < 1).all()
    torch.testing.assert_close(model.weight.data, plain.data.bfloat16(), rtol=0, atol=4e-3)
    master = offloaded.state[model.weight]["master"]
    torch.testing.assert_close(master, plain.data, rtol=0, atol=1e-6)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("poison", [None, float("inf"), float("nan")], ids=["", "inf", "nan"])
def test_the_norm_is_that_of_torch(norm_type: float, poison: float | None) -> None:
    """It is logged, watched for spikes, and divided by."""
    model = make_model()
    loss_of(model, 0).backward()
    if poison is not None:
        model[0].weight.grad[3, 5] = poison
    offloaded = OffloadedOptimizer(model.parameters(), torch.optim.AdamW)
    grads = [param.grad for param in model.parameters()]

    norm = offloaded.clip_grad_norm_(1.0, norm_type)

    expected = nn.utils.get_total_norm(grads, norm_type)
    torch.testing.assert_close(norm, expected, equal_nan=True)
    if poison is not None:
        with pytest.raises(RuntimeError, match="cannot be clipped"):
            offloaded.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)


def test_a_grad_scaler_unscales_skips_and_lowers_its_scale(tmp_path: Path) -> None:
    """fp16 training is this loop; a skipped step may touch nothing."""
    outcomes = []
    for make in (
        lambda p: CPUAdam(p, lr=1e-2, weight_decay=1e-2),
        lambda p: OffloadedOptimizer(p, torch.optim.AdamW, lr=1e-2, **HOMES["disk"](tmp_path)),
    ):
        model = make_model()
        optimizer = make(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        scales = []
        for step in range(7):
            scaler.scale(loss_of(model, step)).backward()
            if step in (3, 6):
                model[2].weight.grad[0, 0] = float("inf")
            if step > 3:  # else the step does it
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        outcomes.append(Outcome(scales, [param.detach() for param in model.parameters()]))

    assert outcomes[0].losses == [256, 512, 512, 256, 256, 512, 256]
    assert_equal(outcomes[1], outcomes[0])


def _a_group_added(model: nn.Module, make: Callable[..., Optimizer]) -> list[float]:
    """Gradual unfreezing does so; what is there already keeps its state."""
    optimizer = make(model[4].parameters())
    losses = train(model, optimizer, steps=range(2)).losses
    model.zero_grad()
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-3})
    return losses + train(model, optimizer, steps=range(2, 5)).losses


def _frozen_by_turns(model: nn.Module, make: Callable[..., Optimizer]) -> list[float]:
    """Frozen models with adapters are passed whole: what has no gradient costs nothing."""
    model[2].requires_grad_(False)
    optimizer = make(model.parameters())
    if isinstance(optimizer, OffloadedOptimizer):
        assert optimizer.footprint.disk_bytes < 8 * (33 * 65 + 65 + 64 * 7 + 7) + 4096 * 8
    losses = train(model, optimizer, steps=range(2)).losses
    model[2].requires_grad_(True)
    model[0].requires_grad_(False)
    return losses + train(model, optimizer, steps=range(2, 5)).losses


def _moved_between_steps(model: nn.Module, make: Callable[..., Optimizer]) -> list[float]:
    """Loading with `assign`, and `model.to()`, put other memory under parameters."""
    made, losses = make(model.parameters()), []
    for step in range(4):
        losses += train(model, made, steps=range(step, step + 1)).losses
        for param in model.parameters():
            param.data = param.data.clone()
    return losses


def _options_changed(model: nn.Module, make: Callable[..., Optimizer]) -> list[float]:
    """Schedules change more than lr; a plan that is kept must notice."""
    optimizer, losses = make(model.parameters(), amsgrad=True), []
    for at, change in enumerate(({}, {"amsgrad": False}, {"maximize": True}, {"amsgrad": True})):
        optimizer.param_groups[0].update(change)
        losses += train(model, optimizer, steps=range(2 * at, 2 * at + 2)).losses
    return losses


@pytest.mark.parametrize(
    ("loop", "optimizer", "home"),
    [
        (_a_group_added, CPUAdam, "disk"),
        (_frozen_by_turns, CPUAdam, "disk"),
        (_options_changed, CPUAdam, "disk"),
        (_options_changed, CPUAdam, "host"),
        (_moved_between_steps, CPUAdam, None),
        (_moved_between_steps, torch.optim.SGD, None),
    ],
)
def test_what_users_do_between_steps_does_the_same(
    tmp_path: Path, loop: Callable[..., list[float]], optimizer: type[Optimizer], home: str | None
) -> None:
    """As with the plain optimizer."""
    options = {"lr": 1e-2, **(CUT if home is None else HOMES[home](tmp_path))}
    plain, offloaded = make_model(), make_model()
    expected = loop(plain, partial(optimizer, lr=1e-2))
    found = loop(offloaded, partial(OffloadedOptimizer, optimizer=optimizer, **options))

    assert_equal(
        Outcome(found, [param.detach() for param in offloaded.parameters()]),
        Outcome(expected, [param.detach() for param in plain.parameters()]),
    )


# Apart from that all rests on the disk; native steps round in another order than torch's.
ELSEWHERE: Final[list[tuple[dict[str, Any], bool]]] = [
    ({"grads": "host"}, True),
    ({"grads": "device"}, True),
    ({"fraction": {"device": 0.5}}, False),
    ({"fraction": {"device": 1.0}}, False),
]


@pytest.mark.parametrize(("options", "is_exact"), ELSEWHERE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_parameters_of_a_device_are_stepped_as_those_that_are_here(
    optimizer: type[Optimizer],
    dtype: torch.dtype,
    options: dict[str, Any],
    is_exact: bool,
    tmp_path: Path,
) -> None:
    """In staging on the host, or there by the class that was asked for: two steps make one."""
    arguments = {"lr": 1e-2, **HOMES["disk"](tmp_path)}
    if optimizer is torch.optim.SGD:
        arguments["momentum"] = 0.9
    expected = _train(dtype, lambda p: OffloadedOptimizer(p, optimizer, **arguments))
    devices = ExitStack()

    def make(params: Iterable[nn.Parameter]) -> OffloadedOptimizer:
        params = list(params)
        devices.enter_context(elsewhere(params))  # here those of the model count as such
        offloaded = OffloadedOptimizer(params, optimizer, **arguments, **options)
        footprint = offloaded.footprint
        assert (footprint.device_bytes > 0) == ("fraction" in options)
        if "grads" in options:
            assert footprint.staging_bytes > 0
            assert (footprint.gradient_bytes > 0) == (options["grads"] == "host")
        return offloaded

    with devices:
        actual = _train(dtype, make)

    if is_exact:
        assert_equal(actual, expected)
        return
    tolerance = 1e-6 if dtype is torch.float32 else 2**-7  # a bf16 value may be its neighbour
    torch.testing.assert_close(actual.params, expected.params, rtol=tolerance, atol=1e-6)


def test_a_sparse_gradient_is_refused_before_anything_is_stepped() -> None:
    """The rest of the model must not be a step ahead of the embedding."""
    table, head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1)
    offloaded = OffloadedOptimizer([*head.parameters(), *table.parameters()], torch.optim.AdamW)
    before = copy.deepcopy(head.state_dict())
    head(table(torch.tensor([1, 2]))).sum().backward()

    with pytest.raises(UnsupportedTensorError, match="use sparse=False"):
        offloaded.step()

    torch.testing.assert_close(head.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"state": "nvme"}, "expected 'host' or 'disk'"),
        ({"state": "disk"}, "takes one of path and store"),
        ({"state": "host", "path": "."}, "state='host' none"),
        ({"grads": "disk"}, "grads='disk'"),
        ({"subgroup_bytes": 0}, "subgroup_bytes=0"),
        ({"subgroup_bytes": 2**20, "small_bytes": 2**20}, "of at most half"),
        ({"lr": -1.0}, "Invalid learning rate"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS evaluates the loss within its step"),
        ({"capturable": True}, "capturable=True"),
        ({"optimizer": CPUAdam, "rounding": "stochastic"}, "depend on how sub-groups are cut"),
    ],
    ids=lambda each: str(each) if isinstance(each, dict) else "",
)
def test_arguments_without_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    """None is ignored: what is asked for is done or answered."""
    with pytest.raises((ValueError, UnsupportedOptimizerError), match=message):
        OffloadedOptimizer(
            make_model().parameters(), **{"optimizer": torch.optim.AdamW, **arguments}
        )


def test_a_copy_and_a_closed_optimizer_say_what_to_do() -> None:
    """The state of a copy would be the same file."""
    offloaded = OffloadedOptimizer(make_model().parameters(), torch.optim.AdamW)

    with pytest.raises(OffloadError, match=r"Save state_dict\(\)"):
        copy.deepcopy(offloaded)

    offloaded.close()
    offloaded.close()
    with pytest.raises(OffloadError, match="is closed"):
        offloaded.step()


def _train(dtype: torch.dtype, make: Make, max_norm: float | None = None) -> Outcome:
    model = make_model(dtype)
    optimizer = make(model.parameters())
    outcome = train(model, optimizer, num_backwards=2, max_norm=max_norm)
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer.close()
    return outcome


def test_an_option_that_needs_further_state_is_refused_before_anything_is_stepped() -> None:
    """There is no room for it, and torch itself raises a bare KeyError."""
    model = make_model()
    optimizer = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, **CUT)
    train(model, optimizer, steps=range(2))
    before = copy.deepcopy(model.state_dict())
    optimizer.param_groups[0]["amsgrad"] = True

    with pytest.raises(
        UnsupportedOptimizerError, match=r"param_groups\[0\]\['amsgrad'\].*optimizer with"
    ):
        train(model, optimizer, steps=range(2, 3))

    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    optimizer.param_groups[0]["amsgrad"] = False
    train(model, optimizer, steps=range(2, 3))
