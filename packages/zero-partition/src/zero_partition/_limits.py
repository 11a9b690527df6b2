"""How much of a sharded model may be whole at a time."""

from __future__ import annotations

from typing import Any, Final

from attrs import Attribute, evolve, field, frozen

from ._errors import PartitionError

ENCODED_IN_FLIGHT: Final = 2  # units, of those that rest whole, whose updates travel at a time


def _at_least(minimum: int) -> Any:
    def check(_: Limits, attribute: Attribute, value: Any) -> None:
        if value is None and attribute.name != "window":
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise PartitionError(
                f"Limits.{attribute.name}: expected an int of at least {minimum}, got {value!r}"
            )

    return check


@frozen
class Limits:
    """Bounds of the schedule at stage 3. What a unit needs at its own use is always gathered.

    Elements are those of whole parameters, padding apart.

    Args:
        window: Units that may be whole at a time, the one in use included; those that enclose
            others do not count.
        max_live_numel: Elements that may be whole at a time, those of units that enclose others
            included. Takes the place of `window` where it is given.
        prefetch_numel: Elements of units whose gather was launched before their use and is not yet
            waited for; 0 turns prefetching off. None: as many as may be whole.
        max_reuse_numel: A unit stays whole until its next use if the units used in between have no
            more elements, and as many may be whole. None: whenever as many may be whole.
        read_ahead: Where shards rest at a home: units whose shards are read before their gather is
            due.

    Raises:
        PartitionError: Names the bound, what was expected and what came.
    """

    window: int = field(default=3, validator=_at_least(1))
    max_live_numel: int | None = field(default=None, validator=_at_least(1), kw_only=True)
    prefetch_numel: int | None = field(default=None, validator=_at_least(0), kw_only=True)
    max_reuse_numel: int | None = field(default=None, validator=_at_least(0), kw_only=True)
    read_ahead: int = field(default=2, validator=_at_least(0), kw_only=True)

    def where_shards_are_read(self) -> Limits:
        """The same where peers' shards can be read without them.

        A unit is then whole when it is needed, by no one's leave: there is nothing to hide by
        asking early.
        """
        return evolve(self, prefetch_numel=0)
