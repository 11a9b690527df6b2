"""A model each rank can run alone though its parameters rest outside the device: unit by unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ._placement import Placement
from ._places import Place
from ._shard_home import AbstractShardHome, ShardSize
from ._sharded_model import ShardedModel
from ._unit import Unit
from ._whole import launch_flat

# NOTE(copies): what does not fit on the device sharded does not fit whole. So each rank keeps whole
# copies of units where its shards rest, and a unit is read from there into its slot when it is
# used, ahead of it as shards are: the memory of the device is that of training, and no rank waits
# for another.


@contextmanager
def streamed(
    sharded: ShardedModel, places: Sequence[Place], home: AbstractShardHome, what: str
) -> Iterator[None]:
    """A context in which units that hold these parameters are read whole. Collective to enter.

    Args:
        sharded: The model.
        places: Of the parameters.
        home: Where its shards rest; room for whole copies is taken there.
        what: Users call it.

    Raises:
        Exception: There is no room for them; what the home raises.
    """
    units = [
        unit
        for unit in {id(place.unit): place.unit for place in places}.values()
        if unit.placement is Placement.SHARDED
    ]
    copies = home.another()
    try:
        _fill(sharded, units, copies)
        for unit in units:
            unit.forget_values()
            unit.copies = copies
        sharded.gathers.append(what)
        try:
            yield
        finally:
            sharded.gathers.remove(what)
    finally:
        for unit in units:  # ranks have read different units, and exact values
            unit.forget_values()
            unit.copies = None
        sharded.outside.forget()
        copies.end()


def _fill(sharded: ShardedModel, units: Sequence[Unit], copies: AbstractShardHome) -> None:
    copies.allocate(
        {
            buffer.index: ShardSize(buffer.plan.layout.numel, buffer.plan.dtype)
            for unit in units
            for buffer in unit.buffers
        }
    )
    for unit in units:
        if unit.codec is not None:  # the slot gets what that leaves of them
            unit.keep_copies(copies, [launch_flat(buffer)() for buffer in unit.buffers])
            continue
        unit.unshard(sharded.schedule.pool)
        unit.keep_copies(copies)
        unit.reshard()
    copies.settle()
