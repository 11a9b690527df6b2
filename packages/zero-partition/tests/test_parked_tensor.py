"""Stand-ins of tensors whose memory was given back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zero_partition import StateError
from zero_partition._parked_tensor import View
from zero_partition._torch_compat import plain_access

USES: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda t: t.sum(),
    "out": lambda t: torch.add(torch.ones(2, 3), 1, out=t),
    "in place": lambda t: t.mul_(2),
    "index": lambda t: t[0],
    "numpy": lambda t: t.detach().numpy(),
    "data": lambda t: t.data,
    "foreach": lambda t: torch._foreach_norm([t]),
    "copy into another": lambda t: torch.zeros(2, 3).copy_(t),
    "linear": lambda t: nn.functional.linear(torch.ones(1, 3), t),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "to": lambda t: t.to(torch.float64),
    "item": lambda t: t.tolist(),
}


@pytest.mark.parametrize("make", [torch.Tensor.clone, nn.Parameter])
@pytest.mark.parametrize("use", USES)
def test_a_parked_tensor_raises_where_its_values_are_used(
    make: Callable[[Tensor], Tensor], use: str
) -> None:
    """Without it, a read of memory that is gone ends the process, or goes on with NaN."""
    tensor = make(torch.arange(6.0).view(2, 3))
    with plain_access():
        View.of(tensor).take_away()

    with pytest.raises(StateError, match=r"reload_states\(model\)"):
        USES[use](tensor)


@pytest.mark.parametrize("make", [torch.Tensor.clone, nn.Parameter])
def test_a_parked_tensor_is_still_itself(make: Callable[[Tensor], Tensor]) -> None:
    """Optimizers, schedulers and reports ask for shapes, and look objects up by identity."""
    tensor = make(torch.arange(6.0).view(2, 3))
    known, kind = {tensor: "state"}, type(tensor)
    storage = tensor.untyped_storage()
    with plain_access():
        view = View.of(tensor)
        view.take_away()

    assert known[tensor] == "state"
    assert isinstance(tensor, kind)
    assert (tensor.shape, tensor.dtype, tensor.numel(), tensor.nbytes) == (
        torch.Size([2, 3]),
        torch.float32,
        6,
        24,
    )
    assert tensor.untyped_storage().nbytes() == 4
    assert "parked" in repr(tensor)

    with plain_access():
        view.put_back(storage)
    assert type(tensor) is kind
    assert torch.equal(tensor, torch.arange(6.0).view(2, 3))
    assert tensor.is_leaf
