"""Which sub-groups the state of some parameters makes, and the memory they need. Planning only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from attrs import frozen
from torch import Tensor

from ._cpu_optimizer import AbstractCPUOptimizer
from ._footprint import Footprint
from ._gradient_stream import bytes_of
from ._stepper import Stepper
from ._subgroups import Item, Residence, Shares, SubGroup, plan_subgroups
from ._transit import is_here, room_of


@frozen(eq=False)
class StatePlan:
    """State of some parameters, by where it rests and how it gets there."""

    subgroups: tuple[SubGroup, ...]
    params: tuple[Any, ...]  # in order: pieces name them by position
    leaving: tuple[Any, ...]  # those whose gradients go to the host during backward
    room_bytes: int  # of each of two buffers through which a sub-group passes

    @property
    def footprint(self) -> Footprint:
        """What all of it takes."""
        return self.with_others((), gradient_bytes=0, room_bytes=0)

    def with_others(
        self, subgroups: Sequence[SubGroup], *, gradient_bytes: int, room_bytes: int
    ) -> Footprint:
        """What it takes besides other state that is there already."""
        return Footprint.of(
            [*subgroups, *self.subgroups],
            gradient_bytes=gradient_bytes + bytes_of(self.leaving),
            transit_bytes=2 * max(self.room_bytes, room_bytes),
        )


def plan_state(
    positions: Mapping[Any, int],
    groups: Sequence[Mapping[str, Any]],
    *,
    stepper: Stepper,
    shares: Shares,
    grads_leave: bool,
    subgroup_bytes: int,
    small_bytes: int,
) -> StatePlan:
    """Plan the state of parameters, which need have no memory.

    Args:
        positions: Of their param groups.
        groups: All param groups.
        stepper: Says what the state consists of.
        shares: Of it, by where it rests.
        grads_leave: Whether gradients go to the host during backward.
        subgroup_bytes: Most that a sub-group holds.
        small_bytes: A sub-group with less stays in memory.
    """
    params = tuple(positions)
    kinds: dict[Any, Any] = {}
    for param, at in positions.items():
        if (param.ndim, param.dtype, at) not in kinds:
            entries = stepper.entries(param.ndim, param.dtype, dict(groups[at]))
            kinds[param.ndim, param.dtype, at] = entries
    used = {dtype: stepper.used_for(dtype) for _, dtype, _ in kinds}
    items = [
        Item(
            numel=param.numel(),
            entries=kinds[param.ndim, param.dtype, at],
            is_divisible=issubclass(used[param.dtype], AbstractCPUOptimizer) and _is_dense(param),
            place=f"{param.device}, {used[param.dtype].__name__}",
        )
        for param, at in positions.items()
    ]
    subgroups = plan_subgroups(
        items, shares=shares, subgroup_bytes=subgroup_bytes, small_bytes=small_bytes
    )
    on_device = {
        params[piece.item]
        for subgroup in subgroups
        if not rests_on_host(subgroup, params)
        for piece in subgroup.pieces
    }
    leaving = tuple(p for p in params if grads_leave and not is_here(p) and p not in on_device)
    among = set(leaving)
    room = max((_room(subgroup, params, among) for subgroup in subgroups), default=0)
    return StatePlan(subgroups, params, leaving, room)


def rests_on_host(subgroup: SubGroup, params: Sequence[Tensor]) -> bool:
    """Whether it is stepped there."""
    first = params[subgroup.pieces[0].item]
    return subgroup.residence is not Residence.DEVICE or is_here(first)


def _room(subgroup: SubGroup, params: Sequence[Tensor], leaving: Collection[Tensor]) -> int:
    """In transit, while it is stepped; gradients that have left their device are here already."""
    owners = [params[piece.item] for piece in subgroup.pieces]
    if not rests_on_host(subgroup, params) or is_here(owners[0]):
        return 0
    return sum(
        room_of(
            piece.numel,
            param.element_size(),
            0 if param in leaving else max(4, param.element_size()),  # masters take fp32
        )
        for piece, param in zip(subgroup.pieces, owners, strict=True)
    )


def _is_dense(param: Tensor) -> bool:
    """Whether it is, or is going to be once it has memory: an expanded number stands for that."""
    return param.is_contiguous() or not any(param.stride())
