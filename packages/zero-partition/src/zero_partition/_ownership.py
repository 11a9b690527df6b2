"""Which rank updates which whole parameter, and keeps its optimizer state. No collectives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import define, field
from torch import Tensor

from ._balance import Balance
from ._chained import options_of
from ._errors import PartitionError
from ._parcel import size_of


@define(eq=False)
class Ownership:
    """The owner of each parameter, once dealt for good."""

    rank: int
    balance: Balance
    owners: dict[Tensor, int] = field(factory=dict, init=False)

    def deal(self, params: Sequence[Tensor]) -> None:
        """Give each an owner, the largest first; those that train before, to be even alone."""
        for trains in (True, False):
            chosen = [param for param in params if param.requires_grad is trains]
            ranks = self.balance.give_whole([size_of(param) for param in chosen])
            self.owners.update(zip(chosen, ranks, strict=True))

    def forget(self, params: Iterable[Tensor]) -> None:
        """Take back what was dealt."""
        for param in params:
            self.balance.bytes_per_rank[self.owners.pop(param)] -= size_of(param)

    def owner_of(self, param: Tensor) -> int:
        """Its rank; PartitionError if it was not dealt."""
        if param not in self.owners:
            raise PartitionError(
                f"expected a parameter of this optimizer, got a tensor of shape "
                f"{tuple(param.shape)} that is in none of its param groups"
            )
        return self.owners[param]

    def own(self, params: Iterable[Tensor], rank: int | None = None) -> list[Tensor]:
        """Those of this rank, or of another."""
        rank = self.rank if rank is None else rank
        return [param for param in params if self.owners[param] == rank]

    def own_part(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A param group, with this rank's parameters only."""
        return {**options_of(group), "params": self.own(group["params"])}


def copy_options(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Make the options of param groups those of others, which have the same order."""
    for mine, theirs in zip(source, target, strict=True):
        theirs.update(options_of(mine))
