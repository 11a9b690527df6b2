"""Training split over ranks as Megatron splits it, checkpointed by the calls that it makes."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from same_numbers import Run, assert_equal, plainly
from torch import Tensor, nn
from torch.nn import functional
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
from zero_comm.testing import equal

DEPTH: Final = 4
DIM: Final = 8
NUMEL: Final = 7354  # of which half is the size of nothing else


def _mpu(group: Group) -> Any:
    return SimpleNamespace(
        get_tensor_model_parallel_rank=lambda: group.rank,
        get_tensor_model_parallel_world_size=lambda: group.world_size,
        get_tensor_model_parallel_group=lambda: group.process_group,
    )


class _Sum(torch.autograd.Function):
    """Over the ranks: of values that leave a split region, of gradients that do so backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, leaves: bool) -> Tensor:
        ctx.group, ctx.leaves = group, leaves
        return _sum_over(group, x) if leaves else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] if ctx.leaves else _sum_over(ctx.group, grads[0]), None, None


def _sum_over(group: Group, tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total, group=group.process_group)
    return total


class _Layer(nn.Module):
    """Hidden units are split, and their dropout is the model-parallel rng's; the rest is not."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group, self.tracker = group, get_cuda_rng_tracker()
        up, down = torch.randn(4 * DIM, DIM), torch.randn(DIM, 4 * DIM)
        self.up = nn.Parameter(up.chunk(group.world_size)[group.rank].clone())
        self.down = nn.Parameter(down.chunk(group.world_size, dim=1)[group.rank].clone())
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = functional.linear(_Sum.apply(self.norm(x), self.group, False), self.up)
        with self.tracker.fork():
            hidden = functional.dropout(hidden.relu(), 0.25)
        y = _Sum.apply(functional.linear(hidden, self.down), self.group, True)
        return x + functional.dropout(y.masked_fill(mask, 0.0), 0.25)


def _train(group: Group, run: Run, *, dtype: torch.dtype, chunk: int) -> list[Tensor]:
    """Outputs, gradients, and where all rngs are, of each step."""
    torch.manual_seed(0)
    layers = nn.ModuleList(_Layer(group) for _ in range(DEPTH)).to(dtype)
    model_parallel_cuda_manual_seed(1234)
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.01)
    mask = torch.arange(DIM) == 3
    numbers: list[Tensor] = []

    def part(start: int) -> Callable[[Tensor, Tensor], Tensor]:
        def forward(x: Tensor, mask: Tensor) -> Tensor:
            for layer in layers[start : start + chunk]:
                x = layer(x, mask)
            return x

        return forward

    for _ in range(2):
        x = torch.randn(2, 5, DIM, dtype=dtype, requires_grad=True)
        output = x
        for start in range(0, DEPTH, chunk):
            output = run(part(start), output, mask)
        output.float().square().mean().backward()
        grads = [param.grad.clone() for param in layers.parameters()]
        states = [torch.get_rng_state(), *get_cuda_rng_tracker().get_states().values()]
        numbers += [output.detach(), x.grad, *grads, *states]
        optimizer.step()
        optimizer.zero_grad()
    return numbers


def _by_apply(choice: bool) -> Run:
    def run(function: Callable[..., Any], *args: Any) -> Any:
        return CheckpointFunction.apply(function, choice, *args)

    return run


_flags = itertools.cycle((False, True))


def _in_turn(function: Callable[..., Any], *args: Any) -> Any:
    """Megatron-style code turns it off around layers that it must not split."""
    partition_activations_in_checkpoint(next(_flags))
    return checkpoint(function, *args)


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
    "partitioned in turn": ({}, _in_turn),
}


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "chunk"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_a_model_split_over_ranks_trains_as_it_does_without_checkpoints(
    group: Group, dtype: torch.dtype, chunk: int
) -> None:
    """Masks of parts must differ and masks of wholes agree in the second run as in the first."""
    configure(_mpu(group))
    expected = _train(group, plainly, dtype=dtype, chunk=chunk)
    for name, (options, run) in CASES.items():
        configure(None, **options)
        try:
            assert_equal(_train(group, run, dtype=dtype, chunk=chunk), expected)
        except AssertionError as error:
            raise AssertionError(f"{name}: number {error}") from error


def test_a_call_that_says_how_inputs_are_kept_is_heard(group: Group) -> None:
    """Megatron's flag is the call's, DeepSpeed's is the process's; code may have both."""
    for is_configured, choice in itertools.product((False, True), repeat=2):
        checkpointer = Checkpointer()
        checkpointer.configure(_mpu(group), partition_activations=is_configured)
        x = torch.ones(NUMEL, requires_grad=True)
        outputs = [checkpointer.checkpoint_distributed(torch.sin, choice, 2 * x)]
        checkpointer.partition_activations_in_checkpoint(choice)
        outputs.append(checkpointer.checkpoint(torch.sin, 2 * x))

        num_shards = sum(type(t) is Tensor and t.shape == (NUMEL // 2,) for t in gc.get_objects())
        assert num_shards == (2 if choice else 0)
        sum(outputs).sum().backward()
        assert equal(x.grad, 4 * torch.cos(2 * torch.ones(NUMEL)))


def test_messages_between_ranks_are_measured_apart_from_copies(group: Group) -> None:
    """Which of them is slow decides between splitting inputs and moving them to the host."""
    for is_split in (False, True):
        checkpointer = Checkpointer()
        checkpointer.configure(_mpu(group), partition_activations=is_split, profile=True)
        x = torch.ones(10, requires_grad=True)

        checkpointer.checkpoint(torch.sin, 2 * x).sum().backward()

        (timing,) = checkpointer.timings()
        assert (timing.gather_s > 0) == is_split
