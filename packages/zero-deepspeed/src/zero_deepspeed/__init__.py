"""DeepSpeed's names, so that a script written for it runs: change its one import line.

    import zero_deepspeed as deepspeed        # was: import deepspeed

`from deepspeed.x import y` becomes `from zero_deepspeed.x import y`; or, where
DeepSpeed is not installed, `deepspeed.install()` lets both lines stay as they are. Names and
meanings are DeepSpeed's; what they return is ours. A name that is missing here is an AttributeError
that says so: nothing is accepted and then ignored.
"""

# Layers, lowest first: leaf_modules, configuration, optimizers, schedules, monitor, engine_config,
# saved, load, reader, weights, accelerator, comm, parameters, memory, tiling, zero, names.

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, final

import torch
import zero_comm
import zero_engine
from attrs import frozen
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import Dataset
from zero_engine import ConfigError, Engine
from zero_engine.engine import DynamicLossScale

from . import accelerator, comm, zero
from .accelerator import get_accelerator
from .comm import init_distributed
from .names import install, make_modules
from .parameters import log_dist, logger

if TYPE_CHECKING:
    checkpoint: Any
    checkpointing: Any
    ops: Any
    runtime: Any
    utils: Any

__all__ = [
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "install",
    "log_dist",
    "logger",
    "ops",
    "runtime",
    "utils",
    "zero",
]

DeepSpeedConfigError = ConfigError
DeepSpeedEngine = Engine
# Scripts compare it: the version of DeepSpeed whose behaviour this package has.
__version__: Final = "0.19.8+zero"


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
    """Call `zero_engine.initialize` with the arguments in DeepSpeed's order. Collective.

    See there for the arguments and errors. The model's parameters may be sharded already, by
    `zero.Init`. `distributed_port` is MASTER_PORT, where the launcher has set none; `config_params`
    is another name of `config`; `auto` has values for keys that are "auto" in the file, which
    Hugging Face fills in for its own scripts alone.

    `mesh_param` is (data ranks, sequence ranks), whose product is the world size. The model is
    sharded over all ranks, samples are divided among the data ranks, and gradients of ranks that
    share a sample are added up.

    The optimizer gets further attributes, for reading only: `cur_scale`, `loss_scale`,
    `loss_scaler`, `dynamic_loss_scale`, `overflow`, and `optimizer`, which is the optimizer itself.
    """
    if config is not None and config_params is not None:
        raise ConfigError("initialize(): expected config or config_params, got both")
    if dist_init_required is not False:
        init_distributed(distributed_port=distributed_port)
    if mesh_param is not None:
        mpu = _mesh_of(mesh_param, mpu)
    _hide_loss_scale(optimizer)
    made = zero_engine.initialize(
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
    _show_loss_scale(made[0])
    chosen = made[0].config.zero
    if chosen.stage == 3:
        zero.name_parameters(made[0].module, chosen.small_param_numel)
    return made


def _mesh_of(sizes: Any, mpu: Any) -> DeviceMesh | None:
    """Return the mesh of all ranks that sequence parallelism asks for; None for one rank.

    Collective.
    """
    group = zero_comm.init()
    is_pair = isinstance(sizes, tuple | list) and len(sizes) == 2
    if not is_pair or math.prod(sizes) != group.world_size or min(sizes) < 1 or mpu is not None:
        besides = "" if mpu is None else ", and mpu besides"
        raise ConfigError(
            "initialize(): expected mesh_param to be (data ranks, sequence ranks), whose product "
            f"is the world size {group.world_size}, and no mpu, got {sizes!r}{besides}"
        )
    if group.process_group is None:
        return None
    names = ("data_parallel", "sequence_parallel")
    return init_device_mesh(group.device.type, tuple(sizes), mesh_dim_names=names)


_PLAIN: Final = "_zero_plain_class"


@final
@frozen(eq=False)
class _LossScale:
    """The engine's loss scale, as it is when asked for; 1 where losses are not scaled."""

    _engine: Engine

    @property
    def cur_scale(self) -> float:
        """Return the factor that losses are multiplied by now."""
        return self._engine.cur_scale

    loss_scale = cur_scale

    @property
    def dynamic(self) -> bool:
        """Return whether the scale changes during training."""
        return isinstance(self._engine.config.loss_scale, DynamicLossScale)

    def __getattr__(self, name: str) -> Any:
        """Counters and settings of DeepSpeed's DynamicLossScaler, where the scale changes."""
        chosen, scaler = self._engine.config.loss_scale, self._engine.loss_scaler
        if not isinstance(chosen, DynamicLossScale) or scaler is None:
            raise AttributeError(f"a loss scaler whose scale does not change has no {name!r}")
        state = scaler.state_dict()
        found = {
            "cur_hysteresis": state["hysteresis"],
            "cur_iter": self._engine.global_steps,
            "consecutive_hysteresis": chosen.consecutive_hysteresis,
            "delayed_shift": chosen.hysteresis,
            "last_overflow_iter": self._engine.global_steps - int(state["clean_steps"]) - 1,
            "min_scale": chosen.minimum,
            "raise_error_at_min_scale": chosen.raises_at_minimum,
            "scale_factor": 2.0,
            "scale_window": chosen.window,
        }
        if name not in found:
            raise AttributeError(f"a loss scaler has no {name!r}; it has {', '.join(found)}")
        return found[name]

    @property
    def overflow(self) -> bool:
        """Return whether the last step at a boundary was skipped for a gradient of inf or nan."""
        return self._engine.was_step_skipped()


def _hide_loss_scale(optimizer: object) -> None:
    """Undo `_show_loss_scale`, so that an optimizer of another engine is known by its class."""
    plain = vars(type(optimizer)).get(_PLAIN)
    if plain is not None:
        optimizer.__class__ = plain


def _show_loss_scale(engine: Engine) -> None:
    """Give the engine's optimizer, the same object, names of DeepSpeed's; all for reading."""
    optimizer, scale = engine.optimizer, _LossScale(engine)
    if optimizer is None:
        return
    # Properties need a class. Values copied to the object would be out of date after an overflow.
    kind = type(optimizer)
    names = {
        _PLAIN: kind,
        "__module__": kind.__module__,
        # A copy or pickle has the plain class: no engine steps it, and this class has no module.
        "__reduce_ex__": lambda self, _: (object.__new__, (kind,), self.__getstate__()),
        "loss_scaler": property(lambda _: scale),
        "cur_scale": property(lambda _: scale.cur_scale),
        "loss_scale": property(lambda _: scale.cur_scale),
        "dynamic_loss_scale": property(lambda _: scale.dynamic),
        "overflow": property(lambda _: scale.overflow),
        # DeepSpeed's optimizer wraps torch's; ours is torch's.
        "optimizer": property(lambda self: self),
    }
    # All other names that the class has already keep their values.
    own = {"__module__", "__reduce_ex__", _PLAIN}
    names = {name: what for name, what in names.items() if name in own or not hasattr(kind, name)}
    names = {name: what for name, what in names.items() if name not in vars(optimizer)}
    optimizer.__class__ = type(kind.__name__, (kind,), names)


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


make_modules()


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"deepspeed.{name}: zero_deepspeed has no such name; what there is: {', '.join(__all__)}"
    )
