"""Norm layers with running statistics, other buffers, and inputs, in a model of 16 bits."""

from __future__ import annotations

import copy
import inspect
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import train
from zero_comm import Group
from zero_comm.testing import equal
from zero_engine import Offload, Precision
from zero_partition import memory_report

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NUM_STEPS = 3
SCALE = 2.0**8  # of the loss: where fp16 ends, DDP's mean of gradients is rounded otherwise


class _More(NamedTuple):
    gain: Tensor
    index: Tensor


class _Normed(nn.Module):
    """Norms with statistics and without, and a buffer of fp32; `is_by_hand` writes out the law."""

    def __init__(self, *, is_by_hand: bool = False, has_sync: bool = False) -> None:
        super().__init__()
        self.is_by_hand = is_by_hand
        self.first = nn.Linear(5, 6)
        self.batch = nn.SyncBatchNorm(3) if has_sync else nn.BatchNorm1d(3)
        self.instance = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
        self.bare = nn.BatchNorm1d(3, affine=False)
        self.follows = nn.BatchNorm1d(3, track_running_stats=False)
        self.layer = nn.LayerNorm(6)
        self.head = nn.Linear(6, 4)
        self.register_buffer("table", torch.linspace(-1, 1, 6) / 3)
        self.seen: list[torch.dtype] = []

    def to_dtype(self, dtype: torch.dtype) -> _Normed:
        """What the law says, in plain torch."""
        for module in (self.first, self.follows, self.layer, self.head):
            module.to(dtype)
        return self

    def forward(self, batch: dict[str, Any], *, more: list[_More]) -> Tensor:
        x, ((gain, index),) = batch["x"], more
        if self.is_by_hand:
            x, gain = x.to(self.first.weight.dtype), gain.to(self.first.weight.dtype)
        self.seen = [x.dtype, gain.dtype, index.dtype]
        x = self.first(x) * gain
        for norm in (self.batch, self.instance, self.bare):
            x = norm(x.float()).to(x.dtype) if self.is_by_hand else norm(input=x)
            x = nn.functional.gelu(x)
        x = self.layer(self.follows(x)) + self.table.to(x.dtype)
        return self.head(x[:, index])


def _inputs(step: int, rank: int) -> tuple[dict[str, Any], list[_More]]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(4, 3, 5, generator=generator)
    return {"x": x}, [_More(torch.rand(1, generator=generator), torch.tensor([0, 2]))]


def _loss(model: nn.Module, step: int, rank: int) -> Tensor:
    batch, more = _inputs(step, rank)
    return model(batch, more=more).float().square().mean() * SCALE


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1 / SCALE, momentum=0.9)


def _by_hand(group: Group, precision: Precision) -> tuple[list[float], _Normed, list[Tensor]]:
    """DistributedDataParallel over the dtypes of the law, and masters beside it."""
    model = parity.build(lambda: _Normed(is_by_hand=True))
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    assert precision.params is not None
    model.to_dtype(precision.params)
    if precision.masters is None:
        masters = list(model.parameters())
    # Statistics are each rank's own, as here. Torch 2.13 renames the argument.
    names = inspect.signature(DistributedDataParallel).parameters
    syncs = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    wrapped = DistributedDataParallel(model, process_group=group.process_group, **{syncs: False})
    optimizer, losses = _sgd(masters), []
    for step in range(NUM_STEPS):
        loss = _loss(wrapped, step, group.rank)
        loss.backward()
        losses.append(loss.item())
        for master, param in zip(masters, model.parameters(), strict=True):
            if master is not param:
                assert param.grad is not None
                master.grad = param.grad.to(FP32)
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, model.parameters(), strict=True):
                param.copy_(master)
        model.zero_grad()
    return losses, model, [master.detach() for master in masters]


def _train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> list[float]:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        return _loss(model, steps[step], rank)

    return train(model, optimizer, loss_of, num_steps=len(steps))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_norms_with_statistics_compute_as_they_are_and_the_rest_in_16_bits(
    group: Group, dtype: torch.dtype
) -> None:
    """Variances of 16 bits lose what they count; FSDP2's users wrap such layers apart."""
    kept = {"batch", "instance", "bare", "table"}
    for masters in (None, FP32):
        precision = Precision(params=dtype, masters=masters)
        losses, plain, values = _by_hand(group, precision)
        ways: list[tuple[int, dict[str, Any]]] = [(stage, {}) for stage in (1, 2, 3)]
        ways.append((0, {}) if masters is None else (2, {"offload": Offload(optimizer="host")}))
        for (stage, more), is_init in itertools.product(ways, (False, True)):
            config = ZeroConfig(stage, precision=precision, state_dict="gather", **more)
            if is_init:
                torch.manual_seed(0)
                with zero_engine.Init(group=group, config=config):
                    model = _Normed()
            else:
                model = parity.build(_Normed)
            optimizer = _sgd(model.parameters())
            zero_engine.shard(model, optimizer, config, group=group)
            what = f"stage {stage}, masters {masters}, {more}, {is_init}"

            assert _train(model, optimizer, group.rank, range(NUM_STEPS)) == losses, what
            assert model.seen == [dtype, dtype, torch.int64]
            for name, value in model.state_dict().items():
                is_index = name.endswith("num_batches_tracked")
                expected = FP32 if name.split(".")[0] in kept else dtype
                assert value.dtype == (torch.int64 if is_index else expected), name
                assert equal(value, plain.state_dict()[name]), f"{what}, {name}"
            zero_engine.unshard(model, optimizer)
            for param, value in zip(model.parameters(), values, strict=True):
                assert equal(param, value), what
            assert not model.batch._forward_pre_hooks


