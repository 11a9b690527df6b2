"""Which rank keeps what cannot be cut: arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define


@define
class Balance:
    """Bytes that each rank keeps so far, while a model is planned."""

    bytes_per_rank: list[int]

    @classmethod
    def of(cls, world_size: int) -> Balance:
        """Nobody has anything."""
        return cls([0] * world_size)

    def give_whole(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Give each size to one rank: the largest first, to whom has least. Returns the ranks.

        No rank ends with more than the least loaded one has, plus one size; equal sizes go to
        ranks in turn, so that the parameters of one unit spread.
        """
        ranks = [0] * len(sizes)
        for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):  # stable
            rank = min(range(len(self.bytes_per_rank)), key=self.bytes_per_rank.__getitem__)
            self.bytes_per_rank[rank] += sizes[index]
            ranks[index] = rank
        return tuple(ranks)

    def give_parts(self, sizes: Sequence[int]) -> None:
        """Add what each rank got of something that was cut."""
        for rank, size in enumerate(sizes):
            self.bytes_per_rank[rank] += size
