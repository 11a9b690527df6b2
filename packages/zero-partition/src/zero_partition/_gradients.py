"""From autograd's gradients to what the optimizer reads: collect, reduce, accumulate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field
from torch import Tensor, nn
from zero_comm import Group, Handle, all_gather_flat, all_reduce_flat, reduce_scatter_flat

from ._errors import StateError
from ._flat_buffer import FlatBuffer
from ._guards import GradientShard
from ._placement import Placement
from ._shard_state import ShardState
from ._slots import Slot, SlotPool
from ._unit import Unit

# NOTE(order): every trainable buffer is reduced at least once in every backward that reduces, with
# zeros where nothing arrived: which buffers are reduced must not depend on which gradients a rank
# happens to have.

# NOTE(shards): the memory of a reduced gradient is kept when the gradient is dropped. Giving it back
# and faulting its pages in again cost 5% of a step on the CPU; release_buffers() gives it back.

# NOTE(arrival): autograd gives away a gradient it has just made when `param.grad` is None, and adds
# into what it finds otherwise. We let it give away, and copy into the flat buffer: 8 bytes of
# memory traffic per element where a zero-filled buffer that autograd adds into costs 16
# (docs/decisions/0004-gradients-are-copied-on-arrival.md).


@define(eq=False)
class BufferGradients:
    """Gradients of the parameters of one flat buffer, on their way."""

    buffer: FlatBuffer
    unit: Unit
    accumulator: Tensor | None = None  # whole and local; memory of its own, or a slot
    views: tuple[Tensor, ...] = ()  # of the accumulator
    slot: Slot[BufferGradients] | None = None
    filled: list[bool] = field(init=False)  # holds a local gradient that was not reduced yet
    guarded: list[bool] = field(init=False)  # we put a guard into `param.grad`
    arrived: set[int] = field(factory=set, init=False)  # in this backward, since the last launch
    launched: bool = False  # in this backward
    shard: Tensor | None = None  # reduced; kept when gradients are dropped, see NOTE(shards)
    parts: tuple[Tensor, ...] = ()  # of the shard: what shard_params have as gradients
    in_flight: Handle[Tensor] | None = None
    received: Tensor | None = None  # where the reduction in flight ends, if not in the shard

    def __attrs_post_init__(self) -> None:
        self.filled = [False] * len(self.buffer.params)
        self.guarded = [False] * len(self.buffer.params)

    @property
    def holds_gradients(self) -> bool:
        """Whether the optimizer has a gradient in the shard."""
        return any(param.grad is not None for param in self.buffer.shard_params)

    @property
    def has_local(self) -> bool:
        """Whether a gradient waits to be reduced."""
        return any(self.filled)


@define(eq=False)
class GradientReducer:
    """Collects gradients per flat buffer and reduces each buffer as soon as it is full."""

    group: Group
    placement: Placement  # of gradients while they accumulate
    shards_state: bool  # whether the optimizer works on shards (every stage but zero)
    pool: SlotPool[BufferGradients]
    gradients: tuple[BufferGradients, ...]
    flags_tag: int  # identity of the exchange of flags
    sync: bool = True  # False inside no_sync
    _of_unit: dict[int, list[BufferGradients]] = field(factory=dict, init=False)
    _in_flight: list[BufferGradients] = field(factory=list, init=False)
    _flags: Handle[Tensor] | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        for g in self.gradients:
            self._of_unit.setdefault(g.unit.index, []).append(g)

    @classmethod
    def plan(
        cls,
        units: Sequence[Unit],
        *,
        group: Group,
        placement: Placement,
        shards_state: bool,
        num_slots: int,
    ) -> GradientReducer:
        """One reducer for the trainable buffers of these units."""
        gradients = tuple(
            BufferGradients(buffer, unit)
            for unit in units
            for buffer in unit.buffers
            if buffer.plan.trainable
        )
        ring = [g.buffer.plan.num_bytes for g in gradients if not g.unit.plan.is_outer]
        pool: SlotPool[BufferGradients] = SlotPool.plan(
            ring if placement is Placement.SHARDED else (),
            num_slots=num_slots,
            device=group.device,
            is_busy=lambda owner: owner.has_local or owner.in_flight is not None,
        )
        num_buffers = sum(len(unit.buffers) for unit in units)
        return cls(group, placement, shards_state, pool, gradients, flags_tag=2 * num_buffers)

    def before_backward(self, unit: Unit) -> None:
        """Take our stand-ins out of `param.grad`, so that autograd gives its gradients away."""
        for g in self._of_unit.get(unit.index, ()):
            self._clear_guards(g)

    def clear_guards(self) -> None:
        """As `before_backward`, for every unit."""
        for g in self.gradients:
            self._clear_guards(g)

    def collect(self, g: BufferGradients, position: int) -> None:
        """A parameter's gradient is in `param.grad`: take it."""
        param = g.buffer.params[position]
        grad = param.grad
        if grad is None:
            return  # autograd found it undefined: the same as unused
        if g.unit.state is not ShardState.UNSHARDED:
            raise StateError(
                f"parameter {g.buffer.plan.params[position].name!r} received a gradient while its "
                f"unit {g.unit.name!r} was sharded (rank {self.group.rank}): its backward may have "
                "read other values. Please report the model; making the modules involved one unit "
                "(ZeroConfig.units) avoids it."
            )
        if grad.layout != torch.strided:
            raise StateError(
                f"parameter {g.buffer.plan.params[position].name!r}: expected a dense gradient, "
                f"got layout {grad.layout} (rank {self.group.rank}); construct the embedding with "
                "sparse=False"
            )
        if g.in_flight is not None:  # again in one backward: a nested one, of a checkpoint
            self._finish(g)
        self._ensure_accumulator(g)
        view = g.views[position]
        if grad.data_ptr() != view.data_ptr():  # not accumulated in place; see NOTE(arrival)
            grad = grad.detach()
            if g.filled[position]:
                view.add_(grad)
            else:
                view.copy_(grad)
        g.filled[position] = True
        param.grad = view if not self.shards_state else None
        g.arrived.add(position)  # not `filled`, which no_sync leaves full
        if self.sync and len(g.arrived) == len(g.filled):
            self.launch(g)

    def launch(self, g: BufferGradients) -> None:
        """Start the reduction of a buffer; parameters without a gradient count as zero."""
        if g.in_flight is not None:
            self._finish(g)
        self._ensure_accumulator(g)
        assert g.accumulator is not None, "made by _ensure_accumulator"
        for position, filled in enumerate(g.filled):
            if not filled and not self._accumulates_in_place(g, position):
                g.views[position].zero_()
        g.launched = True
        g.arrived.clear()
        layout = g.buffer.plan.layout
        if not self.shards_state:
            g.in_flight = all_reduce_flat(
                g.accumulator,
                group=self.group,
                splits=layout.splits,
                payload=layout.payload_splits,
                tag=g.buffer.reduce_tag,
            )
        else:
            fresh = all(param.grad is None for param in g.buffer.shard_params)
            if g.shard is None:
                self._allocate_shard(g)
            g.received = None if fresh else torch.empty_like(g.shard)
            g.in_flight = reduce_scatter_flat(
                g.accumulator,
                group=self.group,
                splits=layout.splits,
                payload=layout.payload_splits,
                out=g.shard if g.received is None else g.received,
                tag=g.buffer.reduce_tag,
            )
        self._in_flight.append(g)
        while len(self._in_flight) > 1:  # one reduction overlaps the backward of the next unit
            self._finish(self._in_flight[0])

    def end_backward(self) -> None:
        """Reduce what is left, and put every gradient where the optimizer reads it."""
        if self.sync:
            # Also those that got nothing: another rank may have launched them; see NOTE(order).
            for g in self.gradients:
                if not g.launched or (g.has_local and g.in_flight is None):
                    self.launch(g)
            self._flush()
            self._agree_on_arrivals()
        for g in self.gradients:
            g.launched = False
            g.arrived.clear()
            self._set_guards(g)

    def before_step(self) -> None:
        """Reduce what `no_sync` left behind; drop what the user dropped."""
        for g in self.gradients:
            self._drop_where_user_did(g)
        if any(g.has_local for g in self.gradients):
            sync, self.sync = self.sync, True
            self.end_backward()
            self.sync = sync

    def abandon(self) -> None:
        """Forget gradients of a backward that an exception ended; reduced ones stay."""
        self._flush()
        for g in self.gradients:
            g.launched = False
            g.arrived.clear()
            g.filled = [False] * len(g.filled)
            self._return_accumulator(g)

    def drop(self, *, set_to_none: bool) -> None:
        """What `zero_grad` means for gradients that are not in the optimizer's hands."""
        self._flush()
        for g in self.gradients:
            g.filled = [False] * len(g.filled)
            self._return_accumulator(g)
            if set_to_none:
                g.guarded = [False] * len(g.guarded)
                for param in g.buffer.params:
                    param.grad = None

    def release(self) -> None:
        """Give reduction buffers back; gradients that wait to be reduced stay."""
        for g in self.gradients:
            if g.has_local or (
                not self.shards_state and any(p.grad is not None for p in g.buffer.params)
            ):
                continue
            g.accumulator, g.views, g.slot = None, (), None
            if not g.holds_gradients:
                g.shard, g.parts = None, ()
        if not any(g.slot for g in self.gradients):
            self.pool.release()

    @property
    def reduction_bytes(self) -> int:
        """Bytes of slots, of whole gradients that accumulate, and of shards without a gradient."""
        accumulators = sum(
            g.buffer.plan.num_bytes
            for g in self.gradients
            if g.accumulator is not None and g.slot is None
        )
        idle = sum(
            g.shard.nbytes
            for g in self.gradients
            if g.shard is not None and not g.holds_gradients
        )
        return accumulators + idle + self.pool.num_bytes

    @property
    def flags_bytes(self) -> int:
        """Bytes of the flags of the last exchange, which nobody may have needed to read."""
        if self._flags is None:
            return 0
        return self.group.world_size * sum(len(self.targets(g)) for g in self.gradients)

    def _ensure_accumulator(self, g: BufferGradients) -> None:
        if g.accumulator is not None:
            return
        if self.placement is Placement.SHARDED and self.sync:
            num_bytes = g.buffer.plan.num_bytes
            alone = g.unit.plan.is_outer
            while not alone and self._in_flight and self.pool.find(num_bytes) is None:
                self._finish(self._in_flight[0])
            slot = self._slot_for(g, num_bytes, alone)
            slot.owner, g.slot = g, slot
            memory = slot.allocate(self.group.device)[:num_bytes]
            g.accumulator = memory.view(g.buffer.plan.dtype)
        else:
            g.accumulator = torch.zeros(
                g.buffer.plan.layout.numel, dtype=g.buffer.plan.dtype, device=self.group.device
            )
        g.views = g.buffer.views_of(g.accumulator)

    def _allocate_shard(self, g: BufferGradients) -> None:
        g.shard = torch.zeros_like(g.buffer.shard)
        parts = g.buffer.parts_of(g.shard)
        g.parts = tuple(GradientShard.over(part, self.group) for part in parts)

    def _slot_for(self, g: BufferGradients, num_bytes: int, alone: bool) -> Slot[BufferGradients]:
        # Outer units keep their slot's size to themselves, and find it again in the next step.
        for slot in self.pool.extra:
            if slot.owner is None and slot.num_bytes == num_bytes:
                return slot
        return self.pool.take(g, num_bytes, alone=alone)

    def _return_accumulator(self, g: BufferGradients) -> None:
        """The accumulator is empty: give it to the next unit, unless this unit keeps it."""
        if self.placement is Placement.REPLICATED or g.accumulator is None or g.in_flight:
            return
        if g.slot is not None:
            g.slot.owner = None
        g.accumulator, g.views, g.slot = None, (), None

    def _flush(self) -> None:
        while self._in_flight:
            self._finish(self._in_flight[0])

    def _finish(self, g: BufferGradients) -> None:
        assert g.in_flight is not None, "listed as in flight"
        g.in_flight.wait()
        self._in_flight.remove(g)
        g.in_flight = None
        if self.shards_state:
            self._accumulate(g)
        g.filled = [False] * len(g.filled)
        self._return_accumulator(g)

    def _accumulate(self, g: BufferGradients) -> None:
        received = () if g.received is None else g.buffer.parts_of(g.received)
        for position, param in enumerate(g.buffer.shard_params):
            part = g.parts[position]
            if received:
                if param.grad is None:
                    part.copy_(received[position])
                else:
                    if param.grad.data_ptr() != part.data_ptr():  # the user put another there
                        part.copy_(param.grad)
                    part.add_(received[position])
            if g.filled[position]:
                self._hand_over(g, position)
        g.received = None

    def _hand_over(self, g: BufferGradients, position: int) -> None:
        """The reduced gradient becomes the optimizer's."""
        param = g.buffer.shard_params[position]
        if param.grad is None or param.grad.data_ptr() != g.parts[position].data_ptr():
            param.grad = g.parts[position]

    def _agree_on_arrivals(self) -> None:
        """A gradient that another rank had and we had not is there all the same, from zeros.

        Every rank says which parameters got one; only a rank that misses some needs the answer,
        so that in the usual case nobody waits.
        """
        if self.group.world_size == 1:
            return
        if self._flags is not None:
            self._flags.wait()
            self._flags = None
        mine = [param.grad is not None for g in self.gradients for param in self.targets(g)]
        flags = torch.tensor(mine, dtype=torch.uint8).to(self.group.device)
        self._flags = all_gather_flat(
            flags.new_empty(self.group.world_size * len(mine)),
            splits=[len(mine)] * self.group.world_size,
            group=self.group,
            shard=flags,
            tag=self.flags_tag,
            control=True,
        )
        if all(mine):
            return
        everyone = self._flags.wait().view(self.group.world_size, -1)
        self._flags = None
        anyone = iter(everyone.any(dim=0).tolist())
        for g in self.gradients:
            for position, param in enumerate(self.targets(g)):
                if next(anyone) and param.grad is None:
                    if self.shards_state:
                        self._hand_over(g, position)
                    else:
                        param.grad = g.views[position]

    def targets(self, g: BufferGradients) -> tuple[nn.Parameter, ...]:
        """The parameters whose gradient the optimizer reads."""
        return g.buffer.shard_params if self.shards_state else g.buffer.params

    def _accumulates_in_place(self, g: BufferGradients, position: int) -> bool:
        grad = None if self.shards_state else g.buffer.params[position].grad
        return grad is not None and grad.data_ptr() == g.views[position].data_ptr()

    def _set_guards(self, g: BufferGradients) -> None:
        if not self.shards_state:
            return
        for position, param in enumerate(g.buffer.params):
            if g.filled[position] or g.buffer.shard_params[position].grad is not None:
                param.grad = g.buffer.guards[position]
                g.guarded[position] = True

    def _clear_guards(self, g: BufferGradients) -> None:
        if not any(g.guarded):
            return
        self._drop_where_user_did(g)
        for position, param in enumerate(g.buffer.params):
            if g.guarded[position]:
                param.grad = None
                g.guarded[position] = False

    def _drop_where_user_did(self, g: BufferGradients) -> None:
        """`param.grad = None` and `model.zero_grad()` drop the shard's gradient too."""
        for position, guarded in enumerate(g.guarded):
            if guarded and g.buffer.params[position].grad is None:
                g.buffer.shard_params[position].grad = None
                g.filled[position] = False
                g.guarded[position] = False
