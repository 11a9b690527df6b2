"""Reads EngineConfig from a configuration file; optimizers and schedulers by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, final

import attrs
import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from zero_comm.logs import warn_user
from zero_engine import ConfigError, ZeroConfig
from zero_engine.engine import DynamicLossScale, EngineConfig, SourceRow, StaticLossScale
from zero_engine.readers import AbstractReader
from zero_partition.plan import Stage

from .configuration.file_key import shown
from .configuration.settings import (
    UNRESOLVED,
    Setting,
    Settings,
    Source,
    autocast_dtype_of,
    implied_values,
    monitoring_of,
    read_settings,
    state_dtype_of,
    zero_arguments,
)
from .leaf_modules import LeafModules
from .monitor import Monitoring
from .optimizers import make_optimizer, members_of
from .schedules import make_scheduler


@final
@frozen
class NamedOptimizer:
    """The optimizer that the section `optimizer` of a file asks for, when called with parameters.

    Args:
        type: Which one.
        params: Its arguments; a copy of what is given.
        state_dtype: Of its moments; see `make_optimizer`.
        is_state_on_device: Whether its state is not offloaded.
    """

    type: str
    params: dict[str, Any] = field(factory=dict, converter=dict, hash=False)
    state_dtype: torch.dtype | None = None
    is_state_on_device: bool = True

    def __call__(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Make the optimizer of parameters, as `make_optimizer` does. Local."""
        params = [
            {**each, "params": members_of(each["params"])} if isinstance(each, dict) else each
            for each in params
        ]
        is_on_host = any(param.device.type == "cpu" for param in _parameters_in(params))
        return make_optimizer(
            params,
            self.type,
            self.params,
            state_dtype=self.state_dtype,
            on_host=is_on_host or not self.is_state_on_device,
        )


@final
@frozen
class NamedScheduler:
    """The scheduler that the section `scheduler` of a file asks for, when called with an optimizer.

    Args:
        type: Which one.
        params: Its arguments; a copy of what is given.
    """

    type: str
    params: dict[str, Any] = field(factory=dict, converter=dict, hash=False)

    def __call__(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        """Make the scheduler of an optimizer, as `make_scheduler` does. Local."""
        return make_scheduler(optimizer, self.type, self.params)


def _parameters_in(params: Iterable[Any]) -> Iterable[Tensor]:
    """Yield the parameters of parameters, named parameters or param groups."""
    for each in params:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, dict):
            yield from _parameters_in(each["params"])
        else:
            yield each[1]


def read_engine_config(
    source: Source,
    *,
    world_size: int = 1,
    model: nn.Module | None = None,
    auto: Mapping[str, Any] | None = None,
    implied: Mapping[str, Any] | None = None,
    universal: AbstractReader,
) -> EngineConfig:
    """See `EngineConfig.from_deepspeed`; `universal` is for `checkpoint.load_universal`. Local."""
    settings = read_settings(source, model=model, auto=auto, implied=implied)
    settings = _with_batch_sizes(settings, world_size=world_size)
    settings.check_resolved()
    value = settings.value
    zero = ZeroConfig(**zero_arguments(settings))
    autocast_dtype = autocast_dtype_of(settings)
    loss_scale, is_bf16 = _loss_scale_of(settings, autocast_dtype), value("bf16.enabled")
    optimizer, scheduler = _named(settings, "optimizer"), _named(settings, "scheduler")
    state_dtype, rests = state_dtype_of(settings), zero.offload and zero.offload.optimizer
    leaves, shown_by_monitors = _leaf_modules(settings), monitoring_of(settings)
    config = EngineConfig(
        zero=zero,
        loss_scale=loss_scale,
        max_norm=float(value("gradient_clipping")),
        train_batch_size=value("train_batch_size"),
        micro_batch_size=value("train_micro_batch_size_per_gpu"),
        accumulation_steps=value("gradient_accumulation_steps"),
        manages_accumulation=value("managed_gradient_accumulation"),
        optimizer=optimizer and NamedOptimizer(*optimizer, state_dtype, rests in (None, "device")),
        scheduler=scheduler and NamedScheduler(*scheduler),
        steps_per_print=value("steps_per_print") or None,
        # With a 16-bit dtype, steps with inf or nan in a gradient are skipped.
        checks_overflow=value("bf16.check_grad_overflow") if is_bf16 else bool(loss_scale),
        autocast_dtype=autocast_dtype,
        drop_last=value("dataloader_drop_last"),
        activation_checkpointing={
            name: setting.value
            for name, setting in settings.under("activation_checkpointing.").items()
            if not setting.key.is_off(setting.value)
        },
        prepare=LeafModules(leaves) if leaves else None,
        state_dtype=state_dtype,
        reader=universal if value("checkpoint.load_universal") else None,
        monitor=Monitoring(shown_by_monitors) if shown_by_monitors else None,
    )
    return attrs.evolve(config, sources=_rows(settings))


