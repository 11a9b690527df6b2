"""Torch's private functions do what we take them to do, in the version that is installed."""

from __future__ import annotations

import torch
from torch import Tensor
from zero_offload._torch_compat import as_subclass_sharing_memory, plain_call


class _Refusing(Tensor):
    @classmethod
    def __torch_function__(cls, *arguments: object) -> None:
        raise AssertionError(arguments)


def test_a_subclass_shares_memory_and_a_plain_call_passes_it_by() -> None:
    """`Tensor._make_subclass` and `DisableTorchFunctionSubclass`: a guard rests on both."""
    tensor = torch.zeros(3)

    refusing = as_subclass_sharing_memory(_Refusing, tensor)
    plain_call(Tensor.fill_, (refusing, 2.0), {})

    assert type(refusing) is _Refusing
    assert plain_call(Tensor.data_ptr, (refusing,), {}) == tensor.data_ptr()
    assert tensor.tolist() == [2, 2, 2]
