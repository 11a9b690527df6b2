"""Settings: keys of a configuration, checked one by one, and what they say to ZeroConfig."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, Final, final

import attrs
import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from zero_comm import Loco
from zero_comm.calls import in_lines
from zero_comm.logs import warn_user
from zero_engine import ConfigError, FileError, Offload
from zero_offload import DiskSettings
from zero_partition import AS_IT_IS, ModulePrecision, Precision, Wire

from .file_key import ANYTHING, FileKey, shown
from .keys import KEYS, SECTIONS, WRITTEN, find_slip, unknown_key

HIDDEN_SIZE_KEYS: Final = (
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)
_16_BIT: Final = {"fp16.enabled": torch.float16, "bf16.enabled": torch.bfloat16}
_OF_ARGS: Final = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)


def _derived_values(
    model: nn.Module | None, known: Mapping[str, Any], implied: Mapping[str, Any]
) -> dict[str, Any]:
    """Return values for keys that are "auto", by path. Local.

    They are those that transformers' Trainer fills in (its docs, "DeepSpeed"). The model has a
    dtype and, in its `config`, a hidden size. `known`, the values of the file, has the 16-bit
    section that is on and the learning rate to which a scheduler warms up. Values in `implied`
    replace those that are found.
    """
    found: dict[str, Any] = {"scheduler.params.warmup_min_lr": 0, "steps_per_print": 0}
    lr = {**implied, **known}.get("optimizer.params.lr")
    if lr is not None:
        found["scheduler.params.warmup_max_lr"] = lr
    hidden_size = _hidden_size(getattr(model, "config", None))
    if hidden_size is not None:
        square = hidden_size * hidden_size
        found |= zip(HIDDEN_SIZE_KEYS, (int(0.9 * square), 10 * hidden_size), strict=True)
    params = () if model is None else model.parameters()
    dtypes = {param.dtype for param in params if param.is_floating_point()}
    said = {of for path, of in _16_BIT.items() if known.get(path) is True}
    if said or len(dtypes) == 1:
        found |= {path: of in (said or dtypes) for path, of in _16_BIT.items()}
    return {**found, **implied}


def implied_values(args: Any, optimizer: Any, lr_scheduler: Any) -> dict[str, Any]:
    """Return values of keys that follow from arguments of `initialize`, by path. Local.

    Where an optimizer or scheduler is given, the keys of its section have their defaults. Of an
    optimizer object, lr, betas, eps, weight_decay and momentum replace those, each where it is
    equal in all param groups.
    """
    found = {
        path: getattr(args, path) for path in _OF_ARGS if getattr(args, path, None) is not None
    }
    for name, given in (("optimizer", optimizer), ("scheduler", lr_scheduler)):
        if given is not None:
            found |= {path: KEYS[path].default for path in KEYS if path.startswith(f"{name}.")}
    if isinstance(optimizer, torch.optim.Optimizer):
        for option in ("lr", "betas", "eps", "weight_decay", "momentum"):
            values = [_option(group, option) for group in optimizer.param_groups]
            if all(value == values[0] for value in values):
                found[f"optimizer.params.{option}"] = values[0]
    return found


def _option(group: Mapping[str, Any], name: str) -> Any:
    # A scheduler stores the first value under this name, and then changes the option.
    value = group.get(f"initial_{name}", group.get(name))
    return value.item() if isinstance(value, Tensor) else value


def _hidden_size(config: Any) -> int | None:
    for part in (config, getattr(config, "text_config", None)):
        sizes = getattr(part, "hidden_size", None) or getattr(part, "hidden_sizes", None)
        if sizes:
            return max(sizes) if isinstance(sizes, list | tuple) else int(sizes)
    return None


Source = Mapping[str, Any] | str | os.PathLike[str]

# Value of a name that occurs more than once in an object of the file.
_TWICE: Final = object()


def _as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        found[name] = _TWICE if name in found else value
    return found


def _load(source: Source) -> Mapping[str, Any]:
    """The top object of a configuration: a mapping, a file, or base64 of such a file. Local."""
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            "from_deepspeed(): expected a dict, the path of a JSON file or its base64, got "
            f"{shown(source)} of type {type(source).__name__}"
        )
    decoded = _decode(source)
    where = _named(source)
    try:
        content = Path(source).read_bytes() if decoded is None else decoded
        loaded = json.loads(content.decode(), object_pairs_hook=_as_dict)
    except OSError as error:
        # Its traceback would come first, and says nothing that this does not.
        raise FileError(
            f"{where}: expected a JSON file, which cannot be read: {error.strerror or error} (in "
            f"{Path.cwd()})"
        ) from None
    except (ValueError, RecursionError) as error:
        # Undecodable bytes are a ValueError, too.
        raise FileError(f"{where}: expected JSON ({error})") from error
    if not isinstance(loaded, dict):
        raise FileError(f"{where}: expected an object ({{...}}), got {shown(loaded)}")
    return loaded


@contextmanager
def _noted(source: Source) -> Iterator[None]:
    """Let errors of keys say in which file they are."""
    try:
        yield
    except ConfigError as error:
        if not isinstance(source, Mapping):
            error.add_note(f"in the configuration {_named(source)}")
        raise


def _named(source: Source) -> str:
    """Return what messages call a configuration."""
    if isinstance(source, Mapping):
        return "the configuration"
    return repr(str(source)) if _decode(source) is None else f"base64 {shown(source)}"


def _decode(source: str | os.PathLike[str]) -> bytes | None:
    """Return the content of a base64 string, in either alphabet; None if the source is a path.

    A string is taken for base64 if the decoded text begins with a brace, which no path does unless
    it is made for it.
    """
    if not isinstance(source, str):
        return None
    try:
        content = base64.b64decode(source.translate(str.maketrans("-_", "+/")), validate=True)
    except ValueError:
        return None
    return content if content.lstrip().startswith(b"{") else None


def _leaves(raw: Mapping[Any, Any], *, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield paths as written, and their values; a section that is null counts as absent.

    A path that is not in the table is an error where it looks like a slip, and in sections where it
    would change results or the use of memory.
    """
    for name, value in raw.items():
        path = f"{prefix}{name}"
        if not isinstance(name, str) or "." in name:
            raise ConfigError(f"{path}: expected names in nested objects as keys, got {name!r}")
        if value is _TWICE:
            raise ConfigError(f"{path}: expected one value, got several; leave one")
        if path in WRITTEN:
            yield path, value
        elif path not in SECTIONS:
            if path.startswith(_NO_UNKNOWN) or find_slip(path) is not None:
                raise unknown_key(path)
            yield path, value
        elif isinstance(value, Mapping):
            yield from _leaves(value, prefix=f"{path}.")
        elif value is not None:
            raise ConfigError(
                f"{path}: expected an object with keys such as "
                f"{next(other for other in WRITTEN if other.startswith(path + '.'))}, "
                f"got {shown(value)}"
            )


