"""When sharded parameters are whole: around each use, and ahead of it as far as limits allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from threading import Thread, current_thread

import torch
from attrs import Factory, define, field

from zero_partition.errors import StateError
from zero_partition.memory.seams import TensorHome
from zero_partition.plan.slots import SlotPool
from zero_partition.plan.stages import Placement
from zero_partition.plan.trace import (
    ExecutionOrder,
    Extent,
    Gather,
    Limits,
    Use,
    choose_slots,
    plan_gathers,
    slot_bytes,
    slot_conflicts,
)
from zero_partition.torch_private import is_in_backward

from .unit import ShardState, Unit

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
    home: TensorHome | None = None  # where shards are read from before they are gathered
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


# ---- When sharded parameters are whole ----


# NOTE(backward order): autograd runs ready nodes latest-created first. When the hook on an output
# of one forward call fires, every node created after that call ended has run: calls that began
# later than this one ended are complete, their units may be resharded and their slots taken. No
# hook on inputs, and none per module, is needed to know it. Each thread counts its own nodes: calls
# of other threads stay in use until backward ends.


@define(eq=False)
class Call:
    """One forward of a unit whose graph may come back in backward."""

    unit: Unit
    start: int  # moments on the schedule's own clock
    stop: int
    version: int  # of the values the graph was made with
    generation: int  # of the slots the graph's views point into
    was_held: bool  # they point into memory of a gather's instead
    thread: Thread = Factory(current_thread)  # that made the graph; its number may come again
    backward: int = -1  # the number of the backward that has reached it

    def is_after(self, other: Call) -> bool:
        """Whether all its nodes were made after the other's; see NOTE(backward order)."""
        return self.start > other.stop and self.thread is other.thread


