"""From a file or dict to single keys with their paths: nothing is known yet of what they mean."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, final

from attrs import frozen

from ._errors import ConfigError, FileError
from ._key_table import SECTIONS, WRITTEN, unknown_key

_PLAIN_ALPHABET: Final = str.maketrans("-_", "+/")

Source = Mapping[str, Any] | str | os.PathLike[str]


@final
@frozen
class _Twice:
    """Stands for the value of a name that an object of the file has more than once."""


def shown(value: Any) -> str:
    """The start of its repr, for a message; its type where it has none (an int of 5,000 digits)."""
    try:
        return f"{value!r:.80}"
    except Exception:
        return f"a value of type {type(value).__name__}"


def _as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        found[name] = _Twice() if name in found else value
    return found


def load(source: Source) -> Mapping[str, Any]:
    """The top object of a configuration: a mapping, a file, or base64 of such a file. Local.

    Raises:
        ConfigError: `source` is neither a mapping nor a string nor a path.
        FileError: There is no such file, or it is not JSON, or no object.
    """
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            "from_deepspeed(): expected a dict, the path of a JSON file or its base64, got "
            f"{shown(source)} of type {type(source).__name__}"
        )
    decoded = _decode(source)
    where = repr(str(source)) if decoded is None else f"base64 {shown(source)}"
    try:
        content = Path(source).read_bytes() if decoded is None else decoded
        loaded = json.loads(content.decode(), object_pairs_hook=_as_dict)
    except OSError as error:
        raise FileError(
            f"{where}: expected a readable JSON file, got {error.strerror or error}"
        ) from error
    except (ValueError, RecursionError) as error:  # ValueError: also of undecodable bytes
        raise FileError(f"{where}: expected JSON, got {error}") from error
    if not isinstance(loaded, dict):
        raise FileError(f"{where}: expected an object ({{...}}), got {shown(loaded)}")
    return loaded


def _decode(source: str | os.PathLike[str]) -> bytes | None:
    """What a base64 string says, in either alphabet; None for what is a path.

    No path decodes to a text that begins with a brace, but one made for it.
    """
    if not isinstance(source, str):
        return None
    try:
        content = base64.b64decode(source.translate(_PLAIN_ALPHABET), validate=True)
    except ValueError:
        return None
    return content if content.lstrip().startswith(b"{") else None


def leaves(raw: Mapping[Any, Any], *, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Paths as written, and their values; a section that is null is as good as absent.

    Raises:
        ConfigError: Names a key that is unknown, given twice, or a section that is no object.
    """
    for name, value in raw.items():
        path = f"{prefix}{name}"
        if not isinstance(name, str) or "." in name:
            raise ConfigError(f"{path}: expected names in nested objects as keys, got {name!r}")
        if isinstance(value, _Twice):
            raise ConfigError(f"{path}: expected one value, got several; leave one")
        if path in WRITTEN:
            yield path, value
        elif path not in SECTIONS:
            raise unknown_key(path)
        elif isinstance(value, Mapping):
            yield from leaves(value, prefix=f"{path}.")
        elif value is not None:
            raise ConfigError(
                f"{path}: expected an object with keys such as "
                f"{next(other for other in WRITTEN if other.startswith(path + '.'))}, "
                f"got {shown(value)}"
            )
