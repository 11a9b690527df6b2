"""Gradients of torch's DistributedDataParallel, reduced by this package."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .codecs import AbstractCodec
from .flat import all_reduce_flat
from .group import Group
from .handle import Handle


def ddp_hook(
    group: Group, *, codec: AbstractCodec | None = None
) -> Callable[[Any, Any], torch.futures.Future]:
    """A communication hook: each bucket of gradients becomes its mean over the group.

    On gloo it moves less than torch's all-reduce, and ranks of one host read each other's buckets.
    Sums are taken in rank order, as `all_reduce_flat` does: on two ranks the bits are those of
    DistributedDataParallel by itself, on more they may differ in the last.

        model.register_comm_hook(None, ddp_hook(group, codec=Blockwise(bits=8)))

    Args:
        group: The ranks of the model's process group. A hook serves one model.
        codec: How gradients are written while they travel, as for `all_reduce_flat`; as they are
            when None.

    Returns:
        What `register_comm_hook` takes. Collective: it launches a bucket's reduction, and waits for
        that of the bucket before; after the last bucket it waits for all.
    """
    in_flight: deque[tuple[Handle[Tensor], torch.futures.Future]] = deque()

    # No annotations: DDP compares them with types, and in this file they are strings.
    def hook(state, bucket):
        if bucket.index() == 0:
            # A backward that raised may have left reductions.
            in_flight.clear()
        future: torch.futures.Future = torch.futures.Future()
        in_flight.append((all_reduce_flat(bucket.buffer(), group=group, codec=codec), future))
        while len(in_flight) > (0 if bucket.is_last() else 1):
            handle, done = in_flight.popleft()
            done.set_result(handle.wait())
        return future

    return hook
