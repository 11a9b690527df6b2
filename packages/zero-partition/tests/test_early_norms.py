"""Norms of gradients that leave the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from zero_comm import Group
from zero_partition._early_norms import EarlyNorms
from zero_partition._guards import GradientShard

EMPTY, PART = torch.empty(0), torch.tensor([3.0, -4.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_that_of_what_was_received(dtype: torch.dtype) -> None:
    """The gradient itself is on its way then, and its memory holds something else."""
    norms, arrived = EarlyNorms(), [EMPTY.clone(), torch.full((2,), torch.nan)]

    norms.take([EMPTY.to(dtype), PART.to(dtype)])
    norms.settle(arrived)

    found = norms.of(1, arrived[1])
    assert found is not None and found.dtype == torch.float32 and found == 5
    assert norms.of(0, arrived[0]) is None, "nothing was received"


def test_no_norm_is_given_while_the_gradient_is_on_its_way() -> None:
    """Nobody could say whether it was written to meanwhile."""
    norms = EarlyNorms()

    norms.take([PART])

    assert norms.of(0, PART) is None


@pytest.mark.parametrize(
    "write",
    [
        lambda grad: grad.mul_(2),
        lambda grad: grad.data.mul_(2),
        lambda grad: grad.numpy().fill(1),
        lambda grad: torch._foreach_mul_([grad], 2.0),
        lambda grad: torch._amp_foreach_non_finite_check_and_unscale_(
            [grad], torch.zeros(1), torch.ones(()) / 2
        ),
    ],
    ids=["in place", "data", "numpy", "foreach", "grad scaler"],
)
def test_a_write_makes_a_norm_void(write: Callable[[Tensor], Any]) -> None:
    """Users scale gradients and clip by value, and not all of it counts as a write with torch."""
    norms, arrived = EarlyNorms(), GradientShard.over(PART.clone(), Group.solo())
    norms.take([PART])
    norms.settle([arrived])
    assert norms.of(0, arrived) == 5

    write(arrived)

    assert norms.of(0, arrived) is None
    norms.settle([arrived])
    assert norms.of(0, arrived) is None, "settling again must not bring it back"


def test_a_further_backward_makes_norms_void() -> None:
    """It adds to the gradients."""
    norms, arrived = EarlyNorms(), PART.clone()
    norms.take([PART])
    norms.settle([arrived])

    norms.clear()

    assert norms.of(0, arrived) is None
