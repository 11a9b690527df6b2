"""Things of one kind somewhere in containers, and others put in their places."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from operator import is_
from typing import Any, Final

_SEQUENCES: Final = (tuple, list)
_MAPPINGS: Final = (dict, MutableMapping)  # a dict is one too, but that takes longer to find out
_PLAIN: Final = (type(None), bool, int, float, str)  # hold nothing


def replace_in(value: Any, kind: type, replace: Callable[[Any], Any]) -> Any:
    """The same value with `replace(x)` in place of each `x` of a kind, depth first.

    Looks into dicts, lists, tuples (named ones too), subclasses of these, and dataclasses. What
    holds nothing to replace is the very same object; what does is copied. Others are left alone.
    """
    if isinstance(value, kind):
        return replace(value)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, _SEQUENCES):
        items = [replace_in(item, kind, replace) for item in value]
        return value if all(map(is_, items, value)) else _like(value, items)
    if isinstance(value, _MAPPINGS):
        return _changed(value, value, kind, replace, _set_item)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return _changed(value, fields, kind, replace, object.__setattr__)
    return value


def _like(value: Any, items: list[Any]) -> Any:
    if isinstance(value, list):
        other = copy(value)
        other[:] = items
        return other
    if hasattr(value, "_fields"):  # a named tuple
        return type(value)(*items)
    return tuple.__new__(type(value), items)


def _changed(
    value: Any,
    items: Mapping[Any, Any],
    kind: type,
    replace: Callable[[Any], Any],
    put: Callable[[Any, Any, Any], None],
) -> Any:
    if not items:
        return value
    new = {key: replace_in(item, kind, replace) for key, item in items.items()}
    changes = {key: item for key, item in new.items() if item is not items[key]}
    other = copy(value) if changes else value
    for key, item in changes.items():
        put(other, key, item)
    return other


def _set_item(mapping: Any, key: Any, item: Any) -> None:
    mapping[key] = item
