"""How a wait for a message is ended from another thread."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any
from weakref import ReferenceType

import torch
import torch.distributed as dist

from ._handle import Message

# NOTE(interrupt): gloo knows no way to give up a receive, and torch's `abort` returns without one.
# But a receive that times out closes every connection of its group, and with them all waits end, in
# this process and in the peers'. So a receive that nobody answers is posted, and given a moment.


def break_connections(of: ReferenceType[Any], message: Message) -> None:
    """End every wait in the message's process group, for good. Local; peers notice at once."""
    process_group = of()
    if process_group is None:
        return
    key = 0 if message.launch is None else max(message.launch.key, 0)  # tags choose a device
    with contextlib.suppress(RuntimeError, ValueError):  # it fails, which is what it is for
        blank = torch.empty(1, dtype=torch.uint8, device="cpu")
        peer = dist.get_global_rank(process_group, message.peer)
        work = dist.irecv(blank, peer, group=process_group, tag=key)
        work.wait(timedelta(milliseconds=1))
