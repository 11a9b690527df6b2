"""Memory of a device in a steady step at stage 3, against FSDP2."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pytest
import torch
import zero_engine
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from zero_comm import Group
from zero_engine import Precision, ZeroConfig
from zero_partition.seams import find_sharded

pytestmark = pytest.mark.skipif(
    "config.getoption('device') != 'sim'", reason="reads the statistics of a simulated device"
)

SLACK: Final = 1.0003  # stand-ins of a number each, flags, padding: 2 KB of 12.8 MB
VOCABULARY: Final = 8192


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.norm_2 = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(torch.softmax(query @ key.transpose(-1, -2) / 8, -1) @ value)
        return x + self.down(torch.relu(self.up(self.norm_2(x))))


class _Experts(nn.Module):
    """All of them called, weighted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 8)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.gate(x), -1)
        return x + sum(weights[..., i : i + 1] * e(x) for i, e in enumerate(self.experts))


class _Adapted(nn.Module):
    """A frozen block, with LoRA around it (arXiv 2106.09685)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = _Block(width).requires_grad_(requires_grad=False)
        self.a, self.b = nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class _Language(nn.Module):
    """An embedding and a head that are larger than all blocks."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 128)
        self.blocks = nn.ModuleList(_Block(128) for _ in range(4))
        self.head = nn.Linear(128, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class _Row(nn.Module):
    def __init__(self, count: int, width: int, kind: Callable[[int], nn.Module] = _Block) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 8)
        self.blocks = nn.ModuleList(kind(width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class _Shape(NamedTuple):
    build: Callable[[], nn.Module]
    dtype: torch.dtype | None = None  # of parameters whose masters are in float32


SHAPES: Final = {
    "24 of 64": _Shape(lambda: _Row(24, 64)),
    "12 of 512": _Shape(lambda: _Row(12, 512)),
    "48 of 256": _Shape(lambda: _Row(48, 256)),
    "embedding and head": _Shape(lambda: _Language(is_tied=False)),
    "tied head": _Shape(lambda: _Language(is_tied=True)),
    "experts": _Shape(lambda: _Row(8, 128, _Experts)),
    "masters": _Shape(lambda: _Row(12, 256), torch.bfloat16),
    "lora": _Shape(lambda: _Row(12, 256, _Adapted)),
}


class _Bytes(NamedTuple):
    idle: int
    peak: int


def _steady_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[], object], x: Tensor
) -> _Bytes:
    """What is asked of the allocator between steps, and most in one."""

    def step() -> None:
        model(x).float().square().mean().backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    step()
    torch.accelerator.synchronize()
    found = torch.accelerator.memory_stats()
    return _Bytes(found["requested_bytes.all.current"], found["requested_bytes.all.peak"])


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, foreach=True)


def _input(model: nn.Module) -> Tensor:
    if isinstance(model, _Language):
        return torch.randint(0, VOCABULARY, (4, 16))
    return torch.randn(4, 16, 8)


def _bytes_of_fsdp2(group: Group, shape: _Shape) -> _Bytes:
    model, mesh = shape.build(), DeviceMesh.from_group(group.process_group, group.device.type)
    policy = MixedPrecisionPolicy(param_dtype=shape.dtype, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh, **({"mp_policy": policy} if shape.dtype else {})}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = _adamw(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # its output may be a view
        return _steady_bytes(
            model,
            optimizer,
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            _input(model),
        )


def _bytes_of_ours(group: Group, shape: _Shape) -> _Bytes:
    model = shape.build()
    precision = Precision(params=shape.dtype, reduce=torch.float32) if shape.dtype else None
    config = ZeroConfig(3, precision=precision)
    model, optimizer = zero_engine.shard(model, _adamw(model), config, group=group)
    return _steady_bytes(
        model, optimizer, lambda: zero_engine.clip_grad_norm_(model, 1.0), _input(model)
    )


def _bytes_now() -> int:
    gc.collect()
    torch.accelerator.synchronize()
    return torch.accelerator.memory_stats()["requested_bytes.all.current"]


@pytest.mark.ranks(2, timeout_s=300)
def test_a_block_that_follows_an_embedding_takes_its_own_bytes_of_the_slot(group: Group) -> None:
    """Nobody else has views of what the embedding was in: its graph keeps tokens."""
    model = _Language(is_tied=False)
    model, optimizer = zero_engine.shard(model, _adamw(model), ZeroConfig(3), group=group)
    found: list[int] = []
    sharded = find_sharded(model)
    for block in model.blocks:
        block.register_forward_hook(lambda *_: found.append(sharded.schedule.pool.num_bytes))
    for _ in range(4):
        model(_input(model)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    of_block = next(u.plan.num_bytes for u in sharded.units if u.name == "blocks.0")

    assert found[-4:-1] == [2 * of_block] * 3  # the head comes beside the last


@pytest.mark.ranks(2, timeout_s=300)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_needs_no_more_memory_of_a_device_than_fsdp2s(group: Group, shape: str) -> None:
    """Between steps and at its peak; all options are the defaults, and the optimizer is one."""
    start = _bytes_now()
    theirs = _bytes_of_fsdp2(group, SHAPES[shape])
    between = _bytes_now()
    ours = _bytes_of_ours(group, SHAPES[shape])

    assert ours.idle - between <= SLACK * (theirs.idle - start), "idle"
    assert ours.peak - between <= SLACK * (theirs.peak - start), "at the peak"
