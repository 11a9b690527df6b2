"""What a configuration says of ZeRO: arguments of ZeroConfig."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from zero_comm import Loco
from zero_offload import DiskSettings
from zero_partition import AS_IT_IS, Precision, Wire

from zero_engine.errors import ConfigError
from zero_engine.offload import Offload

from .file_key import shown
from .settings import STAGE, Setting, Settings, Source, read_settings


def precision_of(settings: Settings) -> Precision | None:
    """Dtypes of training; None where the configuration leaves them as they are.

    Raises:
        ConfigError: Starts with the path of a key that contradicts another, and names that one.
    """
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
    # Without a 16-bit section a model trains as it is, whatever else is said of its gradients.
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
        reduces_mean=value("gradient_allreduce_op") == "mean",
    )
    return None if precision == AS_IT_IS else precision


def state_dtype_of(settings: Settings) -> torch.dtype | None:
    """Of moments, where 16-bit parameters have no masters."""
    if not _has_16_bit_masters(settings):
        return None
    return torch.bfloat16 if settings.value("bf16.bf16_optimizer_states") else torch.float32


def _predivide_factor(settings: Settings) -> float | None:
    factor = settings.value("gradient_predivide_factor")
    if not settings.value("prescale_gradients"):
        return float(factor)
    if factor != 1.0:
        raise ConfigError(
            "gradient_predivide_factor: expected 1.0 with prescale_gradients, which divides by the "
            f"world size itself, got {factor}; leave one of them out"
        )
    if settings.value("gradient_allreduce_op") != "mean":
        raise ConfigError(
            'prescale_gradients: expected it with gradient_allreduce_op "mean", whose division it '
            'does first, got "sum"; leave one of them out'
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
    # Read by hand: with fp16 off, "auto" there means nothing.
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


# Values that several keys make together, those within others first.
_PARTS: Final[Mapping[str, Any]] = {
    "zero.offload.disk": DiskSettings,
    "zero.offload": Offload,
    "zero.wire": _wire_of,
}
_OF_SEVERAL: Final = ("zero.precision",)  # fields that are no single key's


def stage_and_wire_of(source: Source) -> tuple[int, Wire]:
    """All that matters while a model is built: the stage, and which ranks exchange what. Local.

    The whole configuration is checked; other keys may say "auto", as nothing is known yet of the
    model that says what it is. Warns of nothing: whoever trains the model reads all of it.

    Raises:
        ConfigError: Starts with the path of the key that is wrong, or excludes another.
        FileError: There is no such file, or it is not JSON.
    """
    settings = read_settings(source, model=None, auto=None, warns=False)
    wire = _wire_of(**_taken(_fields(settings, within="zero.wire."), "zero.wire"))
    return settings.value(STAGE), wire


def zero_arguments(settings: Settings) -> dict[str, Any]:
    """Keyword arguments for ZeroConfig; what the configuration leaves out keeps our defaults.

    Raises:
        ConfigError: Starts with the path of a key that says "auto", or contradicts another.
    """
    settings.check_resolved(only_not_built=True)  # others matter only where they are read, below
    fields = {"zero.stage": settings.value(STAGE), **_fields(settings)}
    fields["zero.precision"] = precision_of(settings)
    _check_folder(settings, fields)
    for owner, make in _PARTS.items():
        part = make(**_taken(fields, owner))
        if part != make():  # else the file asks for nothing: "none", in many templates
            fields[owner] = part
    return _taken(fields, "zero")


def _fields(settings: Settings, *, within: str = "zero.") -> dict[str, Any]:
    """What single keys say of fields of ZeroConfig and its parts, by the field's path."""
    found: dict[str, Any] = {}
    said_by: dict[str, Setting] = {}
    for setting in settings.given():
        key, field = setting.key, setting.key.becomes
        if field is None or not field.startswith(within) or field in _OF_SEVERAL:
            continue
        if not settings.is_read(key) or (raw := settings.value(key.path)) is None:  # as if absent
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
    """The fields of one owner by name, taken out."""
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
    """Those of the file; see `ZeroConfig.from_deepspeed`."""
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
        if not setting.key.is_neutral(setting.value)
    ]
    if leaves:
        warnings.warn(
            f"{', '.join(leaves)}: a ZeroConfig has no place for names of modules; pass them "
            "to zero_engine.set_leaf_modules(model, ...) before shard()",
            stacklevel=3,
        )
    return zero_arguments(settings)
