"""The five learning-rate schedulers that DeepSpeed's files name, as schedulers of torch."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any, Final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ._checks import check_names, nearest
from ._errors import ConfigError
from ._one_cycle import OneCycle
from ._range_test import LRRangeTest
from ._schedule import Schedule
from ._warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

SCHEDULERS: Final[dict[str, type[Schedule]]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def check_step(scheduler: Any, given: Mapping[str, Any]) -> None:
    """Raise ConfigError unless `scheduler.step(**given)` can be called: some need a metric."""
    try:
        signature(scheduler.step).bind(**given)
    except TypeError as error:
        name = type(scheduler).__name__
        raise ConfigError(
            f"Engine.step(): expected lr_kwargs to be what {name}.step() takes, got "
            f"{dict(given)!r}: {error}; as in engine.step(lr_kwargs={{'metrics': loss}}) for "
            "ReduceLROnPlateau; nothing was done"
        ) from error


def make_scheduler(optimizer: Optimizer, type: str, params: Mapping[str, Any]) -> LRScheduler:
    """The scheduler that the section `scheduler` of a configuration file asks for. Local.

    Args:
        optimizer: Before or after `shard()`.
        type: One of `SCHEDULERS`.
        params: Options of that class by name.

    Raises:
        ConfigError: Names the key, as in `scheduler.params.warmup_num_steps`, what was expected and
            what came, or the nearest key that there is.
    """
    kind = SCHEDULERS.get(type)
    if kind is None:
        near = nearest(type, SCHEDULERS)
        raise ConfigError(
            f"scheduler.type: expected one of {', '.join(SCHEDULERS)}, got {type!r}"
            f"{f'; did you mean {near!r}?' if near else ''}. Any other scheduler is passed as an "
            "object: initialize(lr_scheduler=...)"
        )
    options = dict(list(signature(kind).parameters.items())[1:])  # without the optimizer
    check_names("scheduler.params", params, options)
    for name, option in options.items():
        if option.default is option.empty and name not in params:
            raise ConfigError(f"scheduler.params.{name}: expected a value, as {type} needs it")
    try:
        return kind(optimizer, **params)
    except ConfigError as error:
        path = str(error).removeprefix(f"{type}.")
        raise ConfigError(f"scheduler.params.{path}") from error
