"""What a configuration says of ZeRO: arguments of ZeroConfig."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from zero_offload import DiskSettings
from zero_partition import Wire

from ._errors import ConfigError
from ._file_key import Becomes, NotBuilt
from ._json_file import Source, shown
from ._keys_of_wire import wire_of
from ._offload import Offload
from ._precision_settings import precision_of, state_dtype_of
from ._settings import STAGE, Setting, Settings, read_settings

# Values that several keys make together, those within others first.
_PARTS: Final[Mapping[str, Any]] = {
    "zero.offload.disk": DiskSettings,
    "zero.offload": Offload,
    "zero.wire": wire_of,
}
_OF_SEVERAL: Final = ("zero.precision",)  # fields that are no single key's


def stage_of(source: Source) -> int:
    """The stage alone, 0 to 3: all that matters while a model is built. Local.

    The whole configuration is checked; other keys may say "auto", as nothing is known yet of the
    model that says what it is. Warns of nothing: whoever trains the model reads all of it.

    Raises:
        ConfigError: Starts with the path of the key that is wrong.
        FileError: There is no such file, or it is not JSON.
    """
    stage: int = read_settings(source, model=None, auto=None, warns=False).value(STAGE)
    return stage


def wire_said_in(source: Source) -> Wire:
    """Which ranks exchange what, and how, read as `stage_of` reads. Local.

    Raises:
        ConfigError: As `stage_of`, or some of it excludes other.
        FileError: Likewise.
    """
    settings = read_settings(source, model=None, auto=None, warns=False)
    return wire_of(**_taken(_fields(settings, within="zero.wire."), "zero.wire"))


def zero_arguments(settings: Settings) -> dict[str, Any]:
    """Keyword arguments for ZeroConfig; what the configuration leaves out keeps our defaults.

    Raises:
        ConfigError: Starts with the path of a key that says "auto", or contradicts another.
    """
    settings.check_resolved(NotBuilt)  # others matter only where they are read, below
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
        answer = setting.key.answer
        if not isinstance(answer, Becomes) or not settings.is_read(setting.key):
            continue
        if not answer.field.startswith(within) or answer.field in _OF_SEVERAL:
            continue
        raw = settings.value(setting.key.path)
        if raw is None:  # as good as absent
            continue
        value = answer.convert(raw) if answer.convert else raw
        other = said_by.setdefault(answer.field, setting)
        if found.setdefault(answer.field, value) != value:
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
        for setting in settings.given()
        if ".leaf_module." in setting.key.path and not setting.key.is_neutral(setting.value)
    ]
    if leaves:
        warnings.warn(
            f"{', '.join(leaves)}: a ZeroConfig has no place for names of modules; pass them "
            "to zero_engine.set_leaf_modules(model, ...) before shard()",
            stacklevel=3,
        )
    return zero_arguments(settings)
