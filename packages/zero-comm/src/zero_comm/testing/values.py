"""Comparisons of values that may be on different devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zero_comm.group import Group


def on_cpu(values: Any) -> Any:
    """Return a tensor, or all tensors of a mapping, list or tuple, on the CPU. Local.

    Tensors that are there already are returned as they are, and all other values, too.
    """
    if isinstance(values, Tensor):
        return values.cpu()
    if isinstance(values, Mapping):
        return {key: on_cpu(value) for key, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(map(on_cpu, values))
    return values


def rely_on(group: Group) -> None:
    """Wait for what was launched, as who reads it does, and until ranks have compared it.

    Collective. On the CPU both are done where a handle is waited on.
    """
    if group.device.type != "cpu":
        torch.accelerator.synchronize()
    group.compare_launches("reading", at_once=True)


def equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape and values, whatever their devices. Local."""
    return torch.equal(on_cpu(one), on_cpu(other))


def assert_close(actual: Any, expected: Any, **options: Any) -> None:
    """Compare as `torch.testing.assert_close`, whatever the devices. Local."""
    torch.testing.assert_close(on_cpu(actual), on_cpu(expected), **options)
