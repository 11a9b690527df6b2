"""Checks of single values and of names: each error says where, what was expected, what came."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Iterable
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist
from attrs import Attribute
from torch import nn
from zero_comm import Group

from .errors import ConfigError

Class = TypeVar("Class")


def check_flag(where: str, value: Any) -> bool:
    """True or False, and not what merely counts as one."""
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: expected true or false, got {value!r}")
    return value


def at_least(minimum: float, kind: type | tuple[type, ...], *, below: float | None = None) -> Any:
    """A validator of attrs: a number of at least `minimum`, or None where that is the default."""

    def check(owner: Any, attribute: Attribute, value: Any) -> None:
        if value is None and attribute.default is None:
            return
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if not is_number or not value >= minimum or (below is not None and value >= below):
            bound = "" if below is None else f" and below {below}"
            names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise ConfigError(
                f"{type(owner).__name__}.{attribute.name}: expected {names} of at least {minimum}"
                f"{bound}, got {value!r}"
            )

    return check


def is_kind(*kinds: type | None) -> Any:
    """A validator of attrs: an instance of one of these; None stands for itself."""

    def check(owner: Any, attribute: Attribute, value: Any) -> None:
        if not any(value is None if kind is None else isinstance(value, kind) for kind in kinds):
            names = " or ".join("None" if kind is None else kind.__name__ for kind in kinds)
            raise ConfigError(
                f"{type(owner).__name__}.{attribute.name}: expected {names}, got {value!r}"
            )

    return check


def names_fields(cls: type[Class]) -> type[Class]:
    """Let an attrs class say of a field that it does not know what `check_names` does."""
    make: Any = cls.__init__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **fields: Any) -> None:
        check_names(cls.__name__, fields, [each.alias for each in attrs.fields(cls)])
        make(self, *args, **fields)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def check_names(path: str, given: Iterable[Any], known: Iterable[str]) -> None:
    """Every name given is known; the error shows the nearest, and all there are."""
    known = sorted(known)
    for name in given:
        if name not in known:
            near = nearest(name, known)
            raise ConfigError(
                f"{path}.{name}: unknown{f'; did you mean {near!r}?' if near else '.'} "
                f"Known here: {', '.join(known)}"
            )


def nearest(name: Any, known: Iterable[str]) -> str | None:
    """The known name that a typing error most likely meant."""
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(str(name).lower(), by_lower, n=1)
    return by_lower[found[0]] if found else None


def default_group(model: nn.Module | None = None, *, timeout_s: float | None = None) -> Group:
    """All ranks of the job; without one just this process, where the model's parameters are.

    ConfigError where the environment tells of several ranks, and there is no group of them: each
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
