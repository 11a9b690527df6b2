"""torch's own data parallelism on two ranks trains as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import simulated_device
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)]
    return nn.Sequential(nn.Embedding(11, 16), *layers, nn.LayerNorm(16), nn.Linear(16, 11))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(11, (4, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train(model: nn.Module, rank: int, device: str) -> list[float]:
    """Return this rank's losses of five steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses = []
    for step in range(5):
        inputs, targets = (tensor.to(device) for tensor in batch(step, rank))
        loss = nn.functional.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def shard(model: nn.Sequential, device: str, **options: Any) -> nn.Module:
    mesh = init_device_mesh(device, (2,))
    for block in model[1:4]:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def losses_of(rank: int, system: str, device: str, mode: str) -> tuple[list[float], list[str]]:
    simulated_device.set_mode(mode, seed=rank)
    model = make_model().to(device)
    if system == "DDP":
        model = DistributedDataParallel(model, bucket_cap_mb=0.01)
    elif system == "FSDP2":
        model = shard(model, device)
    elif system == "FSDP2 in bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = shard(model, device, mp_policy=policy)
    losses = train(model, rank, device)
    dist.barrier()
    return losses, simulated_device.take_unordered_uses()


SYSTEMS = ["DDP", "FSDP2", "FSDP2 in bf16"]


@pytest.mark.parametrize("system", SYSTEMS)
def test_data_parallelism_has_the_losses_of_the_cpu(system: str, ranks: Ranks):
    expected = [losses for losses, _ in ranks.run(losses_of, system, "cpu", "late")]
    for mode in ("eager", "late", "random"):
        for (losses, unordered), oracle in zip(
            ranks.run(losses_of, system, "sim", mode), expected, strict=True
        ):
            assert losses == oracle
            assert unordered == []
    assert expected[0] != expected[1]


def launches_of_a_step(rank: int) -> tuple[dict[str, int], dict[str, int]]:
    model = shard(make_model().to("sim"), "sim")
    train(model, rank, "sim")
    before = simulated_device.launches()
    simulated_device.take_host_waits()
    train(model, rank, "sim")
    after, waits = simulated_device.launches(), simulated_device.take_host_waits()
    return {name: count - before.get(name, 0) for name, count in after.items()}, waits


def test_fsdp2_gathers_and_reduces_each_unit_once_a_step(ranks: Ranks):
    for counts, waits in ranks.run(launches_of_a_step):
        # Four units, of which the last keeps its weights from forward to backward.
        assert counts["all_gather_single"] == 5 * 7
        assert counts["reduce_scatter_single"] == 5 * 4
        assert set(waits) <= {"copy H2D", "copy D2H"}
