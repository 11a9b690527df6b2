"""Flat tensors of which each rank of a group keeps a shard."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final, final
from zlib import crc32

import torch
from attrs import frozen
from torch import Tensor

from zero_ckpt.errors import CheckpointError

if TYPE_CHECKING:
    from zero_comm import Group

# Ranks that come for inputs of different calls, or of different sizes, meet in no message, and are
# told so (gloo would end the process). Tags of parameters, on a group that does both, lie below;
# all of them are few, because the group remembers each.
_FIRST_TAG: Final = 1 << 20
_NUM_CALLS: Final = 512  # told apart, counted round
_NUM_SIZES: Final = 64  # likewise, by a checksum

_REMEDY: Final = (
    "every rank of the group must make the same checkpointed calls on the same inputs, and run "
    "backward through the same ones, in one order"
)


@final
@frozen(eq=False)
class Split:
    """Even shards, in rank order: they differ by one element at most."""

    _group: Group

    def splits(self, flat: Tensor, layer: str) -> tuple[int, ...] | None:
        """Elements per rank; None where each keeps all of them. Local.

        Raises:
            CheckpointError: The group does not communicate where the tensor lies.
        """
        from zero_comm import even_splits  # noqa: PLC0415

        group = self._group
        if flat.numel() < group.world_size:
            return None
        if flat.device == group.device:
            return even_splits(flat.numel(), group.world_size)
        if flat.device.type == "cpu":
            return None
        raise CheckpointError(
            f"{layer}: expected inputs on {group.device}, where the group of its saver "
            f"communicates, or on the CPU, got one on {flat.device} (rank {group.rank}); make "
            "the group for that device"
        )

    def own(self, flat: Tensor, splits: Sequence[int]) -> Tensor:
        """The shard of this rank: a view. Local."""
        rank = self._group.rank
        return flat.narrow(0, sum(splits[:rank]), splits[rank])

    def gather(
        self, shards: Sequence[Tensor], splits: Sequence[Sequence[int]], *, number: int, layer: str
    ) -> list[Tensor]:
        """The flat tensors whose shards these are. Collective: one message per dtype.

        Args:
            shards: This rank's, on the group's device.
            splits: Elements per rank, for each of them.
            number: Of the call that they belong to, the same on every rank.
            layer: Whose they are, for errors.

        Raises:
            CommError: A rank did not come, or came for another call.
        """
        from zero_comm import Purpose, all_gather_flat  # noqa: PLC0415

        group = self._group
        sizes = ", ".join(
            f"{sum(each)} of {shard.dtype}" for shard, each in zip(shards, splits, strict=True)
        )
        tag = _FIRST_TAG + number % _NUM_CALLS * _NUM_SIZES + crc32(sizes.encode()) % _NUM_SIZES
        what = f"gathering the inputs of the {layer} (call {number}; elements: {sizes})"
        group.explain({tag: Purpose(what, _REMEDY)})
        launched = []
        for dtype in dict.fromkeys(shard.dtype for shard in shards):
            chosen = [i for i, shard in enumerate(shards) if shard.dtype == dtype]
            sent = shards[chosen[0]] if len(chosen) == 1 else torch.cat([shards[i] for i in chosen])
            totals = [sum(splits[i][rank] for i in chosen) for rank in range(group.world_size)]
            out = sent.new_empty(sum(totals))
            handle = all_gather_flat(out, splits=totals, group=group, shard=sent, tag=tag)
            launched.append((handle, chosen))
        found: dict[int, Tensor] = {}
        for handle, chosen in launched:
            out = handle.wait()
            if len(chosen) == 1:
                found[chosen[0]] = out
                continue
            numels = chain.from_iterable(zip(*(splits[i] for i in chosen), strict=True))
            pieces = out.split(list(numels))  # all of rank 0, then all of rank 1
            for position, i in enumerate(chosen):
                found[i] = torch.cat(pieces[position :: len(chosen)])
        return [found[i] for i in range(len(shards))]
