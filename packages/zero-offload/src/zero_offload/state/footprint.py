"""What an offloaded optimizer holds, and where: the formula that its memory equals."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from attrs import field, frozen
from torch import Tensor

from zero_offload.adam.cpu_optimizer import AbstractCPUOptimizer
from zero_offload.errors import BudgetError

from .gradients import bytes_of
from .stepper import Stepper
from .subgroups import Item, Residence, Shares, SubGroup, plan_subgroups
from .swap_window import slots_of
from .transit import is_here, room_of


@frozen(kw_only=True)
class Footprint:
    """Bytes by purpose and place. What is small is not counted: step counts, Python's objects.

    Attributes:
        resident_bytes: Of state that rests on the host.
        slot_bytes: Of host memory through which state passes on its way from and to the disk.
        gradient_bytes: Of gradients that have left their device.
        transit_bytes: Of host memory through which parameters pass during a step.
        device_bytes: Of state that rests beside the parameters.
        disk_bytes: Of state that rests on the disk.
    """

    resident_bytes: int = field(default=0)
    slot_bytes: int = field(default=0)
    gradient_bytes: int = field(default=0)
    transit_bytes: int = field(default=0)
    device_bytes: int = field(default=0)
    disk_bytes: int = field(default=0)

    @classmethod
    def of(
        cls, groups: Iterable[SubGroup], *, gradient_bytes: int, transit_bytes: int
    ) -> Footprint:
        """That of these sub-groups."""
        sizes = {where: [] for where in Residence}
        for group in groups:
            sizes[group.residence].append(group.nbytes)
        return cls(
            resident_bytes=sum(sizes[Residence.HOST]),
            slot_bytes=sum(slots_of(sizes[Residence.DISK])),
            gradient_bytes=gradient_bytes,
            transit_bytes=transit_bytes,
            device_bytes=sum(sizes[Residence.DEVICE]),
            disk_bytes=sum(sizes[Residence.DISK]),
        )

    @property
    def host_bytes(self) -> int:
        """Of host memory, all together."""
        return self.resident_bytes + self.slot_bytes + self.gradient_bytes + self.transit_bytes

    def check(self, budget_bytes: int | None) -> None:
        """Raise if it is more than the optimizer may hold of the host's memory.

        Raises:
            BudgetError: With what asks for how much, and what would need less.
        """
        if budget_bytes is None or self.host_bytes <= budget_bytes:
            return
        held = {
            "state that rests on the host": self.resident_bytes,
            "slots for state on its way from and to the disk": self.slot_bytes,
            "gradients": self.gradient_bytes,
            "parameters in transit": self.transit_bytes,
        }
        lines = "".join(f"\n  {nbytes:>15,}  {name}" for name, nbytes in held.items() if nbytes)
        raise BudgetError(
            f"OffloadedOptimizer may hold budget_bytes={budget_bytes:,} of host memory and needs "
            f"{self.host_bytes:,}:{lines}\nRest more on disk (state='disk', a smaller "
            f"fraction['host']), pass smaller subgroup_bytes, or grads='device'.",
            nbytes=self.host_bytes,
            held=held,
        )


# ---- Which sub-groups the state of some parameters makes, and the memory they need. Plannin ----


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