def config_of_engine(
    source: Source,
    *,
    world_size: int,
    model: nn.Module,
    auto: Mapping[str, Any] | None,
    args: Any,
    optimizer: Any,
    lr_scheduler: Any,
    universal: AbstractReader,
) -> EngineConfig:
    """Return the configuration for `initialize`, for which a file means what it does to DeepSpeed.

    Local. DeepSpeed has masters without ZeRO too; here they belong to shards, so that a file with
    masters gets at least stage 1. DeepSpeed does not cast inputs. At stage 3 its scripts call
    state_dict() for the names, also on one rank alone.
    """
    settings = read_engine_config(
        source,
        world_size=world_size,
        model=model,
        auto=auto,
        implied=implied_values(args, optimizer, lr_scheduler),
        universal=universal,
    )
    if isinstance(settings.monitor, Monitoring):
        settings.monitor.check_packages()
    passed = {"optimizer": optimizer is not None, "scheduler": lr_scheduler is not None}
    _warn_of_unused(settings, [name for name, is_passed in passed.items() if is_passed])
    zero, precision = settings.zero, settings.zero.precision
    if zero.stage is Stage.THREE:
        zero = attrs.evolve(zero, state_dict="names")
    if precision is not None:
        stage = zero.stage if precision.masters is None else max(zero.stage, Stage.ONE)
        precision = attrs.evolve(precision, cast_inputs=False)
        zero = attrs.evolve(zero, stage=stage, precision=precision)
    return attrs.evolve(settings, zero=zero)


def _warn_of_unused(settings: EngineConfig, passed: Iterable[str]) -> None:
    """Warn of values of the file's sections in whose place an object was passed."""
    in_file = [row.key for row in settings.sources if row.origin == "file"]
    unused = [path for name in passed for path in in_file if path.startswith(f"{name}.params.")]
    if unused:
        warn_user(
            f"{', '.join(unused)}: not used, as initialize() was passed an optimizer or scheduler "
            "in place of the file's; leave out what is not meant"
        )


def _with_batch_sizes(settings: Settings, *, world_size: int) -> Settings:
    """Fill in batch sizes that the file leaves out, as DeepSpeed does; by default one step."""
    paths = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    known = [settings.by_path[path].value for path in paths]
    sizes: list[Any] = [None if value is UNRESOLVED else value for value in known]
    train, micro, steps = sizes
    if train is None and micro is None:
        # Raises if one of them is "auto".
        settings.check_resolved()
        raise ConfigError(
            "train_batch_size: expected it, or train_micro_batch_size_per_gpu, got neither"
        )
    if steps is None:
        steps = 1 if train is None or micro is None else train // (micro * world_size)
    if train is None:
        train = micro * steps * world_size
    if micro is None:
        micro = train // (steps * world_size)
    if train != micro * steps * world_size:
        factors = {path: size for path, size in zip(paths[1:], sizes[1:], strict=True) if size}
        factors["world size"] = world_size
        product = " * ".join(f"{name} {size}" for name, size in factors.items())
        what = "a multiple of " if None in sizes else ""
        raise ConfigError(
            f"train_batch_size: expected {what}{product} = {math.prod(factors.values())}, got "
            f"{train}; to train with any number of ranks, leave train_batch_size out, and name "
            "train_micro_batch_size_per_gpu"
        )
    found = zip(paths, sizes, (train, micro, steps), strict=True)
    return settings.replaced({path: size for path, old, size in found if old is None}, "inferred")


def _loss_scale_of(
    settings: Settings, autocast_dtype: torch.dtype | None
) -> StaticLossScale | DynamicLossScale | None:
    """Return the loss scale, with fp16 and where autocast computes in fp16; else None."""
    value = settings.value
    if not value("fp16.enabled"):
        # The settings of torch.amp.GradScaler, which DeepSpeed uses there.
        is_half = autocast_dtype is torch.float16
        return DynamicLossScale(window=2000, hysteresis=1) if is_half else None
    scale = value("fp16.loss_scale")
    if scale != 0:
        return StaticLossScale(float(scale))
    has_patience = not settings.is_idle(settings.by_path["fp16.hysteresis"].key)
    return DynamicLossScale(
        initial_power=value("fp16.initial_scale_power"),
        window=value("fp16.loss_scale_window"),
        hysteresis=value("fp16.hysteresis") if has_patience else 1,
        consecutive_hysteresis=value("fp16.consecutive_hysteresis") and has_patience,
        minimum=float(value("fp16.min_loss_scale")),
        raises_at_minimum=has_patience,
    )


def _named(settings: Settings, name: str) -> tuple[str, dict[str, Any]] | None:
    kind, given = settings.value(f"{name}.type"), settings.under(f"{name}.params.")
    params = {option: setting.value for option, setting in given.items() if setting.key.becomes}
    if kind is None and params:
        raise ConfigError(
            f"{name}.type: expected a name beside {name}.params, got none; say which {name}"
        )
    return None if kind is None else (kind, params)


def _leaf_modules(settings: Settings) -> dict[str, Any]:
    """Return what to make leaves, the default included; nothing below stage 3."""
    prefix = "zero_optimization.leaf_module."
    return {
        path.removeprefix(prefix): setting.value
        for path, setting in settings.by_path.items()
        if path.startswith(prefix) and settings.is_read(setting.key)
    }


def _rows(settings: Settings) -> tuple[SourceRow, ...]:
    rows = []
    for setting in settings.by_path.values():
        meaning, value = _meaning(settings, setting), setting.value
        if meaning is not None:
            if value is UNRESOLVED:
                value = value.value
            elif setting.key.is_ignored or isinstance(value, Mapping):
                # `str` fails for an int of 5,000 digits.
                value = shown(value)
            rows.append(SourceRow(setting.key.path, value, setting.origin, meaning))
    return tuple(rows)


def _meaning(settings: Settings, setting: Setting) -> str | None:
    """Return the last column of a setting's row; None for a row that need not be shown."""
    key = setting.key
    if setting.origin == "default":
        is_shown = settings.is_read(key) and ".params." not in key.path
        return key.becomes if is_shown else None
    if settings.is_gated_off(key):
        return f"not read: {key.closed}"
    if settings.is_below_stage(key):
        return f"not read below stage {key.min_stage}"
    return "none" if settings.is_idle(key) else key.becomes or "off"
