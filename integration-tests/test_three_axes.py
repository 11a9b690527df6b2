"""Pipeline x data x tensor: a GPT over eight ranks trains as one process, and is saved as one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from zero_comm import Group
from zero_partition import ShardedAverage

pytestmark = pytest.mark.cpu_only("torch's schedules send over gloo here, between host tensors")

WIDTH, HEADS, BLOCKS, LENGTH, TOKENS = 16, 4, 4, 8, 32
ROWS, MICRO_BATCHES, STEPS = 8, 4, 10


class Block(nn.Module):
    """A layer of a GPT; its heads and its hidden units may be split over ranks."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)  # its gradient would be rounding errors
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor(float(number)))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        y = self.norm(x)
        by_head = [
            layer(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        attended = F.scaled_dot_product_attention(*by_head, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Some of the layers of a GPT, by the names that they have in the whole one."""

    def __init__(self, numbers: Sequence[int] = range(BLOCKS)) -> None:
        super().__init__()
        torch.manual_seed(100)
        embed, positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        head = nn.Linear(WIDTH, TOKENS)
        if 0 in numbers:
            self.embed, self.positions = embed, positions
        self.blocks = nn.ModuleDict({str(number): Block(number) for number in numbers})
        if BLOCKS - 1 in numbers:
            self.norm, self.head = nn.LayerNorm(WIDTH), head

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        if "0" in self.blocks:
            x = self.embed(x) + self.positions.weight
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if str(BLOCKS - 1) in self.blocks else x


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(TOKENS, (ROWS, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def _train_alone(steps: int) -> tuple[list[float], nn.Module, torch.optim.Optimizer]:
    """One process takes the batches of two data-parallel ranks; losses are of the first one's."""
    model, losses = GPT(), []
    optimizer = _adamw(model)
    for step in range(steps):
        for rank in reversed(range(2)):
            x, target = _batch(step, rank)
            loss = _loss(model(x), target)
            (loss / 2).backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model, optimizer


PLAN = {
    **dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel()),
    **dict.fromkeys(("out", "down"), RowwiseParallel()),
}


class Pipeline:
    """A stage of the GPT on this rank, sharded over its data-parallel ranks."""

    def __init__(self, mesh: DeviceMesh, stage: int) -> None:
        self.mesh, self.number = mesh, mesh.get_local_rank("stage")
        half = BLOCKS // 2
        self.model = GPT(range(self.number * half, (self.number + 1) * half))
        for block in self.model.blocks.values():
            parallelize_module(block, mesh["tensor"], PLAN)
        self.optimizer = _adamw(self.model)
        zero_engine.shard(self.model, self.optimizer, ZeroConfig(stage), group=mesh["data"])
        ranks, device = mesh.get_group("stage"), torch.device("cpu")
        of_torch = PipelineStage(self.model, self.number, 2, device, group=ranks)
        self.schedule = Schedule1F1B(of_torch, n_microbatches=MICRO_BATCHES, loss_fn=_loss)

    def train(self, step: int) -> list[float]:
        """Take a step; returns the losses of its micro-batches, on the last stage."""
        x, target = _batch(step, self.mesh.get_local_rank("data"))
        losses: list[Tensor] = []
        with zero_engine.coalesce_reduction(self.model):
            if self.number == 0:
                self.schedule.step(x)
            else:
                self.schedule.step(target=target, losses=losses)
        zero_engine.clip_grad_norm_(self.model, 1.0, stages=self.mesh["stage"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss.item() for loss in losses]


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("stage", "data", "tensor"))


@pytest.mark.ranks(8)
@pytest.mark.parametrize("stage", [1, 3])
def test_eight_ranks_train_as_one_process_and_go_on_as_four(
    group: Group, stage: int, tmp_path: Path
) -> None:
    """Losses of ten steps; then data 4 x tensor 1 takes the checkpoint for two more."""
    expected, alone, its_optimizer = _train_alone(STEPS)
    mesh = _mesh()
    of_rank = Pipeline(mesh, stage)
    for step in range(STEPS):
        losses = of_rank.train(step)
        if of_rank.number == 1 and mesh.get_local_rank("data") == 0:
            assert sum(losses) / MICRO_BATCHES == pytest.approx(expected[step], rel=1e-5)
    model, optimizer = of_rank.model, of_rank.optimizer
    report = zero_engine.save(tmp_path, model, optimizer, step=STEPS, stages=mesh["stage"])
    per_param = 4  # its values, step and two moments
    num_params = len([*alone.parameters()])
    assert report.num_tensors == per_param * num_params + BLOCKS  # and a buffer of each block

    four = dist.new_group([0, 1, 2, 3])
    if group.rank < 4:
        whole = GPT()
        optimizer = _adamw(whole)
        zero_engine.shard(whole, optimizer, ZeroConfig(stage), group=four)
        loaded = zero_engine.load(tmp_path, whole, optimizer)
        assert loaded is not None
        assert loaded.num_tensors == loaded.num_tensors_saved == report.num_tensors
        assert not loaded.restores_rngs
        for step in (STEPS, STEPS + 1):
            x, target = _batch(step, group.rank % 2)
            _loss(whole(x), target).backward()
            zero_engine.clip_grad_norm_(whole, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        for step in (STEPS, STEPS + 1):
            for rank in range(2):
                x, target = _batch(step, rank)
                (_loss(alone(x), target) / 2).backward()
            nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
            its_optimizer.step()
            its_optimizer.zero_grad()
        for name, param in whole.named_parameters():
            found, of_alone = zero_engine.full_param(param), alone.get_parameter(name).detach()
            torch.testing.assert_close(found, of_alone, rtol=1e-3, atol=1e-5)
    dist.barrier()


@pytest.mark.ranks(8)
@pytest.mark.parametrize("in_background", [False, True], ids=["save", "Saver"])
def test_each_stage_takes_its_part_of_a_checkpoint(
    group: Group, in_background: bool, tmp_path: Path
) -> None:
    """Of its own job with random numbers, and of one process that has the whole model."""
    mesh = _mesh()
    first = Pipeline(mesh, 2)
    average = ShardedAverage(first.model, 0.5)
    first.train(0)
    average.update()
    stages, expected = mesh["stage"], {}
    what: dict[str, Any] = {"step": 1, "extra": {"epoch": 3}, "average": average}
    if in_background:
        with zero_engine.Saver(tmp_path, first.model, first.optimizer, stages=stages) as saver:
            saver.save(**what)
    else:
        zero_engine.save(tmp_path, first.model, first.optimizer, **what, stages=stages)
    drawn = torch.rand(3)
    first.train(1)
    expected = zero_engine.full_state_dict(first.model)

    second = Pipeline(mesh, 3)
    restored = ShardedAverage(second.model, 0.5)
    loaded = zero_engine.load(
        tmp_path, second.model, second.optimizer, average=restored, stages=stages
    )
    assert loaded is not None and loaded.restores_rngs and loaded.extra == {"epoch": 3}
    assert torch.equal(torch.rand(3), drawn)
    second.train(1)
    found = zero_engine.full_state_dict(second.model)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7)
    assert restored.num_updates == average.num_updates
    averages = average.full_state_dict(), restored.full_state_dict()
    for name, value in averages[0].items():
        torch.testing.assert_close(averages[1][name], value)

    if group.rank == 0:
        _, alone, its_optimizer = _train_alone(1)
        zero_engine.shard(alone, its_optimizer, ZeroConfig(1), group=Group.solo())
        zero_engine.save(tmp_path / "alone", alone, its_optimizer, step=1)
    dist.barrier()
    zero_engine.load(tmp_path / "alone", second.model, second.optimizer, stages=stages)
    second.train(1)
    for name, value in zero_engine.full_state_dict(second.model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5)
