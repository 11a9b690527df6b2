"""A model that torch splits over ranks by DTensor, and how it is trained."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import zero_engine
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from zero_comm import Group

WIDTH, HEADS, LENGTH, VOCABULARY = 16, 4, 6, 24


class Block(nn.Module):
    """A layer of a transformer, as tensor parallelism cuts it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        h = self.norm(x)
        query, value = self.query(h), self.value(h)
        x = x + self.out(torch.sigmoid(query) * value)
        return x + self.down(self.up(self.mlp_norm(x)).relu())


class Model(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _tensor_plan(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        plan = {
            "query": ColwiseParallel(),
            "value": ColwiseParallel(),
            "out": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    return model


def _sequence_plan(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(),
            "query": ColwiseParallel(input_layouts=Shard(1)),
            "value": ColwiseParallel(input_layouts=Shard(1)),
            "out": RowwiseParallel(output_layouts=Shard(1)),
            "mlp_norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    return model


PLANS = {"tensor": _tensor_plan, "sequence": _sequence_plan}


def mesh_of(group: Group, tensor: int = 2) -> DeviceMesh:
    """All ranks: those that have the same part, times `tensor` that have other ones."""
    return _meshes_of(group)[tensor]


@lru_cache(maxsize=1)  # groups have threads: not those of tests before
def _meshes_of(group: Group) -> dict[int, DeviceMesh]:
    """Each number of parts, in the same order in every test.

    torch's caches take a mesh of an earlier test for an equal one, and know its groups by numbers.
    """
    return {
        tensor: init_device_mesh(
            group.device.type,
            (group.world_size // tensor, tensor),
            mesh_dim_names=("data", "tensor"),
        )
        for tensor in (2, 4, 1)
    }


def build_split(plan: str, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model each time, split as a plan says, and its optimizer."""
    torch.manual_seed(0)
    model = PLANS[plan](Model(), mesh["tensor"])
    return model, adamw(model)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Of all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch_of(step: int, mesh: DeviceMesh) -> Tensor:
    """Tokens that ranks with the same part have different ones of."""
    torch.manual_seed(100 * step + mesh.get_local_rank("data"))
    return torch.randint(VOCABULARY, (2, LENGTH))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of tokens that it is to give back."""
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def train_split(
    model: nn.Module, optimizer: Any, mesh: DeviceMesh, *, max_norm: float | None = None
) -> list[float]:
    """Three steps; returns this rank's losses."""
    losses = []
    for step in range(3):
        loss = loss_of(model, batch_of(step, mesh))
        loss.backward()
        if max_norm is not None:
            zero_engine.clip_grad_norm_(model, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
