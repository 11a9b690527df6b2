"""FileKey: one documented key of DeepSpeed's configuration file, and what becomes of it here."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from attrs import frozen
from zero_engine import ConfigError
from zero_partition.plan import nearest


@frozen
class ValueKind:
    """Values that a key may have: how they are tested, converted and described in errors."""

    # Text after "expected " in an error.
    expected: str
    fits: Callable[[Any], bool]
    # Maps a value that fits to the value that is kept.
    convert: Callable[[Any], Any] = lambda value: value
    # Words of which a value that does not fit may be a misspelling.
    words: tuple[str, ...] = ()
    # A sentence for values that are right elsewhere.
    remedy: str = ""

    def read(self, where: str, value: Any, *, or_null: bool = False) -> Any:
        """Return the converted value; raise ConfigError, naming `where`, if it does not fit."""
        if not self.fits(value):
            null = ", or null" if or_null else ""
            near = nearest(value, self.words) if isinstance(value, str) else None
            meant = f"; did you mean {near!r}?" if near else ""
            rest = f"{meant or '.'} {self.remedy}" if self.remedy else meant
            raise ConfigError(f"{where}: expected {self.expected}{null}, got {shown(value)}{rest}")
        return self.convert(value)


def shown(value: Any) -> str:
    """The start of its repr, for a message; its type where it has none (an int of 5,000 digits)."""
    try:
        return f"{value!r:.80}"
    except Exception:
        return f"a value of type {type(value).__name__}"


def _is_number(value: Any) -> bool:
    # A bool is an int in Python, but a flag in a file.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # Neither inf nor nan, nor an int beyond the range of a float.
    return abs(value) <= sys.float_info.max


def _range(minimum: float, maximum: float) -> str:
    if minimum == -math.inf:
        return ""
    return (
        f" of at least {minimum:g}" if maximum == math.inf else f" from {minimum:g} to {maximum:g}"
    )


def integer(minimum: float = -math.inf, maximum: float = math.inf) -> ValueKind:
    """Whole numbers; also a float without a fraction, as JSON reads 5e8."""

    def fits(value: Any) -> bool:
        return _is_number(value) and value == int(value) and minimum <= value <= maximum

    return ValueKind("an integer" + _range(minimum, maximum), fits, int)


def number(
    minimum: float = -math.inf, maximum: float = math.inf, *, below: float = math.inf
) -> ValueKind:
    """Finite numbers."""
    bound = f" and below {below:g}" if below < math.inf else ""
    return ValueKind(
        "a finite number" + _range(minimum, maximum) + bound,
        lambda value: _is_number(value) and minimum <= value <= maximum and value < below,
    )


def choice(*names: str, remedy: str = "") -> ValueKind:
    """One of several words, in any case; the spelling of `names` is kept."""
    kind = _one_of(", ".join(map(repr, names)), {name.lower(): name for name in names})
    return attrs.evolve(kind, words=names, remedy=remedy)


def _one_of(words: str, known: Mapping[Any, Any]) -> ValueKind:
    def as_known(value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    return ValueKind(
        f"one of {words}",
        lambda value: isinstance(value, str | torch.dtype) and as_known(value) in known,
        lambda value: known[as_known(value)],
    )


def several(kind: ValueKind, *, exactly: int | None = None) -> ValueKind:
    """A list of values of one kind; kept as a tuple."""

    def fits(value: Any) -> bool:
        is_list = isinstance(value, list | tuple) and exactly in (None, len(value))
        return is_list and all(map(kind.fits, value))

    count = "values" if exactly is None else f"{exactly} values"
    return ValueKind(
        f"a list of {count}, each {kind.expected}",
        fits,
        lambda value: tuple(map(kind.convert, value)),
    )


def either(first: ValueKind, second: ValueKind) -> ValueKind:
    """Values of one of two kinds; the first that a value fits converts it."""
    return ValueKind(
        f"{first.expected}, or {second.expected}",
        lambda value: first.fits(value) or second.fits(value),
        lambda value: (first if first.fits(value) else second).convert(value),
    )


# As in DeepSpeed, 0 and 1 are flags, too.
FLAG: Final = ValueKind(
    "true or false", lambda value: isinstance(value, bool | int | float) and value in (0, 1), bool
)
ANYTHING: Final = ValueKind("anything", lambda _: True)
TEXT: Final = ValueKind("a string", lambda value: isinstance(value, str))
FOLDER: Final = ValueKind(
    "the path of a folder",
    lambda value: isinstance(value, str | os.PathLike) and str(value) != "",
    Path,
)
OBJECT: Final = ValueKind("an object ({...})", lambda value: isinstance(value, Mapping))
NAMES: Final = either(several(TEXT), TEXT)
COUNT: Final = integer(0)
POSITIVE: Final = integer(1)

_DTYPES: Final = {
    torch.float32: ("fp32", "float32", "float"),
    torch.float16: ("fp16", "float16", "half"),
    torch.bfloat16: ("bf16", "bfloat16"),
}
_SPELLED: Final[dict[Any, torch.dtype]] = {
    spelled: dtype
    for dtype, names in _DTYPES.items()
    for spelled in (dtype, *names, *(f"torch.{name}" for name in names))
}
DTYPE: Final = _one_of("'fp32', 'fp16', 'bf16'", _SPELLED)


@frozen
class FileKey:
    """A row of the table. With neither `becomes` nor `remedy` it changes nothing here.

    Args:
        path: From the top of the file, joined by dots: "fp16.loss_scale".
        kind: What values it may have. None, JSON's null, is one of them where it is the default.
        default: The value where the key is absent.
        becomes: The field of `EngineConfig` that the key is, or is part of, as in
            "zero.prefetch_numel". Several keys may have the same field, and must agree.
        off: Further values that ask for nothing: those that DeepSpeed defaults to where we do
            not, or that turn the feature off.
        convert: From the file's value to the field's.
        idle: Returns whether the key changes nothing, given a function that looks up the values
            of other keys.
        remedy: Only of a key that is not built, and refused unless its value asks for nothing: a
            clause that says what is missing, or what to do instead.
        aliases: Other paths under which DeepSpeed accepts it.
        gates: The keys that turn its section on; one is enough. They are themselves always read.
        opened_by: The value of a gate that turns the section on; any that is not off when None.
        min_stage: The lowest ZeRO stage at which the key is read.
    """

    path: str
    kind: ValueKind
    default: Any
    becomes: str | None = None
    off: tuple[Any, ...] = ()
    convert: Callable[[Any], Any] = lambda value: value
    idle: Callable[[Callable[[str], Any]], bool] | None = None
    remedy: str | None = None
    aliases: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()
    opened_by: Any = None
    min_stage: int = 0

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the paths under which the key may be written in a file."""
        return (self.path, *self.aliases)

    @property
    def closed(self) -> str:
        """Return the clause that says why the key's section is off: "fp16.enabled is off"."""
        verb = "is" if len(self.gates) == 1 else "are"
        state = "off" if self.opened_by is None else f"not {self.opened_by!r}"
        return f"{' and '.join(self.gates)} {verb} {state}"

    def is_off(self, value: Any) -> bool:
        """Return whether the value is the default or turns the feature off.

        An object under a key that is ignored is off if its `enabled` is, or if it is empty.
        """
        if self.is_ignored and isinstance(value, Mapping):
            return not value.get("enabled", bool(value))
        return value == self.default or value in self.off

    @property
    def is_ignored(self) -> bool:
        """Return whether the key changes nothing here, whatever its value."""
        return self.becomes is None and self.remedy is None

    def read(self, where: str, value: Any) -> Any:
        """Return the converted value; raise ConfigError, naming `where`, if its kind is another."""
        if value is None and self.default is None:
            return None
        return self.kind.read(where, value, or_null=self.default is None)

    def check_built(self, where: str, value: Any) -> None:
        """Raise ConfigError if it asks for what is not built."""
        if self.remedy is not None and not self.is_off(value):
            expected = "nothing" if self.default is None else json.dumps(self.default)
            raise ConfigError(
                f"{where}: expected {expected}, got {shown(value)}, which is not supported here: "
                f"{self.remedy}"
            )


