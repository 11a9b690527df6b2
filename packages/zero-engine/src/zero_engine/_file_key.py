"""FileKey: one documented key of DeepSpeed's configuration file, and what becomes of it here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import attrs
from attrs import field, frozen

from ._value_kinds import FLAG, ValueKind


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
