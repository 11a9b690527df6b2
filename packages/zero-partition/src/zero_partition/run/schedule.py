"""When sharded parameters are whole: around each use, and ahead of it as far as limits allow."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter
from threading import Thread, current_thread
from typing import Final

import torch
from attrs import Factory, define, field

from zero_partition.errors import StateError
from zero_partition.memory.seams import ParamOffload
from zero_partition.plan.slots import (
    ExecutionOrder,
    Extent,
    Limits,
    PlannedGather,
    SlotPool,
    Use,
    choose_slots,
    keeps_free_memory,
    plan_gathers,
    slot_bytes,
    slot_conflicts,
)
from zero_partition.plan.stages import Placement
from zero_partition.torch_private import current_backward, is_in_backward

from .unit import RETURN_OUTPUTS, ShardState, Unit

# NOTE(assigned order): at first, units take slots in the order of their first use. When a step has
# recorded the order of uses, slots are assigned anew: units that should be whole at once get slots
# of their own, and others share. That happens right after the optimizer's step, when every graph is
# out of date and none needs the memory that its views point into. A changed order is followed when
# it is recorded twice, so that a loop of varying length keeps its slots.

# NOTE(backward order): autograd runs ready nodes latest-created first. When the hook on an output
# of one forward call fires, every node created after that call ended has run: calls that began
# later than this one ended are complete, their units may be resharded and their slots taken. No
# hook on inputs, and none per module, is needed to know it. Each thread counts its own nodes: calls
# of other threads stay in use until backward ends.

_LOG: Final = logging.getLogger("zero_partition")
_UNIT: Final = attrgetter("unit")
_INDEX: Final = attrgetter("index")


@define(eq=False)
class ForwardCall:
    """One forward of a unit, whose graph may be run in backward."""

    unit: Unit
    # Begin and end on the schedule's clock, which counts both.
    start: int
    stop: int
    # Version of the values that the graph was made with.
    version: int
    # Generation of the slots that the graph's views point into.
    generation: int
    # Whether they point into memory of a context that gathered the parameters instead.
    was_gathered: bool
    # Thread that made the graph; the object itself, since thread numbers are used again.
    thread: Thread = Factory(current_thread)
    # Number of the backward that has reached it, and autograd's number for that; -1: none.
    backward: int = -1
    task: int = -1

    def is_after(self, other: ForwardCall) -> bool:
        """Return whether all its nodes were made after the other's; see NOTE(backward order)."""
        return self.start > other.stop and self.thread is other.thread


