"""Optimizers by name against the classes and formulas that the names stand for."""

import math
import re
from copy import deepcopy
from typing import Any

import pytest
import torch
import zero_engine
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import equal
from zero_deepspeed.engine_config import NamedOptimizer
from zero_engine import ChainedOptimizer, ConfigError, ZeroConfig
from zero_engine.engine import EngineConfig


def _params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (5,), (3, 3), (2, 2, 2)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def _make(params: Any, type: Any, options: dict) -> torch.optim.Optimizer:
    """What `initialize` makes of that section of a file, as a plain optimizer again."""
    members = [m for p in params for m in (p["params"] if isinstance(p, dict) else [p])]
    model = nn.Module()
    model.all = nn.ParameterList(m[1] if isinstance(m, tuple) else m for m in members)
    config = EngineConfig(
        zero=ZeroConfig(stage=0),
        optimizer=NamedOptimizer(type, options),
        train_batch_size=1,
        micro_batch_size=1,
    )
    optimizer = zero_engine.initialize(
        model=model, model_parameters=params, config=config, group=Group.solo()
    )[1]
    return zero_engine.unshard(model, optimizer)[1]


def _step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], num_steps: int = 4) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


_ADAM, _ADAMW = torch.optim.Adam, torch.optim.AdamW
_SGD, _NO_DECAY = {"lr": 0.1, "momentum": 0.9, "nesterov": True}, {"weight_decay": 0.0}
_GIVEN = {"lr": 0.1, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.3}


@pytest.mark.parametrize(
    ("type", "options", "kind", "expected"),
    [
        ("Adam", {}, _ADAMW, _NO_DECAY),
        ("adam", _GIVEN, _ADAMW, _GIVEN),
        ("Adam", _GIVEN | {"adam_w_mode": False}, _ADAM, _GIVEN),
        ("Adam", {"adam_w_mode": False, "torch_adam": True}, _ADAM, {}),
        ("Adam", {"torch_adam": True}, _ADAMW, {"weight_decay": 0.01}),
        ("AdamW", {}, _ADAMW, _NO_DECAY),
        ("adamW", _GIVEN | {"adam_w_mode": False}, _ADAMW, _GIVEN),
        (
            "ADAMW",
            {"bias_correction": True, "amsgrad": True},
            _ADAMW,
            _NO_DECAY | {"amsgrad": True},
        ),
        ("SGD", _SGD, torch.optim.SGD, _SGD),
        ("Adagrad", {"lr_decay": 0.1}, torch.optim.Adagrad, {"lr_decay": 0.1}),
    ],
)
def test_a_name_stands_for_a_class_of_torch(
    type: str, options: dict, kind: Any, expected: dict
) -> None:
    """Adam that is not AdamW, or decay that nobody asked for, trains another model."""
    ours, theirs = _params(), _params()
    _step(_make(ours, type, options), ours)
    _step(kind(theirs, **expected), theirs)

    assert all(map(equal, ours, theirs))


@pytest.mark.parametrize(
    "options", [{}, {"lr": 0.1, "betas": (0.7, 0.9), "weight_decay": 0.3}, {"lr": 0.01}]
)
def test_lion_follows_its_paper(options: dict) -> None:
    """Program 1 of arXiv 2302.06675, element by element, and from a saved state as well."""
    ours, expected = _params(), _params()
    first = _make(ours, "Lion", options)
    _step(first, ours)
    second = _make(ours, "Lion", options)
    second.load_state_dict(deepcopy(first.state_dict()))
    _step(second, ours)
    lr, decay = options.get("lr", 1e-3), options.get("weight_decay", 0.0)
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    averages = [torch.zeros_like(param) for param in expected]
    for _ in range(2):
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            for param, average in zip(expected, averages, strict=True):
                grad = torch.randn(param.shape, generator=generator)
                update = (beta1 * average + (1 - beta1) * grad).sign()
                param.data.sub_(lr * (update + decay * param.data))
                average.copy_(beta2 * average + (1 - beta2) * grad)

    torch.testing.assert_close(ours, expected)


def test_lion_evaluates_a_closure_and_passes_by_what_has_no_gradient() -> None:
    """As every optimizer of torch."""
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = _make([used, unused], "Lion", {"lr": 0.5, "weight_decay": 0.1})

    def closure() -> Tensor:
        loss = used.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3.0
    torch.testing.assert_close(used.detach(), torch.full((3,), 0.95 - 0.5))
    assert torch.equal(unused.detach(), torch.ones(3))
    assert unused not in optimizer.state


