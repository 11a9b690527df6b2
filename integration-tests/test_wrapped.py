"""What others have wrapped for training on several ranks is refused by name, with the remedy."""

from __future__ import annotations

import os
from collections.abc import Callable

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from training import assert_weights_of
from zero_comm import Group
from zero_partition import PartitionError

PREPARED = r"comes from Accelerator\.prepare\(\); shard\(\) the model and the optimizer in place"
Made = tuple[nn.Module, torch.optim.Optimizer | None]


def _build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = parity.build(parity.Chain)
    return model, parity.adamw(model)


def _ddp(group: Group) -> Made:
    model, optimizer = _build()
    return DistributedDataParallel(model, process_group=group.process_group), optimizer


def _ddp_inside(group: Group) -> Made:
    model, optimizer = _build()
    model.layers[1] = DistributedDataParallel(model.layers[1], process_group=group.process_group)
    return model, optimizer


def _data_parallel(group: Group) -> Made:
    model, optimizer = _build()
    return nn.DataParallel(model), optimizer


def _fsdp(group: Group) -> Made:
    model, _ = _build()
    model.layers[1] = FullyShardedDataParallel(
        model.layers[1], group.process_group, device_id=group.device
    )
    return model, parity.adamw(model)


def _fsdp2(group: Group) -> Made:
    model, _ = _build()
    fully_shard(model.layers[1])
    fully_shard(model)
    return model, parity.adamw(model)


def _tensor_parallel(group: Group) -> Made:
    model, _ = _build()
    distribute_module(model, init_device_mesh(group.device.type, (group.world_size,)))
    return model, parity.adamw(model)


def _accelerate(group: Group) -> Made:
    return _prepared(group, "no")


def _accelerate_optimizer(group: Group) -> Made:
    _, optimizer = made = _prepared(group, "no")
    return _unwrapped(made), optimizer


def _accelerate_forward(group: Group) -> Made:
    """The forward of what DistributedDataParallel wraps is patched, too."""
    return _unwrapped(_prepared(group, "bf16")), None


def _prepared(group: Group, mixed_precision: str) -> Made:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    rank, world_size = str(group.rank), str(group.world_size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, OMP_NUM_THREADS="1")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # asked for, and not used
    return accelerate.Accelerator(cpu=True, mixed_precision=mixed_precision).prepare(*_build())


def _unwrapped(made: Made) -> nn.Module:
    assert isinstance(made[0], DistributedDataParallel)
    return made[0].module


WRAPPED: dict[Callable[[Group], Made], str] = {
    _ddp: r"the model is wrapped by torch's DistributedDataParallel; pass .*, ddp\.module",
    _ddp_inside: r"module 'layers\.1' of the model is wrapped by torch's DistributedDataParallel",
    _data_parallel: r"the model is wrapped by torch's DataParallel; pass .* its \.module",
    _fsdp: r"'layers\.1' .* by torch's FullyShardedDataParallel; pass the model as it is before",
    _fsdp2: r"the model is wrapped by torch's FSDPModule; .* as it is before .*fully_shard\(\)",
    _tensor_parallel: r"parameter 'layers\.0\.weight' is a DTensor on .*parallelize_module",
    _accelerate: r"wrapped by torch's DistributedDataParallel; .*ddp\.module",
    _accelerate_optimizer: r"by Accelerator\.prepare\(\) in an AcceleratedOptimizer.*\.optimizer,",
    _accelerate_forward: PREPARED,
}


@pytest.mark.ranks(timeout_s=120)
def test_what_others_have_wrapped_is_refused_by_name(group: Group) -> None:
    """Each would do by itself what sharding does, and an error of torch came much later."""
    for make, message in WRAPPED.items():
        model, optimizer = make(group)
        with pytest.raises(PartitionError, match=message):
            zero_engine.shard(model, optimizer, ZeroConfig(0), group=group)
        with pytest.raises(PartitionError, match=message):
            zero_engine.initialize(
                model=model,
                optimizer=optimizer,
                config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}},
                group=group,
            )


@pytest.mark.ranks(1, timeout_s=120)
def test_what_accelerate_prepares_in_place_is_refused_by_name(group: Group) -> None:
    """Alone, it returns the model itself."""
    model, optimizer = _build()
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    assert accelerate.Accelerator(cpu=True).prepare(model) is model
    with pytest.raises(PartitionError, match=PREPARED):
        zero_engine.shard(model, optimizer, group=group)


def test_the_model_inside_of_ddp_trains_as_ddp_does(group: Group) -> None:
    """The remedy that the error names must be one."""
    plain, plain_optimizer = _build()
    ddp = DistributedDataParallel(plain, process_group=group.process_group)
    model, optimizer = _build()
    inside = DistributedDataParallel(model, process_group=group.process_group).module
    zero_engine.shard(inside, optimizer, ZeroConfig(3), group=group)
    for step in range(2):
        x = torch.randn(2, 64, generator=torch.Generator().manual_seed(10 * step + group.rank))
        for module, its_optimizer in ((ddp, plain_optimizer), (inside, optimizer)):
            parity.finish_step(module(x).square().mean(), its_optimizer)
    assert_weights_of(inside, plain, group=group, what="ddp.module")
