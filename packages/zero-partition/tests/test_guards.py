"""Stand-ins cannot be mistaken for data."""

import pytest
import torch
from torch import nn
from zero_comm import Group
from zero_partition import StateError
from zero_partition._guards import GradientGuard, GradientShard, placeholder

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_placeholder_has_the_shape_and_reads_as_nan(dtype: torch.dtype) -> None:
    """It never shows another unit's bytes."""
    stand_in = placeholder(torch.Size([3, 5]), dtype, CPU)

    assert stand_in.shape == (3, 5)
    assert stand_in.dtype is dtype
    assert stand_in.isnan().all()
    assert stand_in.untyped_storage().nbytes() == dtype.itemsize


def test_placeholders_do_not_look_tied() -> None:
    """Detectors of tied weights compare addresses."""
    first, second = (placeholder(torch.Size([2]), torch.float32, CPU) for _ in range(2))

    assert first.data_ptr() != second.data_ptr()


def test_a_placeholder_cannot_be_initialised_at_random() -> None:
    """The values would be lost without a word; constants are caught at the next forward."""
    param = nn.Parameter(placeholder(torch.Size([2, 2]), torch.float32, CPU))

    with pytest.raises(RuntimeError, match="single memory location"):
        nn.init.normal_(param)


def _guarded_param() -> nn.Parameter:
    param = nn.Parameter(torch.ones(4))
    param.grad = GradientGuard.over(placeholder(param.shape, param.dtype, CPU))
    return param


@pytest.mark.parametrize(
    "use",
    [
        lambda p: nn.utils.clip_grad_norm_([p], 1.0),
        lambda p: p.grad + 1,
        lambda p: p.grad.norm(),
        lambda p: p.grad.zero_(),
        lambda p: p.grad.tolist(),
        lambda p: torch.optim.SGD([p], lr=1.0).step(),
    ],
    ids=["clip", "add", "norm", "zero", "tolist", "step"],
)
def test_a_guard_refuses_every_use_of_values(use) -> None:
    """A sharded gradient that reads as none would be a silent no-op."""
    with pytest.raises(StateError, match="clip_grad_norm_"):
        use(_guarded_param())


def test_a_guard_answers_questions_about_shape() -> None:
    """Progress reports and debuggers look at it."""
    guard = _guarded_param().grad

    assert guard is not None
    assert (guard.shape, guard.dtype, guard.numel(), guard.dim()) == ((4,), torch.float32, 4, 1)
    assert "sharded" in repr(guard)


def _two_ranks() -> Group:
    solo = Group.solo()
    return Group(None, 0, 2, solo.device, solo.backend)


@pytest.mark.parametrize(
    "norm",
    [
        torch.linalg.vector_norm,
        lambda g: torch._foreach_norm([g]),
        lambda g: g.norm(),
        torch.norm,
    ],
    ids=["vector_norm", "foreach_norm", "method", "function"],
)
def test_the_norm_of_one_ranks_part_is_refused(norm) -> None:
    """Clipping over the shards would clip each rank by another factor."""
    shard = GradientShard.over(torch.ones(4), _two_ranks())

    with pytest.raises(StateError, match="rank 0 of 2"):
        norm(shard)


def test_a_shard_is_an_ordinary_tensor_otherwise() -> None:
    """Optimizers must not notice, and must update the same memory."""
    memory = torch.ones(4)
    shard = GradientShard.over(memory, _two_ranks())

    result = shard * 2
    shard.mul_(3)

    assert type(result) is torch.Tensor
    assert torch.equal(memory, torch.full((4,), 3.0))


def test_alone_a_shard_is_the_whole_gradient() -> None:
    """With one rank there is nothing to refuse."""
    shard = GradientShard.over(torch.ones(4), Group.solo())

    assert torch.linalg.vector_norm(shard) == 2
