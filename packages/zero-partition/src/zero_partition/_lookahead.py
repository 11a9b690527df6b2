"""Which slot each unit has, and which gathers to launch ahead, as the recorded order says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from attrs import define, field

from ._gather_plan import (
    Extent,
    Gather,
    choose_slots,
    plan_gathers,
    slot_bytes,
    slot_conflicts,
)
from ._limits import Limits
from ._order import ExecutionOrder, Use
from ._placement import Placement
from ._shard_home import AbstractShardHome
from ._slots import SlotPool
from ._unit import Unit

# NOTE(dealing): slots are taken at first use, by whoever comes. When a step has shown the order,
# they are dealt anew, so that units that should be whole at once have slots of their own and others
# share. That happens right after the optimizer's step, when every graph is out of date and none can
# miss the memory that its views point into. A changed order is followed when it has come twice: a
# loop of varying length keeps its slots.


@define(eq=False)
class Lookahead:
    """The orders of training and of evaluation, and what follows from them."""

    units: Sequence[Unit]
    pool: SlotPool[Unit]
    limits: Limits
    home: AbstractShardHome | None = None  # where shards are read from before they are gathered
    training: ExecutionOrder = field(init=False)
    evaluation: ExecutionOrder = field(init=False)
    extents: dict[int, Extent] = field(init=False)  # of units that need a slot
    _order: ExecutionOrder = field(init=False)
    _dealt_for: list[Use] | None = field(default=None, init=False)  # see NOTE(dealing)
    _candidate: list[Use] | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self.training = self._order = ExecutionOrder(len(self.units))
        self.evaluation = ExecutionOrder(len(self.units))
        sharded = [unit for unit in self.units if unit.placement is Placement.SHARDED]
        self.extents = {unit.index: unit.plan.extent for unit in sharded}
        self._deal_by_size()

    def begin(self, *, is_training: bool) -> None:
        """The model's own forward starts: the order starts again."""
        self._order = self.training if is_training else self.evaluation
        self._order.restart()

    def observe(self, use: Use) -> None:
        """A unit is used now."""
        self._order.observe(use)

    def launch(self, is_in_use: Callable[[Unit], bool]) -> None:
        """Start the gathers that are due at this moment. Collective with its peers' same call."""
        order = self._order
        if order.launches is None:
            order.launches = {}
            gathers = self.gathers(order)
            order.coming = tuple(sorted((gather.launched, gather.unit) for gather in gathers))
            for gather in gathers:
                order.launches.setdefault(gather.launched, []).append(gather.unit)
        for index in order.launches.get(order.position, ()):
            unit = self.units[index]
            owner = unit.slot.owner if unit.slot is not None else None
            if unit.slot is None or (owner is not None and owner is not unit and is_in_use(owner)):
                return  # and launch none that follow: one sequence on every rank
            unit.start_unshard(self.pool)
        if self.home is not None and self.limits.read_ahead:
            coming = [self.units[index] for index in order.after(self.limits.read_ahead)]
            coming = [unit for unit in coming if not unit.is_resident]
            for home in {id(unit.copies): unit.copies or self.home for unit in coming}.values():
                mine = [unit for unit in coming if (unit.copies or self.home) is home]
                home.expect([buffer.index for unit in mine for buffer in unit.buffers])

    def gathers(self, order: ExecutionOrder) -> tuple[Gather, ...]:
        """The gathers of one pass through this order, with the slots as they are."""
        slot_of = {unit.index: unit.slot.index for unit in self.units if unit.slot is not None}
        prefetch_numel = self._limits_of_now().prefetch_numel
        return plan_gathers(order.recorded, self.extents, slot_of, prefetch_numel=prefetch_numel)

    def step(self) -> None:
        """The optimizer has stepped: the order starts again, and slots may be dealt anew."""
        self.begin(is_training=True)
        recorded = self.training.recorded
        if recorded is self._dealt_for or not recorded:
            return
        if self._dealt_for is not None and recorded is not self._candidate:
            self._candidate = recorded
            return
        self._dealt_for = recorded
        self._deal(choose_slots(recorded, self.extents, self._limits_of_now()))

    def release(self) -> None:
        """Give all slots back, and forget whose they were."""
        for unit in self.units:
            unit.release_slot()
        self._deal_by_size()

    def _limits_of_now(self) -> Limits:
        is_exposed = any(unit.exposure is not None for unit in self.units)
        return self.limits.where_shards_are_read() if is_exposed else self.limits

    def _deal(self, groups: Sequence[tuple[int, ...]]) -> None:
        """One slot for each group of units."""
        if set(map(frozenset, groups)) == self._groups():
            return
        for unit in self.units:
            unit.release_slot()
        self.pool.deal(slot_bytes(groups, self.extents))
        self.pool.conflicts = slot_conflicts(groups, self.extents, self.limits)
        for slot, group in zip(self.pool.ring, groups, strict=True):
            for index in group:
                self.units[index].slot = slot
        self._forget_launches()

    def _deal_by_size(self) -> None:
        """As many slots as may be whole at a time, for units in the order of their first use."""
        inner = sorted(
            (extent for extent in self.extents.values() if not extent.is_outer),
            key=lambda extent: extent.num_bytes,
            reverse=True,
        )
        room = self.limits.max_live_numel
        count = self.limits.window
        if room is not None:
            live = accumulate(extent.numel for extent in inner)
            room -= sum(extent.numel for extent in self.extents.values() if extent.is_outer)
            count = max(1, sum(numel <= room for numel in live))
        self.pool.deal([extent.num_bytes for extent in inner[:count]])
        self._dealt_for = self._candidate = None
        self._forget_launches()

    def _groups(self) -> set[frozenset[int]]:
        """Units that share a slot now."""
        groups: dict[int, set[int]] = {}
        for unit in self.units:
            if unit.slot is not None:
                groups.setdefault(unit.slot.index, set()).add(unit.index)
        return set(map(frozenset, groups.values()))

    def _forget_launches(self) -> None:
        self.training.launches = self.evaluation.launches = None