@define(eq=False)
class Schedule:
    """Unshards units for forward and backward, in the same order on every rank."""

    units: Sequence[Unit]
    limits: Limits
    device: torch.device
    # Backend of offloaded shards, which are read before they are gathered.
    param_offload: ParamOffload | None = None
    # Unit index -> sizes, of the units that need a slot; set at construction.
    extents: dict[int, Extent] = field(init=False)
    pool: SlotPool[Unit] = field(init=False)
    # Recorded orders of uses; `_trace` is one of them.
    training: ExecutionOrder = field(init=False)
    evaluation: ExecutionOrder = field(init=False)
    reshard_disabled: bool = field(default=False, init=False)  # see `disable_reshard`
    _sharded: list[Unit] = field(init=False)
    _trace: ExecutionOrder = field(init=False)
    # Order that slots are assigned for, and a new one, used if repeated; see NOTE(assigned order).
    _assigned_order: list[Use] | None = field(default=None, init=False)
    _candidate: list[Use] | None = field(default=None, init=False)
    # How often the slots' memory was given back; graphs of an earlier generation are void.
    _generation: int = field(default=0, init=False)
    _clock: int = field(default=0, init=False)
    # Begins of the forwards that are running, and their units, innermost last.
    _starts: list[int] = field(factory=list, init=False)
    _running: list[Unit] = field(factory=list, init=False)
    # True while slots are being filled, and after an exception has ended that.
    _is_filling: bool = field(default=False, init=False)
    # Calls whose backward is running.
    _active: list[ForwardCall] = field(factory=list, init=False)
    # Number of backwards that have ended.
    _backward: int = field(default=0, init=False)
    # Unit index -> `_backward` when backward last reached the unit.
    _reached: dict[int, int] = field(factory=dict, init=False)
    # Indices of units with a forward since the last backward; of units that ever had two.
    _called: set[int] = field(factory=set, init=False)
    _called_again: set[int] = field(factory=set, init=False)
    # Indices of units with a call that returned no tensor through which backward reaches it.
    _unreachable: set[int] = field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        self.limits = self.limits.with_window(keeps_free_memory=keeps_free_memory(self.device))
        self.training = self._trace = ExecutionOrder(len(self.units))
        self.evaluation = ExecutionOrder(len(self.units))
        self._sharded = [unit for unit in self.units if unit.placement is Placement.SHARDED]
        self.extents = {unit.index: unit.plan.extent for unit in self._sharded}
        self.pool = SlotPool(self.device, self.is_in_use)
        self._assign_slots_by_size()

    @property
    def is_running(self) -> bool:
        """Return whether a unit's forward runs now, or slots are being filled."""
        return self._is_filling or bool(self._running)

    def is_in_use(self, unit: Unit) -> bool:
        """Return whether something may read a unit's parameters before it is unsharded again."""
        if unit.depth or (self.reshard_disabled and unit.state is ShardState.UNSHARDED):
            return True
        for call in self._active:  # noqa: SIM110 - any() would be a call for each
            if call.unit is unit:
                return True
        return False

    # ---- Forwards and backwards begin and end ----

    def begin_forward(self) -> None:
        """The model's own forward starts: the order starts again."""
        if is_in_backward():
            # The model is recomputed as a whole inside a larger model's backward.
            return
        for unit in self.units:
            if unit.plan.is_replicated:
                # No call of a module of its own says when such a unit is used.
                unit.check_untouched()
        self._restart(is_training=torch.is_grad_enabled())
        self._prefetch()

    def before_forward(self, unit: Unit) -> None:
        """Make the unit whole; launch gathers for those that follow."""
        is_watched = False
        if unit.depth == 0:
            unit.check_untouched()
            is_recomputed = is_in_backward()
            self._use(unit, "recomputation" if is_recomputed else "forward")
            if not is_recomputed and torch.is_grad_enabled():  # see NOTE(reads) in hooks.py
                if unit.index in self._called:
                    self._called_again.add(unit.index)
                self._called.add(unit.index)
                is_watched = unit.index in self._called_again
        self._clock += 1
        self._starts.append(self._clock)
        self._running.append(unit)
        unit.begin_forward(is_watched=is_watched)

    def after_forward(self, unit: Unit, *, raised: bool = False) -> ForwardCall:
        """Reshard, and say which call this was."""
        self._clock += 1
        unit.end_forward()
        start = self._starts.pop()
        # The model's own unit shares its slot with no other, and backward comes to it first: it
        # stays whole, for a loss that reads its parameters. In recomputation, a unit's backward
        # follows at once.
        stays = is_in_backward() or (not unit.plan.name and torch.is_grad_enabled() and not raised)
        if not self.is_in_use(unit) and not stays:
            unit.reshard()
        # Last, since `reset` undoes what an exception leaves half done of a running call.
        self._running.pop()
        return ForwardCall(
            unit,
            start,
            self._clock,
            unit.version,
            self._generation,
            was_gathered=unit.has_gathered_values,
        )

    def before_backward(self, call: ForwardCall) -> None:
        """A gradient has reached an output of this call: make its unit whole again."""
        if call.backward == self._backward:
            # An output that an earlier call made has the hooks of both calls.
            return
        self._check_current(call)
        if call.unit.index in self._unreachable:
            raise StateError(
                f"unit {call.unit.name!r} was called twice before this backward, and one of the "
                f"calls returned no tensor through which backward reaches it. {RETURN_OUTPUTS}"
            )
        call.backward = self._reached[call.unit.index] = self._backward
        call.task = current_backward()
        complete = [active for active in self._active if active.is_after(call)]
        for other in complete:  # see NOTE(backward order)
            self._active.remove(other)
        self._active.append(call)
        for other in complete:
            if not self.is_in_use(other.unit):
                other.unit.reshard()
        self._use(call.unit, "backward")

    def end_use(self, unit: Unit) -> None:
        """Give the memory of a unit's slot back, on a device, when all its gradients are there.

        Not where backward may come to the unit once more: a forward called it again, what is inside
        of it is recomputed in backwards of its own, or a graph keeps views of it.
        """
        calls = [call for call in self._active if call.unit is unit]
        is_called_again = unit.index not in self._called or unit.index in self._called_again
        if is_called_again or len(calls) != 1 or self.reshard_disabled:
            return
        if calls[0].task != current_backward():
            return
        unit.leave_slot()
        if unit.slot is not None and unit.slot.owner is None:
            self._active = [call for call in self._active if call.unit is not unit]

    def note_unreachable(self, unit: Unit) -> None:
        """Note a call that returned no tensor through which backward reaches it."""
        self._unreachable.add(unit.index)

    def was_reached(self, unit: Unit) -> bool:
        """Return whether this backward ran the unit's calls while it was whole.

        A gradient may arrive later: autocast remembers casts, and a Function returns gradients that
        a backward inside of it has computed.
        """
        return self._reached.get(unit.index) == self._backward

    def disable_reshard(self, unit: Unit) -> None:
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
        self.reshard_disabled = True

    def enable_reshard(self) -> None:
        """Reshard units again: no graph needs their parameters."""
        self.reshard_disabled = False

    def end_backward(self) -> None:
        """Every call's backward is complete, or was given up."""
        self._active.clear()
        self._called.clear()
        self._unreachable.clear()
        self._backward += 1
        self._reshard_idle()
        self._leave_slots()

    def abandon_backward(self) -> None:
        """An exception ended a backward: nothing is in use. Waits for no other rank.

        Gathers launched ahead are left to travel.
        """
        self._active.clear()
        self._backward += 1
        self.reshard_disabled = False
        self._reshard_idle(travels=ShardState.GATHERING)

    def reset(self) -> None:
        """Forget a forward or backward that an exception ended."""
        for unit in self.units:
            unit.forget_forwards()
        self._starts.clear()
        self._running.clear()
        self.reshard_disabled = False
        is_filling, self._is_filling = self._is_filling, False
        self.end_backward()
        if is_filling:
            # A gather that was launched, and that no code waits for, may still write to the slots.
            self.release()

    def leave_memory(self) -> None:
        """Graphs made so far end: give slots back for a while; see NOTE(free memory)."""
        if keeps_free_memory(self.device) or any(map(self.is_in_use, self._sharded)):
            return
        self._reshard_idle()
        self._leave_slots()
        viewed = [slot for slot in self.pool.slots if slot.allocated_bytes]
        if viewed:
            self._generation += 1
        # Before units forget: the owner of a slot takes it for granted that the slot has memory.
        for slot in viewed:
            slot.release()
        for unit in self._sharded:
            if unit.slot in viewed:
                unit.forget_memory()

    def _leave_slots(self) -> None:
        """On a device, forget the values in slots, and free slots that no other tensor views.

        Every rank forgets the same values. Which slots it frees depends on views on this rank.
        """
        if keeps_free_memory(self.device):
            return
        for unit in self._sharded:
            if not self.is_in_use(unit) and unit.secondary is None:
                unit.leave_slot()
                unit.forget_values()

    def step(self) -> None:
        """The optimizer has stepped: assign slots; where memory stays, launch the first gathers."""
        for unit in self.units:
            if self.is_in_use(unit):
                return
        self.leave_memory()
        self._restart(is_training=True)
        recorded = self.training.recorded
        if recorded is not self._assigned_order and recorded:  # see NOTE(assigned order)
            if self._assigned_order is not None and recorded is not self._candidate:
                self._candidate = recorded
            else:
                self._assigned_order = recorded
                self._assign_slots(choose_slots(recorded, self.extents, self._limits_of_now()))
        if keeps_free_memory(self.device):
            self._prefetch()

    def wait_for_gathers(self) -> None:
        """Wait for gathers in flight, so that nothing reads the shards any more."""
        self.reshard_disabled = False
        self._reshard_idle()

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
        self._assign_slots_by_size()
        self._generation += 1

    def _reshard_idle(self, *, travels: ShardState | None = None) -> None:
        for unit in self._sharded:
            is_sharded = unit.state is ShardState.SHARDED
            if not is_sharded and unit.state is not travels and not self.is_in_use(unit):
                unit.reshard()

    # ---- A unit is used, and gathers of the next ones are launched ----

    def gathers(self, order: ExecutionOrder) -> tuple[PlannedGather, ...]:
        """The gathers of one pass through this order, with the slots as they are."""
        slot_of = {unit.index: unit.slot.index for unit in self.units if unit.slot is not None}
        prefetch_numel = self._limits_of_now().prefetch_numel
        return plan_gathers(order.recorded, self.extents, slot_of, prefetch_numel=prefetch_numel)

    def _restart(self, *, is_training: bool) -> None:
        self._trace = self.training if is_training else self.evaluation
        self._trace.restart()

    def _use(self, unit: Unit, phase: str) -> None:
        if unit.index not in self.extents:
            # It is replicated: there is nothing to gather, now or ahead.
            return
        if unit.has_gathered_values:
            # Already gathered: not traced, so that ranks may use it unequally often.
            unit.unshard(self.pool)
            return
        in_use = [unit, *self._running, *map(_UNIT, self._active)]
        self._trace.observe(Use(unit.index, phase, frozenset(map(_INDEX, in_use))))
        owner = unit.slot.owner if unit.slot is not None else None
        if owner is not None and owner is not unit and owner.depth:
            raise StateError(
                f"unit {unit.name!r} must return to the memory that its forward used, but "
                f"{owner.name!r} is using it: the two were first used one after the other and are "
                "now used at once. Give them as one unit, or call release_buffers(model) before "
                "the change."
            )
        self._is_filling = True
        unit.unshard(self.pool)
        self._prefetch(used=unit)

    def _prefetch(self, used: Unit | None = None) -> None:
        """Start the gathers that are due at this moment. Collective with its peers' same call.

        Args:
            used: A unit whose use begins, and is not counted yet; it may be in no order.
        """
        trace = self._trace
        self._is_filling = True
        launches = trace.plan(self.gathers(trace)) if trace.launches is None else trace.launches
        for index in launches.get(trace.position, ()):
            unit = self.units[index]
            owner = unit.slot.owner if unit.slot is not None else None
            is_of_other = owner is not None and owner is not unit
            is_taken = is_of_other and (owner is used or self.is_in_use(owner))
            if unit.slot is None or is_taken:
                # Launch none that follow either: the sequence is the same on every rank.
                break
            unit.start_unshard(self.pool)
        self._is_filling = False
        if self.param_offload is not None and self.limits.read_ahead:
            coming = [self.units[index] for index in trace.after(self.limits.read_ahead)]
            coming = [unit for unit in coming if not unit.is_resident]
            for param_offload in {
                id(unit.unsharded_cache): unit.unsharded_cache or self.param_offload
                for unit in coming
            }.values():
                mine = [
                    unit
                    for unit in coming
                    if (unit.unsharded_cache or self.param_offload) is param_offload
                ]
                param_offload.expect([buffer.index for unit in mine for buffer in unit.buffers])

    # ---- Slots are assigned; see NOTE(assigned order) ----

    def _limits_of_now(self) -> Limits:
        is_exposed = any(unit.exposure is not None for unit in self.units)
        return self.limits.where_shards_are_read() if is_exposed else self.limits

    def _assign_slots(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Make one slot for each group of units, and assign it to them."""
        now: dict[int, set[int]] = {}
        for unit in self.units:
            if unit.slot is not None:
                now.setdefault(unit.slot.index, set()).add(unit.index)
        if set(map(frozenset, groups)) == set(map(frozenset, now.values())):
            return
        for unit in self.units:
            unit.release_slot()
        num_conflicts = slot_conflicts(groups, self.extents, self.limits)
        self.pool.make_ring(slot_bytes(groups, self.extents), num_conflicts)
        for slot, group in zip(self.pool.ring, groups, strict=True):
            names = ", ".join(self.units[index].name for index in group)
            _LOG.debug("slot %d of %d bytes: %s", slot.index, slot.num_bytes, names)
        for slot, group in zip(self.pool.ring, groups, strict=True):
            for index in group:
                self.units[index].assign_slot(slot)
        self._forget_launches()

    def _assign_slots_by_size(self) -> None:
        """Make a slot for each of the largest units, as many as may be unsharded at a time.

        Units take the slots in the order of their first use.
        """
        inner = sorted(
            (extent for extent in self.extents.values() if not extent.is_outer),
            key=lambda extent: extent.num_bytes,
            reverse=True,
        )
        room = self.limits.max_live_numel
        count = self.limits.num_whole
        if room is not None:
            live = accumulate(extent.numel for extent in inner)
            room -= sum(extent.numel for extent in self.extents.values() if extent.is_outer)
            count = max(1, sum(numel <= room for numel in live))
        self.pool.make_ring([extent.num_bytes for extent in inner[:count]])
        self._assigned_order = self._candidate = None
        self._forget_launches()

    def _forget_launches(self) -> None:
        for order in (self.training, self.evaluation):
            order.forget_launches()

    # ---- Graphs of earlier values or slots are refused ----

    def _check_current(self, call: ForwardCall) -> None:
        unit = call.unit
        if unit.has_gathered_values and not call.was_gathered:
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
        if unit.placement is Placement.SHARDED and self._generation != call.generation:
            raise StateError(
                f"unit {unit.name!r}: release_buffers() was called between this graph's forward "
                "and its backward, or a step began; run the forward again"
            )
