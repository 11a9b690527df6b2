"""Pipeline x data x tensor: a GPT over eight ranks trains as one process, and is saved as one."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zero_engine
from expert_models import WIDTH as MIXTURE_WIDTH
from expert_models import ExpertRanks, build_mixture, nadamw
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
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()  # torch 2.11 compares strides


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
    """A stage of the GPT on this rank, sharded over its data-parallel ranks.

    Without tensor parallelism, "data" has replicas, and ranks along "tensor" have its shards.
    """

    def __init__(self, mesh: DeviceMesh, stage: int, *, is_split: bool = True) -> None:
        self.mesh, self.number = mesh, mesh.get_local_rank("stage")
        half = BLOCKS // 2
        self.model = GPT(range(self.number * half, (self.number + 1) * half))
        for block in self.model.blocks.values() if is_split else ():
            parallelize_module(block, mesh["tensor"], PLAN)
        self.optimizer = _adamw(self.model)
        over = mesh["data"] if is_split else mesh["data", "tensor"]
        zero_engine.shard(self.model, self.optimizer, ZeroConfig(stage), group=over)
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
@pytest.mark.parametrize(("stage", "third"), [(1, "tensor"), (3, "tensor"), (3, "replicas")])
@pytest.mark.drawn(2)
def test_eight_ranks_train_as_one_process_and_go_on_as_four(
    group: Group, stage: int, third: str, tmp_path: Path
) -> None:
    """Losses of ten steps; then data 4 x tensor 1 takes the checkpoint for two more."""
    expected, alone, its_optimizer = _train_alone(STEPS)
    mesh = _mesh()
    of_rank = Pipeline(mesh, stage, is_split=third == "tensor")
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
@pytest.mark.parametrize(("stage", "third"), [(1, "tensor"), (3, "tensor"), (3, "replicas")])
def test_a_rank_keeps_the_bytes_that_the_guide_says(group: Group, stage: int, third: str) -> None:
    """Over all ranks: each layer is on one stage, and a split element on one tensor rank."""
    whole = GPT()
    split = {p for block in whole.blocks.values() for name in PLAN for p in _split(block, name)}
    numel = [
        sum(p.numel() for p in whole.parameters() if (p in split) == of) for of in (False, True)
    ]
    model = Pipeline(_mesh(), stage, is_split=third == "tensor").model
    held: list[Any] = [None] * group.world_size
    dist.all_gather_object(held, zero_engine.memory_report(model).params_bytes)
    num_sharing = 1 if stage == 1 else 2  # ranks over which a parameter is cut
    times = [4 / num_sharing, (2 if third == "tensor" else 4) / num_sharing]
    assert sum(held) == 4 * sum(map(math.prod, zip(numel, times, strict=True)))


def _split(block: nn.Module, name: str) -> list[nn.Parameter]:
    """Parameters of a layer of which each tensor rank has a part; a row-wise bias is whole."""
    layer = block.get_submodule(name)
    is_row_wise = isinstance(PLAN[name], RowwiseParallel)
    return [layer.weight] if is_row_wise else [*layer.parameters()]


@pytest.mark.drawn(2)
@pytest.mark.ranks(8)
def test_each_stage_takes_its_part_of_a_checkpoint(group: Group, tmp_path: Path) -> None:
    """One of its own job, with random numbers, and one of a process that has the whole model."""
    mesh = _mesh()
    first = Pipeline(mesh, 2)
    average = ShardedAverage(first.model, 0.5)
    first.train(0)
    average.update()
    stages, expected = mesh["stage"], {}
    for index, block in enumerate(first.model.blocks.values()):
        block.scale.fill_(100.0 * group.rank + index)  # of which a file has one, and ranks theirs
    torch.manual_seed(1000 + group.rank)
    what: dict[str, Any] = {"step": 1, "extra": {"epoch": 3}, "average": average}
    with zero_engine.Saver(tmp_path, first.model, first.optimizer, stages=stages) as saver:
        saver.save(**what)
    drawn = torch.rand(3)
    first.train(1)
    expected = zero_engine.full_state_dict(first.model)

    second = Pipeline(mesh, 3)
    restored = ShardedAverage(second.model, 0.5)
    torch.manual_seed(7)
    loaded = zero_engine.load(
        tmp_path, second.model, second.optimizer, average=restored, stages=stages
    )
    assert loaded is not None and loaded.restores_rngs and loaded.extra == {"epoch": 3}
    assert torch.equal(torch.rand(3), drawn)
    for index, block in enumerate(second.model.blocks.values()):
        assert block.scale == 100.0 * group.rank + index
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
        if not name.endswith("scale"):  # buffers are those of `alone`
            torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5)


# ---- Pipeline x experts ----


def _layers(ranks: ExpertRanks | None, numbers: Sequence[int]) -> nn.Module:
    """Some layers of a model with experts, by the names that they have in the whole one."""
    whole = build_mixture(None, is_numbered=True)
    part = build_mixture(ranks, is_numbered=True)
    assert isinstance(whole, nn.Sequential) and isinstance(part, nn.Sequential)
    return nn.Sequential(OrderedDict((str(number), part[number]) for number in numbers))


def _error(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def _rows(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, MIXTURE_WIDTH, generator=generator, dtype=torch.float64)
    return x, 2 * x


@pytest.mark.drawn(2)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", range(4))
def test_experts_in_a_pipeline_train_and_are_saved_as_in_one_process(
    group: Group, stage: int, tmp_path: Path
) -> None:
    """Two stages of a layer each, whose experts are spread over two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    made = [dist.new_group([rank]) for rank in range(group.world_size)]
    number, at = mesh.get_local_rank("stage"), mesh.get_local_rank("data")
    ranks = ExpertRanks(made[group.rank], mesh.get_group("data"), index=at, num_parts=2)
    model = _layers(ranks, [number])
    optimizer = nadamw(model)
    config = ZeroConfig(stage, groups={"*.experts.*": made[group.rank]})
    zero_engine.shard(model, optimizer, config, group=mesh["data"])
    device, of_stages = torch.device("cpu"), mesh.get_group("stage")
    of_torch = PipelineStage(model, number, 2, device, group=of_stages)
    schedule = Schedule1F1B(of_torch, n_microbatches=MICRO_BATCHES, loss_fn=_error)

    alone = _layers(None, [0, 1])
    its_optimizer = nadamw(alone)
    for step in range(3):
        x, target = _rows(step, at)
        is_once = stage == 0  # with groups, a step's gradients are reduced once at this stage
        with zero_engine.coalesce_reduction(model) if is_once else nullcontext():
            schedule.step(*(() if number else (x,)), **({"target": target} if number else {}))
        norm = zero_engine.clip_grad_norm_(model, 0.1, stages=mesh["stage"])
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(2):
            x, target = _rows(step, rank)
            (_error(alone(x), target) / 2).backward()
        expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        its_optimizer.step()
        its_optimizer.zero_grad()
        assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    zero_engine.save(tmp_path, model, optimizer, step=3, stages=mesh["stage"])

    again = _layers(None, [0, 1])
    optimizer = nadamw(again)
    zero_engine.shard(again, optimizer, ZeroConfig(2), group=group)
    zero_engine.load(tmp_path, again, optimizer)
    for (name, param), of_alone in zip(again.named_parameters(), alone.parameters(), strict=True):
        found = zero_engine.full_param(param)
        torch.testing.assert_close(found, of_alone.detach(), rtol=1e-9, atol=1e-12, msg=name)
