"""Which state an optimizer keeps for each parameter, as a step of a tiny one shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from attrs import frozen
from torch import Tensor, nn

from ._chained import members_of
from ._errors import PartitionError
from ._probe import states_after_step

_SIDES: Final = (11, 13, 7, 5, 3, 2, 2, 2)  # of the parameters that are tried; told apart up to 2


@frozen
class StateTensor:
    """One tensor of a parameter's state, of any size of the parameter."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # that it had
    of: tuple[int, ...]  # when this was the shape of the parameter

    def shape_for(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Its shape for a parameter of this one, which has as many dims."""
        if self.shape == self.of:
            return tuple(shape)
        if self.shape and math.prod(self.shape) == math.prod(self.of):
            return (math.prod(shape),)
        return tuple(shape[self.of.index(side)] if side in self.of else side for side in self.shape)


Kind = tuple[int, int, torch.dtype]  # param group, dims, dtype


@frozen
class StatePlan:
    """State by kind of parameter. Empty without an optimizer."""

    of_kind: Mapping[Kind, tuple[StateTensor, ...]]

    def bytes_of(self, kind: Kind, shape: Sequence[int]) -> tuple[int, int]:
        """Of a parameter: one value per element or row, and single numbers."""
        state = scalars = 0
        for tensor in self.of_kind.get(kind, ()):
            found = tensor.shape_for(shape)
            num_bytes = math.prod(found) * tensor.dtype.itemsize
            if found == tuple(shape) or math.prod(found) > 1:
                state += num_bytes
            else:
                scalars += num_bytes
        return state, scalars


def plan_state(optimizer: torch.optim.Optimizer, kinds: Sequence[Kind]) -> StatePlan:
    """Step a copy of the optimizer on a tiny parameter of each kind. Local.

    Args:
        optimizer: Is not changed.
        kinds: Of its parameters, as they are stepped; groups are counted through all optimizers of
            a chain.

    Raises:
        PartitionError: It cannot step so.
    """
    found: dict[Kind, tuple[StateTensor, ...]] = {}
    first = 0
    for member in members_of(optimizer):
        groups = range(first, first + len(member.param_groups))
        mine = [sorted({k for k in kinds if k[0] == at}, key=str) for at in groups]
        params = [[_tiny(kind) for kind in of_group] for of_group in mine]
        states = states_after_step(member, params)
        if states is None:
            raise PartitionError(
                f"a trial step of a {type(member).__name__} on tiny tensors failed, so nothing is "
                "known of the state that it keeps; give an optimizer that steps any tensors"
            )
        for of_group, tried in zip(mine, params, strict=True):
            for kind, param in zip(of_group, tried, strict=True):
                found[kind] = tuple(
                    StateTensor(name, value.dtype, tuple(value.shape), tuple(param.shape))
                    for name, value in states.get(param, {}).items()
                    if isinstance(value, Tensor)
                )
        first = groups.stop
    return StatePlan(found)


def _tiny(kind: Kind) -> nn.Parameter:
    _, num_dims, dtype = kind
    return nn.Parameter(torch.ones(_SIDES[:num_dims], dtype=dtype))
