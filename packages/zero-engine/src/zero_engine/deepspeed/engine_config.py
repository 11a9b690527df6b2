"""EngineConfig: all that an engine is told, from arguments or from DeepSpeed's file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import attrs
import torch
from attrs import field, frozen
from torch import nn

from zero_engine.checks import at_least, is_kind, names_fields
from zero_engine.config import ZeroConfig
from zero_engine.deepspeed_file.file_key import shown
from zero_engine.deepspeed_file.settings import (
    UNRESOLVED,
    Setting,
    Settings,
    Source,
    monitoring_of,
    read_settings,
    state_dtype_of,
    zero_arguments,
)
from zero_engine.errors import ConfigError
from zero_engine.reports import as_table

from .loss_scale import DynamicLossScale, StaticLossScale


@final
@frozen
class NamedSpec:
    """Something to be made by name: an optimizer or a scheduler.

    Args:
        type: Which one.
        params: Its arguments; a copy of what is given.
    """

    type: str
    params: dict[str, Any] = field(factory=dict, converter=dict, hash=False)


@final
@frozen
class SourceRow:
    """One line of `EngineConfig.table`."""

    key: str  # its path in the file
    value: Any  # in the end
    origin: str  # "file", "auto" (the file leaves it open), "inferred" or "default"
    meaning: str  # the field of EngineConfig that it becomes part of, or why it changes nothing


@final
@names_fields
@frozen(kw_only=True)
class EngineConfig:
    """How an engine trains. The same on every rank.

    Args:
        zero: How the model is distributed, and in which dtypes.
        loss_scale: What the loss is multiplied by before its backward; nothing when None.
        max_norm: Gradients are clipped to this global L2 norm; 0 turns it off.
        train_batch_size: Samples of all ranks for one step of the optimizer.
        micro_batch_size: Samples of one rank in one forward.
        accumulation_steps: Micro-batches for one step of the optimizer.
        manages_accumulation: Whether the engine counts them. When False every `Engine.step` is a
            boundary, and you call it once per `accumulation_steps` backwards: their number divides
            losses as ever. Each backward reduces; inside `Engine.no_sync` those before the last
            one need not.
        optimizer: Made by the engine where the caller gives none.
        scheduler: Likewise.
        steps_per_print: Steps between two lines of progress; none when None.
        needs_scaled_loss: Whether a backward that no engine runs is an error unless its loss went
            through `Engine.scale`. By default as in DeepSpeed: with a DynamicLossScale, and at
            stage 0 with a static one too; elsewhere that is taken on trust.
        checks_overflow: Whether a step whose gradients hold inf or nan on any rank is skipped.
        autocast_dtype: What torch.autocast computes in during forward; off when None.
        drop_last: Whether the data loader drops a last, incomplete batch.
        activation_checkpointing: How `zero_ckpt.checkpoint` keeps inputs: that section of a file.
            Where `zero_ckpt.configure` was called before `initialize`, that stays.
        leaf_modules: "classes", "names" and "name_suffixes" of modules that `initialize` makes
            leaves (`set_leaf_modules`), as that section of a file has them; at stage 3.
        state_dtype: Of the optimizer's moments beside `Precision(params=torch.bfloat16,
            masters=None)`: torch.bfloat16, or torch.float32, which Adam can. `initialize` makes
            such an optimizer, or refuses one that is passed and has others. Its own when None.
        monitoring: What DeepSpeed's monitors are to show, by path in its file as in
            `{"csv_monitor.enabled": True, "csv_monitor.output_path": "logs"}`.
        sources: Where every value came from, if it came from a file; no part of what is compared.

    Raises:
        ConfigError: Names the field, what was expected and what came.
    """

    zero: ZeroConfig = field(factory=ZeroConfig, validator=is_kind(ZeroConfig))
    loss_scale: StaticLossScale | DynamicLossScale | None = field(
        default=None, validator=is_kind(StaticLossScale, DynamicLossScale, None)
    )
    max_norm: float = field(default=0.0, validator=at_least(0, (int, float)))
    train_batch_size: int = field(validator=at_least(1, int))
    micro_batch_size: int = field(validator=at_least(1, int))
    accumulation_steps: int = field(default=1, validator=at_least(1, int))
    manages_accumulation: bool = field(default=True, validator=is_kind(bool))
    optimizer: NamedSpec | None = field(default=None, validator=is_kind(NamedSpec, None))
    scheduler: NamedSpec | None = field(default=None, validator=is_kind(NamedSpec, None))
    steps_per_print: int | None = field(default=None, validator=at_least(1, int))
    needs_scaled_loss: bool = field(validator=is_kind(bool))
    checks_overflow: bool = field(default=False, validator=is_kind(bool))
    autocast_dtype: torch.dtype | None = field(default=None, validator=is_kind(torch.dtype, None))
    drop_last: bool = field(default=False, validator=is_kind(bool))
    activation_checkpointing: dict[str, Any] = field(factory=dict, converter=dict, hash=False)
    leaf_modules: dict[str, Any] = field(factory=dict, converter=dict, hash=False)
    state_dtype: torch.dtype | None = field(default=None, validator=is_kind(torch.dtype, None))
    monitoring: dict[str, Any] = field(factory=dict, converter=dict, hash=False)
    sources: tuple[SourceRow, ...] = field(default=(), repr=False, eq=False)

    @needs_scaled_loss.default
    def _needs_scaled_loss(self) -> bool:
        is_static = isinstance(self.loss_scale, StaticLossScale)
        return self.loss_scale is not None and (not is_static or self.zero.stage == 0)

    @classmethod
    def from_deepspeed(
        cls,
        source: Source,
        *,
        world_size: int = 1,
        model: nn.Module | None = None,
        auto: Mapping[str, Any] | None = None,
        implied: Mapping[str, Any] | None = None,
    ) -> EngineConfig:
        """Read a configuration written for DeepSpeed (deepspeed.ai/docs/config-json). Local.

        Every key is honoured or answered: an unknown one, one of the wrong type, or one whose
        feature is not built is an error; those that cannot matter here are listed in one warning,
        of rank 0 where there is a job.
        Of keys that are absent, those of the schedule of stage 3 keep the defaults of ZeroConfig,
        and `gradient_clipping` is 1.0, as it is in DeepSpeed.

        Args:
            source: A dict, the path of a JSON file, or its base64, as launchers hand it on.
            world_size: Ranks over which the batch is divided.
            model: Resolves "auto" where it depends on `model.config.hidden_size` or, which 16-bit
                section is on, on the dtype of its parameters.
            auto: Values for further keys that are "auto" in the file, by path, as in
                `{"optimizer.params.lr": 1e-4}`; of the three batch sizes, two are enough.
            implied: Likewise, and not held against what the file says: `initialize` passes what
                follows from its arguments.

        Raises:
            ConfigError: Starts with the path of the key that is wrong; of what is still "auto" it
                names every key.
            FileError: There is no such file, or it is not JSON.
        """
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ConfigError(
                f"EngineConfig.from_deepspeed(): expected world_size to be an int of at least 1, "
                f"got {world_size!r}"
            )
        settings = read_settings(source, model=model, auto=auto, implied=implied)
        settings = _with_batch_sizes(settings, world_size=world_size)
        settings.check_resolved()
        value = settings.value
        zero = ZeroConfig(**zero_arguments(settings))
        autocast_dtype = None
        if value("torch_autocast.enabled"):
            autocast_dtype = value("torch_autocast.dtype") or torch.bfloat16
        loss_scale, is_bf16 = _loss_scale_of(settings, autocast_dtype), value("bf16.enabled")
        config = cls(
            zero=zero,
            loss_scale=loss_scale,
            max_norm=float(value("gradient_clipping")),
            train_batch_size=value("train_batch_size"),
            micro_batch_size=value("train_micro_batch_size_per_gpu"),
            accumulation_steps=value("gradient_accumulation_steps"),
            manages_accumulation=value("managed_gradient_accumulation"),
            optimizer=_named(settings, "optimizer"),
            scheduler=_named(settings, "scheduler"),
            steps_per_print=value("steps_per_print") or None,
            # Steps with inf or nan in a gradient are skipped where the mode is a 16-bit one.
            checks_overflow=value("bf16.check_grad_overflow") if is_bf16 else bool(loss_scale),
            autocast_dtype=autocast_dtype,
            drop_last=value("dataloader_drop_last"),
            activation_checkpointing={
                name: setting.value
                for name, setting in settings.under("activation_checkpointing.").items()
                if not setting.key.is_off(setting.value)
            },
            leaf_modules=_leaf_modules(settings),
            state_dtype=state_dtype_of(settings),
            monitoring=monitoring_of(settings),
        )
        return attrs.evolve(config, sources=_rows(settings))

    def table(self) -> str:
        """All keys of the file and all that were inferred or left to their defaults, to print."""
        rows = [
            # An object that is not looked into may hold what has no str(): an int of 5,000 digits.
            (each.key, shown(value) if isinstance(value, Mapping) else value, *rest)
            for each in self.sources
            for value, *rest in [(each.value, each.origin, each.meaning)]
        ]
        return as_table(
            rows, headers=["key", "value", "from", "meaning"], missingval="-", disable_numparse=True
        )


def _with_batch_sizes(settings: Settings, *, world_size: int) -> Settings:
    """Fill in what the file leaves open, as DeepSpeed does: one step where nothing says more."""
    paths = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    known = [settings.by_path[path].value for path in paths]
    sizes: list[Any] = [None if value is UNRESOLVED else value for value in known]
    train, micro, steps = sizes
    if train is None and micro is None:
        settings.check_resolved()  # they may be "auto", beside others
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
        raise ConfigError(
            f"train_batch_size: expected train_micro_batch_size_per_gpu {micro} * "
            f"gradient_accumulation_steps {steps} * world size {world_size} = "
            f"{micro * steps * world_size}, got {train}; leave one of the three out to have it "
            "inferred"
        )
    found = zip(paths, sizes, (train, micro, steps), strict=True)
    return settings.replaced({path: size for path, old, size in found if old is None}, "inferred")


def _loss_scale_of(
    settings: Settings, autocast_dtype: torch.dtype | None
) -> StaticLossScale | DynamicLossScale | None:
    """How the loss is scaled: with fp16, and where autocast computes in fp16."""
    value = settings.value
    if not value("fp16.enabled"):
        # What torch.amp.GradScaler starts with, which DeepSpeed uses there.
        is_half = autocast_dtype is torch.float16
        return DynamicLossScale(window=2000, hysteresis=1) if is_half else None
    scale = value("fp16.loss_scale")
    if scale != 0:
        return StaticLossScale(float(scale))
    has_patience = settings.idle(settings.by_path["fp16.hysteresis"]) is None
    return DynamicLossScale(
        initial_power=value("fp16.initial_scale_power"),
        window=value("fp16.loss_scale_window"),
        hysteresis=value("fp16.hysteresis") if has_patience else 1,
        consecutive_hysteresis=value("fp16.consecutive_hysteresis") and has_patience,
        minimum=float(value("fp16.min_loss_scale")),
        raises_at_minimum=has_patience,
    )


def _named(settings: Settings, name: str) -> NamedSpec | None:
    kind, given = settings.value(f"{name}.type"), settings.under(f"{name}.params.")
    params = {option: setting.value for option, setting in given.items() if setting.key.becomes}
    if kind is None and params:
        raise ConfigError(
            f"{name}.type: expected a name beside {name}.params, got none; say which {name}"
        )
    return None if kind is None else NamedSpec(kind, params)


def _leaf_modules(settings: Settings) -> dict[str, Any]:
    """What to make leaves, those of the default included; nothing below stage 3."""
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
            shown_value = value.value if value is UNRESOLVED else value
            rows.append(SourceRow(setting.key.path, shown_value, setting.origin, meaning))
    return tuple(rows)


def _meaning(settings: Settings, setting: Setting) -> str | None:
    """The last column; None for what need not be shown."""
    key = setting.key
    if setting.origin == "default":
        is_shown = settings.is_read(key) and ".params." not in key.path
        return key.becomes if is_shown else None
    if settings.is_gated_off(key):
        return f"not read: {key.closed}"
    if settings.is_below_stage(key):
        return f"not read below stage {key.min_stage}"
    reason = settings.idle(setting)
    return f"none: {reason}" if reason else key.becomes or "off"
