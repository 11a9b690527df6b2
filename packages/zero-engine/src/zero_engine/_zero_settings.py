"""What a configuration says of ZeRO: arguments of ZeroConfig."""

from __future__ import annotations

from typing import Any

from ._file_key import Becomes
from ._precision_settings import precision_of
from ._settings import Settings


def zero_arguments(settings: Settings) -> dict[str, Any]:
    """Keyword arguments for ZeroConfig; what the configuration leaves out keeps our defaults.

    Raises:
        ConfigError: Starts with the path of a key that says "auto", or contradicts another.
    """
    arguments: dict[str, Any] = {
        "stage": settings.value("zero_optimization.stage"),
        "precision": precision_of(settings),
    }
    for setting in settings.given():
        answer = setting.key.answer
        if not isinstance(answer, Becomes) or not settings.is_read(setting.key):
            continue
        owner, _, name = answer.field.rpartition(".")
        if owner == "zero" and name not in arguments:
            value = settings.value(setting.key.path)
            arguments[name] = answer.convert(value) if answer.convert else value
    return arguments
