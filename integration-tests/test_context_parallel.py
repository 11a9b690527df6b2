"""Ranks that have parts of a sequence: gradients are the mean over data x context ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zero_ckpt
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from zero_comm import Group
from zero_engine import Offload, Precision, Wire

WIDTH, HEADS, LENGTH, TOKENS, STEPS = 16, 2, 12, 24, 3
LR = 1e-2


class _Gather(torch.autograd.Function):
    """Parts of a sequence, [batch, part, ...] on each rank, become the whole, [batch, all, ...]."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        parts = [torch.empty_like(part) for _ in range(mesh.size())]
        dist.all_gather(parts, part.contiguous(), group=mesh.get_group())
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.mesh.get_group())  # each rank used all keys and values
        return grad.chunk(ctx.mesh.size(), dim=1)[ctx.mesh.get_local_rank()], None


class Block(nn.Module):
    """Causal attention of this rank's tokens to all before them, and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mesh: DeviceMesh | None) -> Tensor:  # noqa: D102
        y = self.norm(x)
        query, key, value = self.query(y), self.key(y), self.value(y)
        mask = None
        if mesh is not None:
            key, value = _Gather.apply(key, mesh), _Gather.apply(value, mesh)
            rows = torch.arange(x.shape[1], device=x.device) + mesh.get_local_rank() * x.shape[1]
            mask = rows[:, None] >= torch.arange(key.shape[1], device=x.device)
        by_head = [
            t.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for t in (query, key, value)
        ]
        attended = F.scaled_dot_product_attention(*by_head, mask, is_causal=mask is None)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.norm2(x)).tanh())


class Model(nn.Module):
    """A GPT of two blocks in float64."""

    def __init__(self, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS)
        self.is_checkpointed = is_checkpointed
        self.double()

    def forward(  # noqa: D102
        self, tokens: Tensor, positions: Tensor, mesh: DeviceMesh | None = None
    ) -> Tensor:
        x = self.embed(tokens) + self.positions(positions)
        for block in self.blocks:
            x = zero_ckpt.checkpoint(block, x, mesh) if self.is_checkpointed else block(x, mesh)
        return self.head(x)


def _batch(step: int, data_rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cpu").manual_seed(10 * step + data_rank)
    tokens = torch.randint(TOKENS, (2, LENGTH + 1), generator=generator, device="cpu")
    device = torch.get_default_device()
    return tokens[:, :-1].to(device).clone(), tokens[:, 1:].to(device).clone()


def _positions() -> Tensor:
    return torch.arange(LENGTH, device=torch.get_default_device())


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _train_alone(
    num_data: int, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, list[float]]:
    """One process takes whole sequences of all data-parallel ranks."""
    model, norms = Model().to(dtype), []
    optimizer = torch.optim.NAdam(model.parameters(), lr=LR)
    for step in range(STEPS):
        for data_rank in range(num_data):
            x, target = _batch(step, data_rank)
            (_loss(model(x, _positions()), target) / num_data).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


def _mesh(group: Group, context: int = 2) -> DeviceMesh:
    sizes = (group.world_size // context, context)
    return init_device_mesh(group.device.type, sizes, mesh_dim_names=("data", "context"))


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, step: int
) -> Tensor:
    """Take a step with this rank's part of its sequences; returns the norm."""
    ranks = mesh["context"]
    at, data_rank = ranks.get_local_rank(), mesh.get_local_rank("data")
    whole = *_batch(step, data_rank), _positions()
    x, target, positions = (each.chunk(ranks.size(), dim=-1)[at] for each in whole)
    _loss(model(x, positions, ranks), target).backward()
    norm = zero_engine.clip_grad_norm_(model, 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def _ranks(mesh: DeviceMesh, which: str) -> Any:
    """The ways in which data x context ranks are named."""
    if which == "job":
        return None
    return mesh["data", "context"]._flatten("shards") if which == "flattened" else mesh


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("stage", "which"),
    [*((stage, "job") for stage in range(4)), (3, "flattened"), (0, "replicas"), (3, "replicas")],
)
def test_parts_of_sequences_train_as_one_process(group: Group, stage: int, which: str) -> None:
    """Two sequences' halves over four ranks, whichever way these are named."""
    alone, norms = _train_alone(num_data=2)
    mesh, model = _mesh(group), Model()
    optimizer = torch.optim.NAdam(model.parameters(), lr=LR)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=_ranks(mesh, which))
    for step in range(STEPS):
        assert _step(model, optimizer, mesh, step).item() == pytest.approx(norms[step], rel=1e-6)
    _compare(model, alone)


