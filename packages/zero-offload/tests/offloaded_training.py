"""One small training, whatever the optimizer: the oracle is the same with the plain one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.optim import Optimizer
from zero_offload import OffloadedOptimizer
from zero_offload.testing import RecordingStore

# Many sub-groups of a small model, none of which is too small for the disk.
CUT: Final[dict[str, Any]] = {"subgroup_bytes": 8_000, "small_bytes": 0}
HOMES: Final[dict[str, Callable[[Path], dict[str, Any]]]] = {
    "host": lambda folder: {"state": "host", **CUT},
    "disk": lambda folder: {"state": "disk", "path": folder, **CUT},
    "lazy store": lambda folder: {"state": "disk", "store": RecordingStore(), **CUT},
    "shared": lambda folder: {
        "state": "disk",
        "path": folder,
        **CUT,
        "fraction": {"device": 0.2, "host": 0.3},
    },
}


@frozen
class Outcome:
    """Of a training."""

    losses: list[float]
    params: list[Tensor]


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A net of odd sizes, the same each time."""
    torch.manual_seed(0)
    layers = (nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 64), nn.Tanh(), nn.Linear(64, 7))
    return nn.Sequential(*layers).to(dtype)


def offloaded(
    folder: Path,
    optimizer: type[Optimizer] = torch.optim.AdamW,
    *,
    home: str = "disk",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[nn.Module, OffloadedOptimizer]:
    """The net and its optimizer, whose state rests there."""
    model = make_model(dtype)
    arguments = {"lr": 1e-2, **HOMES[home](folder), **options}
    return model, OffloadedOptimizer(model.parameters(), optimizer, **arguments)


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 33, generator=generator), torch.randn(8, 7, generator=generator)
    return x.to(dtype), y.to(dtype)


def loss_of(model: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """One micro-batch."""
    x, y = batch(step, dtype)
    return (model(x) - y).float().square().mean()


def train(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    steps: range = range(5),
    num_backwards: int = 1,
    max_norm: float | None = None,
) -> Outcome:
    """The plain loop."""
    dtype = next(model.parameters()).dtype
    losses = []
    for step in steps:
        for k in range(num_backwards):
            loss = loss_of(model, step * num_backwards + k, dtype)
            loss.backward()
        if max_norm is not None and isinstance(optimizer, OffloadedOptimizer):
            optimizer.clip_grad_norm_(max_norm)
        elif max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Outcome(losses, [param.detach().clone() for param in model.parameters()])


def assert_equal(actual: Outcome, expected: Outcome) -> None:
    """To the bit."""
    assert actual.losses == expected.losses
    torch.testing.assert_close(actual.params, expected.params, rtol=0, atol=0)
