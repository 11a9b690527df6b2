"""Kernels and copies that a step launches on a device, against DDP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

import pytest
import torch
import zero_engine
from torch import Tensor, nn
from zero_comm import Group
from zero_engine import ZeroConfig

pytestmark = pytest.mark.skipif(
    "config.getoption('device') != 'sim'", reason="counts what a simulated device is given"
)

NUM_BLOCKS: Final = 6
WIDTH: Final = 64
NUM_UNITS: Final = NUM_BLOCKS + 1  # blocks, and what lies around them
STAGES: Final = range(4)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(NUM_BLOCKS))
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


def _launches(
    model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[], object]
) -> tuple[int, int]:
    """Return kernels and copies of a steady step."""
    import simulated_device  # only it counts

    x = torch.randn(4, 8)

    def step() -> None:
        model(x).square().mean().backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    before = Counter(simulated_device.launches())
    step()
    after = Counter(simulated_device.launches()) - before
    kernels = sum(n for name, n in after.items() if name.startswith("aten"))
    return kernels, sum(n for name, n in after.items() if name.startswith("copy"))


def test_a_step_launches_no_more_than_ddp_and_three_kernels_a_unit(group: Group) -> None:
    """Clipping included, which DDP is spared here. Powers of norms were two kernels a parameter."""
    plain = _Blocks().to(group.device)
    ddp = nn.parallel.DistributedDataParallel(plain, process_group=group.process_group)
    kernels_of_ddp, _ = _launches(ddp, _adamw(plain), lambda: None)
    num_params = len(list(plain.parameters()))
    for stage in STAGES:
        model = _Blocks()
        config = ZeroConfig(stage, min_unit_bytes=0)
        model, optimizer = zero_engine.shard(model, _adamw(model), config, group=group)

        def clip(model: nn.Module = model) -> Tensor:
            return zero_engine.clip_grad_norm_(model, 1.0)

        kernels, copies = _launches(model, optimizer, clip)

        assert kernels <= kernels_of_ddp + 3 * NUM_UNITS, f"stage {stage}"
        assert copies <= 1.1 * (num_params + 2 * NUM_UNITS), f"stage {stage}"


def test_clipping_takes_as_many_launches_for_any_number_of_parameters(group: Group) -> None:
    """It is a few kernels for all of them, and one collective."""
    import simulated_device  # only it counts

    found = []
    for num_layers in (2, 20):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers)))
        model, _ = zero_engine.shard(model, _adamw(model), ZeroConfig(2), group=group)
        model(torch.randn(4, 8)).square().mean().backward()
        before = Counter(simulated_device.launches())
        zero_engine.clip_grad_norm_(model, 1.0)
        found.append(Counter(simulated_device.launches()) - before)
    assert found[0] == found[1]
