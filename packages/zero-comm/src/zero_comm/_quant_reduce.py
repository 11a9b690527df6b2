"""Reductions of lists of tensors in two hops, under the names that DeepSpeed gave them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from ._blockwise import Blockwise
from ._by_levels import add_by_levels, count_hops
from ._codec import AbstractCodec, check_encodable
from ._handle import Handle
from ._levels import Levels
from ._loco import LocoErrors
from ._reduction import Reduction, finish_mean
from ._wire import check_list

_INT4: Final = Blockwise(bits=4)


def all_to_all_quant_reduce(
    tensors: Sequence[Tensor], levels: Levels, *, codec: AbstractCodec = _INT4
) -> Handle[list[Tensor]]:
    """Each tensor's mean over the ranks, and of it this rank's part. Collective.

    As `reduce_scatter_by_levels`: one encoding for each of two hops, inside the node and across
    nodes. A rank's part has `ceil(numel / world size)` elements, in rank order; where that does
    not divide, the last parts are shorter, or empty. Every part is encoded apart.

    Args:
        tensors: Contiguous, on the group's device, of any shape; float32, bfloat16 or float16. The
            same shapes and dtypes on every rank. Borrowed until the handle was waited on; never
            written.
        levels: The ranks that take part.
        codec: How values are written while they travel.

    Returns:
        Handle of one 1-D tensor for each, in its dtype.

    Raises:
        GroupMismatchError: A tensor is on another device or not contiguous.
        CodecError: The dtype of one is none of these.
    """
    return _reduce(tensors, levels, codec, errors=None)


def all_to_all_loco_quant_reduce(
    tensors: Sequence[Tensor],
    levels: Levels,
    errors: LocoErrors,
    *,
    codec: AbstractCodec = _INT4,
) -> Handle[list[Tensor]]:
    """The same, with the errors of encoding fed back into the next reduction. Collective.

    Args:
        tensors: As for `all_to_all_quant_reduce`.
        levels: The ranks that take part.
        errors: Of these tensors, each time they are reduced.
        codec: How values are written while they travel.

    Returns:
        Handle of one 1-D tensor for each, in its dtype.

    Raises:
        GroupMismatchError: A tensor is on another device or not contiguous.
        CodecError: The dtype of one is none of these, or `errors` are of other tensors.
    """
    return _reduce(tensors, levels, codec, errors=errors)


def _reduce(
    tensors: Sequence[Tensor], levels: Levels, codec: AbstractCodec, *, errors: LocoErrors | None
) -> Handle[list[Tensor]]:
    whole = levels.whole
    check_list(tensors, whole)
    check_encodable(tensors, codec)
    cut = [_parts(tensor, whole.world_size) for tensor in tensors]
    parts = [[each[rank] for each in cut] for rank in range(whole.world_size)]
    payload = [[part.numel() for part in row] for row in parts]
    count_hops(parts, payload, levels=levels, codec=codec, tag=0)
    reduction = add_by_levels(parts, levels=levels, codec=codec, errors=errors, tag=0)

    def finish(totals: list[Tensor]) -> list[Tensor]:
        for total in totals:
            finish_mean(total, op=Reduction.MEAN, world_size=whole.world_size)
        return [total.to(tensor.dtype) for total, tensor in zip(totals, tensors, strict=True)]

    return reduction.map(finish)


def _parts(tensor: Tensor, world_size: int) -> list[Tensor]:
    flat = tensor.detach().view(-1)
    numel = -(-flat.numel() // world_size)
    return [flat[rank * numel : (rank + 1) * numel] for rank in range(world_size)]
