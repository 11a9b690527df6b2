"""FileKey: one documented key of DeepSpeed's configuration file, and what becomes of it here."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, final

import attrs
import torch
from attrs import field, frozen


@frozen
class ValueKind:
    """A check and a conversion. `read` returns the value to keep, or raises ValueError."""

    expected: str  # ends the sentence "expected ..."
    read: Callable[[Any], Any]


def _fits(is_of_kind: Callable[[Any], bool]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not is_of_kind(value):
            raise ValueError
        return value

    return read


def _is_number(value: Any) -> bool:
    # A bool is an int to Python and a flag to whoever wrote the file.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # neither inf nor nan, nor an int beyond both


def integer(minimum: int | None = None, maximum: int | None = None) -> ValueKind:
    """Whole numbers; 5e8 is a float to JSON and whole all the same."""

    def read(value: Any) -> int:
        if not _is_number(value) or value != int(value):
            raise ValueError
        if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
            raise ValueError
        return int(value)

    return ValueKind("an integer" + _range(minimum, maximum), read)


def number(
    minimum: float | None = None, maximum: float | None = None, *, below: float = math.inf
) -> ValueKind:
    """Finite numbers."""

    def fits(value: Any) -> bool:
        return (
            _is_number(value)
            and (minimum is None or value >= minimum)
            and (maximum is None or value <= maximum)
            and value < below
        )

    bound = f" and below {below:g}" if below < math.inf else ""
    return ValueKind("a finite number" + _range(minimum, maximum) + bound, _fits(fits))


def _range(minimum: float | None, maximum: float | None) -> str:
    if minimum is None:
        return "" if maximum is None else f" of at most {maximum:g}"
    return f" of at least {minimum:g}" if maximum is None else f" from {minimum:g} to {maximum:g}"


def choice(*names: str) -> ValueKind:
    """One of several words, in any case; the spelling of `names` is kept."""
    spelled = {name.lower(): name for name in names}
    return ValueKind("one of " + ", ".join(map(repr, names)), _look_up(spelled))


def _look_up(known: Mapping[str, Any]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, str) or value.lower() not in known:
            raise ValueError
        return known[value.lower()]

    return read


def several(kind: ValueKind, *, exactly: int | None = None) -> ValueKind:
    """A list of values of one kind; kept as a tuple."""

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or (exactly and len(value) != exactly):
            raise ValueError
        return tuple(map(kind.read, value))

    count = "values" if exactly is None else f"{exactly} values"
    return ValueKind(f"a list of {count}, each {kind.expected}", read)


def either(first: ValueKind, second: ValueKind) -> ValueKind:
    """What fits one of two kinds."""

    def read(value: Any) -> Any:
        try:
            return first.read(value)
        except ValueError:
            return second.read(value)

    return ValueKind(f"{first.expected}, or {second.expected}", read)


def _read_folder(value: Any) -> Path:
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise ValueError
    return Path(value)


def _read_flag(value: Any) -> bool:
    """Written 0 and 1 too, as DeepSpeed reads them."""
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise ValueError
    return bool(value)


def is_off(value: Any) -> bool:
    """Whether a section that is not checked, or a flag, asks for nothing."""
    return not value or (isinstance(value, Mapping) and not value.get("enabled"))


FLAG: Final = ValueKind("true or false", _read_flag)
ANYTHING: Final = ValueKind("anything", lambda value: value)
TEXT: Final = ValueKind("a string", _fits(lambda value: isinstance(value, str)))
FOLDER: Final = ValueKind("the path of a folder", _read_folder)
OBJECT: Final = ValueKind("an object ({...})", _fits(lambda value: isinstance(value, Mapping)))
NAMES: Final = either(several(TEXT), TEXT)
COUNT: Final = integer(0)
POSITIVE: Final = integer(1)

_DTYPES: Final = {
    torch.float32: ("fp32", "float32", "float"),
    torch.float16: ("fp16", "float16", "half"),
    torch.bfloat16: ("bf16", "bfloat16"),
}
_SPELLED: Final = {
    prefix + name: dtype
    for dtype, names in _DTYPES.items()
    for name in names
    for prefix in ("", "torch.")
}


def _read_dtype(value: Any) -> torch.dtype:
    if isinstance(value, torch.dtype) and value in _DTYPES:
        return value
    return _look_up(_SPELLED)(value)


DTYPE: Final = ValueKind("one of 'fp32', 'fp16', 'bf16'", _read_dtype)


# ---- FileKey ----


@final
@frozen
class Becomes:
    """The key is honoured: it is, or is part of, a field of `EngineConfig`."""

    field: str  # as in "zero.prefetch_numel"; several keys may say it, and then agree
    convert: Callable[[Any], Any] | None = None  # from the file's value to the field's


@final
@frozen
class CannotMatter:
    """There is nothing here that the key could change."""

    reason: str  # a clause: "gradients are always contiguous"


@final
@frozen
class NotBuilt:
    """Refused by name, unless its value asks for nothing."""

    remedy: str  # what is missing, or what to do instead; a clause


@final
@frozen
class Gate:
    """Where keys are read: not while what they belong to is turned off.

    Args:
        paths: The keys that turn it on; one is enough.
        values: Those that do; whatever is not neutral when empty.
    """

    paths: tuple[str, ...]
    values: tuple[Any, ...] = ()

    @property
    def closed(self) -> str:
        """What holds where the keys are not read; a clause."""
        verb = "is" if len(self.paths) == 1 else "are"
        state = f"not {' or '.join(map(repr, self.values))}" if self.values else "off"
        return f"{' and '.join(self.paths)} {verb} {state}"

    def within(self, name: str) -> Gate:
        """The same, its paths relative to a section."""
        return attrs.evolve(self, paths=tuple(f"{name}.{path}" for path in self.paths))


def _as_gate(value: Gate | str | None) -> Gate | None:
    return Gate((value,)) if isinstance(value, str) else value


@frozen
class FileKey:
    """A row of the table.

    Args:
        path: From the top of the file, joined by dots: "fp16.loss_scale".
        kind: What values it may have. None, JSON's null, is one of them where it is the default.
        default: What holds where the key is absent.
        answer: What becomes of it here.
        neutral: Further values that ask for nothing: those that DeepSpeed defaults to where we do
            not, or that turn the feature off.
        aliases: Other paths under which DeepSpeed accepts it.
        gate: What turns its section on; a path is short for the gate of that key.
        min_stage: Not read below it, and an error there unless neutral.
        idle: Why it changes nothing, as other keys are, which it is given a function to look up; a
            clause, None where it may.
    """

    path: str
    kind: ValueKind
    default: Any
    answer: Becomes | CannotMatter | NotBuilt
    neutral: tuple[Any, ...] = ()
    aliases: tuple[str, ...] = ()
    gate: Gate | None = field(default=None, converter=_as_gate)
    min_stage: int = 0
    idle: Callable[[Callable[[str], Any]], str | None] | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """Under which it may be written."""
        return (self.path, *self.aliases)

    def is_neutral(self, value: Any) -> bool:
        """Whether it asks for nothing but what is done without the key."""
        return value == self.default or value in self.neutral


def section(
    name: str, *keys: FileKey, gate: str | None = None, alias: str | None = None
) -> tuple[FileKey, ...]:
    """Keys written relative to a section, with their whole paths.

    Args:
        name: The section's path.
        keys: Their paths, aliases and gates are relative to it.
        gate: Gate of all keys but itself that have none.
        alias: Another name of the whole section.
    """
    return tuple(
        attrs.evolve(
            key,
            path=f"{name}.{key.path}",
            aliases=(
                *(f"{name}.{other}" for other in key.aliases),
                *(f"{alias}.{path}" for path in key.paths if alias),
            ),
            gate=found.within(name)
            if (found := key.gate or _as_gate(gate)) and found.paths != (key.path,)
            else None,
        )
        for key in keys
    )


def not_built(name: str, remedy: str, **kinds: ValueKind) -> tuple[FileKey, ...]:
    """A section whose feature is not built: refused where it is "enabled", checked all the same."""
    answer = NotBuilt(remedy)
    keys = (FileKey(key, kind, None, answer) for key, kind in kinds.items())
    return section(name, FileKey("enabled", FLAG, False, answer), *keys, gate="enabled")
