"""The ZeRO table (arXiv 1910.02054, section 5): a stage is a row of placements."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, IntEnum
from typing import Any, Final, TypeVar

import attrs
from attrs import Attribute, frozen

from zero_partition.errors import PartitionError

Class = TypeVar("Class")


class Placement(Enum):
    """Placement of one kind of tensor between uses."""

    REPLICATED = "replicated"  # every rank has all of it
    SHARDED = "sharded"  # every rank has 1 / world_size of it


class Stage(IntEnum):
    """The names the paper gave to three placements; zero is plain data parallelism."""

    ZERO = 0
    ONE = 1
    TWO = 2
    THREE = 3


@frozen
class Placements:
    """Placements of parameters, gradients and optimizer state between uses."""

    params: Placement
    grads: Placement
    optim: Placement

    def __str__(self) -> str:
        """Return the stage, which is the number of kinds that are sharded, and these kinds."""
        kinds = {
            "optimizer state": self.optim,
            "gradients": self.grads,
            "parameters": self.params,
        }
        sharded = [kind for kind, placement in kinds.items() if placement is Placement.SHARDED]
        return f"{len(sharded)} (sharded: {', '.join(sharded) or 'nothing'})"


REPLICATED, SHARDED = Placement
STAGES: Final = {
    Stage.ZERO: Placements(params=REPLICATED, grads=REPLICATED, optim=REPLICATED),
    Stage.ONE: Placements(params=REPLICATED, grads=REPLICATED, optim=SHARDED),
    Stage.TWO: Placements(params=REPLICATED, grads=SHARDED, optim=SHARDED),
    Stage.THREE: Placements(params=SHARDED, grads=SHARDED, optim=SHARDED),
}


def expects(what: str, is_fine: Callable[[Any], bool]) -> Callable[..., None]:
    """Return an attrs validator that raises PartitionError where a value is not fine."""

    def check(owner: object, attribute: Attribute, value: Any) -> None:
        if not is_fine(value):
            name = f"{type(owner).__name__}.{attribute.name}"
            raise PartitionError(f"{name}: expected {what}, got {value!r}")

    return check


def names_fields(cls: type[Class], error: type[Exception] = PartitionError) -> type[Class]:
    """Make an attrs class refuse unknown keyword arguments as `check_names` does."""
    make: Any = cls.__init__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **fields: Any) -> None:
        check_names(cls.__name__, fields, [each.alias for each in attrs.fields(cls)], error)
        make(self, *args, **fields)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def check_names(
    path: str, given: Iterable[Any], known: Iterable[str], error: type[Exception]
) -> None:
    """Raise `error` for a name that is not known, with the nearest and all known names."""
    known = sorted(known)
    for name in given:
        if name not in known:
            near = nearest(name, known)
            raise error(
                f"{path}.{name}: unknown{f'; did you mean {near!r}?' if near else '.'} "
                f"Known here: {', '.join(known)}"
            )


_LONGEST: Final = 60  # characters of a value in an error
_MOST: Final = 8  # texts of a list in an error


def shown(value: object) -> str:
    """Return a value as an error shows it: if its `repr` is long, by its type."""
    text = repr(value)
    is_short = len(text) <= _LONGEST and "\n" not in text
    return text if is_short else f"a value of type {type(value).__name__}"


def shown_all(texts: Sequence[str], *, separator: str = "; ") -> str:
    """Return texts as an error lists them: the first of them, and how many more there are."""
    rest = len(texts) - _MOST
    # A text is as short as the words that would stand for it.
    shown_ones = [*texts[:_MOST], f"and {rest} more"] if rest > 1 else texts
    return separator.join(shown_ones)


def nearest(name: Any, known: Iterable[str]) -> str | None:
    """Return the known name that is nearest to a mistyped one; None if none is near."""
    by_lower = {each.lower(): each for each in known}
    lower = str(name).lower()
    found = difflib.get_close_matches(lower, by_lower, n=1)
    found = found or [each for each in by_lower if lower.startswith(f"{each}_")]
    return by_lower[found[0]] if found else None


def is_whole_number(value: object, minimum: int) -> bool:
    """Return whether `value` is an int, and no bool, of at least `minimum`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum
