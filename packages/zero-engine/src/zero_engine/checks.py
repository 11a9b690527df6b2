"""Checks of single values and of names: each error says where, what was expected, what came."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from attrs import Attribute
from torch import nn
from zero_comm import Group
from zero_comm.logs import warn_user
from zero_partition import plan

from .errors import ConfigError

Class = TypeVar("Class")
check_names = partial(plan.check_names, error=ConfigError)


def check_flag(where: str, value: Any) -> bool:
    """Return `value` if it is a bool; raise ConfigError for any other type."""
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: expected true or false, got {value!r}")
    return value


def check_number(
    where: str,
    value: Any,
    minimum: float,
    kind: type | tuple[type, ...],
    *,
    below: float | None = None,
) -> Any:
    """Return `value` if it is a `kind` in [minimum, below); raise ConfigError otherwise."""
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if not is_number or not value >= minimum or (below is not None and value >= below):
        bound = "" if below is None else f" and below {below}"
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise ConfigError(f"{where}: expected {names} of at least {minimum}{bound}, got {value!r}")
    return value


def own_masters(optimizer: torch.optim.Optimizer) -> bool | None:
    """Return whether an optimizer keeps masters of 16-bit parameters by itself.

    None: it has no such setting. zero-offload's `CPUAdam` and `FusedAdam` have one, and so do
    optimizers with `masters` in their groups.
    """
    said = [group["masters"] for group in optimizer.param_groups if "masters" in group]
    kept: bool | None = getattr(optimizer, "keeps_masters", any(said) if said else None)
    return kept


def at_least(minimum: float, kind: type | tuple[type, ...], *, below: float | None = None) -> Any:
    """Return an attrs validator: a number in [minimum, below), or None if that is the default."""

    def check(owner: Any, attribute: Attribute, value: Any) -> None:
        if value is not None or attribute.default is not None:
            where = f"{type(owner).__name__}.{attribute.name}"
            check_number(where, value, minimum, kind, below=below)

    return check


def is_kind(*kinds: type | None, such_as: str = "") -> Any:
    """Return an attrs validator: an instance of one of `kinds`; None among them allows None.

    Its error has an example of one, if given.
    """
    example = f", such as {such_as}" if such_as else ""

    def check(owner: Any, attribute: Attribute, value: Any) -> None:
        if not any(value is None if kind is None else isinstance(value, kind) for kind in kinds):
            names = " or ".join("None" if kind is None else kind.__name__ for kind in kinds)
            raise ConfigError(
                f"{type(owner).__name__}.{attribute.name}: expected {names}{example}, got {value!r}"
            )

    return check


def names_fields(cls: type[Class]) -> type[Class]:
    """Have an attrs class check the field names it is given; an unknown one is a ConfigError."""
    return plan.names_fields(cls, ConfigError)


def default_group(model: nn.Module | None = None, *, timeout_s: float | None = None) -> Group:
    """Return the group of all ranks, or of this process alone without torch.distributed.

    The group of this process alone is on the device of the model's parameters, or on torch's
    default device if there are none, or all are on the meta device.

    Raises:
        ConfigError: WORLD_SIZE names several ranks, but the group has one: each rank would train
            a full model by itself, without an error.
    """
    if dist.is_initialized():
        group = Group.from_process_group(timeout_s=timeout_s)
    else:
        params = [] if model is None else [param.device for param in model.parameters()]
        device = next((device for device in params if device.type != "meta"), None)
        group = Group.solo(torch.get_default_device() if device is None else device)
        say_alone(group.device)
    # A value that is not a number is ignored.
    launched = os.environ.get("WORLD_SIZE", "1")
    if group.world_size == 1 and launched.isdecimal() and int(launched) > 1:
        raise ConfigError(
            f"WORLD_SIZE={launched} processes were started, but the group has one rank, so that "
            "each would train alone, unsharded; call group = zero_comm.init() first, or pass "
            "group=Group.solo() if this process is to be alone"
        )
    return group


def say_alone(device: torch.device) -> None:
    """Say that this process trains alone, where the machine has further devices. Local."""
    if device.type in ("cpu", "meta") or "WORLD_SIZE" in os.environ:
        return
    num_devices = torch.accelerator.device_count()
    if num_devices > 1:
        warn_user(
            f"this process trains alone on {device}, and the machine has {num_devices} devices: "
            f"to use all, start it by `torchrun --nproc-per-node {num_devices}` and call "
            "zero_comm.init(); pass group=Group.solo() if it is meant to be alone",
        )
