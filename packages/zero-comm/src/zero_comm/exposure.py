"""Shards that peers read when they like, between the writes of their owner."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate, pairwise

from attrs import define, field
from torch import Tensor

from .agreement import all_gather_json, check_agreement
from .errors import CommError, GroupMismatchError
from .group import Group
from .shared_host.reads import Reads
from .shared_host.shards import SharedShards, Words, new_words
from .transport import check_tensor, count_traffic


@define(eq=False)
class Exposure(SharedShards):
    """Shards of a group: an all-gather that needs no peer to take part. Made by `expose`."""

    group: Group = field(kw_only=True)
    # Elements of each shard, by rank and position.
    _numels: list[list[int]] = field(kw_only=True)
    # `id` of a shard -> its position in `shards`.
    _index: dict[int, int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self._index = {id(shard): index for index, shard in enumerate(self.shards)}

    def count_on(self, group: Group) -> None:
        """Count what is read as traffic of this group object, which has the same ranks. Local."""
        self.group = group

    def gather(
        self,
        shard: Tensor,
        out: Tensor,
        *,
        splits: Sequence[int],
        starts: Sequence[int] | None = None,
        payload: Sequence[int] | None = None,
        tag: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Fill `out` with every rank's values of `shard`. Local: peers need not call it.

        Args:
            shard: One of `shards`, the very object.
            out: 1-D, contiguous, on the CPU, `sum(splits)` elements of the shard's dtype.
            splits: Elements per rank, in rank order.
            starts: Where they start in each rank's shard, in elements; at its first when None.
            payload: Elements per rank that carry data, for the traffic count; `splits` when None.
            tag: Tag of the `Purpose` whose subject the traffic is counted under; none when None.
            timeout_s: Longest wait for a peer that is writing, in seconds; the group's when None.

        Raises:
            GroupMismatchError: `shard` is none of `shards`, `out` does not fit it or `splits`, or
                they reach past the end of a rank's shard.
            CommError: A peer has ended, has deleted its shards, or did not end its write in time.
        """
        if self._is_writing:
            self.end_write()
        starts = [0] * len(splits) if starts is None else starts
        index = self._check(shard, out, splits, starts)
        count_traffic(self.group, "all_gather", out, splits, payload, sends_own=True, tag=tag)
        for rank, (begin, end) in enumerate(pairwise(accumulate(splits, initial=0))):
            first = starts[rank]
            if rank == self.group.rank:
                out[begin:end].copy_(shard[first : first + end - begin])
            elif begin < end:
                offset = first * shard.element_size()
                self.read(rank, index, offset, out[begin:end], timeout_s=timeout_s)

    def move(self, *, tag: int = 0, timeout_s: float | None = None) -> None:
        """Exchange the shards' new addresses with the peers. Collective.

        Call it between `begin_write` and `end_write`, when no peer reads them. Numels and dtypes
        must not change.

        Args:
            tag: As for `all_gather_flat`.
            timeout_s: Longest wait for the other ranks, in seconds; the group's own when None.

        Raises:
            CommError: Not while this rank writes, or a rank did not take part in time.
        """
        if not self._is_writing:
            raise CommError(
                f"shards may move to other memory only between begin_write() and end_write() (rank "
                f"{self.group.rank}): peers would read their old memory; call begin_write() first"
            )
        rows = _tell_all(self.shards, self._words, self.group, tag, timeout_s)
        self._addresses.update(_addresses_in(rows, len(self.shards), self.group.rank))

    def _check(
        self, shard: Tensor, out: Tensor, splits: Sequence[int], starts: Sequence[int]
    ) -> int:
        """Return the position of `shard` among `shards`.

        Raises:
            GroupMismatchError: It is none of them, or `out`, `splits` or `starts` do not fit.
        """
        index = self._index.get(id(shard))
        if index is None:
            raise GroupMismatchError(
                f"expected one of the {len(self.shards)} tensors that were exposed, the very "
                f"object, got another of shape {tuple(shard.shape)} (rank {self.group.rank}); what "
                "is computed from it or views it is not known to the peers"
            )
        world_size = self.group.world_size
        if len(splits) != world_size or len(starts) != world_size:
            raise GroupMismatchError(
                f"expected one split and one start per rank, {world_size} each, got {len(splits)} "
                f"and {len(starts)} (rank {self.group.rank})"
            )
        check_tensor(out, sum(splits), self.group, "out", dtype=shard.dtype)
        for rank, (numels, first, split) in enumerate(
            zip(self._numels, starts, splits, strict=True)
        ):
            if split and not 0 <= first <= numels[index] - split:
                raise GroupMismatchError(
                    f"expected a part of the {numels[index]} elements of shard {index} of rank "
                    f"{rank}, got {split} elements from {first} on (rank {self.group.rank})"
                )
        return index


def expose(
    shards: Sequence[Tensor], *, group: Group, tag: int = 0, timeout_s: float | None = None
) -> Exposure | None:
    """Let peers read these shards; None where the group's ranks cannot. Collective.

    Args:
        shards: 1-D, contiguous, on the CPU, in the same order and dtypes on every rank. They must
            stay where they are while the exposure lives, unless `move` says so, and may be written
            between `begin_write` and `end_write`.
        group: The ranks that read each other's shards.
        tag: As for `all_gather_flat`.
        timeout_s: Longest wait for the other ranks, in seconds; the group's own when None.

    Raises:
        GroupMismatchError: A shard is not 1-D, contiguous and on the group's device.
        AgreementError: Ranks differ in the number of shards or in their dtypes.
        CommError: A rank did not take part in time.
    """
    for index, shard in enumerate(shards):
        check_tensor(shard, shard.numel(), group, f"shard {index}")
    exchanges = group.exchanges
    if not isinstance(exchanges, Reads):
        return None
    timeout_s = exchanges.memory.timeout_s if timeout_s is None else timeout_s
    facts = {"exposed shards": ", ".join(str(shard.dtype) for shard in shards)}
    check_agreement(facts, group=group, tag=tag, timeout_s=timeout_s)
    words = new_words()
    rows = _tell_all(shards, words, group, tag, timeout_s)
    where = (exchanges.memory, words, _addresses_in(rows, len(shards), group.rank))
    numels = [row[1 + len(shards) :] for row in rows]
    return Exposure(tuple(shards), *where, group=group, numels=numels)


def _tell_all(
    shards: Sequence[Tensor], words: Words, group: Group, tag: int, timeout_s: float | None
) -> list[list[int]]:
    """Return, by rank, the address of its words, those of its shards, and their numels.

    Collective.
    """
    mine = [ctypes.addressof(words)]
    mine += [shard.data_ptr() for shard in shards]
    mine += [shard.numel() for shard in shards]
    return all_gather_json(mine, group=group, tag=tag, timeout_s=timeout_s)


def _addresses_in(rows: list[list[int]], num_shards: int, own: int) -> dict[int, list[int]]:
    """Return, by peer, the address of its words, then those of its shards."""
    return {rank: row[: 1 + num_shards] for rank, row in enumerate(rows) if rank != own}
