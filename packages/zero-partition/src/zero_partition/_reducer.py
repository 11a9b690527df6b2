"""When gradients are reduced: each buffer as soon as it is full, in one order on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from attrs import define, field
from torch import Tensor
from zero_comm import Handle, all_gather_flat

from ._errors import StateError
from ._flat_buffer import FlatBuffer
from ._gradient_home import AbstractGradientHome
from ._gradients import BufferGradients
from ._placement import Placement
from ._precision import AS_IT_IS, Precision
from ._reduction_plan import ring_bytes
from ._shard_state import ShardState
from ._slots import SlotPool
from ._unit import Unit
from ._wire import AS_ONE, Routes, Wire

# NOTE(order): which buffers are reduced, and in which order, must not depend on which gradients a
# rank happens to have: ranks that wait for each other in different order never end. So every
# trainable buffer is reduced in every backward that reduces, with zeros where nothing arrived, in
# one order: the reverse of the model's at first, and then the order in which rank 0's buffers
# became full. A buffer that is full early waits for its turn.

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
    max_in_flight: int  # reductions that travel while the next buffer fills
    control_tag: int  # identity of exchanges of flags, norms and the order
    home: AbstractGradientHome | None = None  # where reduced gradients wait; see NOTE(leaving)
    sync: bool = True  # False inside no_sync
    has_collected: bool = field(default=False, init=False)  # in this backward
    _of_unit: dict[int, list[BufferGradients]] = field(factory=dict, init=False)
    _order: list[BufferGradients] = field(init=False)  # see NOTE(order)
    _order_is_settled: bool = field(default=False, init=False)
    _turn: int = field(default=0, init=False)  # how many of the order were launched
    _became_full: list[BufferGradients] = field(factory=list, init=False)
    _in_flight: list[BufferGradients] = field(factory=list, init=False)
    _flags: Handle[Tensor] | None = field(default=None, init=False)
    _has_earlier: bool = field(default=False, init=False)  # of a backward before this one

    def __attrs_post_init__(self) -> None:
        self._order = list(reversed(self.gradients))
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
        num_slots: int,
        precision: Precision = AS_IT_IS,
        home: AbstractGradientHome | None = None,
        wire: Wire = AS_ONE,
    ) -> GradientReducer:
        """One reducer for the trainable buffers of these units."""
        gradients = tuple(
            BufferGradients(buffer, unit, shards_state, precision, home)
            for unit in units
            for buffer in unit.buffers
            if buffer.plan.trainable
        )
        for g in gradients:
            g.use_wire(wire)
        ring = ring_bytes([(g.wire_bytes, g.unit.plan.is_outer) for g in gradients])
        pool: SlotPool[BufferGradients] = SlotPool.plan(
            ring if placement is Placement.SHARDED else (),
            num_slots=num_slots,
            device=routes.whole.device,
            is_busy=lambda owner: owner.has_local or owner.in_flight is not None,
        )
        last = max((buffer.index for unit in units for buffer in unit.buffers), default=0)
        return cls(
            routes,
            placement,
            shards_state,
            pool,
            gradients,
            max_in_flight=num_slots - 1 + (routes.replicas is not None),
            control_tag=2 * last + 2,
            home=home,
        )

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
        if g.shards_state:
            g.ensure_shard()
        else:
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
        if g.in_flight is not None:  # again in one backward: a nested one, of a checkpoint
            self._finish(g)
            g.refuse_to_sum_again()
        if g.accumulator is None:
            self._ensure_accumulator(g)
        self.has_collected = True
        g.take(grads)
        if self.sync and g.is_full:
            self._became_full.append(g)
            while self._turn < len(self._order) and self._order[self._turn].is_full:
                self._turn += 1
                self._launch(self._order[self._turn - 1])

    def keep(self) -> None:
        """Nothing arrived: what was there before stays, and is guarded."""
        for g in self.gradients:
            g.end_backward()

    def end_backward(self) -> None:
        """Reduce what is left, and put every gradient where the optimizer reads it."""
        if self.sync:
            for g in self._order:
                if not g.launched or (g.has_local and g.in_flight is None):
                    self._launch(g)
            self._flush()
            for g in self.gradients if self.home is not None else ():
                g.norms.settle(g.parts)
            self._agree_on_arrivals()
            self._settle_order()
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
        if self.routes.whole.world_size == 1:
            return mine
        return bool(self._exchange(torch.tensor([mine], dtype=torch.uint8)).wait().any())

    def lend(self, *, has_closure: bool) -> None:
        """The optimizer steps now: show it the gradients as it needs them."""
        for g in self.gradients:
            g.lend(has_closure=has_closure)

    def take_back(self) -> None:
        """The optimizer has stepped."""
        for g in self.gradients:
            g.take_back()

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
            self._return_accumulator(g)
        self._has_earlier = False

    def drop(self, *, set_to_none: bool) -> None:
        """What `zero_grad` means for gradients that are not in the optimizer's hands."""
        self._flush()
        for g in self.gradients:
            if set_to_none:
                g.drop()
            g.carried.clear()
            g.forget_local()
            self._return_accumulator(g)
        self._has_earlier = False

    def release(self) -> None:
        """Give reduction buffers back; gradients that somebody waits for stay."""
        for g in self.gradients:
            if not g.has_local and (self.shards_state or not g.holds_gradients):
                g.leave_accumulator()
                g.views = ()
            if not g.holds_gradients:
                g.shard, g.parts = None, ()
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
        return sum(g.loco_errors.num_bytes for g in self.gradients if g.loco_errors is not None)

    @property
    def host_bytes(self) -> int:
        """Bytes of gradients, or room for them, that are on the host."""
        shards = [g.shard for g in self.gradients if g.shard is not None]
        return 0 if self.home is None else sum(shard.nbytes for shard in shards)

    @property
    def flags_bytes(self) -> int:
        """Bytes of the flags of the last exchange, which nobody may have needed to read."""
        if self._flags is None:
            return 0
        return self.routes.whole.world_size * sum(len(g.targets) for g in self.gradients)

    def _launch(self, g: BufferGradients) -> None:
        if g.in_flight is not None:
            self._finish(g)
        self._ensure_accumulator(g)
        g.launch(self.routes)
        self._send_across(self._in_flight)
        self._in_flight.append(g)
        while len(self._in_flight) > self.max_in_flight:
            self._finish(self._in_flight[0])

    def _finish(self, g: BufferGradients) -> None:
        if self.routes.hops is not None:  # the second hop is launched as the first is waited for
            while self._in_flight[0] is not g:
                self._finish(self._in_flight[0])
        self._send_across(self._in_flight[: self._in_flight.index(g)])
        g.finish()
        self._in_flight.remove(g)
        self._return_accumulator(g)

    def _send_across(self, reduced: Sequence[BufferGradients]) -> None:
        """Replicas are next, in one order on every rank; the accumulators are free."""
        for g in reduced:
            if g.go_across() and self.placement is Placement.SHARDED:
                g.leave_accumulator()

    def _flush(self) -> None:
        while self._in_flight:
            self._finish(self._in_flight[0])
        if self.home is not None:
            self.home.settle()

    def _forget_turns(self) -> None:
        self._turn = 0
        self.has_collected = False
        self._became_full.clear()

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
        while not alone and self._in_flight and self.pool.find(g.wire_bytes) is None:
            self._finish(self._in_flight[0])
        slot = self.pool.take_again(g, g.wire_bytes, alone=alone)
        slot.owner = g
        memory = slot.allocate(self.pool.device)[: g.wire_bytes]
        g.use_accumulator(memory.view(g.buffer.wire_dtype), slot)

    def _return_accumulator(self, g: BufferGradients) -> None:
        """The accumulator is empty: give it to the next unit, unless this unit keeps it."""
        if self.placement is Placement.SHARDED and g.in_flight is None:
            g.leave_accumulator()

    def _agree_on_arrivals(self) -> None:
        """A gradient that another rank had and we had not is there all the same, from zeros.

        Every rank says which parameters got one; only a rank that misses some needs the answer,
        so that in the usual case nobody waits.
        """
        world_size = self.routes.whole.world_size
        if world_size == 1:
            return
        if self._flags is not None:
            self._flags.wait()
        mine = [param.grad is not None for g in self.gradients for param in g.targets]
        self._flags = self._exchange(torch.tensor(mine, dtype=torch.uint8))
        if all(mine):
            return
        everyone = self._flags.wait().view(world_size, -1)
        self._flags = None
        anyone = iter(everyone.any(dim=0).tolist())
        for g in self.gradients:
            for position, param in enumerate(g.targets):
                if next(anyone) and param.grad is None:
                    g.hand_over([position])

    def _settle_order(self) -> None:
        """Take rank 0's order of becoming full for the backwards to come; see NOTE(order)."""
        if self._order_is_settled:
            return
        numbers = {id(g): number for number, g in enumerate(self.gradients)}
        full = [numbers[id(g)] for g in self._became_full]
        full += [-1] * (len(self.gradients) - len(full))
        mine = torch.tensor(full[: len(self.gradients)], dtype=torch.int64)
        everyone = self._exchange(mine).wait() if self.routes.whole.world_size > 1 else mine
        first = [number for number in everyone[: len(mine)].tolist() if number >= 0]
        if not first:
            return  # nothing became full on rank 0: too early to say
        rest = [numbers[id(g)] for g in self._order if numbers[id(g)] not in first]
        self._order = [self.gradients[number] for number in dict.fromkeys((*first, *rest))]
        self._order_is_settled = True

    def _exchange(self, mine: Tensor) -> Handle[Tensor]:
        group = self.routes.whole
        shard = mine.to(group.device)
        return all_gather_flat(
            shard.new_empty(group.world_size * shard.numel()),
            splits=[shard.numel()] * group.world_size,
            group=group,
            shard=shard,
            tag=self.control_tag,
            control=True,
        )