def ignored(paths: str, **more: Any) -> tuple[FileKey, ...]:
    """Keys that change nothing here. One warning names those that a file has."""
    return tuple(FileKey(path, ANYTHING, None, **more) for path in paths.split())


def not_built(path: str, default: Any, remedy: str, kind: ValueKind = FLAG, **more: Any) -> FileKey:
    """Return a key that is refused unless its value is the default or turns the feature off."""
    return FileKey(path, kind, default, remedy=remedy, **more)


def foreign(path: str, remedy: str, switch: str | None = "enabled") -> FileKey:
    """Section that is not built here: refused as a whole unless it is off. Its keys are not read.

    `switch` is the key that turns the section on; with None, any true value in it does.
    """

    def read(value: Mapping[str, Any]) -> Mapping[str, Any] | None:
        asks = any(value.values()) if switch is None else value.get(switch)
        return value if asks else None

    return FileKey(path, attrs.evolve(OBJECT, convert=read), None, remedy=remedy)


def section(
    name: str, *keys: FileKey, alias: str | None = None, **gate: Any
) -> tuple[FileKey, ...]:
    """Return keys with their whole paths; the arguments have paths relative to the section.

    `alias` is another name of the section; `gate` is `gates` and `opened_by` of keys without them.
    """
    return tuple(
        attrs.evolve(
            key,
            path=f"{name}.{key.path}",
            aliases=(
                *(f"{name}.{other}" for other in key.aliases),
                *(f"{alias}.{path}" for path in key.paths if alias),
            ),
            **({} if key.gates else gate),
        )
        for key in keys
    )
