"""Settings: all keys of a configuration, those of the file and the others, checked one by one."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Final, final

import attrs
import torch.distributed as dist
from attrs import frozen
from torch import nn

from ._auto import HIDDEN_SIZE_KEYS, derived_values
from ._errors import ConfigError
from ._file_key import CannotMatter, FileKey, Gate, NotBuilt
from ._json_file import Source, leaves, load, shown
from ._key_table import KEYS, WRITTEN, unknown_key

STAGE: Final = "zero_optimization.stage"


class Origin(Enum):
    """Where a value came from."""

    FILE = "file"
    AUTO = "auto"  # the file says "auto"
    INFERRED = "inferred"  # from other values
    DEFAULT = "default"


class _Unresolved(Enum):
    UNRESOLVED = "auto"


UNRESOLVED: Final = _Unresolved.UNRESOLVED  # "auto" until something says what it is


@final
@frozen
class Setting:
    """One key, its value, and where that came from."""

    key: FileKey
    value: Any
    origin: Origin
    written: str  # the path in the file, which may be an alias


@final
@frozen(eq=False)
class Settings:
    """A value for every key of the table. Local, like all of it."""

    by_path: Mapping[str, Setting]

    def value(self, path: str) -> Any:
        """What the key says.

        Raises:
            ConfigError: It says "auto", and nothing says what that is.
        """
        setting = self.by_path[path]
        if setting.value is UNRESOLVED:
            model = "model=..., whose config has a hidden_size, or " * (path in HIDDEN_SIZE_KEYS)
            raise ConfigError(
                f'{setting.written}: expected a value for "auto", got none; pass {model}'
                f'auto={{"{path}": ...}}'
            )
        return setting.value

    def is_gated_off(self, key: FileKey) -> bool:
        """Whether its section is turned off."""
        return key.gate is not None and not any(
            self._opens(key.gate, KEYS[path]) for path in key.gate.paths
        )

    def _opens(self, gate: Gate, key: FileKey) -> bool:
        if not self.is_read(key):
            return False
        value = self.value(key.path)
        return value in gate.values if gate.values else not key.is_neutral(value)

    def is_below_stage(self, key: FileKey) -> bool:
        """Whether it is a key of higher stages than this one."""
        return key.min_stage > 0 and self.value(STAGE) < key.min_stage

    def is_read(self, key: FileKey) -> bool:
        """Whether it means anything beside the others."""
        return not self.is_gated_off(key) and not self.is_below_stage(key)

    def given(self) -> Iterator[Setting]:
        """What the file has, in no particular order."""
        return (item for item in self.by_path.values() if item.origin is not Origin.DEFAULT)

    def check_resolved(self) -> None:
        """Raise ConfigError where a key that is read still says "auto"."""
        for setting in self.given():
            if self.is_read(setting.key):
                self.value(setting.key.path)

    def replaced(self, values: Mapping[str, Any], origin: Origin) -> Settings:
        """The same but for some values."""
        changed = {
            path: attrs.evolve(self.by_path[path], value=value, origin=origin)
            for path, value in values.items()
        }
        return Settings({**self.by_path, **changed})


def read_settings(
    source: Source,
    *,
    model: nn.Module | None,
    auto: Mapping[str, Any] | None,
    warns: bool = True,
) -> Settings:
    """Read a configuration; rank 0 warns once of all its keys that cannot matter.

    Args:
        source: A dict, the path of a JSON file, or its base64.
        model: Resolves what DeepSpeed's users let Hugging Face derive from its hidden size.
        auto: Values by path for what the file leaves "auto". They must not contradict it.
        warns: False where the same configuration will be read again.

    Raises:
        ConfigError: Starts with the path of a key that is unknown, of a wrong type or value, not
            built, or given twice.
        FileError: The file is missing or not JSON.
    """
    defaults = {path: Setting(key, key.default, Origin.DEFAULT, path) for path, key in KEYS.items()}
    settings = Settings({**defaults, **_read_leaves(load(source))})
    settings = settings.replaced(_answers(settings, auto or {}), Origin.AUTO)
    open_paths = [
        item.key.path
        for item in settings.given()
        if item.value is UNRESOLVED and not settings.is_below_stage(item.key)
    ]
    lr = settings.by_path["optimizer.params.lr"].value
    derived = derived_values(model, lr=None if lr is UNRESOLVED else lr)
    settings = settings.replaced(
        {path: derived[path] for path in open_paths if path in derived}, Origin.AUTO
    )
    _refuse_what_is_not_built(settings)
    if warns:
        _warn_of_what_cannot_matter(settings)
    return settings


def _read_leaves(raw: Mapping[Any, Any]) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for written, value in leaves(raw):
        key = WRITTEN[written]
        if key.path in found:
            raise ConfigError(
                f"{written}: expected this key under one name, got {found[key.path].written} too"
            )
        found[key.path] = Setting(key, _read_value(key, value, written), Origin.FILE, written)
    return found


def _read_value(key: FileKey, value: Any, written: str) -> Any:
    if value is None and key.default is None:
        return None
    try:
        return key.kind.read(value)
    except ValueError:
        if isinstance(value, str) and value == "auto":
            return UNRESOLVED
        null = ", or null" if key.default is None else ""
        raise ConfigError(
            f"{written}: expected {key.kind.expected}{null}, got {shown(value)}"
        ) from None


def _answers(settings: Settings, auto: Mapping[Any, Any]) -> dict[str, Any]:
    """What `auto` says of keys that are "auto" in the file."""
    if not isinstance(auto, Mapping):
        raise ConfigError(
            "from_deepspeed(): expected auto to be values by path, as in "
            f'{{"optimizer.params.lr": 1e-4}}, got {shown(auto)}'
        )
    found: dict[str, Any] = {}
    for written, value in auto.items():
        if written not in WRITTEN:
            raise unknown_key(str(written))
        key = WRITTEN[written]
        setting, answer = settings.by_path[key.path], _read_value(key, value, written)
        if setting.value is UNRESOLVED:
            found[key.path] = answer
        elif setting.origin is Origin.FILE and setting.value != answer:
            raise ConfigError(
                f"{setting.written}: expected {shown(value)}, as auto=... says, got "
                f'{shown(setting.value)} in the file; change one, or write "auto" in the file'
            )
    return found


def _refuse_what_is_not_built(settings: Settings) -> None:
    for setting in settings.given():
        key = setting.key
        if settings.is_gated_off(key):
            continue
        if settings.is_below_stage(key):
            if setting.value is not UNRESOLVED and not key.is_neutral(setting.value):
                raise ConfigError(
                    f"{setting.written}: expected it from stage {key.min_stage} on, got "
                    f"{shown(setting.value)} at stage {settings.value(STAGE)}; leave it out, or "
                    f"set {STAGE} to {key.min_stage}"
                )
        elif isinstance(key.answer, NotBuilt) and not key.is_neutral(settings.value(key.path)):
            raise ConfigError(
                f"{setting.written}: expected {_as_json(key.default)}, as what it asks for is not "
                f"built yet, got {shown(setting.value)}: {key.answer.remedy}"
            )


def _as_json(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)


def _warn_of_what_cannot_matter(settings: Settings) -> None:
    if dist.is_initialized() and dist.get_rank() > 0:
        return  # rank 0 says it; before there are ranks, each does
    lines = [
        f"  {setting.written}: {setting.key.answer.reason}"
        for setting in settings.given()
        if isinstance(setting.key.answer, CannotMatter) and settings.is_read(setting.key)
    ]
    if lines:
        warnings.warn(
            "keys of the configuration that change nothing here:\n" + "\n".join(lines),
            stacklevel=4,
        )
