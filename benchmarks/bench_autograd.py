"""What hooks cost, and what the ways of collecting a gradient cost: one process, no ranks.

    python benchmarks/run.py autograd

Two tables, each measured in turns and printed as medians and ratios to the first row. The outcome
is in docs/decisions/0003 and 0004.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from results import write_results
from torch import Tensor, nn


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--layers", type=int, default=500, help="tiny layers for the hook table")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)

    hooks = {
        "no hooks": _no_hooks,
        "forward pre and post": _forward_hooks,
        "forward pre and post, tensor hook on the output": _tensor_hooks,
        "full backward pre and post": _full_backward_hooks,
        "post-accumulate on each parameter": _arrival_hooks,
    }
    rows = _compare(
        f"hooks on {options.layers} layers",
        {name: _tiny_layers(install, options.layers) for name, install in hooks.items()},
        options.rounds,
    )
    ways = {
        "left in .grad": _leave,
        "copied on arrival": _copy,
        "added into a zero-filled view": _zero_and_add,
    }
    rows += _compare(
        "collecting gradients of 8 layers of 1280 x 5120",
        {name: _large_layers(collect) for name, collect in ways.items()},
        options.rounds,
    )
    print(write_results("autograd", rows, folder=options.folder))
    return 0


def _compare(title: str, cases: dict[str, Callable[[], None]], rounds: int) -> list[dict]:
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_index in range(rounds + 2):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            if round_index >= 2:
                times[name].append(time.perf_counter() - start)
    base = next(iter(cases))
    rows = []
    print(f"\n{title}")
    for name, samples in times.items():
        ratio = statistics.median(a / b for a, b in zip(samples, times[base], strict=True))
        median_ms = statistics.median(samples) * 1e3
        print(f"{name:50s} {median_ms:9.2f} ms {ratio:7.2f}")
        rows.append({"table": title, "case": name, "median_ms": median_ms, "ratio": ratio})
    return rows


def _tiny_layers(install: Callable[[nn.Module], None], num_layers: int) -> Callable[[], None]:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(num_layers)))
    for layer in model:
        install(layer)
    x = torch.randn(4, 16)

    def run() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return run


def _no_hooks(layer: nn.Module) -> None:
    pass


def _forward_hooks(layer: nn.Module) -> None:
    layer.register_forward_pre_hook(lambda module, args: None)
    layer.register_forward_hook(lambda module, args, output: None)


def _tensor_hooks(layer: nn.Module) -> None:
    def after(module: nn.Module, args: tuple, output: Tensor) -> None:
        output.register_hook(_ignore)

    layer.register_forward_pre_hook(lambda module, args: None)
    layer.register_forward_hook(after)


def _ignore(grad: Tensor) -> None:
    pass


def _full_backward_hooks(layer: nn.Module) -> None:
    layer.register_full_backward_pre_hook(lambda module, grads: None)
    layer.register_full_backward_hook(lambda module, before, after: None)


def _arrival_hooks(layer: nn.Module) -> None:
    for param in layer.parameters():
        param.register_post_accumulate_grad_hook(_ignore)


def _large_layers(collect: Callable[[nn.Module], Callable[[], None]]) -> Callable[[], None]:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(1280, 5120), nn.Linear(5120, 1280)]
    model = nn.Sequential(*layers)
    prepare = collect(model)
    x = torch.randn(4, 1280)  # few rows: memory traffic decides

    def run() -> None:
        prepare()
        model(x).sum().backward()

    return run


def _buffers(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    flat = torch.zeros(sum(param.numel() for param in model.parameters()))
    views, start = {}, 0
    for param in model.parameters():
        views[param] = flat[start : start + param.numel()].view_as(param)
        start += param.numel()
    return views


def _leave(model: nn.Module) -> Callable[[], None]:
    return model.zero_grad


def _copy(model: nn.Module) -> Callable[[], None]:
    views = _buffers(model)

    def take(param: nn.Parameter) -> None:
        assert param.grad is not None, "the hook runs after accumulation"
        views[param].copy_(param.grad)
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(take)  # type: ignore[arg-type]
    return lambda: None


def _zero_and_add(model: nn.Module) -> Callable[[], None]:
    views = _buffers(model)

    def prepare() -> None:
        for param, view in views.items():
            view.zero_()
            param.grad = view

    return prepare


if __name__ == "__main__":
    raise SystemExit(main())
