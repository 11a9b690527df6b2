"""Every documented key of DeepSpeed's file, by path, and the nearest to a wrong one."""

from __future__ import annotations

import difflib
from typing import Final

from ._errors import ConfigError
from ._file_key import FileKey
from ._keys_of_offload import OFFLOAD_KEYS
from ._keys_of_precision import PRECISION_KEYS
from ._keys_of_reports import REPORTS_KEYS
from ._keys_of_training import TRAINING_KEYS
from ._keys_of_wire import WIRE_KEYS
from ._keys_of_zero import ZERO_KEYS

KEYS: Final[dict[str, FileKey]] = {
    key.path: key
    for key in (
        *TRAINING_KEYS,
        *PRECISION_KEYS,
        *ZERO_KEYS,
        *OFFLOAD_KEYS,
        *WIRE_KEYS,
        *REPORTS_KEYS,
    )
}

# As written in a file: aliases too.
WRITTEN: Final[dict[str, FileKey]] = {path: key for key in KEYS.values() for path in key.paths}

SECTIONS: Final[frozenset[str]] = frozenset(
    path.rsplit(".", depth)[0] for path in WRITTEN for depth in range(1, path.count(".") + 1)
)


def unknown_key(path: str) -> ConfigError:
    """The error for a path that is not in the table; it names the nearest that is."""
    nearest = _nearest(path)
    hint = f"; did you mean {nearest}?" if nearest else ""
    return ConfigError(f"{path}: expected a key of DeepSpeed's configuration, got this name{hint}")


def _nearest(path: str) -> str | None:
    known = [*WRITTEN, *sorted(SECTIONS)]
    prefix, dot, name = path.rpartition(".")
    section = prefix + dot
    inside = {
        other.removeprefix(section).lower(): other for other in known if other.startswith(section)
    }
    # A slip is likelier than the right name in the wrong section, and that than a similar name.
    close = difflib.get_close_matches(name.lower(), inside, n=1, cutoff=0.5)
    if close and difflib.SequenceMatcher(a=close[0], b=name.lower()).ratio() >= 0.8:
        return inside[close[0]]
    moved = [other for other in known if other.rpartition(".")[2] == name]
    if moved:
        return max(moved, key=lambda other: difflib.SequenceMatcher(a=path, b=other).ratio())
    if close:
        return inside[close[0]]
    names = {other.rpartition(".")[2]: other for other in known}
    elsewhere = difflib.get_close_matches(name, names, n=1)
    return names[elsewhere[0]] if elsewhere else None
