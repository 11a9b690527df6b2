"""The ranks that are meant when the user names none."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from zero_comm import Group

from ._errors import ConfigError


def default_group(model: nn.Module | None = None, *, timeout_s: float | None = None) -> Group:
    """All ranks of the job; just this process where there is no job.

    Args:
        model: Where its parameters are, this process alone works.
        timeout_s: How long to wait for ranks that do not call this, in seconds.

    Raises:
        ConfigError: The environment tells of several ranks, but torch.distributed was not
            initialised: each would keep a whole model, and nothing would be said.
    """
    if dist.is_initialized():
        return Group.from_process_group(timeout_s=timeout_s)
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size.isdecimal() and int(world_size) > 1:
        raise ConfigError(
            f"WORLD_SIZE={world_size} is set, but torch.distributed is not initialised, so this "
            "rank would train alone; call group = zero_comm.init() first, or pass "
            "group=Group.solo() if that is meant"
        )
    params = [] if model is None else [param.device for param in model.parameters()]
    device = next((device for device in params if device.type != "meta"), None)
    return Group.solo(torch.get_default_device() if device is None else device)
