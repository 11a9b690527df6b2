"""What kinds of values a key of a configuration file may have, and how each is read."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen


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