@pytest.mark.ranks(8)
@pytest.mark.parametrize(("stage", "which"), [(1, "flattened"), (3, "replicas")])
def test_parts_of_sequences_compose_with_tensor_parallelism(
    group: Group, stage: int, which: str
) -> None:
    """Two sequences' halves over four ranks, each with the heads of one of two more ranks."""
    alone, norms = _train_alone(num_data=2)
    mesh = init_device_mesh(
        group.device.type, (2, 2, 2), mesh_dim_names=("data", "context", "tensor")
    )
    model = Model()
    plan = {
        **dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel()),
        **dict.fromkeys(("out", "down"), RowwiseParallel()),
    }
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], plan)
    optimizer = torch.optim.NAdam(model.parameters(), lr=LR)
    ranks = _ranks(mesh["data", "context"], which)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=ranks)
    for step in range(STEPS):
        assert _step(model, optimizer, mesh, step).item() == pytest.approx(norms[step], rel=1e-6)
    _compare(model, alone)


KINDS: dict[str, tuple[ZeroConfig, bool]] = {
    "recomputed": (ZeroConfig(3), True),
    "host": (ZeroConfig(3, offload=Offload(optimizer="host", params="host")), False),
    "secondary": (ZeroConfig(3, wire=Wire(levels=2, secondary=True)), True),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_what_else_composes_with_parts_of_sequences(
    group: Group, kind: str, tmp_path: Path
) -> None:
    """A recomputed block exchanges keys and values again; a checkpoint is of no context."""
    alone, _ = _train_alone(num_data=1)
    config, is_checkpointed = KINDS[kind]
    mesh, model = _mesh(group, context=4), Model(is_checkpointed=is_checkpointed)
    optimizer = torch.optim.NAdam(model.parameters(), lr=LR)
    zero_engine.shard(model, optimizer, config)
    for step in range(STEPS - 1):
        _step(model, optimizer, mesh, step)
    zero_engine.save(tmp_path, model, optimizer, step=STEPS - 1)

    again, pairs = Model(), _mesh(group)
    optimizer = torch.optim.NAdam(again.parameters(), lr=LR)
    zero_engine.shard(again, optimizer, ZeroConfig(2))
    zero_engine.load(tmp_path, again, optimizer)
    x, target = _batch(STEPS - 1, 0)  # both data-parallel ranks have it now
    at, ranks = pairs.get_local_rank("context"), pairs["context"]
    half = slice(at * LENGTH // 2, (at + 1) * LENGTH // 2)
    _loss(again(x[:, half], _positions()[half], ranks), target[:, half]).backward()
    zero_engine.clip_grad_norm_(again, 0.1)
    optimizer.step()
    _compare(again, alone)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [0, 3])
def test_losses_of_parts_are_added_up_on_request(group: Group, stage: int) -> None:
    """Parts with other numbers of counted tokens: a rank's loss is its share of the whole mean."""
    ignored = -100
    plain, mesh, model = Model(), _mesh(group), Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    config = ZeroConfig(stage, precision=Precision(masters=None, mean_over=2))
    zero_engine.shard(model, optimizer, config)
    for data_rank in range(2):
        x, target = _batch(0, data_rank)
        target[:, LENGTH // 3 :: 2] = ignored
        logits, at = plain(x, _positions()), mesh.get_local_rank("context")
        (_sum(logits, target) / (target != ignored).sum() / 2).backward()
        if mesh.get_local_rank("data") == data_rank:
            half = slice(at * LENGTH // 2, (at + 1) * LENGTH // 2)
            logits = model(x[:, half], _positions()[half], mesh["context"])
            (_sum(logits, target[:, half]) / (target != ignored).sum()).backward()
    for (name, param), of_plain in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert of_plain.grad is not None
        found = zero_engine.full_grad(param)
        torch.testing.assert_close(found, of_plain.grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(4))
def test_torchs_context_parallel_trains_as_one_process(group: Group, stage: int) -> None:
    """Its attention knows no CPU. `pytest --device cuda -m gpu` of this file, with two GPUs."""
    alone, _ = _train_alone(num_data=1, dtype=torch.float32)
    mesh, model = _mesh(group), Model().float()
    optimizer = torch.optim.NAdam(model.parameters(), lr=LR)
    zero_engine.shard(model, optimizer, ZeroConfig(stage))
    for step in range(STEPS):
        buffers = [*_batch(step, 0), _positions()]
        with context_parallel(mesh["context"], buffers=buffers, buffer_seq_dims=[1, 1, 0]):
            x, target, positions = buffers  # cut in place
            _loss(model(x, positions), target).backward()
        zero_engine.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    for (name, param), of_alone in zip(model.named_parameters(), alone.parameters(), strict=True):
        found = zero_engine.full_param(param)
        torch.testing.assert_close(found, of_alone.detach(), rtol=1e-3, atol=1e-5, msg=name)


def _sum(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")


def _compare(model: nn.Module, alone: nn.Module) -> None:
    for (name, param), of_alone in zip(model.named_parameters(), alone.parameters(), strict=True):
        found = zero_engine.full_param(param)
        torch.testing.assert_close(found, of_alone.detach(), rtol=1e-8, atol=1e-11, msg=name)
