"""Optimizer state as tensors and words about them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from zero_partition import StateError
from zero_partition.nested import describe, is_plain, map_tensors, rebuild

A, B = torch.arange(6.0).view(2, 3), torch.ones(2, 3)
NESTS = {
    "plain": {"step": 3, 1: [1.5, True]},
    "tensors": [A, (B, {"c": A})],
    "sets and dtypes": {"seen": {1, 2}, "dtype": torch.bfloat16, "shape": torch.Size((2, 3))},
    "a tensor of tensors": {"exp_avg": TwoTensor(A, B)},
}


@pytest.mark.parametrize("nest", NESTS)
def test_what_is_described_is_built_again_of_the_same_tensors(nest: str) -> None:
    """Through JSON, as in a manifest, and with something in the place of tensors meanwhile."""
    tensors: list[Tensor] = []
    said = json.loads(json.dumps(describe(NESTS[nest], tensors)))
    numbers = iter([_Number(number) for number in range(len(tensors))])
    found = map_tensors(rebuild(said, numbers), lambda each: tensors[each.number], _Number)
    torch.testing.assert_close(_flat(found), _flat(NESTS[nest]))


class _Number:
    def __init__(self, number: int) -> None:
        self.number = number


def _flat(value: Any) -> Any:
    if isinstance(value, TwoTensor):
        return [value.a, value.b]
    if isinstance(value, dict):
        return {str(key): _flat(item) for key, item in value.items()}
    if isinstance(value, set):
        return sorted(value)
    return 16 if value is torch.bfloat16 else value


@pytest.mark.parametrize("key", [A, _Number(1)], ids=["tensor", "object"])
def test_what_cannot_be_a_key_in_a_file_is_refused(key: Any) -> None:
    with pytest.raises(StateError, match=f"keys that are numbers.*got a {type(key).__name__}"):
        describe([{key: 1.0}, A], [])


def test_a_dict_with_keys_of_an_enumeration_is_not_plain() -> None:
    assert not is_plain(describe({pytest.ExitCode.OK: 1.0}, []))
    assert is_plain(describe({(1, "a"): [1.0, torch.float16]}, []))


def test_a_class_that_nobody_has_imported_is_not_looked_for() -> None:
    said = ["wrapper", ["nowhere.to.be", "Found"], describe({"a": A}, []), *_plain(None, ())]
    with pytest.raises(StateError, match=r"nowhere\.to\.be\.Found.*import the optimizer's package"):
        map_tensors(rebuild(said, iter([A])), lambda each: each)


def _plain(*values: Any) -> list[Any]:
    return [describe(value, []) for value in values]
