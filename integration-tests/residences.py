"""Trainings whose parameters and optimizer state rest somewhere, and what they leave behind."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final
from unittest import mock

import parity
import poisoned
import pytest
import torch
import zero_engine
from attrs import frozen
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import equal, on_cpu
from zero_engine import Offload, testing
from zero_offload import CPUAdam, DiskStore, StoreError

Optimizers = Callable[[nn.Module], torch.optim.Optimizer]
NUM_STEPS: Final = 3


def host_adam(params: Any, *, lr: float = 1e-2) -> torch.optim.Optimizer:
    """Make an Adam that steps state on the host, by our kernels.

    On a device other than the CPU it is torch's, which can step the oracle's parameters, too.
    """
    if torch.get_default_device().type == "cpu":
        return CPUAdam(params, lr=lr)
    return torch.optim.AdamW(params, lr=lr, foreach=False)


def cpu_adam(model: nn.Module) -> torch.optim.Optimizer:
    """Make `host_adam` with two groups."""
    return host_adam(parity.param_groups(model))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Stepped as it is, parameter by parameter."""
    groups = parity.param_groups(model)
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True, foreach=False)


def skipping_adam(params: Any) -> torch.optim.Optimizer:
    """Make an Adam whose kernels skip steps, and unscale and clip gradients."""
    if torch.get_default_device().type == "cpu":
        return CPUAdam(params, lr=1e-2)
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


class Blocks(nn.Module):
    """Two units and a root, of odd sizes; one tensor is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(parity.VOCABULARY, parity.WIDTH)
        self.blocks = nn.ModuleList(parity.Block() for _ in range(2))
        self.frozen = nn.Parameter(torch.randn(parity.WIDTH), requires_grad=False)
        self.head = nn.Linear(parity.WIDTH, parity.VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        x = self.embed(tokens) + self.frozen
        for block in self.blocks:
            x = block(x)
        return self.head(x).float()


@frozen
class Cell:
    """One of the matrix."""

    stage: int
    optimizer: str = "device"
    params: str = "device"
    fraction: float = 1
    residence: str = "engine"

    def offload(self, folder: str | Path) -> Offload:
        """As a value. Sub-groups are small, so that every model here has several."""
        uses_disk = "disk" in (self.optimizer, self.params)
        return Offload(
            optimizer=self.optimizer,
            params=self.params,
            path=Path(folder) if uses_disk else None,
            subgroup_bytes=512,
            **({} if self.optimizer == "device" else {"fraction": self.fraction}),
        )


def config_of(
    folder: str | Path, offload: tuple[str, str] | None = None, **options: Any
) -> ZeroConfig:
    """With optimizer state and parameters at these places, on the disk in `folder`."""
    if offload is not None:
        path = Path(folder) if "disk" in offload else None
        options["offload"] = Offload(optimizer=offload[0], params=offload[1], path=path)
    return ZeroConfig(**options)


def cells(stage: int) -> Iterator[Cell]:
    """All of a stage, but for those in which nothing rests elsewhere, or poison rests nowhere."""
    places = ("device", "host", "disk") if stage == 3 else ("device",)
    for params, optimizer in itertools.product(places, ("device", "host", "disk")):
        for fraction in (0, 0.3, 1) if optimizer != "device" else (1,):
            if (params, optimizer) != ("device", "device"):
                yield Cell(stage, optimizer, params, fraction)
            if "disk" in (optimizer, params) and fraction:
                yield Cell(stage, optimizer, params, fraction, "poisoned")


def resting_as(cell: Cell | None) -> contextlib.AbstractContextManager[None]:
    """Where `zero_engine.shard` finds homes: the machine's host is its device.

    Poison shows that a copy is used too early. A device needs neither: its memory is another than
    the host's, and its streams show the same.
    """
    if torch.get_default_device().type != "cpu":
        return contextlib.nullcontext()
    if cell is None or cell.residence == "engine":
        return testing.host_apart()
    return testing.using_backends(
        param_offload=poisoned.PoisonedHome,
        store=poisoned.PoisonedStore,
        grad_offload=poisoned.PoisonedGradients,
    )


@contextlib.contextmanager
def sharded(
    group: Group,
    cell: Cell | None,
    folder: str | Path,
    *,
    make: Callable[[], nn.Module] = parity.Tiny,
    make_optimizer: Optimizers = cpu_adam,
    **settings: Any,
) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    """A model and its optimizer, resting as the cell says; plain again at the end."""
    model = parity.build(make)
    optimizer = make_optimizer(model)
    offload = None if cell is None else cell.offload(folder)
    config = ZeroConfig(offload=offload, **settings)
    with resting_as(cell):
        zero_engine.shard(model, optimizer, config, group=group)
    yield model, optimizer
    zero_engine.unshard(model, optimizer)


def parts_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every value that this rank keeps of the training. Local."""
    found: dict[str, Any] = {n: zero_engine.local_param(p) for n, p in model.named_parameters()}
    shards = [shard for group in optimizer.param_groups for shard in group["params"]]
    for shard, state in optimizer.state.items():
        index = next(i for i, known in enumerate(shards) if known is shard)
        found |= {f"{index}.{key}": value for key, value in state.items() if key != "master"}
    return found


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    *,
    steps: range = range(NUM_STEPS),
) -> list[float]:
    """Two micro-batches a step, and clipping that bites."""
    losses = []
    for step in steps:
        for micro in range(2):
            loss = parity.loss_of(model, parity.batch(step, micro, rank))
            loss.backward()
            losses.append(loss.item())
        zero_engine.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_same(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    """Compare by `is_same`."""
    assert found.keys() == expected.keys(), what
    different = [key for key, value in expected.items() if not is_same(found[key], value)]
    assert not different, f"{what}: these differ: {different}"


def is_same(found: Any, expected: Any) -> bool:
    """Return whether values are the same: bit for bit where the host's kernels computed all.

    Kernels of another device add and multiply in another order: a few roundings are allowed.
    """
    is_exact = torch.get_default_device().type == "cpu"
    if isinstance(expected, Tensor):
        if is_exact or not expected.is_floating_point():
            return found.dtype == expected.dtype and equal(found, expected)
        # bf16 has 8 bits, of which the last may differ, or more where moments of small gradients
        # nearly cancel.
        rtol, atol = (1e-5, 1e-6) if expected.dtype == torch.float32 else (2**-7, 1e-5)
        near = torch.allclose(on_cpu(found), on_cpu(expected), rtol=rtol, atol=atol)
        return found.dtype == expected.dtype and found.shape == expected.shape and near
    if isinstance(expected, float) and not is_exact:
        return found == pytest.approx(expected, rel=1e-5)
    if isinstance(expected, dict):
        pairs = [(found.get(key), value) for key, value in expected.items()]
        return found.keys() == expected.keys() and all(is_same(*pair) for pair in pairs)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(is_same, found, expected))
    return found == expected


@contextlib.contextmanager
def failing_disk(verb: str, part: str = "", *, after: int = 0) -> Iterator[None]:
    """Inside, disk stores "read" or "write" so many values whose key has `part`, and then fail."""
    granted, left = getattr(DiskStore, verb), after

    def failing(store: DiskStore, key: str, tensor: Tensor) -> Future[Any]:
        nonlocal left
        left -= part in key
        if part not in key or left >= 0:
            return granted(store, key, tensor)
        failed: Future[Any] = Future()
        failed.set_exception(StoreError("no such disk", key=key))
        return failed

    with mock.patch.object(DiskStore, verb, failing):
        yield
