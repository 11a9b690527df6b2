"""Flat tensors of which each rank of a group keeps a shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, final
from zlib import crc32

import torch
from attrs import frozen
from torch import Tensor

from zero_ckpt.errors import CheckpointError

if TYPE_CHECKING:
    from zero_comm import Group

# Tags of messages consist of the call's number modulo `_NUM_CALLS` and a checksum of the inputs'
# sizes modulo `_NUM_SIZES`. Ranks that gather inputs of different calls or sizes thus exchange no
# message, and get an error (gloo would end the process). A group may gather parameters too, with
# tags below `_FIRST_TAG`. There are few tags, because the group remembers each.
_FIRST_TAG: Final = 1 << 20
_NUM_CALLS: Final = 512
_NUM_SIZES: Final = 64

_REMEDY: Final = (
    "every rank of the group must make the same checkpointed calls on the same inputs, and run "
    "backward through the same ones, in one order"
)


def group_class() -> type[Group]:
    """Return `zero_comm.Group`, imported only where inputs are split over ranks.

    Raises:
        CheckpointError: zero-comm is not installed.
    """
    try:
        from zero_comm import Group  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise CheckpointError(
            "splitting inputs over ranks: expected the package zero-comm, the extra `split` of "
            "zero-ckpt, which is not installed; in a clone of the repository: pip install "
            "./packages/zero-comm './packages/zero-ckpt[split]'"
        ) from error
    return Group


@final
@frozen(eq=False)
class EvenSplit:
    """Even shards, in rank order: they differ by one element at most."""

    _group: Group

    def shard(self, flat: Tensor, layer: str) -> tuple[Tensor, tuple[int, ...] | None]:
        """Return this rank's shard, a view, and the elements per rank. Local.

        Return the tensor and None where each rank keeps all of it: it has fewer elements than there
        are ranks, or is on the CPU while the group is not.

        Raises:
            CheckpointError: The tensor is neither on the group's device nor on the CPU.
        """
        from zero_comm import even_splits  # noqa: PLC0415

        group = self._group
        is_elsewhere = flat.device != group.device
        if flat.numel() < group.world_size or (is_elsewhere and flat.device.type == "cpu"):
            return flat, None
        if not is_elsewhere:
            splits = even_splits(flat.numel(), group.world_size)
            return flat.narrow(0, sum(splits[: group.rank]), splits[group.rank]), splits
        raise CheckpointError(
            f"{layer}: expected inputs on {group.device}, where the group of its saver "
            f"communicates, or on the CPU, got one on {flat.device} (rank {group.rank}); make "
            "the group for that device"
        )

    def gather(
        self, shards: Sequence[Tensor], splits: Sequence[Sequence[int]], *, number: int, layer: str
    ) -> list[Tensor]:
        """Gather the flat tensors whose shards these are. Collective: one all-gather per dtype.

        `number` is the number of the call that had these inputs; it is the same on every rank.

        Raises:
            CommError: A rank does not take part, or gathers for another call.
        """
        from zero_comm import Purpose, all_gather_flat  # noqa: PLC0415

        group, ranks = self._group, range(self._group.world_size)
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
            totals = [sum(splits[i][rank] for i in chosen) for rank in ranks]
            out = sent.new_empty(sum(totals))
            handle = all_gather_flat(out, splits=totals, group=group, shard=sent, tag=tag)
            launched.append((handle, chosen))
        found: dict[int, Tensor] = {}
        for handle, chosen in launched:
            out = handle.wait()
            pieces = out.split([splits[i][rank] for rank in ranks for i in chosen])
            for position, i in enumerate(chosen):
                found[i] = out if len(chosen) == 1 else torch.cat(pieces[position :: len(chosen)])
        return [found[i] for i in range(len(shards))]
