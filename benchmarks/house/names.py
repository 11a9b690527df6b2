"""Where names of the library have moved: the gates run a fixed commit and the tree alike.

All that a gate calls is found here, by its name of the fixed commit, and reports are read as plain
values. Who renames a public name or a field that a gate reads adds it to one of the two tables.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

import attrs
from torch import Tensor

# A name of the fixed commit, and what it is called since.
RENAMED: Final[dict[str, tuple[str, ...]]] = {"materialise": ("materialize",)}

# A field of a report as it is called now, and as it was called by the fixed commit.
FIELDS: Final[dict[str, str]] = {}

_MODULES: Final = (
    *("zero_engine", "zero_partition", "zero_comm", "zero_ckpt", "zero_offload"),
    *("zero_engine.planning", "zero_engine.checkpoint", "zero_engine.deepspeed"),
    *("zero_partition.plan", "zero_partition.seams"),
)
COMPUTED: Final = {"Traffic": ("operations", "subjects")}  # what were fields, and are properties


def find(name: str) -> Any:
    """A public name of the library, wherever it is now."""
    for module in _MODULES:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        for spelling in (name, *RENAMED.get(name, ())):
            value = getattr(found, spelling, None)
            if value is not None and not isinstance(value, ModuleType):  # zero_engine.checkpoint
                return value
    raise AttributeError(
        f"no package has the public name {name!r}; say in {__file__} what it is called now"
    )


def plain(value: Any) -> Any:
    """A report as dicts, lists, numbers and strings, with the fixed commit's names of fields."""
    if attrs.has(type(value)):
        fields = COMPUTED.get(type(value).__name__) or [f.name for f in attrs.fields(type(value))]
        return {FIELDS.get(name, name): plain(getattr(value, name)) for name in fields}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str | Tensor):
        return value
    return value.hex() if isinstance(value, float) else str(value)
