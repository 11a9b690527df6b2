"""When gradients are reduced: each buffer as soon as it is full, in one order on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from attrs import define, field
from torch import Tensor

from ._control import Control
from ._errors import StateError
from ._flat_buffer import FlatBuffer
from ._gradient_home import AbstractGradientHome
from ._gradient_route import GradientRoute
from ._gradients import BufferGradients
from ._in_flight import InFlight
from ._placement import Placement
from ._precision import AS_IT_IS, Precision
from ._reduced_shard import ReducedShard
from ._reduction_order import ReductionOrder
from ._reduction_plan import REDUCTION_SLOTS, ring_bytes
from ._shard_state import ShardState
from ._slots import SlotPool
from ._unit import Unit
from ._wire import AS_ONE, Routes, Wire

# NOTE(leaving): with a home of gradients a reduced shard leaves the device as soon as it is there,
# while backward goes on, and the end of backward waits for the last: from then on `grad` of a shard
# is an ordinary tensor of the host, whoever reads it.


@define(eq=False)
class GradientReducer:
    """Collects gradients per flat buffer and reduces each buffer when its turn comes."""

    routes: Routes
    placement: Placement  # of gradients while they accumulate
    shards_state: bool  # whether the optimizer works on shards (every stage but zero)
    pool: SlotPool[BufferGradients]
    gradients: tuple[BufferGradients, ...]
    control: Control
    home: AbstractGradientHome | None = None  # where reduced gradients wait; see NOTE(leaving)
    sync: bool = True  # False inside no_sync
    has_collected: bool = field(default=False, init=False)  # in this backward
    _of_unit: dict[int, list[BufferGradients]] = field(factory=dict, init=False)
    _order: ReductionOrder = field(init=False)
    _in_flight: InFlight = field(init=False)
    _has_earlier: bool = field(default=False, init=False)  # of a backward before this one

    def __attrs_post_init__(self) -> None:
        self._order = ReductionOrder(self.gradients)
        self._in_flight = InFlight(keeps_accumulators=self.placement is Placement.REPLICATED)
        for g in self.gradients:
            self._of_unit.setdefault(g.unit.index, []).append(g)

    @classmethod
    def plan(
        cls,
        units: Sequence[Unit],
        *,
        routes: Routes,
        placement: Placement,
        shards_state: bool,
        precision: Precision = AS_IT_IS,
        home: AbstractGradientHome | None = None,
        wire: Wire = AS_ONE,
    ) -> GradientReducer:
        """One reducer for the trainable buffers of these units."""
        gradients = tuple(
            BufferGradients(
                buffer,
                unit,
                shards_state,
                GradientRoute.plan(buffer, unit, routes=routes, precision=precision, wire=wire),
                ReducedShard(buffer, home),
            )
            for unit in units
            for buffer in unit.buffers
            if buffer.plan.trainable
        )
        ring = ring_bytes([(g.wire_bytes, g.unit.plan.is_outer) for g in gradients])
        pool: SlotPool[BufferGradients] = SlotPool.plan(
            ring if placement is Placement.SHARDED else (),
            num_slots=REDUCTION_SLOTS,
            device=routes.whole.device,
            is_busy=lambda owner: owner.has_local or owner.is_in_flight,
        )
        last = max((buffer.index for unit in units for buffer in unit.buffers), default=0)
        return cls(
            routes,
            placement,
            shards_state,
            pool,
            gradients,
            control=Control(routes.whole, tag=2 * last + 2),
            home=home,
        )

    @property
    def control_tag(self) -> int:
        """Identity of exchanges of flags, norms and the order."""
        return self.control.tag

    def before_backward(self, unit: Unit) -> None:
        """Let autograd give this unit's gradients away."""
        for g in self._of_unit.get(unit.index, ()):
            g.clear_guards()

    def expect_from_outside(self, buffer: FlatBuffer, position: int) -> None:
        """A gradient of this parameter is right though its unit is sharded: no slot was read."""
        for g in self.gradients:
            if g.buffer is buffer:
                g.from_outside.add(position)

    def set_whole(self, g: BufferGradients, position: int, value: Tensor) -> None:
        """Make `value` the gradient of a parameter; inside no_sync, the local one. Local."""
        if not self.sync:
            self._ensure_accumulator(g)
            g.views[position].copy_(value)
            g.filled[position] = True
            g.buffer.params[position].grad = None if g.shards_state else g.views[position]
            return
        if not g.shards_state:
            self._ensure_accumulator(g)
        g.copy_whole(position, value)

    def before_forward(self) -> bool:
        """As `before_backward`, for every unit; compiled code looks at gradients in any forward.

        Returns:
            Whether there were guards.
        """
        had_guards = [g for g in self.gradients if g.clear_guards()]
        return bool(had_guards)

    def check_arrival(self, g: BufferGradients, position: int) -> None:
        """Raise StateError where a gradient arrives while its unit is sharded."""
        param = g.buffer.params[position]
        is_whole = g.unit.state is ShardState.UNSHARDED or position in g.from_outside
        if is_whole or param.grad is None:
            return
        raise StateError(
            f"parameter {g.buffer.plan.params[position].name!r} received a gradient while its unit "
            f"{g.unit.name!r} was sharded (rank {self.routes.whole.rank}): its backward may have "
            "read other values. Please report the model; making the modules involved one unit "
            "(ZeroConfig.units) avoids it."
        )

    def collect_waiting(self) -> None:
        """Backward has ended: take what waits in every buffer."""
        for g in self.gradients:
            if g.waiting:
                self.collect(g)

    def collect(self, g: BufferGradients) -> None:
        """Gradients are in `param.grad`: take them, and reduce what is ready."""
        grads = g.find_waiting()
        if not grads:
            return
        if g.is_in_flight:  # again in one backward: a nested one, of a checkpoint
            self._in_flight.end(g)
            g.refuse_to_sum_again()
        if g.accumulator is None:
            self._ensure_accumulator(g)
        self.has_collected = True
        g.take(grads)
        if self.sync and g.is_full:
            for full in self._order.turns_after(g):
                self._launch(full)

    def keep(self) -> None:
        """Nothing arrived: what was there before stays, and is guarded."""
        for g in self.gradients:
            g.end_backward()

    def end_backward(self) -> None:
        """Reduce what is left, and put every gradient where the optimizer reads it."""
        if self.sync:
            for g in self._order:
                if not g.launched or (g.has_local and not g.is_in_flight):
                    self._launch(g)
            self._flush()
            for g in self.gradients if self.home is not None else ():
                g.result.norms.settle(g.parts)
            self.control.agree_on_arrivals(self.gradients)
            self._order.settle(self.control.exchange, device=self.routes.whole.device)
        self._forget_turns()
        for g in self.gradients:
            g.end_backward()
        self._has_earlier = True

    def before_step(self) -> None:
        """Reduce what `no_sync` left behind; drop what the user dropped."""
        for g in self.gradients:
            g.drop_where_user_did()
        if any(g.has_local for g in self.gradients):
            self.reduce_local()

    def reduce_local(self) -> None:
        """Reduce the sum of what `no_sync` has collected, with zeros where there is none."""
        if any(getattr(part, "is_unscaled", False) for g in self.gradients for part in g.parts):
            raise StateError(
                "no_sync left gradients to reduce, but GradScaler has unscaled those reduced "
                "before; run the last micro-batch outside no_sync"
            )
        self.refuse_to_sum_again()
        sync, self.sync = self.sync, True
        self.end_backward()
        self.sync = sync

    def refuse_to_sum_again(self) -> None:
        """Raise StateError where gradients that were summed over the ranks would be so again."""
        for g in self.gradients:
            g.refuse_to_sum_again()

    def is_true_anywhere(self, mine: bool) -> bool:
        """Whether any rank says so. Collective."""
        return self.control.is_true_anywhere(mine)

    def lend(self, *, has_closure: bool) -> None:
        """The optimizer steps now: show it the gradients as it needs them."""
        for g in self.gradients:
            g.lending.begin(has_closure=has_closure)

    def take_back(self) -> None:
        """The optimizer has stepped."""
        for g in self.gradients:
            g.lending.end()

    def abandon(self, *, is_asked_for: bool) -> None:
        """Drop all gradients: an exception ended a backward, and some lack its part.

        Stage 0 leaves it to the user, whose `param.grad` they are, as plain torch does.

        Args:
            is_asked_for: The user drops them anyway; else earlier ones go with a warning.
        """
        self._flush()
        if self._has_earlier and self.shards_state and not is_asked_for:
            warnings.warn(
                "a backward ended in an exception: the gradients of the backwards before it, "
                "accumulated since zero_grad(), are dropped with its own",
                stacklevel=2,
            )
        self._forget_turns()
        for g in self.gradients:
            if self.shards_state:
                g.drop()
            g.forget_local()
            g.end_backward()
            self._in_flight.return_accumulator(g)
        self._has_earlier = False

    def drop(self, *, set_to_none: bool) -> None:
        """What `zero_grad` means for gradients that are not in the optimizer's hands."""
        self._flush()
        for g in self.gradients:
            if set_to_none:
                g.drop()
            g.carried.clear()
            g.forget_local()
            self._in_flight.return_accumulator(g)
        self._has_earlier = False

    def release(self) -> None:
        """Give reduction buffers back; gradients that somebody waits for stay."""
        for g in self.gradients:
            if not g.has_local and (self.shards_state or not g.holds_gradients):
                g.leave_accumulator()
                g.views = ()
            if not g.holds_gradients:
                g.result.release()
        if not any(g.slot for g in self.gradients):
            self.pool.release()

    @property
    def reduction_bytes(self) -> int:
        """Bytes of slots, of whole gradients that accumulate, and of shards without a gradient."""
        own = sum(
            g.accumulator.nbytes
            for g in self.gradients
            if g.accumulator is not None and g.slot is None
        )
        shards = [g for g in self.gradients if g.shard is not None and self.home is None]
        idle = sum(g.shard.nbytes for g in shards if g.shard is not None and not g.holds_gradients)
        return own + idle + self.pool.num_bytes

    @property
    def loco_bytes(self) -> int:
        """Bytes of errors of encoding, kept for the next reductions."""
        return sum(errors.num_bytes for g in self.gradients if (errors := g.route.loco_errors))

    @property
    def host_bytes(self) -> int:
        """Bytes of gradients, or room for them, that are on the host."""
        shards = [g.shard for g in self.gradients if g.shard is not None]
        return 0 if self.home is None else sum(shard.nbytes for shard in shards)

    @property
    def flags_bytes(self) -> int:
        """Bytes of the flags of the last exchange, which nobody may have needed to read."""
        return self.control.flags_bytes(self.gradients)

    def _launch(self, g: BufferGradients) -> None:
        self._in_flight.end(g)
        self._ensure_accumulator(g)
        self._in_flight.launch(g)

    def _flush(self) -> None:
        self._in_flight.end_all()
        if self.home is not None:
            self.home.settle()

    def _forget_turns(self) -> None:
        self._order.forget_turns()
        self.has_collected = False

    def _ensure_accumulator(self, g: BufferGradients) -> None:
        if g.accumulator is not None:
            return
        plan = g.buffer.plan
        if self.placement is Placement.REPLICATED or not self.sync:
            dtype = g.buffer.training.dtype  # several backwards may be added up here
            memory = torch.zeros(plan.layout.numel, dtype=dtype, device=self.pool.device)
            g.use_accumulator(memory, None)
            return
        alone = g.unit.plan.is_outer
        while not alone and self._in_flight.holds_slots and self.pool.find(g.wire_bytes) is None:
            self._in_flight.advance()
        slot = self.pool.take_again(g, g.wire_bytes, alone=alone)
        slot.owner = g
        memory = slot.allocate(self.pool.device)[: g.wire_bytes]
        g.use_accumulator(memory.view(g.buffer.wire_dtype), slot)
