"""Copies between the host and a device, beside what the device computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def copy_beside(source: Tensor, into: Tensor, streams: dict[torch.device, Any]) -> Any:
    """Begin a copy between the host and a device, and return the event of its end.

    Args:
        source: Tensor that the current stream has written.
        into: Tensor that the current stream may have used before; unused until the event.
        streams: Streams for such copies, by device; made at first use.
    """
    device = source.device if into.is_cpu else into.device
    if device not in streams:
        streams[device] = torch.Stream(device)
    streams[device].wait_stream(torch.accelerator.current_stream(device))
    with streams[device]:
        into.copy_(source, non_blocking=True)
        event = torch.Event(device)
        event.record(streams[device])
    # After an exception no code waits for the event, and the memory could be freed too early.
    (source if into.is_cpu else into).record_stream(streams[device])
    return event
