"""Training split over ranks as Megatron splits it, checkpointed by the calls that it makes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from same_numbers import Run, assert_equal, plainly
from tensor_parallel import ParallelLayer, Whole
from torch import Tensor, nn
from zero_ckpt import (
    Checkpointer,
    CheckpointFunction,
    checkpoint,
    configure,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
    partition_activations_in_checkpoint,
)
from zero_comm import Group

pytestmark = pytest.mark.xdist_group("ranks")

DEPTH: Final = 4
DIM: Final = 8
NUMEL: Final = 7354  # of which half is the size of nothing else
BATCH: Final = (2, 5)  # an odd length: 2 x 5 x 8 elements


def _mpu(group: Group) -> Any:
    return SimpleNamespace(
        get_tensor_model_parallel_rank=lambda: group.rank,
        get_tensor_model_parallel_world_size=lambda: group.world_size,
        get_tensor_model_parallel_group=lambda: group.process_group,
    )


def _layers(group: Group, dropout: float) -> nn.ModuleList:
    torch.manual_seed(0)
    wholes = [Whole.draw(DIM, heads=4) for _ in range(DEPTH)]
    tracker = get_cuda_rng_tracker()
    return nn.ModuleList(ParallelLayer(whole, group, tracker, dropout) for whole in wholes)


def _train(group: Group, run: Run, *, dtype: torch.dtype, chunk: int, steps: int) -> list[Tensor]:
    """Losses, outputs, gradients, and where all rngs are, of each step."""
    layers = _layers(group, dropout=0.25).to(dtype)
    model_parallel_cuda_manual_seed(1234)
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.01)
    mask = torch.ones(BATCH[1], BATCH[1], dtype=torch.bool).triu(1)
    feed = torch.Generator().manual_seed(7)
    numbers: list[Tensor] = []

    def part(start: int) -> Callable[[Tensor, Tensor], Tensor]:
        def forward(x: Tensor, mask: Tensor) -> Tensor:
            for layer in layers[start : start + chunk]:
                x = layer(x, mask)
            return x

        return forward

    for _ in range(steps):
        x = torch.randn(*BATCH, DIM, generator=feed).to(dtype).requires_grad_()
        output = x
        for start in range(0, DEPTH, chunk):
            output = run(part(start), output, mask)
        loss = output.float().square().mean()
        loss.backward()
        grads = [param.grad.clone() for param in layers.parameters()]
        states = [torch.get_rng_state(), *get_cuda_rng_tracker().get_states().values()]
        numbers += [loss.detach(), output.detach(), x.grad, *grads, *states]
        optimizer.step()
        optimizer.zero_grad()
    return numbers


def _by_apply(choice: bool) -> Run:
    def run(function: Callable[..., Any], *args: Any) -> Any:
        return CheckpointFunction.apply(function, choice, *args)

    return run


CASES: Final = {  # how it is configured, and how it is called
    "kept": ({}, checkpoint),
    "kept, as Megatron asks": ({}, _by_apply(False)),
    "partitioned": ({"partition_activations": True}, checkpoint),
    "partitioned, as Megatron asks": ({}, _by_apply(True)),
    "partitioned, on the host": (
        {"partition_activations": True, "checkpoint_in_cpu": True},
        checkpoint,
    ),
    "partitioned, contiguous": (
        {
            "partition_activations": True,
            "contiguous_checkpointing": True,
            "num_checkpoints": DEPTH,
        },
        checkpoint,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_a_model_split_over_ranks_trains_as_it_does_without_checkpoints(
    group: Group, name: str, dtype: torch.dtype
) -> None:
    """Masks of parts must differ and masks of wholes agree in the second run as in the first."""
    options, run = CASES[name]
    configure(_mpu(group), **options)

    for chunk in (1, 2):
        expected = _train(group, plainly, dtype=dtype, chunk=chunk, steps=3)
        found = _train(group, run, dtype=dtype, chunk=chunk, steps=3)

        assert_equal(found, expected)


@pytest.mark.parametrize("is_configured", [False, True])
@pytest.mark.parametrize("choice", [False, True])
def test_a_call_that_says_how_inputs_are_kept_is_heard(
    group: Group, choice: bool, is_configured: bool
) -> None:
    """Megatron's flag is the call's, DeepSpeed's is the process's; code may have both."""
    checkpointer = Checkpointer()
    checkpointer.configure(_mpu(group), partition_activations=is_configured)
    x = torch.ones(NUMEL, requires_grad=True)

    output = checkpointer.checkpoint_distributed(torch.sin, choice, 2 * x)

    num_shards = sum(type(t) is Tensor and t.shape == (NUMEL // 2,) for t in gc.get_objects())
    assert num_shards == int(choice)
    output.sum().backward()
    assert torch.equal(x.grad, 2 * torch.cos(2 * torch.ones(NUMEL)))


def test_messages_between_ranks_are_measured_apart_from_copies(group: Group) -> None:
    """Which of them is slow decides between splitting inputs and moving them to the host."""
    for is_split in (False, True):
        checkpointer = Checkpointer()
        checkpointer.configure(_mpu(group), partition_activations=is_split, profile=True)
        x = torch.ones(10, requires_grad=True)

        checkpointer.checkpoint(torch.sin, 2 * x).sum().backward()

        (timing,) = checkpointer.timings()
        assert (timing.gather_s > 0) == is_split


def test_partitioning_is_turned_off_and_on_between_steps(group: Group) -> None:
    """Megatron-style code does so around layers that it must not split."""
    configure(_mpu(group), partition_activations=True)
    flag = False

    def run(function: Callable[..., Any], *args: Any) -> Any:
        nonlocal flag
        partition_activations_in_checkpoint(flag)
        flag = not flag
        return checkpoint(function, *args)

    found = _train(group, run, dtype=torch.float32, chunk=1, steps=2)

    assert_equal(found, _train(group, plainly, dtype=torch.float32, chunk=1, steps=2))


def test_the_layer_computes_what_it_does_in_one_piece(group: Group) -> None:
    """Else these tests would be about something that is no tensor parallelism."""
    configure(_mpu(group))
    model_parallel_cuda_manual_seed(1234)
    whole_layers = _layers(Group.solo(), dropout=0.0)
    x = torch.randn(*BATCH, DIM)
    mask = torch.ones(BATCH[1], BATCH[1], dtype=torch.bool).triu(1)
    outcomes = []

    for layers in (whole_layers, _layers(group, dropout=0.0)):
        y = x.clone().requires_grad_()
        output = y
        for layer in layers:
            output = checkpoint(layer, output, mask)
        output.square().sum().backward()
        assert y.grad is not None
        outcomes.append((output.detach(), y.grad))

    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, other)
