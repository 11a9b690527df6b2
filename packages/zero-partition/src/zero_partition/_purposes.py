"""What the collectives of a sharded model are for, in words for errors between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from zero_comm import Purpose

from ._placement import Placement
from ._unit import Unit

_SAME_UNITS: Final = (
    "where messages carry the values, every rank must use the same units in the same order: call "
    "set_leaf_modules() on the module that chooses among these, before shard()"
)
_SAME_STEPS: Final = "every rank must run as many backwards and steps: a rank without a batch "
_CALL: Final = "calls backward_without_batch(model) in place of forward and backward"
_RUN: Final = "runs one of any kind with its loss times zero, because gathers need it"


def purposes_of(units: Sequence[Unit], *, control_tag: int, access_tag: int) -> dict[int, Purpose]:
    """By tag, for the group on which these units are gathered and reduced."""
    is_sharded = any(unit.placement is Placement.SHARDED for unit in units)
    gathers_together = is_sharded and all(unit.exposure is None for unit in units)
    same_steps = _SAME_STEPS + (_RUN if gathers_together else _CALL)
    found = {
        control_tag: Purpose("agreeing on gradients or their norm", same_steps),
        access_tag: Purpose(
            "access to whole parameters", "every rank must make the same calls for access"
        ),
    }
    for unit in units:
        gather = Purpose(
            f"{'gathering' if is_sharded else 'publishing'} unit {unit.name!r}",
            _SAME_UNITS if is_sharded else same_steps,
            unit.name,
        )
        reduction = Purpose(f"reducing the gradients of unit {unit.name!r}", same_steps, unit.name)
        for buffer in unit.buffers:
            found |= {buffer.gather_tag: gather, buffer.reduce_tag: reduction}
    return found