def test_bytes_and_files_know_of_norms_that_keep_their_dtype(group: Group, tmp_path: Path) -> None:
    """A plan, a report and a checkpoint are of the dtypes that are trained."""
    precision = Precision(params=BF16)
    for stage in (1, 2, 3):
        config = ZeroConfig(stage, precision=precision)
        with torch.device("meta"):
            empty = _Normed()
        plan = zero_engine.plan(
            empty,
            config,
            optimizer=_sgd(empty.parameters()),
            device=group.device,
            world_size=2,
            rank=group.rank,
            reads_peers=group.exchanges.reads_peers,
        )
        model = parity.build(_Normed)
        optimizer = _sgd(model.parameters())
        zero_engine.shard(model, optimizer, config, group=group)
        _train(model, optimizer, group.rank, range(2))
        assert memory_report(model) == plan.at_rest, f"stage {stage}"
        where = f"{tmp_path}/{stage}"
        zero_engine.save(where, model, optimizer, step=2)
        expected = _train(model, optimizer, group.rank, range(2, 4))

        again = parity.build(_Normed, seed=7)
        resumed = _sgd(again.parameters())
        other = ZeroConfig(4 - stage, precision=precision)
        zero_engine.shard(again, resumed, other, group=group)
        zero_engine.load(where, again, resumed)
        found = _train(again, resumed, group.rank, range(2, 4))
        assert found == expected or group.rank, "buffers are those of rank 0"


@pytest.mark.ranks(1)
def test_sync_batch_norm_is_a_norm_with_statistics(group: Group) -> None:
    """It is what several ranks use in the place of batch norm."""
    model = parity.build(lambda: _Normed(has_sync=True)).eval()
    plain = copy.deepcopy(model).to_dtype(BF16)
    plain.is_by_hand = True
    config = ZeroConfig(3, precision=Precision(params=BF16, outputs=FP32))
    zero_engine.shard(model, None, config, group=group)
    batch, more = _inputs(0, 0)
    with torch.no_grad():
        assert equal(model(batch, more=more), plain(batch, more=more).float())


class _CastsItself(nn.Linear):
    seen = FP32

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dtype
        return super().forward((x * 1000).cos().to(self.weight.dtype))


@pytest.mark.parametrize("stage", [0, 3])
def test_inputs_are_left_alone_where_that_is_said(group: Group, stage: int) -> None:
    """A model that casts its inputs itself may need them whole first, as times and masks are."""
    x = torch.rand(3, 5)
    plain = parity.build(lambda: _CastsItself(5, 5)).to(BF16)
    for casts in (False, True):
        model = parity.build(lambda: _CastsItself(5, 5))
        precision = Precision(params=BF16, masters=None, cast_inputs=casts)
        zero_engine.shard(model, None, ZeroConfig(stage, precision=precision), group=group)
        assert equal(model(x), plain(x.to(BF16) if casts else x))
        assert model.seen == (BF16 if casts else FP32)
    model = parity.build(lambda: _CastsItself(5, 5))
    zero_engine.shard(model, None, ZeroConfig(stage, precision=Precision()), group=group)
    model(x)
    assert model.seen == FP32, "no dtype was asked for"


def test_a_file_of_deepspeeds_leaves_inputs_as_deepspeed_does(group: Group) -> None:
    """Its scripts cast what they want cast; anything more would be other numbers."""
    file = {
        "train_micro_batch_size_per_gpu": 3,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    }
    model = parity.build(lambda: _CastsItself(5, 5))
    engine, *_ = zero_engine.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=file
    )
    engine(torch.rand(3, 5))
    assert model.seen == FP32


@pytest.mark.cpu_only("the simulated device multiplies matrices of different dtypes")
def test_inputs_of_another_dtype_are_named_in_torchs_error(group: Group) -> None:
    """Its scripts meet it first, and torch says nothing of the file."""
    file = {
        "train_micro_batch_size_per_gpu": 3,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    }
    model = parity.build(lambda: nn.Linear(5, 5))
    engine, *_ = zero_engine.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=file
    )
    x = torch.rand(3, 5)
    with pytest.raises(RuntimeError, match="dtype") as found:
        engine(x)
    (note,) = found.value.__notes__
    assert "Inputs have torch.float32 and parameters torch.bfloat16" in note
    engine(x.to(torch.bfloat16)).sum().backward()
    with pytest.raises(RuntimeError) as found:
        engine(x.to(torch.bfloat16)[:, :4])
    assert not hasattr(found.value, "__notes__")
    with pytest.raises(AttributeError, match="neither the Engine nor the Linear in it has"):
        engine.module_state_dict()
    assert not hasattr(engine, "missing") and engine.in_features == 5
