"""Copies between the host and a device, beside what the device computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def copy_beside(source: Tensor, into: Tensor, streams: dict[torch.device, Any]) -> Any:
    """Begin to copy between the host and a device; the event of its end.

    Args:
        source: What the current stream has written.
        into: What the current stream has used before; nobody may until the event.
        streams: For such copies, by device; made at first use.
    """
    device = into.device if into.is_cuda else source.device
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    streams[device].wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(streams[device]):
        into.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(streams[device])
    return event