ZERO: Final = "zero_optimization"
STAGE: Final = f"{ZERO}.stage"
# Paths with these prefixes must be known.
_NO_UNKNOWN: Final = (f"{ZERO}.", "optimizer.", "scheduler.")


class _Unresolved(Enum):
    UNRESOLVED = "auto"


# Value of a key that is "auto" in the file, until something resolves it.
UNRESOLVED: Final = _Unresolved.UNRESOLVED


@final
@frozen
class Setting:
    """One key, its value, and where that came from."""

    key: FileKey
    value: Any
    # "file", "auto" (the file says "auto"), "inferred" from other values, or "default".
    origin: str
    # Path in the file, which may be an alias.
    written: str


@final
@frozen(eq=False)
class Settings:
    """A value for every key of the table. All methods are local."""

    by_path: Mapping[str, Setting]

    def value(self, path: str) -> Any:
        """Return the value of a key; raise ConfigError if it is "auto" and not resolved yet."""
        setting = self.by_path[path]
        if setting.value is UNRESOLVED:
            raise _unresolved([setting])
        return setting.value

    def is_gated_off(self, key: FileKey) -> bool:
        """Return whether the key's section is turned off; False where that is not known yet."""
        if not key.gates or key.path in key.gates:
            return False
        for setting in (self.by_path[path] for path in key.gates):
            value, is_off = setting.value, setting.key.is_off(setting.value)
            opens = not is_off if key.opened_by is None else value == key.opened_by
            if (opens or value is UNRESOLVED) and self.is_read(setting.key):
                return False
        return True

    def is_below_stage(self, key: FileKey) -> bool:
        """Return whether the key needs a higher stage; False where the stage is not known yet."""
        stage = self.by_path[STAGE].value
        return stage is not UNRESOLVED and stage < key.min_stage

    def is_read(self, key: FileKey) -> bool:
        """Return whether the key is read: its section is not off, and its stage is reached."""
        return not self.is_gated_off(key) and not self.is_below_stage(key)

    def given(self) -> Iterator[Setting]:
        """Return the settings that are not defaults, in no particular order."""
        return (item for item in self.by_path.values() if item.origin != "default")

    def under(self, prefix: str) -> dict[str, Setting]:
        """Return the settings under a prefix that are not defaults, by path without the prefix."""
        return {
            item.key.path.removeprefix(prefix): item
            for item in self.given()
            if item.key.path.startswith(prefix)
        }

    def check_resolved(self, *, only_not_built: bool = False) -> None:
        """Raise ConfigError, which names them all, if keys that are read are still "auto"."""
        open_settings = [
            item
            for item in self.given()
            if item.value is UNRESOLVED
            and (item.key.remedy or not only_not_built)
            and self.is_read(item.key)
        ]
        if open_settings:
            raise _unresolved(open_settings)

    def is_idle(self, key: FileKey) -> bool:
        """Return whether a key that is read changes nothing here."""
        if key.idle is not None:
            return key.idle(lambda path: self.by_path[path].value)
        return key.is_ignored

    def replaced(self, values: Mapping[str, Any], origin: str) -> Settings:
        """Return a copy that has other values at some paths, all of one origin."""
        changed = {
            path: attrs.evolve(self.by_path[path], value=value, origin=origin)
            for path, value in values.items()
        }
        return Settings({**self.by_path, **changed})


