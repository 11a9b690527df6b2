"""The gradients of one flat buffer: taken from autograd, reduced, handed to the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Final

import torch
from attrs import define, field
from torch import Tensor, nn
from zero_comm import (
    AbstractCodec,
    CommError,
    DivergenceError,
    Group,
    Handle,
    LocoErrors,
    Reduction,
    all_reduce_flat,
    even_splits,
    reduce_scatter_by_levels,
    reduce_scatter_flat,
)

from ._cut import Cut
from ._early_norms import EarlyNorms
from ._errors import StateError
from ._flat_buffer import FlatBuffer
from ._gradient_home import AbstractGradientHome
from ._guards import GradientShard
from ._precision import AS_IT_IS, Precision
from ._slots import Slot
from ._torch_compat import foreach_add_, foreach_copy_
from ._unit import Unit
from ._wire import Routes, Wire

# NOTE(arrival): autograd gives away a gradient it has just made when `param.grad` is None, and adds
# into what it finds otherwise. We let it give away, and copy into the flat buffer: 8 bytes of
# memory traffic per element where a zero-filled buffer that autograd adds into costs 16
# (docs/decisions/0004-gradients-are-copied-on-arrival.md).

# NOTE(waiting): a copy by itself costs a Python call, and as much as all the rest of a tiny layer's
# backward. So gradients of small parameters wait in `param.grad` and are copied together: as soon
# as no more is missing, or MAX_WAITING wait, or a large one arrives, or backward has ended. At most
# MAX_WAITING x SMALL_BYTES of a buffer wait (docs/decisions/0015-small-gradients-wait.md).

# NOTE(shards): the memory of a reduced gradient is kept when the gradient is dropped. Giving it
# back and faulting its pages in again cost 5% of a step on the CPU; release_buffers() gives it
# back.

# NOTE(carrying): at stage 0 `param.grad` is where the next backward adds to, so that what was
# reduced before is reduced again with what came since, as DDP does. A mean of equal numbers is
# that number. A sum of them is not, so it is refused.

# NOTE(lending): an optimizer that needs more than single elements may take norms, which gradient
# shards refuse, and may divide by a size, which is zero for an empty shard. So while it steps, the
# gradients of parameters with a cut of their own are plain tensors, and None where this rank keeps
# nothing: every optimizer skips a parameter without a gradient. Before and after the step they are
# all there, so that ranks make the same calls (GradScaler's check for inf is a collective).

SMALL_BYTES: Final = 2**14  # gradients up to this size may wait
MAX_WAITING: Final = 64  # so many of them, in one buffer; what was just made is still in the cache


@define(eq=False)
class BufferGradients:
    """Gradients of the parameters of one flat buffer, on their way."""

    buffer: FlatBuffer
    unit: Unit
    shards_state: bool  # whether the optimizer works on shards (every stage but zero)
    precision: Precision = AS_IT_IS
    home: AbstractGradientHome | None = None  # of the shard; the device when None
    accumulator: Tensor | None = None  # whole and local; memory of its own, or a slot
    views: tuple[Tensor, ...] = ()  # of the accumulator; kept while a slot may come back
    views_at: int = 0  # its address
    slot: Slot[BufferGradients] | None = None
    codec: AbstractCodec | None = None  # in which they travel; see `Wire.gradients`
    loco_errors: LocoErrors | None = None  # what that lost before, to be made up for
    filled: list[bool] = field(init=False)  # holds a local gradient that was not reduced yet
    guarded: list[bool] = field(init=False)  # we put a guard into `param.grad`
    waiting: list[int] = field(factory=list, init=False)  # arrived, still in `param.grad`
    room: int = field(init=False)  # when so many wait, they are taken
    arrived: set[int] = field(factory=set, init=False)  # taken in this backward, since the launch
    from_outside: set[int] = field(factory=set, init=False)  # used outside the unit: no slot read
    launched: bool = False  # in this backward
    reduced: set[int] = field(factory=set, init=False)  # handed over in this backward
    carried: set[int] = field(factory=set, init=False)  # equal on all ranks; see NOTE(carrying)
    shard: Tensor | None = None  # reduced; see NOTE(shards)
    parts: tuple[Tensor, ...] = ()  # of the shard: what shard_params have as gradients
    lent: dict[int, Tensor | None] = field(factory=dict, init=False)  # see NOTE(lending)
    is_lending: bool = field(default=False, init=False)
    in_flight: Handle[Tensor] | None = None
    _across: Callable[[Tensor], Handle[Tensor]] | None = None  # launches what follows `in_flight`
    factor_after: float = field(default=1.0, init=False)  # of the reduction in flight
    received: Tensor | None = None  # where the reduction in flight ends, if not in the shard
    norms: EarlyNorms = field(factory=EarlyNorms, init=False)  # of what has left the device
    _structured: tuple[int, ...] = field(init=False)  # parameters with a cut of their own

    def __attrs_post_init__(self) -> None:
        self.filled = [False] * len(self.buffer.params)
        self.guarded = [False] * len(self.buffer.params)
        self._make_room()
        plans = enumerate(self.buffer.plan.params)
        self._structured = tuple(i for i, plan in plans if plan.cut != Cut.FLAT)

    @property
    def targets(self) -> tuple[nn.Parameter, ...]:
        """The parameters whose gradient the optimizer reads."""
        return self.buffer.shard_params if self.shards_state else self.buffer.params

    @property
    def wire_bytes(self) -> int:
        """Of the whole buffer's gradients as they travel, padding included."""
        return self.buffer.plan.layout.numel * self.buffer.wire_dtype.itemsize

    @property
    def has_local(self) -> bool:
        """Whether a gradient waits to be reduced."""
        return any(self.filled)

    @property
    def is_full(self) -> bool:
        """Whether every parameter's gradient has arrived in this backward."""
        return len(self.arrived) == len(self.filled)  # not `filled`, which no_sync leaves full

    @property
    def holds_gradients(self) -> bool:
        """Whether the optimizer has a gradient here."""
        for param in self.targets:  # noqa: SIM110 - any() would be a call for each
            if param.grad is not None:
                return True
        return False

    def use_accumulator(self, memory: Tensor, slot: Slot[BufferGradients] | None) -> None:
        """Collect in this memory, 1-D, of the buffer's numel and dtype."""
        if not self.views or memory.data_ptr() != self.views_at:  # usually the same slot again
            self.views, self.views_at = self.buffer.views_of(memory), memory.data_ptr()
        self.accumulator, self.slot = memory, slot

    def leave_accumulator(self) -> None:
        """Collect nowhere until `use_accumulator`."""
        if self.slot is not None:
            self.slot.owner = None
        elif self.accumulator is not None:
            self.views = ()  # nothing else keeps that memory
        self.accumulator, self.slot = None, None

    def use_wire(self, wire: Wire) -> None:
        """Travel as it says."""
        self.codec = wire.codec_of_gradients(self.buffer.wire_dtype)
        if self.codec is not None and wire.loco is not None:
            self.loco_errors = LocoErrors(wire.loco)

    def forget_address(self) -> None:
        """The accumulator may lie elsewhere now; the views are its own all the same."""
        if self.accumulator is not None:
            self.views_at = self.accumulator.data_ptr()

    def find_waiting(self) -> dict[int, Tensor]:
        """What autograd left in `param.grad`, by position; from now on it does not wait.

        What it found undefined is not there: the same as unused.

        Raises:
            StateError: A gradient is not dense.
        """
        params, found = self.buffer.params, {}
        for position in self.waiting:
            grad = params[position].grad
            if grad is None:
                continue
            if grad.layout is not torch.strided:
                name, rank = self.buffer.plan.params[position].name, self.buffer.group.rank
                raise StateError(
                    f"parameter {name!r}: expected a dense gradient, got layout {grad.layout} "
                    f"(rank {rank}); construct the embedding with sparse=False"
                )
            found[position] = grad
        self.waiting.clear()
        return found

    def take(self, grads: Mapping[int, Tensor]) -> None:
        """Move these, out of `param.grad`, into the accumulator; see NOTE(arrival)."""
        views, filled, params = self.views, self.filled, self.buffer.params
        moved = grads
        if not self.shards_state:  # else nothing is ever in place
            moved = {p: g for p, g in grads.items() if g.data_ptr() != views[p].data_ptr()}
        first = [position for position in moved if not filled[position]]
        again = [position for position in moved if filled[position]]
        with torch.no_grad():  # create_graph=True makes gradients that have a graph
            if first:
                foreach_copy_([views[p] for p in first], [moved[p] for p in first])
                self.carried.difference_update(first)
            if again:
                foreach_add_([views[p] for p in again], [moved[p] for p in again])
        for position in grads:
            filled[position] = True
            params[position].grad = None if self.shards_state else views[position]
        self.arrived.update(grads)
        self._make_room()

    def launch(self, routes: Routes) -> None:
        """Start the reduction; parameters without a gradient count as zero."""
        group = routes.shards
        assert self.accumulator is not None, "the reducer gives one first"
        if not all(self.filled):
            for position, filled in enumerate(self.filled):
                if not filled and not self._accumulates_in_place(position):
                    self.views[position].zero_()
        if self.codec is not None:  # what another unit left there would count in a block's scale
            for gap in self.buffer.plan.layout.gaps:
                self.accumulator[gap.as_slice()].zero_()
        self.launched = True
        self._forget_arrivals()
        layout, tag = self.buffer.plan.layout, self.buffer.reduce_tag
        splits, payload = layout.splits, layout.payload_splits
        scaling = self.precision.scaling_of(routes.whole.world_size)
        self.factor_after = scaling.after
        if scaling.divisor_before != 1.0:
            self.accumulator.div_(scaling.divisor_before)
        if not self.shards_state:
            self.in_flight = all_reduce_flat(
                self.accumulator,
                group=group,
                op=scaling.op,
                splits=splits,
                payload=payload,
                tag=tag,
            )
            return
        self.ensure_shard()
        self.received, wire_dtype = None, self.buffer.wire_dtype
        is_elsewhere = self.home is not None
        if is_elsewhere or self.holds_gradients or wire_dtype != self.buffer.training.dtype:
            numel = self.buffer.shard_numel
            self.received = torch.empty(numel, dtype=wire_dtype, device=group.device)
        values, out = self.accumulator.to(wire_dtype), self.received
        out = self.shard if out is None else out
        if self.codec is not None and self.unit.errors is not None:
            parts = values.split(splits)
            self.unit.errors.gradients.note(self.unit.name, self.codec, parts)
        if self.codec is not None and routes.hops is not None:
            self.in_flight = reduce_scatter_by_levels(
                values,
                splits=splits,
                levels=routes.hops,
                codec=self.codec,
                errors=self.loco_errors,
                op=scaling.op,
                out=out,
                tag=tag,
                payload=payload,
            )
            return
        self.in_flight = reduce_scatter_flat(
            values,
            group=group,
            op=scaling.op,
            splits=splits,
            payload=payload,
            out=out,
            tag=tag,
            codec=self.codec,
        )
        if routes.replicas is not None:
            self._across = partial(self._launch_across, routes.replicas, scaling.op)

    def go_across(self) -> bool:
        """Where replicas have the same shard: wait for ours, and start the reduction of all.

        Returns:
            Whether it starts now, with the accumulator empty; not where there are none, or twice.
        """
        if self.in_flight is None or self._across is None:
            return False
        launch, self._across = self._across, None
        self.in_flight = launch(self._wait())
        return True

    def _launch_across(self, replicas: Group, op: Reduction, shard: Tensor) -> Handle[Tensor]:
        layout = self.buffer.plan.layout
        splits = even_splits(shard.numel(), replicas.world_size)
        return all_reduce_flat(
            shard,
            group=replicas,
            op=op,
            splits=splits,
            payload=layout.payload_of(splits, start=layout.shard(self.buffer.group.rank).start),
            tag=self.buffer.reduce_tag,
            codec=self.codec,
        )

    def _wait(self) -> Tensor:
        assert self.in_flight is not None, "the reducer lists what is in flight"
        try:
            return self.in_flight.wait()
        except DivergenceError:
            raise  # it names the units
        except CommError as error:
            raise CommError(
                f"reducing the gradients of unit {self.unit.name!r}: {error}"
            ) from error

    def ensure_shard(self) -> None:
        """Memory for this rank's part of the reduced gradients; see NOTE(shards)."""
        if self.shard is None:
            buffer = self.buffer
            numel, dtype = buffer.shard_numel, buffer.training.dtype
            if self.home is not None:
                self.shard = self.home.allocate(numel, dtype)
            else:
                self.shard = torch.zeros(numel, dtype=dtype, device=buffer.group.device)
            parts = self.buffer.parts_of(self.shard)
            self.parts = tuple(GradientShard.over(part, self.buffer.group) for part in parts)

    def copy_whole(self, position: int, value: Tensor) -> None:
        """Replace the gradient that the optimizer reads by its part of a whole one. Local."""
        param = self.targets[position]
        if not self.shards_state:
            self.views[position].copy_(value)
            param.grad = self.views[position]
            self.carried.add(position)
            return
        piece = self.buffer.piece_of(position)
        if piece is not None:
            part = self.parts[position]
            part.copy_(value.reshape(-1)[piece.in_tensor.as_slice()].view(part.shape))
        param.grad = self.parts[position]
        self.buffer.params[position].grad = self.buffer.guards[position]
        self.guarded[position] = True

    def finish(self) -> None:
        """Wait for the reduction, and add it to what the optimizer has."""
        self.go_across()
        self._wait()
        self.in_flight = None
        if self.factor_after != 1.0:
            ours = self.shard if self.shards_state else self.accumulator
            reduced = ours if self.received is None else self.received
            assert reduced is not None, "the reduction ended in one of them"
            reduced.mul_(self.factor_after)
        if self.received is not None:
            self._add(self.received)
            self.received = None
        self.hand_over([position for position, filled in enumerate(self.filled) if filled])
        self.forget_local()

    def norm_of(self, position: int) -> Tensor | None:
        """Of order 2, of a gradient that has left the device and is as it came; else None."""
        part = self.parts[position] if self.parts else None
        if part is None or self.targets[position].grad is not part:
            return None
        return self.norms.of(position, part)

    def hand_over(self, positions: Collection[int]) -> None:
        """What was reduced becomes the gradients that the optimizer reads."""
        values = self.parts if self.shards_state else self.views
        targets = self.targets
        self.reduced.update(positions)
        if not self.shards_state:
            self.carried.update(positions)
        for position in positions:
            targets[position].grad = values[position]
            if self.is_lending and position in self._structured:  # the backward of a closure
                self._lend(position)

    def lend(self, *, has_closure: bool) -> None:
        """The optimizer steps now, maybe after backwards of its own; see NOTE(lending)."""
        self.is_lending = has_closure
        self.lent.clear()
        for position in self._structured if self.parts else ():
            if self.targets[position].grad is self.parts[position]:
                self._lend(position)

    def take_back(self) -> None:
        """The optimizer has stepped."""
        self.is_lending = False
        for position, plain in self.lent.items():
            if self.targets[position].grad is plain:  # else the optimizer has dropped it
                self.targets[position].grad = self.parts[position]
        self.lent.clear()

    def forget_local(self) -> None:
        """Drop gradients that were not reduced."""
        self.filled = [False] * len(self.filled)

    def end_backward(self) -> None:
        """Forget what belongs to one backward; guard what is sharded."""
        self.launched = False
        self.waiting.clear()  # what an exception left behind
        self._forget_arrivals()
        self.from_outside.clear()
        has_gradient, self.reduced = self.reduced, set()
        if not self.shards_state:
            return
        buffer = self.buffer
        if len(has_gradient) < len(buffer.params):
            has_gradient = {
                position
                for position, param in enumerate(buffer.shard_params)
                if self.filled[position] or param.grad is not None
            }
        for position in has_gradient:
            buffer.params[position].grad = buffer.guards[position]
            self.guarded[position] = True

    def refuse_to_sum_again(self) -> None:
        """Raise StateError where a reduction would sum what one has summed; see NOTE(carrying)."""
        if self.precision.reduces_mean or self.buffer.group.world_size == 1:
            return
        again = [position for position in self.carried if self._accumulates_in_place(position)]
        if again:
            raise StateError(
                f"parameter {self.buffer.plan.params[min(again)].name!r}: its gradient was summed "
                "over the ranks by a backward before this one, and at stage 0 would be so again "
                "with what has been added to it since, as often as there are ranks "
                f"(rank {self.buffer.group.rank}). With Precision(reduces_mean=False), run all "
                "micro-batches but the last inside no_sync(model), or use stage 1; to begin anew, "
                "call optimizer.zero_grad()"
            )

    def clear_guards(self) -> bool:
        """Take our stand-ins out of `param.grad`, so that autograd gives its gradients away.

        Returns:
            Whether there were any.
        """
        if not any(self.guarded):
            return False
        self.drop_where_user_did()
        for position, param in enumerate(self.buffer.params):
            if self.guarded[position]:
                param.grad = None
                self.guarded[position] = False
        return True

    def drop_where_user_did(self) -> None:
        """`param.grad = None` and `model.zero_grad()` drop the shard's gradient too."""
        for position, guarded in enumerate(self.guarded):
            if guarded and self.buffer.params[position].grad is None:
                self.buffer.shard_params[position].grad = None
                self.filled[position] = False
                self.guarded[position] = False

    def drop(self) -> None:
        """Drop every gradient, reduced or not."""
        self.forget_local()
        for part in self.parts:
            part.is_unscaled = False  # type: ignore[attr-defined]
        self.guarded = [False] * len(self.guarded)
        self.reduced.clear()
        self.carried.clear()
        self.lent.clear()
        for param in (*self.buffer.params, *self.buffer.shard_params):
            param.grad = None

    def _forget_arrivals(self) -> None:
        self.arrived.clear()
        self._make_room()

    def _make_room(self) -> None:
        missing = len(self.filled) - len(self.arrived)
        self.room = min(missing, MAX_WAITING) or 1  # 1: all are here, and one comes again

    def _lend(self, position: int) -> None:
        part, shape = self.parts[position], self.buffer.plan.params[position].shape
        is_absent = shape.numel() and not part.numel()
        self.lent[position] = None if is_absent else part.as_subclass(Tensor)
        self.targets[position].grad = self.lent[position]

    def _add(self, received: Tensor) -> None:
        """Add what a reduction gave to what the optimizer has; the first becomes that itself."""
        self.norms.clear()
        has_first = [param.grad is None for param in self.targets]
        for param, part in zip(self.targets, self.parts, strict=True):
            if param.grad is not None and param.grad.data_ptr() != part.data_ptr():
                part.copy_(param.grad)  # the user put another there
        if self.home is not None and self.shard is not None and len(set(has_first)) == 1:
            if has_first[0] and received.dtype == self.shard.dtype:
                self.norms.take(self.buffer.parts_of(received))
            self.home.deliver(received, self.shard, adds=not has_first[0])
            return
        more = self.buffer.parts_of(received)
        for is_first, part, other in zip(has_first, self.parts, more, strict=True):
            if self.home is not None:
                self.home.deliver(
                    other.view(-1), part.as_subclass(Tensor).view(-1), adds=not is_first
                )
            elif is_first:
                part.copy_(other)
            else:
                part.add_(other)

    def _accumulates_in_place(self, position: int) -> bool:
        grad = None if self.shards_state else self.buffer.params[position].grad
        return grad is not None and grad.data_ptr() == self.views[position].data_ptr()
