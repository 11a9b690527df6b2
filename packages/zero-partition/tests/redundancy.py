"""Optimizers and a model for tests of ZeroRedundancyOptimizer, and what runs them side by side."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import equal
from zero_partition import ZeroRedundancyOptimizer

Make = Callable[..., torch.optim.Optimizer]


class Odd(nn.Module):
    """Parameters of 0 to 3 dims, none of a size that anything divides, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.second = nn.Linear(7, 11, bias=False)
        self.cube = nn.Parameter(torch.randn(11, 3, 1))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        hidden = self.second(torch.tanh(self.norm(self.first(x))))
        return hidden @ self.cube.flatten(1) * self.scale


class Nested(torch.optim.Optimizer):
    """State in lists, tuples and dicts, scalar tensors in it, and a key of a tensor's dtype."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr, "seen": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # noqa: D102
        for group in self.param_groups:
            group["seen"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["factors"] = [torch.zeros_like(param), {"count": torch.tensor(0)}]
                    state["pair"] = (torch.zeros((), dtype=torch.float64), 7)
                    state["calls"] = 0
                momentum, counted = state["factors"]
                momentum.lerp_(param.grad, 0.1)
                counted["count"] += 1
                state["pair"][0].add_(param.grad.double().mean())
                state["calls"] += 1
                shift = state["pair"][0].to(param.dtype) * 1e-3
                param.sub_(group["lr"] * (momentum + shift))


ELEMENTWISE: Final[dict[str, tuple[Make, dict[str, Any]]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    "adam-amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw-foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "radam": (torch.optim.RAdam, {"lr": 0.01}),
    "asgd": (torch.optim.ASGD, {"lr": 0.01, "t0": 5.0}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "nested": (Nested, {"lr": 0.1}),
}
WHOLE: Final[dict[str, tuple[Make, dict[str, Any]]]] = {
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "muon": (torch.optim.Muon, {"lr": 0.01}),
}


def torchs_optimizer() -> Any:
    """Torch's class, whose import warns of what it is made of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer


def model_for(name: str) -> nn.Module:
    """The same at every call; Muon takes matrices and nothing else."""
    torch.manual_seed(0)
    if name != "muon":
        return Odd()
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in ((5, 7), (7, 3), (3, 9))))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Iterable[int]
) -> None:
    """Plain steps on this rank's data."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        model(torch.randn(4, 5, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def give_grads(params: Sequence[Tensor], step: int) -> None:
    """The gradients that every rank would have after a reduction."""
    generator = torch.Generator().manual_seed(step)
    for param in params:
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = grad if param.requires_grad else None


def make_params(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """The same at every call."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def params_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Of all param groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def pair(
    params: Sequence[nn.Parameter], make: Make, group: Group, in_place: bool = False, **options: Any
) -> tuple[Any, Any]:
    """The plain optimizer of copies of these parameters, and ours of themselves."""
    oracle = make([copy.deepcopy(param) for param in params], **options)
    return oracle, ZeroRedundancyOptimizer(params, make, group, in_place, **options)


def step_alike(oracle: Any, optimizer: Any, steps: Iterable[int]) -> None:
    """Step both with the same gradients, and compare."""
    for step in steps:
        for each in (oracle, optimizer):
            give_grads(params_of(each), step)
            each.step()
        assert_alike(oracle, optimizer)


def assert_alike(oracle: Any, optimizer: Any) -> None:
    """Their parameters are equal, bit for bit."""
    mine, theirs = ([p.detach() for p in params_of(each)] for each in (optimizer, oracle))
    assert same(mine, theirs)


def same(first: Any, second: Any) -> bool:
    """Equal in every bit, through lists, tuples and dicts."""
    if isinstance(first, Tensor):
        is_tensor = isinstance(second, Tensor) and first.dtype == second.dtype
        return is_tensor and equal(first, second)
    if isinstance(first, dict):
        is_dict = isinstance(second, dict) and first.keys() == second.keys()
        return is_dict and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        is_like = type(first) is type(second) and len(first) == len(second)
        return is_like and all(map(same, first, second))
    return first == second


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a nest."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(tensor_bytes, value.values()))
    return sum(map(tensor_bytes, value)) if isinstance(value, list | tuple) else 0
