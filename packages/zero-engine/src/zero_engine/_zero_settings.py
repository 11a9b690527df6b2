"""What a configuration says of ZeRO: arguments of ZeroConfig."""

from __future__ import annotations

from typing import Any

from ._file_key import Becomes
from ._json_file import Source
from ._precision_settings import precision_of
from ._settings import STAGE, Settings, read_settings


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


def zero_arguments(settings: Settings) -> dict[str, Any]:
    """Keyword arguments for ZeroConfig; what the configuration leaves out keeps our defaults.

    Raises:
        ConfigError: Starts with the path of a key that says "auto", or contradicts another.
    """
    arguments: dict[str, Any] = {
        "stage": settings.value(STAGE),
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
