"""When gradients are reduced: each buffer as soon as it is full, in one order on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from attrs import define, field
from torch import Tensor
from zero_comm import Group, Handle, all_gather_flat

from zero_partition.errors import StateError
from zero_partition.memory.flat_buffer import FlatBuffer
from zero_partition.memory.seams import GradientHome
from zero_partition.plan.slots import REDUCTION_SLOTS, SlotPool, ring_bytes
from zero_partition.plan.stages import AS_IT_IS, Placement, Precision
from zero_partition.plan.wire import AS_ONE, Routes, Wire

from .gradients import BufferGradients, GradientRoute, ReducedShard
from .unit import ShardState, Unit


@define(eq=False)
class Control:
    """Exchanges of small tensors among all ranks. Collective."""

    group: Group
    tag: int  # identity of its collectives
    _flags: Handle[Tensor] | None = field(default=None, init=False)  # of arrivals, on their way

    def launch(self, mine: Tensor) -> Handle[Tensor]:
        """A handle of all ranks' tensors of equal size, 1-D, one after the other."""
        shard, world_size = mine.to(self.group.device), self.group.world_size
        return all_gather_flat(
            shard.new_empty(world_size * shard.numel()),
            splits=[shard.numel()] * world_size,
            group=self.group,
            shard=shard,
            tag=self.tag,
            control=True,
        )

    def exchange(self, mine: Tensor) -> Tensor:
        """All ranks' tensors of equal size, 1-D, one after the other."""
        return mine if self.group.world_size == 1 else self.launch(mine).wait()

    def is_true_anywhere(self, mine: bool) -> bool:
        """Whether any rank says so."""
        return bool(self.exchange(torch.tensor([mine], dtype=torch.uint8)).any())

    def agree_on_arrivals(self, gradients: Sequence[BufferGradients]) -> None:
        """A gradient that another rank had and we had not is there all the same, from zeros.

        Every rank says which parameters got one; only a rank that misses some needs the answer,
        so that in the usual case nobody waits.
        """
        if self.group.world_size == 1:
            return
        if self._flags is not None:
            self._flags.wait()
        mine = [param.grad is not None for g in gradients for param in g.targets]
        self._flags = self.launch(torch.tensor(mine, dtype=torch.uint8))
        if all(mine):
            return
        everyone = self._flags.wait().view(self.group.world_size, -1)
        self._flags = None
        anyone = iter(everyone.any(dim=0).tolist())
        for g in gradients:
            for position, param in enumerate(g.targets):
                if next(anyone) and param.grad is None:
                    g.hand_over([position])

    def flags_bytes(self, gradients: Sequence[BufferGradients]) -> int:
        """Bytes of the flags of the last exchange, which nobody may have needed to read."""
        if self._flags is None:
            return 0
        return self.group.world_size * sum(len(g.targets) for g in gradients)


# ---- Reductions that travel while the next buffers fill, hop by hop ----


# NOTE(hops): a reduction may take several hops, and each begins when the one before has arrived.
# When that is differs from rank to rank, and what is launched then must be in one order everywhere.
# So reductions advance in step: whenever one is launched, those before it go one hop further, the
# oldest first, or end. A hop has the time in which the next buffer fills, and a reduction of three
# hops travels beside those of the next two buffers. Its slot is free after the first of them
# (docs/decisions/0038-reductions-advance-in-step.md).


@define(eq=False)
class InFlight:
    """See NOTE(hops). All methods but `return_accumulator` are collective."""

    keeps_accumulators: bool  # they are more than slots: gradients accumulate in them, or end there
    _reductions: list[BufferGradients] = field(factory=list, init=False)  # the oldest first

    @property
    def holds_slots(self) -> bool:
        """Whether one is in its first hop, and to advance would free a slot."""
        return any(g.slot is not None for g in self._reductions)

    def launch(self, g: BufferGradients) -> None:
        """Begin a reduction; those before it go one hop further."""
        g.launch()
        before = tuple(self._reductions)
        self._reductions.append(g)
        self._advance(before)

    def advance(self) -> None:
        """All go one hop further, or end."""
        self._advance(tuple(self._reductions))

    def end(self, g: BufferGradients) -> None:
        """Advance until this one has ended, if it is in flight."""
        while g.is_in_flight:
            self.advance()

    def end_all(self) -> None:
        """Advance until all have ended."""
        while self._reductions:
            self.advance()

    def return_accumulator(self, g: BufferGradients) -> None:
        """The accumulator is empty: give it to the next unit, unless this unit keeps it."""
        if not self.keeps_accumulators and not g.is_in_flight:
            g.leave_accumulator()

    def _advance(self, reductions: Iterable[BufferGradients]) -> None:
        arrived = []
        for g in reductions:
            if not g.route.advance():
                arrived.append(g)
            elif not self.keeps_accumulators:
                g.leave_accumulator()
        for g in arrived:
            g.finish()
            self._reductions.remove(g)
            self.return_accumulator(g)


# ---- In which order buffers are reduced ----


# NOTE(order): which buffers are reduced, and in which order, must not depend on which gradients a
# rank happens to have: ranks that wait for each other in different order never end. So every
# trainable buffer is reduced in every backward that reduces, with zeros where nothing arrived, in
# one order: the reverse of the model's at first, and then the order in which rank 0's buffers
# became full. A buffer that is full early waits for its turn.


@define(eq=False)
class ReductionOrder:
    """See NOTE(order)."""

    gradients: Sequence[BufferGradients]
    _order: list[BufferGradients] = field(init=False)
    _is_settled: bool = field(default=False, init=False)
    _num_taken: int = field(default=0, init=False)  # turns, in this backward
    _became_full: list[BufferGradients] = field(factory=list, init=False)  # in this backward

    def __attrs_post_init__(self) -> None:
        self._order = list(reversed(self.gradients))

    def __iter__(self) -> Iterator[BufferGradients]:
        return iter(self._order)

    def turns_after(self, g: BufferGradients) -> Iterator[BufferGradients]:
        """It became full: those that are full, and whose turn it is now."""
        self._became_full.append(g)
        while self._num_taken < len(self._order) and self._order[self._num_taken].is_full:
            self._num_taken += 1
            yield self._order[self._num_taken - 1]

    def forget_turns(self) -> None:
        """The backward has ended."""
        self._num_taken = 0
        self._became_full.clear()

    def settle(self, of_all: Callable[[Tensor], Tensor], *, device: torch.device) -> None:
        """Take rank 0's order of becoming full for the backwards to come. Collective, once.

        Args:
            of_all: Puts the ranks' tensors one after the other.
            device: Where it takes them.
        """
        if self._is_settled:
            return
        numbers = {id(g): number for number, g in enumerate(self.gradients)}
        full = [numbers[id(g)] for g in self._became_full]
        full += [-1] * (len(self.gradients) - len(full))
        mine = torch.tensor(full[: len(self.gradients)], dtype=torch.int64, device=device)
        first = [number for number in of_all(mine)[: len(mine)].tolist() if number >= 0]
        if not first:
            return  # nothing became full on rank 0: too early to say
        rest = [numbers[id(g)] for g in self._order if numbers[id(g)] not in first]
        self._order = [self.gradients[number] for number in dict.fromkeys((*first, *rest))]
        self._is_settled = True


# ---- When gradients are reduced ----


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
    home: GradientHome | None = None  # where reduced gradients wait; see NOTE(leaving)
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
        home: GradientHome | None = None,
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
