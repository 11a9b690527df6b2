"""When gradients are reduced: each buffer as soon as it is full, in one order on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from attrs import define, field
from torch import Tensor
from zero_comm import Group, Handle, LocoErrors, all_gather_flat

from zero_partition.errors import StateError
from zero_partition.memory.flat_buffer import FlatBuffer
from zero_partition.memory.seams import GradientHome
from zero_partition.plan.slots import REDUCTION_SLOTS, SlotPool
from zero_partition.plan.stages import AS_IT_IS, Placement, Precision
from zero_partition.plan.wire import AS_ONE, Routes, Wire

from .gradients import BufferGradients
from .unit import ShardState, Unit

# NOTE(order): which buffers are reduced, and in which order, must not depend on which gradients a
# rank happens to have: ranks that wait for each other in different order never end. So every
# trainable buffer is reduced in every backward that reduces, with zeros where nothing arrived, in
# one order: the reverse of the model's at first, and then the order in which rank 0's buffers
# became full. A buffer that is full early waits for its turn.

# NOTE(hops): a reduction may take several hops, and each begins when the one before has arrived.
# When that is differs from rank to rank, and what is launched then must be in one order everywhere.
# So reductions advance in step: whenever one is launched, those before it go one hop further, the
# oldest first, or end. A hop has the time in which the next buffer fills, and a reduction of three
# hops travels beside those of the next two buffers. Its slot is free after the first of them
# (docs/decisions/0038-reductions-advance-in-step.md).

# NOTE(leaving): with a home of gradients a reduced shard leaves the device as soon as it is there,
# while backward goes on, and the end of backward waits for the last: from then on `grad` of a shard
# is an ordinary tensor of the host, whoever reads it.


@define(eq=False)
class GradientReducer:
    """Collects gradients per flat buffer and reduces each buffer when its turn comes."""

    units: Sequence[Unit]  # whose trainable buffers have gradients
    routes: Routes
    placement: Placement  # of gradients while they accumulate
    shards_state: bool  # whether the optimizer works on shards (every stage but zero)
    precision: Precision = AS_IT_IS
    home: GradientHome | None = None  # where reduced gradients wait; see NOTE(leaving)
    wire: Wire = AS_ONE
    sync: bool = field(default=True, init=False)  # False inside no_sync
    gradients: tuple[BufferGradients, ...] = field(init=False)
    pool: SlotPool[BufferGradients] = field(init=False)
    control_tag: int = field(init=False)  # identity of exchanges of flags, norms and the order
    has_collected: bool = field(default=False, init=False)  # in this backward
    _of_unit: dict[int, list[BufferGradients]] = field(factory=dict, init=False)
    _order: list[BufferGradients] = field(init=False)  # see NOTE(order)
    _is_settled: bool = field(default=False, init=False)  # it is rank 0's
    _num_taken: int = field(default=0, init=False)  # turns, in this backward
    _became_full: list[BufferGradients] = field(factory=list, init=False)  # in this backward
    _in_flight: list[BufferGradients] = field(factory=list, init=False)  # the oldest first
    _flags: Handle[Tensor] | None = field(default=None, init=False)  # of arrivals, on their way
    _has_earlier: bool = field(default=False, init=False)  # of a backward before this one

    def __attrs_post_init__(self) -> None:
        buffers = [(buffer, unit) for unit in self.units for buffer in unit.buffers]
        self.gradients = tuple(self._of(*each) for each in buffers if each[0].plan.trainable)
        ring = [g.wire_bytes for g in self.gradients if not g.unit.plan.is_outer]
        self.pool = SlotPool.plan(
            ring if self.placement is Placement.SHARDED else (),
            num_slots=REDUCTION_SLOTS,
            device=self.routes.whole.device,
            is_busy=lambda owner: bool(owner.filled) or owner.is_in_flight,
        )
        self.control_tag = 2 * max((buffer.index for buffer, _ in buffers), default=0) + 2
        self._order = list(reversed(self.gradients))
        for g in self.gradients:
            self._of_unit.setdefault(g.unit.index, []).append(g)

    def _of(self, buffer: FlatBuffer, unit: Unit) -> BufferGradients:
        codec, loco = self.wire.codec_of_gradients(buffer.wire_dtype), self.wire.loco
        errors = None if codec is None or loco is None else LocoErrors(loco)
        return BufferGradients(
            buffer, unit, self.routes, self.precision, self.shards_state, codec, errors, self.home
        )

    # ---- Gradients come ----

    def before_forward(self) -> bool:
        """As `before_backward`, for every unit; compiled code looks at gradients in any forward.

        Returns:
            Whether there were guards.
        """
        guarded = [g for g in self.gradients if g.guarded]
        for g in guarded:
            g.clear_guards()
        return bool(guarded)

    def before_backward(self, unit: Unit) -> None:
        """Let autograd give this unit's gradients away."""
        for g in self._of_unit.get(unit.index, ()):
            g.clear_guards()

    def expect_from_outside(self, buffer: FlatBuffer, position: int) -> None:
        """A gradient of this parameter is right though its unit is sharded: no slot was read."""
        for g in self.gradients:
            if g.buffer is buffer:
                g.from_outside.add(position)

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

    def collect(self, g: BufferGradients) -> None:
        """Gradients are in `param.grad`: take them, and reduce what is ready."""
        grads = g.find_waiting()
        if not grads:
            return
        if g.is_in_flight:  # again in one backward: a nested one, of a checkpoint
            self._end(g)
            g.refuse_to_sum_again()
        self._ensure_accumulator(g)
        self.has_collected = True
        g.take(grads)
        if self.sync and g.is_full:
            self._became_full.append(g)
            order = self._order
            while self._num_taken < len(order) and order[self._num_taken].is_full:
                self._num_taken += 1
                self._launch(order[self._num_taken - 1])

    def collect_waiting(self) -> None:
        """Backward has ended: take what waits in every buffer."""
        for g in self.gradients:
            if g.waiting:
                self.collect(g)

    def set_whole(self, g: BufferGradients, position: int, value: Tensor) -> None:
        """Make `value` the gradient of a parameter; inside no_sync, the local one. Local."""
        if not self.sync or not g.shards_state:
            self._ensure_accumulator(g)
        if self.sync:
            g.copy_whole(position, value)
            return
        g.views[position].copy_(value)
        g.filled.add(position)
        g.buffer.params[position].grad = None if g.shards_state else g.views[position]

    # ---- They are reduced; see NOTE(order) and NOTE(hops). Collective ----

    def keep(self) -> None:
        """Nothing arrived: what was there before stays, and is guarded."""
        for g in self.gradients:
            g.end_backward()

    def end_backward(self) -> None:
        """Reduce what is left, and put every gradient where the optimizer reads it."""
        if self.sync:
            for g in self._order:
                if not g.launched or (g.filled and not g.is_in_flight):
                    self._launch(g)
            self._flush()
            for g in self.gradients if self.home is not None else ():
                g.settle_norms()
            self._agree_on_arrivals()
            self._settle_order()
        self._forget_turns()
        self.keep()
        self._has_earlier = True

    def before_step(self) -> None:
        """Reduce what `no_sync` left behind; drop what the user dropped."""
        for g in self.gradients:
            g.drop_where_user_did()
        if any(g.filled for g in self.gradients):
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
        for g in () if self.shards_state else self.gradients:
            g.refuse_to_sum_again()

    def _launch(self, g: BufferGradients) -> None:
        """Begin a reduction; those before it go one hop further."""
        if g.is_in_flight:
            self._end(g)
        self._ensure_accumulator(g)
        g.launch()
        before = tuple(self._in_flight)
        self._in_flight.append(g)
        self._advance(before)

    def _end(self, g: BufferGradients) -> None:
        while g.is_in_flight:
            self._advance(tuple(self._in_flight))

    def _flush(self) -> None:
        while self._in_flight:
            self._advance(tuple(self._in_flight))
        if self.home is not None:
            self.home.settle()

    def _advance(self, reductions: Sequence[BufferGradients]) -> None:
        """These go one hop further, or end."""
        for g in [g for g in reductions if not g.advance()]:
            g.finish()
            self._in_flight.remove(g)
        self._leave_accumulators(reductions)

    def _ensure_accumulator(self, g: BufferGradients) -> None:
        if g.accumulator is not None:
            return
        plan, pool, num_bytes = g.buffer.plan, self.pool, g.wire_bytes
        if self.placement is Placement.REPLICATED or not self.sync:
            dtype = g.buffer.training.dtype  # several backwards may be added up here
            memory = torch.zeros(plan.layout.numel, dtype=dtype, device=pool.device)
            g.use_accumulator(memory, None)
            return
        alone = g.unit.plan.is_outer
        while not alone and pool.find(num_bytes) is None and any(o.slot for o in self._in_flight):
            self._advance(tuple(self._in_flight))
        slot = pool.take_again(num_bytes, alone=alone)
        slot.owner = g
        memory = slot.allocate(pool.device)[:num_bytes]
        g.use_accumulator(memory.view(g.buffer.wire_dtype), slot)

    def _leave_accumulators(self, gradients: Sequence[BufferGradients]) -> None:
        """They are free: the next units may have them, unless gradients add up or end there."""
        for g in gradients if self.placement is Placement.SHARDED else ():
            g.leave_accumulator()

    def _settle_order(self) -> None:
        """Take rank 0's order of becoming full for the backwards to come, once."""
        if self._is_settled:
            return
        numbers = {id(g): number for number, g in enumerate(self.gradients)}
        full = [numbers[id(g)] for g in self._became_full]
        full += [-1] * (len(self.gradients) - len(full))
        device = self.routes.whole.device
        mine = torch.tensor(full[: len(self.gradients)], dtype=torch.int64, device=device)
        first = [n for n in self._exchange(mine)[: len(mine)].tolist() if n >= 0]
        if first:  # else nothing became full on rank 0: too early to say
            rest = [numbers[id(g)] for g in self._order]
            self._order = [self.gradients[n] for n in dict.fromkeys((*first, *rest))]
            self._is_settled = True

    def _forget_turns(self) -> None:
        self._num_taken, self.has_collected = 0, False
        self._became_full.clear()

    # ---- Ranks agree. Collective ----

    def is_true_anywhere(self, mine: bool) -> bool:
        """Whether any rank says so."""
        return bool(self._exchange(torch.tensor([mine], dtype=torch.uint8)).any())

    def _exchange(self, mine: Tensor) -> Tensor:
        """All ranks' tensors of equal size, 1-D, one after the other."""
        group = self.routes.whole
        return mine if group.world_size == 1 else self.launch_exchange(mine, group).wait()

    def launch_exchange(self, mine: Tensor, group: Group) -> Handle[Tensor]:
        """The same, by handle, in any group."""
        shard = mine.to(group.device)
        return all_gather_flat(
            shard.new_empty(group.world_size * shard.numel()),
            splits=[shard.numel()] * group.world_size,
            group=group,
            shard=shard,
            tag=self.control_tag,
            control=True,
        )

    def _agree_on_arrivals(self) -> None:
        """A gradient that another rank had and we had not is there all the same, from zeros.

        Every rank says which parameters got one; only a rank that misses some needs the answer,
        so that in the usual case nobody waits.
        """
        group = self.routes.whole
        if group.world_size == 1:
            return
        if self._flags is not None:
            self._flags.wait()
        mine = [param.grad is not None for g in self.gradients for param in g.targets]
        self._flags = self.launch_exchange(torch.tensor(mine, dtype=torch.uint8), group)
        if all(mine):
            return
        everyone = self._flags.wait().view(group.world_size, -1)
        self._flags = None
        anyone = iter(everyone.any(dim=0).tolist())
        for g in self.gradients:
            for position, param in enumerate(g.targets):
                if next(anyone) and param.grad is None:
                    g.hand_over([position])

    # ---- Gradients are dropped, and memory given back ----

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
        self._drop(reduced_too=self.shards_state)
        self.keep()

    def drop(self, *, set_to_none: bool) -> None:
        """What `zero_grad` means for gradients that are not in the optimizer's hands."""
        self._flush()
        self._drop(reduced_too=set_to_none)
        for g in self.gradients:
            g.carried.clear()

    def _drop(self, *, reduced_too: bool) -> None:
        for g in self.gradients:
            if reduced_too:
                g.drop()
            g.filled.clear()
        self._leave_accumulators(self.gradients)
        self._has_earlier = False

    def release(self) -> None:
        """Give reduction buffers back; gradients that somebody waits for stay."""
        for g in self.gradients:
            g.release()
        if not any(g.slot for g in self.gradients):
            self.pool.release()

    # ---- Bytes of it ----

    @property
    def reduction_bytes(self) -> int:
        """Bytes of slots, of whole gradients that accumulate, and of shards without a gradient."""
        own = [g.accumulator for g in self.gradients if g.slot is None]
        idle = [g.shard for g in self.gradients if self.home is None and not g.holds_gradients]
        return self.pool.num_bytes + sum(t.nbytes for t in (*own, *idle) if t is not None)

    @property
    def loco_bytes(self) -> int:
        """Bytes of errors of encoding, kept for the next reductions."""
        return sum(g.loco_errors.num_bytes for g in self.gradients if g.loco_errors is not None)

    @property
    def host_bytes(self) -> int:
        """Bytes of gradients, or room for them, that are on the host."""
        shards = [g.shard for g in self.gradients if self.home is not None]
        return sum(shard.nbytes for shard in shards if shard is not None)

    @property
    def flags_bytes(self) -> int:
        """Bytes of the flags of the last exchange, which nobody may have needed to read."""
        num_flags = sum(len(g.targets) for g in self.gradients)
        return 0 if self._flags is None else self.routes.whole.world_size * num_flags
