"""When sharded parameters are whole: around each use, and a window of units ahead of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import Factory, define, field

from ._errors import StateError
from ._order import ExecutionOrder
from ._placement import Placement
from ._slots import SlotPool
from ._torch_compat import is_in_backward
from ._unit import Unit

# NOTE(backward order): autograd runs ready nodes latest-created first. When the hook on an output
# of one forward call fires, every node created after that call ended has run: calls that began
# later than this one ended are complete, their units may be resharded and their slots taken. No
# hook on inputs, and none per module, is needed to know it.


@define(eq=False)
class Call:
    """One forward of a unit whose graph may come back in backward."""

    unit: Unit
    start: int  # moments on the schedule's own clock
    stop: int
    version: int  # of the values the graph was made with
    generation: int  # of the slots the graph's views point into
    was_held: bool  # they point into memory of a gather's instead
    backward: int = -1  # the number of the backward that has reached it


@define(eq=False)
class Schedule:
    """Unshards units for forward and backward, in the same order on every rank."""

    units: Sequence[Unit]
    pool: SlotPool[Unit]
    window: int  # units whole at a time, the one in use included
    training: ExecutionOrder = field(init=False)
    evaluation: ExecutionOrder = field(init=False)
    _order: ExecutionOrder = field(init=False)
    _generation: int = field(default=0, init=False)  # how often slots were given back
    _clock: int = field(default=0, init=False)
    _starts: list[int] = field(default=Factory(list), init=False)
    _active: list[Call] = field(default=Factory(list), init=False)  # in backward
    _backward: int = field(default=0, init=False)  # how many have ended

    def __attrs_post_init__(self) -> None:
        self.training = ExecutionOrder(len(self.units))
        self.evaluation = ExecutionOrder(len(self.units))
        self._order = self.training

    @classmethod
    def plan(cls, units: Sequence[Unit], *, window: int, device: torch.device) -> Schedule:
        """A schedule, with slots for a window of the units that can share them."""
        ring = [unit.plan.num_bytes for unit in units if not unit.plan.is_outer]
        pool: SlotPool[Unit] = SlotPool.plan(
            ring, num_slots=window, device=device, is_busy=lambda unit: unit.depth > 0
        )
        schedule = cls(units, pool, window)
        pool.is_busy = schedule.is_in_use
        return schedule

    def is_in_use(self, unit: Unit) -> bool:
        """Whether something may read its parameters before it is unsharded again."""
        return unit.depth > 0 or any(call.unit is unit for call in self._active)

    def begin_forward(self) -> None:
        """The model's own forward starts: the order starts again."""
        if is_in_backward():
            return  # recomputed as a whole inside a larger model's backward
        self._order = self.training if torch.is_grad_enabled() else self.evaluation
        self._order.restart()

    def before_forward(self, unit: Unit) -> None:
        """Make the unit whole; launch gathers for those that follow."""
        if unit.depth == 0:
            unit.check_untouched()
            self._use(unit)
        self._clock += 1
        self._starts.append(self._clock)
        unit.depth += 1

    def after_forward(self, unit: Unit, *, raised: bool = False) -> Call:
        """Reshard, and say which call this was."""
        self._clock += 1
        unit.depth -= 1
        start = self._starts.pop()
        # The model's own unit has its slot to itself and comes back first: it stays, for a loss
        # that reads its parameters. In recomputation a unit's backward follows at once.
        stays = is_in_backward() or (not unit.plan.name and torch.is_grad_enabled() and not raised)
        if unit.depth == 0 and not stays:
            unit.reshard()
        return Call(unit, start, self._clock, unit.version, self._generation, was_held=unit.is_held)

    def before_backward(self, call: Call) -> None:
        """A gradient has reached an output of this call: make its unit whole again."""
        if call.backward == self._backward:
            return  # an output that an earlier call made carries the hooks of both
        self._check_current(call)
        call.backward = self._backward
        complete = [active for active in self._active if active.start > call.stop]
        self._active = [active for active in self._active if active.start <= call.stop]
        self._active.append(call)
        for other in complete:  # see NOTE(backward order)
            if not self.is_in_use(other.unit):
                other.unit.reshard()
        self._use(call.unit)

    def end_backward(self) -> None:
        """Every call's backward is complete, or was given up."""
        self._active.clear()
        self._backward += 1
        for unit in self.units:
            if unit.depth == 0:
                unit.reshard()

    def reset(self) -> None:
        """Forget a forward or backward that an exception ended."""
        for unit in self.units:
            unit.depth = 0
        self._starts.clear()
        self.end_backward()

    def prefetch(self, *, using: Unit | None = None) -> None:
        """Launch gathers for the units that come next, as far as slots are free."""
        if self.units[0].exposure is not None:
            return  # whole when they are needed, by no one's leave
        ahead = [] if using is None else [using]  # it does not count as in use yet
        for index in self._order.upcoming(self.window - 1):
            unit = self.units[index]
            if not unit.is_resident and unit.placement is Placement.SHARDED:
                if unit.slot is None:
                    return  # never used yet: its slot is chosen when it is
                owner = unit.slot.owner
                is_other = owner is not None and owner is not unit
                if is_other and (self.is_in_use(owner) or owner in ahead):
                    return  # needed sooner; do not skip ahead either: one order on every rank
                unit.start_unshard(self.pool)
            ahead.append(unit)

    def settle(self) -> None:
        """Wait for gathers in flight, so that nothing reads the shards any more."""
        for unit in self.units:
            if unit.depth == 0 and not self.is_in_use(unit):
                unit.reshard()

    def release(self) -> None:
        """Give the slots back. Graphs that still refer to them can no longer run backward."""
        for unit in self.units:
            if self.is_in_use(unit):
                raise StateError(
                    f"release_buffers() was called while unit {unit.name!r} is in use; call it "
                    "between steps, outside forward and backward"
                )
        for unit in self.units:
            unit.release_slot()
        self.pool.release()
        self._generation += 1

    def _use(self, unit: Unit) -> None:
        if unit.is_held:  # no gather, and no trace: how often ranks come here is their own affair
            unit.unshard(self.pool)
            return
        self._order.observe(unit.index)
        owner = unit.slot.owner if unit.slot is not None else None
        if owner is not None and owner is not unit and owner.depth:
            self._refuse(unit, owner)
        unit.unshard(self.pool)
        self.prefetch(using=unit)

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