@define(eq=False)
class Schedule:
    """Unshards units for forward and backward, in the same order on every rank."""

    units: Sequence[Unit]
    pool: SlotPool[Unit]
    ahead: Lookahead
    keeps_whole: bool = field(default=False, init=False)  # see `keep_whole`
    _generation: int = field(default=0, init=False)  # how often slots were given back
    _clock: int = field(default=0, init=False)
    _starts: list[int] = field(default=Factory(list), init=False)
    _running: list[Unit] = field(default=Factory(list), init=False)  # forwards, innermost last
    _active: list[Call] = field(default=Factory(list), init=False)  # in backward
    _backward: int = field(default=0, init=False)  # how many have ended

    @classmethod
    def plan(
        cls,
        units: Sequence[Unit],
        *,
        limits: Limits,
        device: torch.device,
        home: TensorHome | None = None,
    ) -> Schedule:
        """A schedule without a recorded order yet."""
        pool: SlotPool[Unit] = SlotPool(device, is_busy=lambda unit: unit.depth > 0)
        schedule = cls(units, pool, Lookahead(units, pool, limits, home))
        pool.is_busy = schedule.is_in_use
        return schedule

    def is_in_use(self, unit: Unit) -> bool:
        """Whether something may read its parameters before it is unsharded again."""
        if self.keeps_whole and unit.state is ShardState.UNSHARDED:
            return True
        return unit.depth > 0 or any(call.unit is unit for call in self._active)

    def begin_forward(self) -> None:
        """The model's own forward starts: the order starts again."""
        if is_in_backward():
            return  # recomputed as a whole inside a larger model's backward
        for unit in self.units:
            if unit.plan.rests_whole:
                unit.check_untouched()  # no call of a module of its own says when it is used
        self.ahead.begin(is_training=torch.is_grad_enabled())
        self.ahead.launch(self.is_in_use)

    def before_forward(self, unit: Unit) -> None:
        """Make the unit whole; launch gathers for those that follow."""
        if unit.depth == 0:
            unit.check_untouched()
            self._use(unit, "recomputation" if is_in_backward() else "forward")
        self._clock += 1
        self._starts.append(self._clock)
        self._running.append(unit)
        unit.depth += 1

    def after_forward(self, unit: Unit, *, raised: bool = False) -> Call:
        """Reshard, and say which call this was."""
        self._clock += 1
        unit.depth -= 1
        start = self._starts.pop()
        self._running.pop()
        # The model's own unit has its slot to itself and comes back first: it stays, for a loss
        # that reads its parameters. In recomputation a unit's backward follows at once.
        stays = is_in_backward() or (not unit.plan.name and torch.is_grad_enabled() and not raised)
        if not self.is_in_use(unit) and not stays:
            unit.reshard()
        return Call(unit, start, self._clock, unit.version, self._generation, was_held=unit.is_held)

    def before_backward(self, call: Call) -> None:
        """A gradient has reached an output of this call: make its unit whole again."""
        if call.backward == self._backward:
            return  # an output that an earlier call made carries the hooks of both
        self._check_current(call)
        call.backward = self._backward
        complete = [active for active in self._active if active.is_after(call)]
        self._active = [active for active in self._active if not active.is_after(call)]
        self._active.append(call)
        for other in complete:  # see NOTE(backward order)
            if not self.is_in_use(other.unit):
                other.unit.reshard()
        self._use(call.unit, "backward")

    def keep_whole(self, unit: Unit) -> None:
        """A backward makes a graph that reads this unit's parameters: reshard none until its own.

        Raises:
            StateError: Another unit takes turns in the unit's slot.
        """
        for other in self.units:
            if other is not unit and other.slot is not None and other.slot is unit.slot:
                raise StateError(
                    f"unit {unit.name!r}: backward with create_graph=True makes a graph that reads "
                    f"its parameters later, but {other.name!r} takes turns with it in one slot. A "
                    "gradient penalty at stage 3 needs every unit whole at a time: "
                    f"ZeroConfig(window={len(self.units)}), or stage 2 or lower"
                )
        self.keeps_whole = True

    def end_backward(self) -> None:
        """Every call's backward is complete, or was given up."""
        self._active.clear()
        self._backward += 1
        for unit in self.units:
            if not self.is_in_use(unit):
                unit.reshard()

    def abandon_backward(self) -> None:
        """An exception ended a backward: nothing is in use. Waits for no other rank."""
        self._active.clear()
        self._backward += 1
        self.keeps_whole = False
        for unit in self.units:
            if unit.depth == 0 and unit.state is ShardState.UNSHARDED:
                unit.reshard()

    def reset(self) -> None:
        """Forget a forward or backward that an exception ended."""
        for unit in self.units:
            unit.depth = 0
        self._starts.clear()
        self._running.clear()
        self.keeps_whole = False
        self.end_backward()

    def step(self) -> None:
        """The optimizer has stepped: launch the first gathers of the next forward."""
        if not any(self.is_in_use(unit) for unit in self.units):
            self.ahead.step()
            self.ahead.launch(self.is_in_use)

    def give_up_backward(self) -> None:
        """No backward follows the last forward. Gathers launched ahead are left to travel."""
        self.keeps_whole = False
        for unit in self.units:
            if unit.state is ShardState.UNSHARDED and not self.is_in_use(unit):
                unit.reshard()

    def settle(self) -> None:
        """Wait for gathers in flight, so that nothing reads the shards any more."""
        self.keeps_whole = False
        for unit in self.units:
            if not self.is_in_use(unit):
                unit.reshard()

    def release(self) -> None:
        """Give the slots back. Graphs that still refer to them can no longer run backward."""
        for unit in self.units:
            if self.is_in_use(unit):
                raise StateError(
                    f"release_buffers() was called while unit {unit.name!r} is in use; call it "
                    "between steps, outside forward and backward"
                )
        self.ahead.release()
        self._generation += 1

    def _use(self, unit: Unit, phase: str) -> None:
        if unit.index not in self.ahead.extents:  # rests whole: nothing to gather, now or ahead
            return
        if unit.is_held:  # no gather, and no trace: how often ranks come here is their own affair
            unit.unshard(self.pool)
            return
        in_use = [unit, *self._running, *(call.unit for call in self._active)]
        self.ahead.observe(Use(unit.index, phase, frozenset(other.index for other in in_use)))
        owner = unit.slot.owner if unit.slot is not None else None
        if owner is not None and owner is not unit and owner.depth:
            self._refuse(unit, owner)
        unit.unshard(self.pool)
        self.ahead.launch(self.is_in_use)

    def _refuse(self, unit: Unit, owner: Unit) -> None:
        raise StateError(
            f"unit {unit.name!r} must return to the memory that its forward used, but "
            f"{owner.name!r} is using it: the two were first used one after the other and are now "
            "used at once. Give them as one unit, or call release_buffers(model) before the change."
        )

    def _check_current(self, call: Call) -> None:
        unit = call.unit
        if unit.placement is Placement.SHARDED and self._generation != call.generation:
            raise StateError(
                f"unit {unit.name!r}: release_buffers() was called between this graph's forward "
                "and its backward; run the forward again"
            )
        if unit.is_held and not call.was_held:
            raise StateError(
                f"unit {unit.name!r}: backward inside unsharded() or GatheredParameters of a graph "
                "that was made before it, whose views point into other memory; run backward before "
                "the parameters are gathered, or forward after"
            )
        if unit.version != call.version:
            raise StateError(
                f"unit {unit.name!r}: its parameters were changed between this graph's forward and "
                "its backward (by optimizer.step() or load_state_dict()), so its gradients would "
                "be wrong; run the forward again"
            )