def _unresolved(settings: Sequence[Setting]) -> ConfigError:
    first, *others = [setting.written for setting in settings]
    paths = [setting.key.path for setting in settings]
    model = "model=..., whose config has a hidden_size, or " * any(
        path in HIDDEN_SIZE_KEYS for path in paths
    )
    answers = ", ".join(f'"{path}": ...' for path in paths)
    likewise = f", as of {', '.join(others)}" if others else ""
    return ConfigError(
        f'{first}: expected a value for "auto", got none{likewise}; pass {model}auto={{{answers}}} '
        "to initialize() or ZeroConfig.from_deepspeed()"
    )


def read_settings(
    source: Source,
    *,
    model: nn.Module | None,
    auto: Mapping[str, Any] | None,
    implied: Mapping[str, Any] | None = None,
    warns: bool = True,
) -> Settings:
    """Read a configuration; rank 0 warns once of all its keys that change nothing.

    A value for a key that is "auto" is taken from `auto`, else from `implied`, else from the model.
    `auto` must not contradict the file. `warns` is False where the same configuration will be read
    again.
    """
    with _noted(source):
        defaults = {path: Setting(key, key.default, "default", path) for path, key in KEYS.items()}
        settings = Settings({**defaults, **_read_leaves(_load(source))})
        settings = settings.replaced(_answers(settings, auto or {}), "auto")
        known = {
            item.key.path: item.value
            for item in settings.given()
            if item.value is not UNRESOLVED or settings.is_below_stage(item.key)
        }
        derived = _derived_values(model, known, implied or {})
        settings = settings.replaced(
            {
                item.key.path: _read_value(item.key, derived[item.key.path], item.written)
                for item in settings.given()
                if item.key.path in derived and item.key.path not in known
            },
            "auto",
        )
        for item in settings.given():
            if item.value is not UNRESOLVED and settings.is_read(item.key):
                item.key.check_built(item.written, item.value)
        if warns:
            _warn_of_what_changes_nothing(settings, source)
    return settings


def _read_leaves(raw: Mapping[Any, Any]) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for written, value in _leaves(raw):
        key = WRITTEN.get(written) or FileKey(written, ANYTHING, None)
        if key.path in found:
            raise ConfigError(
                f"{written}: expected this key under one name, got {found[key.path].written} too"
            )
        found[key.path] = Setting(key, _read_value(key, value, written), "file", written)
    return found


def _read_value(key: FileKey, value: Any, written: str) -> Any:
    is_open = isinstance(value, str) and value == "auto" and not key.kind.fits(value)
    return UNRESOLVED if is_open else key.read(written, value)


