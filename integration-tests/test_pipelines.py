"""Stages of torch.distributed.pipelining, each sharded over its data-parallel ranks."""

from __future__ import annotations

import os
import signal
from collections import OrderedDict
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from zero_comm import CommError, Group
from zero_comm.circles import break_connections
from zero_engine.checkpoint import StopSignals
from zero_engine.checkpoint.folder import Checkpoint
from zero_partition import StateError

pytestmark = pytest.mark.cpu_only("torch's schedules send over gloo here, between host tensors")

WIDTH, BLOCKS, ROWS, STEPS, MICRO_BATCHES = 8, 8, 16, 3, 4


class Block(nn.Module):
    """A residual layer in float64, of values that its number says."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x + self.down(self.up(x).tanh())


def _loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def _batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x[0], x[1]


def _nadam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.NAdam(model.parameters(), lr=1e-2)


def _train_alone() -> tuple[nn.Module, list[float]]:
    """One process with all layers takes the batches of two data-parallel ranks."""
    model, norms = nn.Sequential(*map(Block, range(BLOCKS))), []
    optimizer = _nadam(model)
    for step in range(STEPS):
        for rank in range(2):
            x, target = _batch(step, rank)
            (_loss(model(x), target) / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


def _mesh(group: Group) -> DeviceMesh:
    return init_device_mesh("cpu", (2, group.world_size // 2), mesh_dim_names=("stage", "data"))


def _stages(mesh: DeviceMesh, per_rank: int) -> tuple[nn.ModuleList, list[PipelineStage]]:
    """This rank's parts of the model, and stages over them, in turns with the other rank's."""
    parts, stages = nn.ModuleList(), []
    each = BLOCKS // (2 * per_rank)
    for number in range(mesh.get_local_rank("stage"), 2 * per_rank, 2):
        numbers = range(number * each, (number + 1) * each)  # names differ from stage to stage
        parts.append(nn.Sequential(OrderedDict((f"block{n}", Block(n)) for n in numbers)))
        ranks = mesh.get_group("stage")
        device = torch.device("cpu")
        stages.append(PipelineStage(parts[-1], number, 2 * per_rank, device, group=ranks))
    return parts, stages


SCHEDULES = {ScheduleGPipe: 1, Schedule1F1B: 1, ScheduleInterleaved1F1B: 2}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("is_reduced_once", [False, True], ids=["each-backward", "once"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.drawn(2)
def test_a_pipeline_trains_as_one_process(
    group: Group, stage: int, schedule: Any, is_reduced_once: bool
) -> None:
    """Two stages times two data-parallel ranks; the norm is of all stages."""
    alone, norms = _train_alone()
    mesh = _mesh(group)
    parts, stages = _stages(mesh, SCHEDULES[schedule])
    optimizer = _nadam(parts)
    zero_engine.shard(parts, optimizer, ZeroConfig(stage), group=mesh["data"])
    last = mesh.get_local_rank("stage") == 1
    one = stages[0] if SCHEDULES[schedule] == 1 else stages
    running = schedule(one, n_microbatches=MICRO_BATCHES, loss_fn=_loss)
    for step in range(STEPS):
        x, target = _batch(step, mesh.get_local_rank("data"))
        args, kwargs = (() if last else (x,)), ({"target": target} if last else {})
        if is_reduced_once:
            with zero_engine.coalesce_reduction(parts):
                running.step(*args, **kwargs)
        else:
            running.step(*args, **kwargs)
        norm = zero_engine.clip_grad_norm_(parts, 0.1, stages=mesh["stage"])
        assert norm.item() == pytest.approx(norms[step], rel=1e-6)
        optimizer.step()
        optimizer.zero_grad()
    each = BLOCKS // len(stages) // 2
    for part, of in zip(parts, stages, strict=True):
        for number, block in enumerate(part, of.stage_index * each):
            expected = dict(alone[number].named_parameters())
            for name, param in block.named_parameters():
                found = zero_engine.full_param(param)
                torch.testing.assert_close(found, expected[name].detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("is_one_model", [False, True], ids=["a-model-a-stage", "one-model"])
@pytest.mark.parametrize("stage", range(4))
def test_a_schedule_that_splits_backward_is_refused_by_name(
    group: Group, stage: int, is_one_model: bool
) -> None:
    """Gradients that it assigns were taken for averaged ones, and ranks stepped apart."""
    mesh = _mesh(group)
    parts, stages = _stages(mesh, 2)
    for model in (parts,) if is_one_model else parts:
        zero_engine.shard(model, _nadam(model), ZeroConfig(stage), group=mesh["data"])
    running = ScheduleInterleavedZeroBubble(stages, n_microbatches=MICRO_BATCHES, loss_fn=_loss)
    x, target = _batch(0, 0)
    if mesh.get_local_rank("stage") == 0:
        with pytest.raises(StateError, match="ScheduleInterleavedZeroBubble splits backward"):
            running.step(x)
        break_connections(ref(stages[0].group))
    else:
        with pytest.raises(RuntimeError):  # its peer has ended
            running.step(target=target)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [0, 2])
def test_an_overflow_of_one_stage_is_known_to_all(group: Group, stage: int) -> None:
    """Each decides by the same norm whether it steps."""
    mesh = _mesh(group)
    parts, _ = _stages(mesh, 1)
    optimizer = _nadam(parts)
    zero_engine.shard(parts, optimizer, ZeroConfig(stage), group=mesh["data"])
    x, target = _batch(0, group.rank)
    factor = float("inf") if mesh.get_local_rank("stage") == 0 else 1.0
    (factor * _loss(parts[0](x), target)).backward()
    how: dict[str, Any] = {"scale": 2.0, "stages": mesh["stage"]}
    assert not zero_engine.unscale_and_clip_(parts, **how).is_finite


# ---- One checkpoint of all stages ----


class Hooked(nn.Linear):
    """A module that saves by a method of its own."""

    def get_extra_state(self) -> int:  # noqa: D102
        return 3

    def set_extra_state(self, state: int) -> None:  # noqa: D102
        pass


def _module_of(kind: str, number: int) -> nn.Module:
    name = "same" if kind == "names" else str(number)
    module = Hooked(WIDTH, WIDTH) if kind == "state_dict" and number else nn.Linear(WIDTH, WIDTH)
    return nn.ModuleDict({name: module})


REFUSED = {
    "names": "parameter 'same.weight' is on stages \\[0, 1\\]",
    "options": "expected the same param groups on all stages",
    "state_dict": "modules change what state_dict\\(\\) gives.*on rank 2",
    "ranks": "expected ranks that have different stages",
    "number": "expected the ranks to be a zero_comm.Group",
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_checkpoint_of_all_stages_is_refused(
    group: Group, kind: str, tmp_path: Path
) -> None:
    """On every rank, before anything is written."""
    mesh = _mesh(group)
    number = mesh.get_local_rank("stage")
    model = _module_of(kind, number)
    lr = 0.1 * (1 + number * (kind == "options"))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    zero_engine.shard(model, optimizer, ZeroConfig(1), group=mesh["data"])
    stages: Any = {"ranks": mesh["data"], "number": 2}.get(kind, mesh["stage"])
    with pytest.raises((StateError, CommError), match=REFUSED[kind]):
        zero_engine.save(tmp_path / "all", model, optimizer, step=0, stages=stages)
    assert not (tmp_path / "all").exists()
    zero_engine.save(tmp_path / f"{number}", model, optimizer, step=0)


class _WithCount(nn.Linear):
    """A module with a buffer that all stages name alike."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", ["buffers", "experts"])
