"""Secondary shards: what a node has gathered, kept by its ranks in parts until values change."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from attrs import define, field
from torch import Tensor
from zero_comm import Group, Handle, all_gather_flat, even_splits

from ._buffer_plan import BufferPlan

# NOTE(keeping): a unit's copy is taken when its slot goes to another unit, and not before: until
# then the slot has its values, and nobody gathers them. So units that share no slot have none, and
# what evaluation or a further micro-batch gathers again is local too.


@define(eq=False)
class SecondaryShards:
    """This rank's even parts of a unit's flat buffers, as its node has gathered them."""

    group: Group  # ranks of the node
    plans: Sequence[BufferPlan]
    version: int = field(default=-1, init=False)  # of the values; -1: none
    _parts: list[Tensor] = field(factory=list, init=False)  # one for each buffer

    @property
    def num_bytes(self) -> int:
        """Of the parts, padding included."""
        return sum(part.nbytes for part in self._parts)

    def keep(self, full: Sequence[Tensor], version: int) -> None:
        """Copy this rank's parts of whole buffers, unless it has them. Local; see NOTE(keeping)."""
        if self.version == version:
            return
        own = [
            whole.split(splits)[self.group.rank]
            for whole, splits in zip(full, self._splits, strict=True)
        ]
        if not self._parts:
            self._parts = [torch.empty_like(part) for part in own]
        for part, source in zip(self._parts, own, strict=True):
            part.copy_(source)
        self.version = version

    def gather(
        self, full: Sequence[Tensor], *, tags: Sequence[int], version: int
    ) -> list[Handle[Tensor]]:
        """Launch the gathers that fill whole buffers from the node's parts. Collective in it."""
        return [
            all_gather_flat(
                whole,
                splits=splits,
                payload=payload,
                group=self.group,
                shard=part,
                tag=tag,
                version=version,
            )
            for whole, splits, payload, part, tag in zip(
                full, self._splits, self._payload, self._parts, tags, strict=True
            )
        ]

    def release(self) -> None:
        """Give the memory back."""
        self._parts, self.version = [], -1

    @cached_property
    def _splits(self) -> list[tuple[int, ...]]:
        return [even_splits(plan.layout.numel, self.group.world_size) for plan in self.plans]

    @cached_property
    def _payload(self) -> list[tuple[int, ...]]:
        pairs = zip(self.plans, self._splits, strict=True)
        return [plan.layout.payload_of(splits) for plan, splits in pairs]
