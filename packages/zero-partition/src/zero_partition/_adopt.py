"""From one shard per parameter to flat buffers of units: what partition() does with Init's work."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from zero_comm import Group, all_gather_coalesced, broadcast_flat

from ._buffer_plan import BufferPlan
from ._construction import CURRENT
from ._early_guards import unguard_module
from ._early_shard import find_early, forget_early, in_batches
from ._errors import PartitionError
from ._placement import Placement
from ._wire import Routes

_BATCH_BYTES: Final = 2**20  # small parameters travel together


def check_adoptable(model: nn.Module, group: Group) -> None:
    """Raise PartitionError inside Init, or where it sharded over other ranks."""
    if CURRENT.get() is not None:
        raise PartitionError(
            "shard() was called inside `with Init(...):`, which still watches every parameter; "
            "call it after the block"
        )
    for name, param in model.named_parameters():
        early = find_early(param)
        if early is None:
            continue
        if early.is_blank:
            raise PartitionError(
                f"parameter {name!r} was never initialised (rank {group.rank}); call "
                "zero_engine.materialise() or load its weights first"
            )
        if early.group.process_group is not group.process_group:
            raise PartitionError(
                f"parameter {name!r} was sharded by Init over {early.group.world_size} ranks of "
                f"another group than the one of {group.world_size} ranks given to shard() (rank "
                f"{group.rank}); pass the same group to both"
            )


def describe_early(model: nn.Module) -> dict[str, str]:
    """What ranks must agree on: which parameters arrive sharded."""
    names = [name for name, param in model.named_parameters() if find_early(param) is not None]
    if not names:
        return {"parameters sharded by Init": "none"}
    found = zlib.crc32(" ".join(names).encode())
    return {"parameters sharded by Init": f"{len(names)} from {names[0]!r} on ({found:08x})"}


def release_modules(model: nn.Module) -> None:
    """Take away the hooks that waited for shard()."""
    for module in model.modules():
        unguard_module(module)


def adopt(
    plan: BufferPlan, params: Sequence[nn.Parameter], *, routes: Routes, placement: Placement
) -> tuple[Tensor, Tensor | None]:
    """Fill a flat buffer from parameters of which some are early sharded. Collective.

    One parameter is whole at a time, or 1 MiB of small ones, and early shards are given up as their
    values arrive, so that the peak is what rests, one unit's shard and its largest parameter.

    Returns:
        This rank's shard, and the whole buffer where parameters rest replicated.
    """
    layout, is_sharded, rank = plan.layout, placement is Placement.SHARDED, routes.shards.rank
    numel = layout.splits[rank] if is_sharded else layout.numel
    resting = torch.zeros(numel, dtype=plan.dtype, device=routes.whole.device)
    pieces = {piece.index: piece for piece in layout.pieces(rank)}
    index = 0
    named = zip((param.name for param in plan.params), params, strict=True)
    for batch in in_batches(named, max_bytes=_BATCH_BYTES):
        for value in _take([param for _, param in batch], routes.whole):
            if not is_sharded:
                resting[layout.spans[index].as_slice()].copy_(value)
            elif (piece := pieces.get(index)) is not None:
                resting[piece.in_shard.as_slice()].copy_(value[piece.in_tensor.as_slice()])
            index += 1
            del value
    if is_sharded:
        return resting, None
    return resting[layout.shard(rank).as_slice()], resting


def _take(params: Sequence[nn.Parameter], group: Group) -> Iterator[Tensor]:
    """The parameters' values, 1-D, in turn; small ones have travelled as one."""
    shards = [early.shard for param in params if (early := find_early(param)) is not None]
    gathered: Iterator[Tensor] | None = None
    if len(shards) > 1:
        gathered = iter(all_gather_coalesced(shards, group=group).wait())
    del shards
    for param in params:
        early = find_early(param)
        if early is None:
            value = param.detach().view(-1)
            if value.numel():
                broadcast_flat(value.view(torch.uint8), src=0, group=group).wait()
            yield value
            continue
        value = early.whole().view(-1) if gathered is None else next(gathered)[: param.numel()]
        forget_early(param)
        del early
        yield value
