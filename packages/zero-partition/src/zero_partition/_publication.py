"""How parameters that one rank each has updated reach all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from attrs import define, field
from torch import Tensor
from zero_comm import Group, Purpose, all_gather_flat

from ._parcel import Parcel, plan_parcels, seen_as, size_of

TAG: Final = 2**22  # above those of any sharded model on the same group
AGREE_TAG: Final = TAG + 1
_IN_FLIGHT: Final = 2  # wire buffers at a time
PURPOSES: Final = {
    TAG: Purpose(
        "exchanging the parameters, or the state, of a ZeroRedundancyOptimizer",
        "call its step() and consolidate_state_dict() on every rank",
    ),
    AGREE_TAG: Purpose(
        "comparing the parameters of a ZeroRedundancyOptimizer between ranks",
        "make it, add param groups, freeze and unfreeze parameters alike on every rank",
    ),
}


class Facts(NamedTuple):
    """What a plan rests on, for one parameter; equal on all ranks. Made in every step: a tuple."""

    travels: bool  # it trains, or has a gradient all the same: its owner may change it
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, param: Tensor) -> Facts:
        """As it is now."""
        travels = param.requires_grad or param.grad is not None
        return cls(travels, param.shape, param.stride(), param.dtype, param.device)


@define(eq=False)
class Publication:
    """Parameters, their owners, and the memory through which they travel."""

    group: Group
    params: list[Tensor]
    owners: list[int]
    facts: tuple[Facts, ...]  # per parameter
    in_place: Parcel | None = None  # of parameters that are views of `buffer`
    buffer: Tensor | None = None
    _views: dict[int, Tensor] = field(factory=dict, init=False)  # by position: its place there
    _packed: tuple[Parcel, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        placed = set(self.in_place.positions) if self.in_place is not None else set()
        rest = [
            position
            for position, facts in enumerate(self.facts)
            if facts.travels and position not in placed
        ]
        self._packed = self.parcels_of(rest)
        if self.in_place is not None and self.buffer is not None:
            for position, _, span in self.in_place.places():
                param = self.params[position]
                place = self.buffer[span.as_slice()].view(param.dtype)
                self._views[position] = place.as_strided(param.shape, _dense_stride(param))

    @classmethod
    def plan(
        cls, group: Group, params: Sequence[Tensor], owners: Sequence[int], *, in_place: bool
    ) -> Publication:
        """Of these parameters, as they are now, which it makes views. Local.

        Args:
            group: The ranks.
            params: All that there are, in an order that ranks share.
            owners: The rank that updates each.
            in_place: Whether those that travel become views of one buffer, if they lie on the
                group's device.
        """
        params, facts = list(params), tuple(map(Facts.of, params))
        if not in_place:
            return cls(group, params, list(owners), facts)
        sizes = [size_of(param) for param in params]
        chosen = [
            position
            for position, of_param in enumerate(facts)
            if of_param.travels and of_param.device == group.device and sizes[position]
        ]
        parcel = Parcel.plan(chosen, sizes, owners, world_size=group.world_size)
        # Zeros: padding travels too, and uninitialised bytes of a process are nobody's business.
        buffer = torch.zeros(parcel.layout.numel, dtype=torch.uint8, device=group.device)
        planned = cls(group, params, list(owners), facts, parcel, buffer)
        planned.install()
        planned.facts = tuple(map(Facts.of, params))  # views are dense
        return planned

    @torch.no_grad()
    def install(self) -> None:
        """Make parameters views of the buffer, where they are not. Local; values stay."""
        for position, place in self._views.items():
            param = self.params[position]
            if param.data_ptr() != place.data_ptr():
                place.copy_(param)
                param.data = place

    @torch.no_grad()
    def release(self) -> None:
        """Give parameters memory of their own again, where they are views of the buffer. Local."""
        for position, place in self._views.items():
            param = self.params[position]
            if param.data_ptr() == place.data_ptr():
                param.data = place.clone()

    def publish(self) -> None:
        """Give every rank the values of each parameter that its owner has. Collective; blocks."""
        if self.group.world_size == 1:
            return
        waits: deque[Callable[[], Any]] = deque()
        if self.in_place is not None and self.buffer is not None:
            self.install()  # a user may have given a parameter other memory
            handle = all_gather_flat(
                self.buffer, splits=self.in_place.layout.splits, group=self.group, tag=TAG
            )
            waits.append(handle.wait)
        for parcel in self._packed:
            waits.append(self.launch(parcel))
            if len(waits) > _IN_FLIGHT:
                waits.popleft()()
        for wait in waits:
            wait()

    def parcels_of(self, positions: Sequence[int]) -> tuple[Parcel, ...]:
        """How these parameters travel when they are packed. Local."""
        found = plan_parcels(
            [size_of(self.params[position]) for position in positions],
            [self.owners[position] for position in positions],
            world_size=self.group.world_size,
        )
        return tuple(
            Parcel(tuple(positions[i] for i in each.positions), each.owners, each.layout)
            for each in found
        )

    @torch.no_grad()
    def launch(self, parcel: Parcel) -> Callable[[], None]:
        """Send what this rank owns of a parcel. Collective; the result waits, and unpacks."""
        rank = self.group.rank
        wire = torch.empty(parcel.layout.numel, dtype=torch.uint8, device=self.group.device)
        for position, owner, span in parcel.places():
            if owner == rank:
                param = self.params[position]
                seen_as(wire, span, param.dtype, param.shape).copy_(param)
        handle = all_gather_flat(wire, splits=parcel.layout.splits, group=self.group, tag=TAG)

        @torch.no_grad()
        def wait() -> None:
            handle.wait()
            for position, owner, span in parcel.places():
                if owner != rank:
                    param = self.params[position]
                    param.copy_(seen_as(wire, span, param.dtype, param.shape))

        return wait


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Its strides where it fills its memory, in whatever order of dims; else contiguous ones."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1:
            if stride != expected:
                return torch.empty(tensor.shape, device="meta").stride()
            expected *= length
    return tensor.stride()