def _answers(settings: Settings, auto: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the values that `auto` has for keys that are "auto" in the file."""
    if not isinstance(auto, Mapping):
        raise ConfigError(
            "from_deepspeed(): expected auto to be values by path, as in "
            f'{{"optimizer.params.lr": 1e-4}}, got {shown(auto)}'
        )
    found, differ = dict[str, Any](), list[str]()
    for written, value in auto.items():
        if written not in WRITTEN:
            raise unknown_key(str(written))
        key = WRITTEN[written]
        setting, answer = settings.by_path[key.path], _read_value(key, value, written)
        if setting.value is UNRESOLVED:
            found[key.path] = answer
        elif setting.origin == "file" and setting.value != answer:
            differ.append(
                f"{setting.written}: expected {shown(value)}, as auto=... says, got "
                f"{shown(setting.value)} in the file"
            )
    if differ:
        remedy = 'change one, or write "auto" in the file'
        raise ConfigError(in_lines(*differ, remedy) if differ[1:] else f"{differ[0]}; {remedy}")
    return found


def _warn_of_what_changes_nothing(settings: Settings, source: Source) -> None:
    if dist.is_initialized() and dist.get_rank() > 0:
        # Rank 0 warns. Before there are ranks, each process does.
        return
    names = []
    for item in settings.given():
        key = item.key
        if settings.is_below_stage(key):
            if item.value is not UNRESOLVED and not key.is_off(item.value):
                names.append(f"{item.written} (from stage {key.min_stage} on)")
        elif not settings.is_gated_off(key) and settings.is_idle(key):
            if key.path not in KEYS:
                names.append(f"{item.written} (unknown)")
            elif key.idle is not None or not key.is_off(item.value):
                names.append(item.written)
    if names:
        warn_user(
            f"keys of {_named(source)} that change nothing here: {', '.join(names)}",
        )


# ---- What they say of ZeRO ----


def _precision_of(settings: Settings) -> Precision | None:
    """Dtypes of training; None where the configuration leaves them as they are."""
    value = settings.value
    _check_modes(settings)
    params = torch.bfloat16 if value("bf16.enabled") else None
    if value("fp16.enabled"):
        params = torch.float16
    asked = value("data_types.param_dtype")
    if asked not in (None, params or torch.float32):
        raise ConfigError(
            f"data_types.param_dtype: expected {params or torch.float32}, as fp16.enabled and "
            f"bf16.enabled say, got {asked}; leave it out, or turn the section of its dtype on"
        )
    # Without a 16-bit section a model trains in its own dtype, whatever is set for gradients.
    masters = torch.float32 if params and not _has_16_bit_masters(settings) else None
    accumulate, kept = value("data_types.grad_accum_dtype"), masters or params or torch.float32
    if accumulate not in (None, kept):
        raise ConfigError(
            f"data_types.grad_accum_dtype: expected {kept}, in which the optimizer updates and "
            f"gradients are added up, got {accumulate}; leave it out"
        )
    precision = Precision(
        params=params or asked,
        masters=masters,
        reduce=value("communication_data_type"),
        predivide_factor=_predivide_factor(settings),
        keep=_travelling(settings),
        reduces_mean=value("prescale_gradients") or value("gradient_allreduce_op") == "mean",
    )
    return None if precision == AS_IT_IS else precision


def autocast_dtype_of(settings: Settings) -> torch.dtype | None:
    """Return the dtype that torch.autocast computes in; None where it is off."""
    if not settings.value("torch_autocast.enabled"):
        return None
    dtype: torch.dtype = settings.value("torch_autocast.dtype") or torch.bfloat16
    return dtype


_SAFE_MODULES: Final = ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d")


def _travelling(settings: Settings) -> dict[str | type[nn.Module], ModulePrecision]:
    """Return modules that compute in autocast's dtype; their parameters are communicated in it.

    DeepSpeed documents this for gradients, and for parameters at stage 3 ("torch_autocast").
    """
    dtype = autocast_dtype_of(settings)
    if dtype is None or settings.value(STAGE) == 0:
        return {}
    said = settings.value("torch_autocast.lower_precision_safe_modules")
    names = _SAFE_MODULES if said is None else (said,) if isinstance(said, str) else said
    return {_class_of(name): ModulePrecision(travel=dtype) for name in names}


def _class_of(path: str) -> type[nn.Module]:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        found = None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(
            "torch_autocast.lower_precision_safe_modules: expected paths of classes of modules, as "
            f"in 'torch.nn.Linear', got {path!r}"
        )
    return found


def state_dtype_of(settings: Settings) -> torch.dtype | None:
    """Return the dtype of moments where 16-bit parameters have no fp32 masters; else None."""
    if not _has_16_bit_masters(settings):
        return None
    return torch.bfloat16 if settings.value("bf16.bf16_optimizer_states") else torch.float32


def monitoring_of(settings: Settings) -> dict[str, Any]:
    """Return the values of monitoring keys that are read and not off, by path."""
    return {
        path: setting.value
        for path, setting in settings.by_path.items()
        if setting.key.becomes == "monitoring"
        and settings.is_read(setting.key)
        and not setting.key.is_off(settings.value(path))
    }


def _predivide_factor(settings: Settings) -> float | None:
    factor = settings.value("gradient_predivide_factor")
    if not settings.value("prescale_gradients"):
        return float(factor)
    if factor != 1.0:
        raise ConfigError(
            "gradient_predivide_factor: expected 1.0 with prescale_gradients, which divides by the "
            f"world size itself, got {factor}; leave one of them out"
        )
    return None


def _has_16_bit_masters(settings: Settings) -> bool:
    return settings.value("bf16.enabled") and settings.value("bf16.bf16_master_weights_and_grads")


def _check_modes(settings: Settings) -> None:
    value = settings.value
    is_fp16, is_bf16 = value("fp16.enabled"), value("bf16.enabled")
    if is_fp16 and is_bf16:
        raise ConfigError(
            "fp16.enabled: expected at most one of fp16.enabled and bf16.enabled, got both; turn "
            "one off"
        )
    # `settings.value` would refuse "auto", which means nothing here with fp16 off.
    scale = settings.by_path["fp16.loss_scale"].value
    if is_bf16 and isinstance(scale, int | float) and scale != 0:
        raise ConfigError(
            f"fp16.loss_scale: expected none with bf16.enabled, as bf16 has the range of fp32, got "
            f"{scale}; leave it out"
        )
    if is_fp16 and value("fp16.min_loss_scale") > 2.0 ** value("fp16.initial_scale_power"):
        raise ConfigError(
            "fp16.min_loss_scale: expected at most the first scale, two to the power of "
            f"fp16.initial_scale_power ({value('fp16.initial_scale_power')}), got "
            f"{value('fp16.min_loss_scale')}"
        )
    masters, states = "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"
    if is_bf16 and value(states) and not value(masters):
        raise ConfigError(
            f"{states}: expected it with {masters}, as an optimizer keeps no less precise state "
            "than what it updates, got true and false; turn both on, or both off"
        )


def _wire_of(
    *,
    secondary: int = 1,
    replicas: int = -1,
    params: str | None = None,
    gradients: str | None = None,
    frozen: str | None = None,
    loco: Loco | None = None,
) -> Wire:
    """A Wire from what the file gives: ranks of a node, ranks of a replica, and codecs.

    Gradients are reduced by the same nodes; where no size is given, torchrun says what a node is.
    """
    if secondary > 1 and replicas > 0:
        raise ConfigError(
            f"zero_optimization.mics_shard_size: expected -1 together with zero_hpz_partition_size "
            f"{secondary}, got {replicas}: where each replica has all shards, there is nothing to "
            "keep a second time; leave one of them out"
        )
    if replicas > 0 and loco is not None:
        raise ConfigError(
            "zero_optimization.zeropp_loco_param: expected none together with mics_shard_size "
            f"{replicas}: what is lost across replicas has no feedback; leave one of them out"
        )
    has_nodes = replicas > 0 or secondary > 1
    return Wire(
        levels=max(replicas, secondary) if has_nodes else None,
        secondary=secondary > 1,
        replicas=replicas > 0,
        params=params,
        gradients=gradients,
        frozen=frozen,
        loco=loco,
    )


# Field that several keys set together -> function that makes its value. Inner fields come first.
_PARTS: Final[Mapping[str, Any]] = {
    "zero.offload.disk": DiskSettings,
    "zero.offload": Offload,
    "zero.wire": _wire_of,
}
# Fields that are computed from several keys, and that no single key sets.
_OF_SEVERAL: Final = ("zero.precision",)


def stage_and_wire_of(source: Source) -> tuple[int, Wire]:
    """Return the settings that matter while a model is built: the stage and the `Wire`. Local.

    The whole configuration is checked, but other keys may be "auto", since the model that resolves
    them is not known yet. Warns of nothing: the configuration is read again to train the model.
    """
    settings = read_settings(source, model=None, auto=None, warns=False)
    wire = _wire_of(**_taken(_fields(settings, within="zero.wire."), "zero.wire"))
    return settings.value(STAGE), wire


def zero_arguments(settings: Settings) -> dict[str, Any]:
    """Keyword arguments for ZeroConfig; what the configuration leaves out keeps our defaults."""
    # Other keys may be "auto" here. They are checked when they are read.
    settings.check_resolved(only_not_built=True)
    fields = {"zero.stage": settings.value(STAGE), **_fields(settings)}
    fields["zero.precision"] = _precision_of(settings)
    _check_folder(settings, fields)
    for owner, make in _PARTS.items():
        part = make(**_taken(fields, owner))
        # An unset part equals the default. Many templates say "none" for it.
        if part != make():
            fields[owner] = part
    return _taken(fields, "zero")


def _fields(settings: Settings, *, within: str = "zero.") -> dict[str, Any]:
    """Return the fields of ZeroConfig and its parts that single keys set, by path of the field.

    Raises:
        ConfigError: Two keys set one field to different values.
    """
    found: dict[str, Any] = {}
    said_by: dict[str, Setting] = {}
    for setting in settings.given():
        key, field = setting.key, setting.key.becomes
        if field is None or not field.startswith(within) or field in _OF_SEVERAL:
            continue
        # A null counts as a missing key.
        if not settings.is_read(key) or (raw := settings.value(key.path)) is None:
            continue
        value, other = key.convert(raw), said_by.setdefault(field, setting)
        if found.setdefault(field, value) != value:
            raise ConfigError(
                f"{setting.written}: expected what agrees with {other.written}, which is "
                f"{shown(other.value)}, as both are one setting here, got {shown(raw)}; make them "
                "the same, or leave one out"
            )
    return found


def _taken(fields: dict[str, Any], owner: str) -> dict[str, Any]:
    """Remove the fields of one owner from `fields`, and return them by name."""
    names = [path for path in fields if path.rpartition(".")[0] == owner]
    return {path.rpartition(".")[2]: fields.pop(path) for path in names}


def _check_folder(settings: Settings, fields: Mapping[str, Any]) -> None:
    if "zero.offload.path" in fields:
        return
    for section in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"):
        device = settings.by_path[f"{section}.device"]
        if settings.is_read(device.key) and device.value == "nvme":
            raise ConfigError(
                f"{section}.nvme_path: expected a folder on the disk to use, as {section}.device "
                "is 'nvme', got none; say which folder"
            )


def read_zero_arguments(
    source: Source, *, model: nn.Module | None, auto: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the arguments of ZeroConfig from a file; see `ZeroConfig.from_deepspeed`."""
    settings = read_settings(source, model=model, auto=auto)
    if state_dtype_of(settings) is torch.float32:
        raise ConfigError(
            "bf16.bf16_optimizer_states: expected true with bf16_master_weights_and_grads, as "
            "the optimizer of a plain loop is yours, got false; set it to true, and pass "
            "zero_offload.CPUAdam(masters=False) or FusedAdam(masters=False), whose moments "
            "are fp32; or call initialize()"
        )
    leaves = [
        setting.written
        for setting in settings.under("zero_optimization.leaf_module.").values()
        if not setting.key.is_off(setting.value)
    ]
    if asked := monitoring_of(settings):
        warn_user(
            f"{', '.join(asked)}: a plain loop has zero_engine.metrics() and timeline() for it",
        )
    if leaves:
        warn_user(
            f"{', '.join(leaves)}: a ZeroConfig has no place for names of modules; pass them "
            "to zero_partition.set_leaf_modules(model, ...) before shard()",
        )
    return zero_arguments(settings)