def test_muon_updates_matrices_and_adamw_the_rest() -> None:
    """Newton-Schulz means nothing for a bias."""
    ours, theirs = _params(), _params()
    optimizer = _make(ours, "Muon", {"lr": 0.1, "muon_lr": 0.05, "momentum": 0.9})
    muon = torch.optim.Muon([theirs[0], theirs[2]], lr=0.05, momentum=0.9, weight_decay=0)
    adamw = torch.optim.AdamW(
        [theirs[1], theirs[3]], lr=0.1, betas=(0.9, 0.95), eps=1e-10, weight_decay=0
    )
    _step(optimizer, ours)
    _step(ChainedOptimizer(muon, adamw), theirs)

    assert all(map(equal, ours, theirs))


def test_muon_keeps_the_options_of_param_groups_in_the_halves_that_there_are() -> None:
    """No decay on norms is the grouping that most recipes use."""
    ours = _params()
    assert type(_make(ours[:1], "Muon", {})) is torch.optim.Muon
    assert type(_make(ours[1:2], "Muon", {})) is torch.optim.AdamW
    groups = [
        {"params": ours[:2], "weight_decay": 0.5, "lr": 0.3, "betas": (0.1, 0.2)},
        {"params": ours[2:], "momentum": 0.1},
    ]
    options = {"weight_decay": 0.25, "eps": 1e-3}
    found = _make(groups, "muon", options).param_groups

    assert [len(group["params"]) for group in found] == [1, 1, 1, 1]
    assert [group["weight_decay"] for group in found] == [0.5, 0.25, 0.5, 0.25]
    assert [group["lr"] for group in found] == [0.3, 0.02, 0.3, 3e-4]
    assert [group.get("momentum") for group in found] == [0.95, 0.1, None, None]
    assert [group.get("betas") for group in found] == [None, None, (0.1, 0.2), (0.9, 0.95)]


def test_a_parameter_may_say_that_it_is_not_for_muon() -> None:
    """An embedding is a matrix by its shape alone."""
    params = _params()
    params[0].use_muon = False  # type: ignore[attr-defined]
    named = [("tok_embed.weight", params[2]), ("head.weight", nn.Parameter(torch.zeros(2, 2)))]
    by_attribute = _make(params, "Muon", {})
    by_name = _make(named, "Muon", {})

    assert isinstance(by_attribute, ChainedOptimizer)
    muon, adamw = by_attribute.optimizers
    assert [id(param) for param in muon.param_groups[0]["params"]] == [id(params[2])]
    assert len(adamw.param_groups[0]["params"]) == 3
    assert isinstance(by_name, ChainedOptimizer)
    assert by_name.optimizers[0].param_groups[0]["params"][0] is named[1][1]


@pytest.mark.parametrize(
    ("type", "options", "message"),
    [
        ("AdamX", {}, "optimizer.type: expected one of adam, *got 'AdamX'; did you mean 'adam'?"),
        (None, {}, "optimizer.type: *got None"),
        ("Adam", {"beta": 1}, "optimizer.params.beta: unknown; did you mean 'betas'?"),
        ("Muon", {"amsgrad": True}, "optimizer.params.amsgrad: unknown"),
        ("Adam", {"max_grad_norm": 1.0}, "optimizer.params.max_grad_norm: *gradient_clipping"),
        ("Adam", {"bias_correction": False}, "optimizer.params.bias_correction: expected True"),
        ("Muon", {"ns_method": "gram"}, "optimizer.params.ns_method: expected 'standard', got"),
        ("Adam", {"lr": "auto"}, "optimizer.params.lr: expected a finite number*got 'auto'"),
        ("Adam", {"betas": [0.9, 1]}, "optimizer.params.betas: *below 1, got [0.9, 1]"),
        ("SGD", {"nesterov": True}, "optimizer.params: SGD does not take them: Nesterov"),
    ],
)
def test_a_wrong_file_is_refused_by_the_full_name_of_the_key(
    type: Any, options: dict, message: str
) -> None:
    """Whoever reads the message has the file open, not this code."""
    pattern = ".*".join(map(re.escape, message.split("*")))

    with pytest.raises(ConfigError, match=pattern):
        _make(_params(), type, options)


def test_lion_refuses_param_groups_that_make_no_step() -> None:
    """They are checked when they are added."""
    optimizer = _make(_params()[:1], "Lion", {})
    for name, value in (("lr", -1.0), ("betas", (0.9, 1.0)), ("weight_decay", math.nan)):
        with pytest.raises(ConfigError, match=rf"Lion\.{name}: expected .*, got"):
            optimizer.add_param_group({"params": _params()[1:], name: value})


def test_muon_refuses_a_vector_that_says_it_is_for_muon() -> None:
    """Torch would say so without the name."""
    param = nn.Parameter(torch.zeros(3))
    param.use_muon = True  # type: ignore[attr-defined]

    with pytest.raises(ConfigError, match=r"Muon updates matrices, got .*'bias'.*shape \(3,\)"):
        _make([("bias", param)], "Muon", {})
