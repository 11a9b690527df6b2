"""How a wait for a message is ended from another thread."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any
from weakref import ReferenceType

import torch
import torch.distributed as dist

# NOTE(interrupt): gloo knows no way to give up a receive, and torch's `abort` returns without one.
# But a receive that times out closes every connection of its group, and with them all waits end, in
# this process and in the peers'. So a receive that nobody answers is posted, and given a moment.


def break_connections(of: ReferenceType[Any]) -> None:
    """End every wait in this gloo group, for good. Local; peers notice at once."""
    process_group = of()
    if process_group is None:
        return
    options = process_group._get_backend(torch.device("cpu")).options
    # Each peer, because a connection that is closed already fails at once and closes no other;
    # each device, over which gloo spreads tags.
    for peer in dist.get_process_group_ranks(process_group):
        for tag in range(len(options._devices)):
            blank = torch.empty(1, dtype=torch.uint8, device="cpu")
            with contextlib.suppress(RuntimeError, ValueError):  # ValueError: the peer is this rank
                work = dist.irecv(blank, peer, group=process_group, tag=tag)
                assert work is not None, "this rank is in the group"
                work.wait(timedelta(milliseconds=1))
