"""FileKey: one documented key of DeepSpeed's configuration file, and what becomes of it here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import attrs
from attrs import frozen

from ._value_kinds import FLAG, ValueKind


@final
@frozen
class Becomes:
    """The key is honoured: it is, or is part of, a field of `EngineConfig`."""

    field: str  # as in "zero.prefetch_numel"
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
        gate: The path of the key that turns its section on; it is not read while that is neutral.
        needs_stage_3: Not read below stage 3, and an error there unless neutral.
    """

    path: str
    kind: ValueKind
    default: Any
    answer: Becomes | CannotMatter | NotBuilt
    neutral: tuple[Any, ...] = ()
    aliases: tuple[str, ...] = ()
    gate: str | None = None
    needs_stage_3: bool = False

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
        gate: Gate of all keys but itself that name none.
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
            gate=None
            if (found := key.gate or gate) is None or found == key.path
            else f"{name}.{found}",
        )
        for key in keys
    )


def not_built(name: str, remedy: str, **kinds: ValueKind) -> tuple[FileKey, ...]:
    """A section whose feature is not built: refused where it is "enabled", checked all the same."""
    answer = NotBuilt(remedy)
    keys = (FileKey(key, kind, None, answer) for key, kind in kinds.items())
    return section(name, FileKey("enabled", FLAG, False, answer), *keys, gate="enabled")
