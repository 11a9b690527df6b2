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
        ConfigError: The environment tells of several ranks, but there is no group of them: each
            would keep a whole model, and nothing would be said.
    """
    if dist.is_initialized():
        group = Group.from_process_group(timeout_s=timeout_s)
    else:
        params = [] if model is None else [param.device for param in model.parameters()]
        device = next((device for device in params if device.type != "meta"), None)
        group = Group.solo(torch.get_default_device() if device is None else device)
    launched = os.environ.get("WORLD_SIZE", "1")  # what is no number says nothing
    if group.world_size == 1 and launched.isdecimal() and int(launched) > 1:
        raise ConfigError(
            f"WORLD_SIZE={launched} processes were started, but the group has one rank, so that "
            "each would train alone, unsharded; call group = zero_comm.init() first, or pass "
            "group=Group.solo() if this process is to be alone"
        )
    return group
