"""DeepSpeed's names, so that a script written for it runs: change its one import line.

    from zero_engine.compat import deepspeed        # was: import deepspeed

`from deepspeed.x import y` becomes `from zero_engine.compat.deepspeed.x import y`. Names and
meanings are DeepSpeed's; what they return is ours. A name that is missing here is an AttributeError
that says so: nothing is accepted and then ignored.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import Dataset

import zero_engine
from zero_engine import ConfigError, Engine

from . import accelerator, checkpointing, comm, utils, zero
from .accelerator import get_accelerator
from .comm import init_distributed
from .utils import log_dist, logger

__all__ = [
    "DeepSpeedEngine",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "utils",
    "zero",
]

DeepSpeedEngine: Final = Engine


def initialize(  # noqa: PLR0917 - the order is DeepSpeed's
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    *,
    auto: Mapping[str, Any] | None = None,
) -> tuple[Engine, torch.optim.Optimizer | None, Any, Any]:
    """`zero_engine.initialize`, with the arguments in DeepSpeed's order. Collective.

    Args:
        args: As there; as are all others that are not named here.
        model: Its parameters may be sharded already, by `zero.Init`.
        optimizer: As there.
        model_parameters: As there.
        training_data: As there.
        lr_scheduler: As there.
        distributed_port: MASTER_PORT, where the launcher has set none.
        mpu: As there.
        dist_init_required: As there.
        collate_fn: As there.
        config: As there.
        mesh_param: Sequence parallelism is not built: None.
        config_params: Another name of `config`.
        auto: As there: values for what the file leaves "auto", which Hugging Face fills in for its
            own scripts alone.

    Raises:
        ConfigError: As there, or `mesh_param` is given.
    """
    if mesh_param is not None:
        raise ConfigError("initialize(): mesh_param (sequence parallelism) is not built yet")
    if config is not None and config_params is not None:
        raise ConfigError("initialize(): expected config or config_params, got both")
    if dist_init_required is not False:
        init_distributed(distributed_port=distributed_port)
    return zero_engine.initialize(
        args,
        model,
        optimizer,
        model_parameters,
        training_data,
        lr_scheduler,
        mpu,
        dist_init_required,
        collate_fn,
        config_params if config is None else config,
        auto=auto,
    )


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config` to a command line. Returns the parser."""
    group = parser.add_argument_group("DeepSpeed", "read by initialize(args=...)")
    group.add_argument(
        "--deepspeed", action="store_true", help="for scripts that ask whether to use it"
    )
    group.add_argument(
        "--deepspeed_config", type=str, default=None, help="path of a JSON file, or its base64"
    )
    return parser


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"deepspeed.{name}: zero_engine.compat.deepspeed has no such name; what there is: "
        f"{', '.join(__all__)}"
    )
