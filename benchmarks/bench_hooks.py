"""What hooks cost where nothing travels, and the ways of collecting a gradient: one process."""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import zero_engine
from harness import Column, Row, ratio, suite, take_turns, timed
from torch import Tensor, nn

COLUMNS: tuple[Column, ...] = (
    ("table", "table"),
    ("case", "case"),
    ("ms", "median_ms", ".2f"),
    ("/ first", "ratio", ".2f"),
    ("of rounds", "ratio_range", ".2f"),
)
Case = Callable[[], float]  # one turn; its seconds


def _compare(title: str, cases: Mapping[str, Case], rounds: int) -> list[Row]:
    """Medians, and ratios to the first."""
    found = take_turns(cases, rounds, skipped=2)
    first = next(iter(found.values()))
    return [
        {"table": title, "case": case, "median_ms": statistics.median(seconds) * 1e3}
        | {"ms_of_rounds": [each * 1e3 for each in seconds], **ratio(seconds, first)}
        for case, seconds in found.items()
    ]


# ---- hooks ----


@suite(
    *COLUMNS,
    rounds=(30, "turns of each"),
    tiny=(2000, "layers of 16 x 16"),
    middle=(500, "layers of 256 x 256"),
)
def hooks(options: Namespace) -> list[Row]:
    """What our hooks cost on one rank, where nothing travels: a forward and backward against plain.

    Tiny layers show the cost per parameter, and middle ones, each a unit of its own, that per unit.
    The same model is built once per system, all in one process and thread, and the systems take
    turns; the ratio is that of two turns of one round. What is counted is the processor's time,
    which a machine that does other things disturbs less.
    """
    torch.set_num_threads(1)
    rows = []
    for name, num_layers, width in (("tiny", options.tiny, 16), ("middle", options.middle, 256)):
        if num_layers:
            cases = {"plain": _sharded(num_layers, width, None)}
            cases |= {f"stage {s}": _sharded(num_layers, width, s) for s in (0, 1, 2, 3)}
            title = f"{num_layers} {name} layers of {width} x {width}"
            rows += _compare(title, cases, options.rounds)
    return rows


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


def _sharded(num_layers: int, width: int, stage: int | None) -> Case:
    """Forward and backward of the model, plain or sharded."""
    torch.manual_seed(0)
    model = nn.Sequential(*(_Layer(width) for _ in range(num_layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if stage is not None:
        zero_engine.shard(model, optimizer, zero_engine.ZeroConfig(stage))
    x = torch.randn(4, width)
    forward_backward = timed(lambda: model(x).sum().backward(), time.process_time)

    def turn() -> float:
        seconds = forward_backward()
        optimizer.zero_grad()
        return seconds

    return turn


# ---- autograd ----


@suite(
    *COLUMNS,
    rounds=(30, "turns of each"),
    layers=(500, "tiny layers for the hook table"),
)
def autograd(options: Namespace) -> list[Row]:
    """What hooks cost, and what the ways of collecting a gradient cost: one process, no ranks.

    Two tables, each measured in turns and printed as medians and ratios to the first row. The
    outcome is in docs/decisions/0003 and 0004.
    """
    torch.set_num_threads(1)
    installs: dict[str, Callable[[nn.Module], Any]] = {
        "no hooks": lambda layer: None,
        "forward pre and post": _forward_hooks,
        "forward pre and post, tensor hook on the output": partial(
            _forward_hooks, after=lambda module, args, output: output.register_hook(_ignore)
        ),
        "full backward pre and post": _full_backward_hooks,
        "post-accumulate on each parameter": _arrival_hooks,
    }
    collects: dict[str, Callable[[nn.Module], Callable[[], Any]]] = {
        "left in .grad": lambda model: model.zero_grad,
        "copied on arrival": _copy,
        "added into a zero-filled view": _zero_and_add,
    }
    tiny = {name: _tiny_layers(install, options.layers) for name, install in installs.items()}
    large = {name: _large_layers(collect) for name, collect in collects.items()}
    return [
        *_compare(f"hooks on {options.layers} layers", tiny, options.rounds),
        *_compare("gradients of 8 layers of 1280 x 5120", large, options.rounds),
    ]


def _tiny_layers(install: Callable[[nn.Module], Any], num_layers: int) -> Case:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(num_layers)))
    for layer in model:
        install(layer)
    x = torch.randn(4, 16)

    def run() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return timed(run)


def _ignore(*arguments: Any) -> None:
    pass


def _forward_hooks(layer: nn.Module, after: Callable[..., Any] = _ignore) -> None:
    def post(*arguments: Any) -> None:  # what a hook returns would replace the output
        after(*arguments)

    layer.register_forward_pre_hook(_ignore)
    layer.register_forward_hook(post)


def _full_backward_hooks(layer: nn.Module) -> None:
    layer.register_full_backward_pre_hook(_ignore)
    layer.register_full_backward_hook(_ignore)


def _arrival_hooks(layer: nn.Module) -> None:
    for param in layer.parameters():
        param.register_post_accumulate_grad_hook(_ignore)


def _large_layers(collect: Callable[[nn.Module], Callable[[], Any]]) -> Case:
    pairs = ((nn.Linear(1280, 5120), nn.Linear(5120, 1280)) for _ in range(4))
    model = nn.Sequential(*(layer for pair in pairs for layer in pair))
    prepare = collect(model)
    x = torch.randn(4, 1280)  # few rows: memory traffic decides

    def run() -> None:
        prepare()
        model(x).sum().backward()

    return timed(run)


def _views(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Of one flat buffer, a part for each parameter."""
    params = list(model.parameters())
    flat = torch.zeros(sum(param.numel() for param in params))
    parts = flat.split([param.numel() for param in params])
    return {param: part.view_as(param) for param, part in zip(params, parts, strict=True)}


def _copy(model: nn.Module) -> Callable[[], Any]:
    views = _views(model)

    def take(param: nn.Parameter) -> None:
        assert param.grad is not None, "the hook runs after accumulation"
        views[param].copy_(param.grad)
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(take)  # type: ignore[arg-type]
    return lambda: None


def _zero_and_add(model: nn.Module) -> Callable[[], Any]:
    views = _views(model)

    def prepare() -> None:
        for param, view in views.items():
            view.zero_()
            param.grad = view

    return prepare
