"""Checks of single values and of names: each error says where, what was expected, what came."""

from __future__ import annotations

import difflib
import functools
import math
import os
from collections.abc import Iterable
from typing import Any, TypeVar

import attrs
from attrs import Attribute

from ._errors import ConfigError

Class = TypeVar("Class")


def check_number(
    where: str,
    value: Any,
    *,
    minimum: float = -math.inf,
    below: float = math.inf,
) -> float:
    """A finite int or float with minimum <= value < below."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not minimum <= value < below
    ):
        bounds = f" of at least {minimum:g}" if minimum > -math.inf else ""
        bounds += f" and below {below:g}" if below < math.inf else ""
        raise ConfigError(f"{where}: expected a finite number{bounds}, got {value!r}")
    return float(value)


def check_whole(where: str, value: Any, *, minimum: int) -> int:
    """A whole number of at least `minimum`; JSON's 1e3 is one, too."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value != int(value) or value < minimum:
        raise ConfigError(f"{where}: expected a whole number of at least {minimum}, got {value!r}")
    return int(value)


def check_flag(where: str, value: Any) -> bool:
    """True or False, and not what merely counts as one."""
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: expected true or false, got {value!r}")
    return value


def at_least(minimum: float, kind: type | tuple[type, ...]) -> Any:
    """A validator of attrs: a number of at least `minimum`, or None where that is the default."""

    def check(owner: Any, attribute: Attribute, value: Any) -> None:
        if value is None and attribute.default is None:
            return
        if isinstance(value, bool) or not isinstance(value, kind) or not value >= minimum:
            names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise ConfigError(
                f"{type(owner).__name__}.{attribute.name}: expected {names} of at least {minimum}, "
                f"got {value!r}"
            )

    return check


def is_kind(*kinds: type | None) -> Any:
    """A validator of attrs: an instance of one of these; None stands for itself."""

    def check(owner: Any, attribute: Attribute, value: Any) -> None:
        if not any(value is None if kind is None else isinstance(value, kind) for kind in kinds):
            names = " or ".join("None" if kind is None else kind.__name__ for kind in kinds)
            raise ConfigError(
                f"{type(owner).__name__}.{attribute.name}: expected {names}, got {value!r}"
            )

    return check


def names_fields(cls: type[Class]) -> type[Class]:
    """Let an attrs class say of a field that it does not know what `check_names` does."""
    make: Any = cls.__init__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **fields: Any) -> None:
        check_names(cls.__name__, fields, [each.alias for each in attrs.fields(cls)])
        make(self, *args, **fields)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def check_folder(where: str, folder: Any) -> None:
    """A path that is not empty: that would be the working directory."""
    if not isinstance(folder, str | os.PathLike) or not str(folder):
        raise ConfigError(f"{where}: expected the path of a folder, got {folder!r}")


def check_names(path: str, given: Iterable[Any], known: Iterable[str]) -> None:
    """Every name given is known; the error shows the nearest, and all there are."""
    known = sorted(known)
    for name in given:
        if name not in known:
            near = nearest(name, known)
            raise ConfigError(
                f"{path}.{name}: unknown{f'; did you mean {near!r}?' if near else '.'} "
                f"Known here: {', '.join(known)}"
            )


def nearest(name: Any, known: Iterable[str]) -> str | None:
    """The known name that a typing error most likely meant."""
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(str(name).lower(), by_lower, n=1)
    return by_lower[found[0]] if found else None