def test_names_that_several_ranks_have_go_on(group: Group, kind: str, tmp_path: Path) -> None:
    """A buffer on both stages; experts that are others on each rank, and have the same names."""
    mesh = _mesh(group)
    alone = [dist.new_group([rank]) for rank in range(group.world_size)][group.rank]
    number = str(mesh.get_local_rank("stage"))

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed + group.rank)
        layers: dict[str, nn.Module] = {number: nn.Linear(WIDTH, WIDTH)}
        if kind == "buffers":
            layers["shared"] = layer = _WithCount()
            layer.weight = layer.bias = None
            layer.count.fill_(float(seed + group.rank))
        else:
            layers[f"experts{number}"] = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        model = nn.ModuleDict(layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        groups = {"experts*": alone} if kind == "experts" else {}
        zero_engine.shard(model, optimizer, ZeroConfig(2, groups=groups), group=mesh["data"])
        return model, optimizer

    model, optimizer = build(0)
    zero_engine.save(tmp_path, model, optimizer, step=0, stages=mesh["stage"])
    again, optimizer = build(10)
    report = zero_engine.load(tmp_path, again, optimizer, stages=mesh["stage"])
    assert report is not None and not report.unexpected
    for param, other in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(zero_engine.full_param(param), zero_engine.full_param(other))
    for buffer, other in zip(again.buffers(), model.buffers(), strict=True):
        assert torch.equal(buffer, other)


@pytest.mark.ranks(4)
def test_a_checkpoint_says_of_each_stage_what_it_would_say_of_it_alone(
    group: Group, tmp_path: Path
) -> None:
    """Frozen parameters, ties and state that is no tensor; random numbers are of its own ranks."""
    mesh = _mesh(group)
    number = mesh.get_local_rank("stage")

    def layers(numbers: list[int]) -> tuple[nn.Module, torch.optim.Optimizer]:
        found: dict[str, nn.Module] = {}
        for n in numbers:
            found |= {f"first{n}": nn.Linear(4, 4), f"second{n}": nn.Linear(4, 4)}
            found[f"second{n}"].weight = found[f"first{n}"].weight
            found[f"first{n}"].bias.requires_grad_(False)
        model = nn.ModuleDict(found)
        return model, torch.optim.RMSprop([p for p in model.parameters() if p.requires_grad])

    model, optimizer = layers([number])
    zero_engine.shard(model, optimizer, ZeroConfig(2), group=mesh["data"])
    sum(param.sum() for param in model.parameters() if param.requires_grad).backward()
    optimizer.step()
    optimizer.zero_grad()
    zero_engine.save(tmp_path, model, optimizer, step=1, stages=mesh["stage"])
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint is not None
    assert checkpoint.frozen == {"first0.bias", "first1.bias"}
    assert checkpoint.manifest.ties == {f"second{n}.weight": f"first{n}.weight" for n in (0, 1)}
    checkpoint.folder.close()

    whole, optimizer = layers([0, 1])
    zero_engine.shard(whole, optimizer, ZeroConfig(1), group=group)
    report = zero_engine.load(tmp_path, whole, optimizer)  # as many ranks, and no stages
    assert report is not None and not report.restores_rngs
    for name, param in model.named_parameters():
        found = zero_engine.full_param(param)
        for rank in (0, 2):  # calls of all ranks, for a parameter of each stage
            chosen = name.replace(f"{number}.", f"{rank // 2}.")
            other = zero_engine.full_param(whole.get_parameter(chosen))
            assert torch.equal(found, other) or rank // 2 != number


@pytest.mark.ranks(4)
def test_all_stages_hear_of_a_signal(group: Group) -> None:
    """Each stage asked its own ranks, and stopped at a step of its own."""
    mesh = _mesh(group)
    model = nn.Linear(WIDTH, WIDTH)
    zero_engine.shard(model, None, ZeroConfig(1), group=mesh["data"])
    with StopSignals(model, stages=mesh["stage"]) as stop:
        assert stop.arrived() is None
        if group.rank == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.arrived() == "SIGTERM"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_stage_takes_a_parameter_by_another_of_its_names(
    group: Group, stage: int, tmp_path: Path
) -> None:
    """The head of a model that ties it to the embedding is on a stage without that."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "data"))
    whole = nn.ModuleDict({"first": nn.Linear(4, 4), "last": nn.Linear(4, 4)})
    whole["last"].weight = whole["first"].weight
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1)
    zero_engine.shard(whole, optimizer, ZeroConfig(stage), group=group)
    (whole["last"](whole["first"](torch.ones(2, 4))) * group.rank).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    zero_engine.save(tmp_path, whole, optimizer, step=1)

    name = ("first", "last")[mesh.get_local_rank("stage")]
    part = nn.ModuleDict({name: nn.Linear(4, 4)})
    its_optimizer = torch.optim.AdamW(part.parameters(), lr=0.1)
    zero_engine.shard(part, its_optimizer, ZeroConfig(stage), group=mesh["data"])
    report = zero_engine.load(tmp_path, part, its_optimizer, stages=mesh["stage"])
    assert report is not None and not report.missing and not report.unexpected
    params = whole.named_parameters(remove_duplicate=False)
    expected = {full_name: zero_engine.full_param(param) for full_name, param in params}
    for full_name, param in part.named_parameters():
        assert torch.equal(zero_engine.full_param(param), expected[full_name]), full_name
    key = "exp_avg"
    moment = zero_engine.full_optimizer_state(part[name].weight, key)
    assert torch.equal(moment, zero_engine.full_optimizer_state(whole["first"].weight, key))
