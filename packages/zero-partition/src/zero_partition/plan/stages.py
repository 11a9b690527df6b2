"""The ZeRO table (arXiv 1910.02054, section 5): a stage is a row of placements."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable
from enum import Enum, IntEnum
from typing import Any, Final, TypeVar

import attrs
from attrs import Attribute, frozen

from zero_partition.errors import PartitionError

Class = TypeVar("Class")


class Placement(Enum):
    """Where a kind of tensor rests between uses."""

    REPLICATED = "replicated"  # every rank holds all of it
    SHARDED = "sharded"  # every rank holds 1 / world_size of it


class Stage(IntEnum):
    """The names the paper gave to three placements; zero is plain data parallelism."""

    ZERO = 0
    ONE = 1
    TWO = 2
    THREE = 3


@frozen
class Placements:
    """What each rank keeps at rest."""

    params: Placement
    grads: Placement
    optim: Placement


REPLICATED, SHARDED = Placement
STAGES: Final = {
    Stage.ZERO: Placements(params=REPLICATED, grads=REPLICATED, optim=REPLICATED),
    Stage.ONE: Placements(params=REPLICATED, grads=REPLICATED, optim=SHARDED),
    Stage.TWO: Placements(params=REPLICATED, grads=SHARDED, optim=SHARDED),
    Stage.THREE: Placements(params=SHARDED, grads=SHARDED, optim=SHARDED),
}


def expects(what: str, is_fine: Callable[[Any], bool]) -> Callable[..., None]:
    """A validator of attrs: PartitionError where the value of a field is not fine."""

    def check(owner: object, attribute: Attribute, value: Any) -> None:
        if not is_fine(value):
            name = f"{type(owner).__name__}.{attribute.name}"
            raise PartitionError(f"{name}: expected {what}, got {value!r}")

    return check


def names_fields(cls: type[Class], error: type[Exception] = PartitionError) -> type[Class]:
    """Let an attrs class say of a field that it does not know what `check_names` does."""
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
    """Every name given is known; the error shows the nearest, and all there are."""
    known = sorted(known)
    for name in given:
        if name not in known:
            near = nearest(name, known)
            raise error(
                f"{path}.{name}: unknown{f'; did you mean {near!r}?' if near else '.'} "
                f"Known here: {', '.join(known)}"
            )


def nearest(name: Any, known: Iterable[str]) -> str | None:
    """The known name that a typing error most likely meant."""
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(str(name).lower(), by_lower, n=1)
    return by_lower[found[0]] if found else None


def is_whole_number(value: object, minimum: int) -> bool:
    """Whether it is an int, and no bool, of at least this."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum
