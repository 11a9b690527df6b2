"""When each unit is whole, as the recorded order and the slots have it."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from ._gather_plan import Gather
from ._order import Use
from ._sharded_model import ShardedModel


@frozen
class ScheduleRow:
    """One time that a unit becomes whole. Moments are in words."""

    unit: str  # its name
    num_bytes: int  # of its slot's memory that it takes, padding included
    slot: int  # units with one number take turns in one memory
    gathered: str
    used: str  # first
    released: str  # when another unit takes its memory


@frozen
class ScheduleReport:
    """The gathers of one training step, in the order of uses, or of one evaluation.

    Units that rest whole on this rank have no rows.
    """

    rows: tuple[ScheduleRow, ...]
    peak_live_numel: int  # parameter elements that are whole at once, at most, in all slots
    slots_bytes: int  # memory of all slots


def schedule_report(sharded: ShardedModel) -> ScheduleReport:
    """What the public `schedule_report` documents."""
    ahead = sharded.schedule.ahead
    order = ahead.training if ahead.training.recorded else ahead.evaluation
    names = [unit.name for unit in sharded.units]
    gathers = ahead.gathers(order)
    rows = []
    for gather in gathers:
        unit = sharded.units[gather.unit]
        assert unit.slot is not None, "what was used has one"
        is_ahead = gather.launched < gather.used
        launched = _in_words(gather.launched, order.recorded, names)
        rows.append(
            ScheduleRow(
                unit=unit.name,
                num_bytes=unit.plan.num_bytes,
                slot=unit.slot.index,
                gathered=f"ahead, {launched}" if is_ahead else "at its use",
                used=_in_words(gather.used, order.recorded, names),
                released="at the end"
                if gather.released is None
                else _in_words(gather.released, order.recorded, names),
            )
        )
    numels = {index: extent.numel for index, extent in ahead.extents.items()}
    live = [
        sum(numels[gather.unit] for gather in gathers if _is_live(gather, position))
        for position in range(len(order.recorded))
    ]
    return ScheduleReport(tuple(rows), max(live, default=0), sharded.schedule.pool.num_bytes)


def _is_live(gather: Gather, position: int) -> bool:
    return gather.launched <= position and (gather.released is None or position < gather.released)


def _in_words(position: int, uses: Sequence[Use], names: Sequence[str]) -> str:
    if position < 0:
        return "before the forward"
    return f"{uses[position].phase} of {names[uses[position].unit]}"
