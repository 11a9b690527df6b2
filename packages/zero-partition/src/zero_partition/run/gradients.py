"""The gradients of one flat buffer: taken from autograd, reduced, handed to the optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from attrs import define, field
from torch import Tensor, nn
from zero_comm import (
    AbstractCodec,
    CommError,
    DivergenceError,
    Handle,
    LocoErrors,
    Reduction,
    all_reduce_flat,
    even_splits,
    reduce_scatter_by_levels,
    reduce_scatter_flat,
)

from zero_partition.errors import StateError
from zero_partition.memory.flat_buffer import FlatBuffer
from zero_partition.memory.seams import GradientHome, TensorHome
from zero_partition.memory.store import AtHome
from zero_partition.plan.cuts import Cut
from zero_partition.plan.slots import Slot
from zero_partition.plan.stages import Precision
from zero_partition.plan.wire import Routes, Wire
from zero_partition.stand_in import GradientShard
from zero_partition.torch_private import foreach_add_, foreach_copy_, foreach_norm

from .unit import Unit


@define(eq=False)
class GradientRoute:
    """Over which groups, in how many hops and in which codec one buffer's gradients are reduced.

    One reduction at a time. What it launches, in `launch` and in `advance`, must be launched in the
    same order on every rank.
    """

    buffer: FlatBuffer
    unit: Unit
    routes: Routes
    precision: Precision
    codec: AbstractCodec | None = None  # in which they travel; see `Wire.gradients`
    loco_errors: LocoErrors | None = None  # what that lost before, to be made up for
    _in_flight: Handle[Tensor] | None = field(default=None, init=False)

    @classmethod
    def plan(
        cls, buffer: FlatBuffer, unit: Unit, *, routes: Routes, precision: Precision, wire: Wire
    ) -> GradientRoute:
        """As the wire says for gradients of this dtype."""
        codec = wire.codec_of_gradients(buffer.wire_dtype)
        errors = None if codec is None or wire.loco is None else LocoErrors(wire.loco)
        return cls(buffer, unit, routes, precision, codec, errors)

    @property
    def is_in_flight(self) -> bool:
        """Whether a reduction has begun that nobody has waited for."""
        return self._in_flight is not None

    def launch(self, values: Tensor, *, into: Tensor | None) -> None:
        """Begin the first hop of a reduction. Collective.

        Args:
            values: This rank's gradients, 1-D, of the whole buffer, padding included. Lent until
                `advance` or `finish` has returned once; written.
            into: Receives this rank's part of the result, in the dtype that travels. None: all of
                it takes the place of `values`, on every rank.
        """
        scaling = self.precision.scaling_of(self.routes.whole.world_size)
        if self.codec is not None:  # what another unit left there would count in a block's scale
            for gap in self.buffer.plan.layout.gaps:
                values[gap.as_slice()].zero_()
        if scaling.divisor_before != 1.0:
            values.div_(scaling.divisor_before)
        if into is None:
            reduction = self._reduce_in_place(values, scaling.op)
        else:
            reduction = self._reduce_into(into, values.to(self.buffer.wire_dtype), scaling.op)
        if scaling.after != 1.0:
            reduction = reduction.map(lambda reduced: reduced.mul_(scaling.after))
        self._in_flight = reduction

    def advance(self) -> bool:
        """Wait for the hop in flight and launch the next; the last is for `finish`. Collective.

        Returns:
            Whether there was a next one, and `values` are the caller's again.
        """
        assert self._in_flight is not None, "the reducer lists what is in flight"
        with self._named():
            return self._in_flight.advance()

    def finish(self) -> Tensor:
        """Wait for what is left of the reduction, and return its result."""
        assert self._in_flight is not None, "the reducer lists what is in flight"
        with self._named():
            reduced = self._in_flight.wait()
        self._in_flight = None
        return reduced

    def _reduce_in_place(self, values: Tensor, op: Reduction) -> Handle[Tensor]:
        layout = self.buffer.plan.layout
        return all_reduce_flat(
            values,
            group=self.routes.shards,
            op=op,
            splits=layout.splits,
            payload=layout.payload_splits,
            tag=self.buffer.reduce_tag,
        )

    def _reduce_into(self, out: Tensor, values: Tensor, op: Reduction) -> Handle[Tensor]:
        layout, codec, tag = self.buffer.plan.layout, self.codec, self.buffer.reduce_tag
        splits, payload = layout.splits, layout.payload_splits
        if codec is not None and self.unit.errors is not None:
            self.unit.errors.gradients.note(self.unit.name, codec, values.split(splits))
        if codec is not None and self.routes.hops is not None:
            return reduce_scatter_by_levels(
                values,
                splits=splits,
                levels=self.routes.hops,
                codec=codec,
                errors=self.loco_errors,
                op=op,
                out=out,
                tag=tag,
                payload=payload,
            )
        reduction = reduce_scatter_flat(
            values,
            group=self.routes.shards,
            op=op,
            splits=splits,
            payload=payload,
            out=out,
            tag=tag,
            codec=codec,
        )
        if self.routes.replicas is None:
            return reduction
        return reduction.then(lambda shard: self._reduce_over_replicas(shard, op))

    def _reduce_over_replicas(self, shard: Tensor, op: Reduction) -> Handle[Tensor]:
        replicas, layout = self.routes.replicas, self.buffer.plan.layout
        assert replicas is not None, "it follows where there are some"
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

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except DivergenceError:
            raise  # it names the units
        except CommError as error:
            raise CommError(
                f"reducing the gradients of unit {self.unit.name!r}: {error}"
            ) from error


# ---- Norms of gradients that leave the device, taken while they are still there ----


_ON_ITS_WAY = -1  # in the place of a version


@define(eq=False)
class EarlyNorms:
    """Of order 2, of the parts of one gradient shard, by position.

    A norm holds as long as nobody else has the gradient's elements, and we do not write to it,
    which its version tells; and is void with a further backward, which adds to it.
    """

    _found: dict[int, tuple[Tensor, int]] = field(factory=dict, init=False)  # and the version

    def clear(self) -> None:
        """Gradients become others."""
        self._found.clear()

    def take(self, received: Sequence[Tensor]) -> None:
        """Measure what a reduction has left on the device: in float32 what has 16 bits."""
        full = {position: part for position, part in enumerate(received) if part.numel()}
        if not full:
            return
        dtype = received[0].dtype
        wide = torch.float32 if dtype.itemsize < torch.float32.itemsize else None
        norms = foreach_norm(list(full.values()), 2.0, dtype=wide)
        self._found = {p: (norm, _ON_ITS_WAY) for p, norm in zip(full, norms, strict=True)}

    def settle(self, parts: Sequence[Tensor]) -> None:
        """All of it is where it was to go: from now on a write makes a norm void."""
        for position, (norm, version) in self._found.items():
            if version == _ON_ITS_WAY:
                self._found[position] = (norm, parts[position]._version)
                parts[position].is_touched = False  # type: ignore[attr-defined]

    def of(self, position: int, part: Tensor) -> Tensor | None:
        """Of this part, if it is as it came."""
        norm, version = self._found.get(position, (None, _ON_ITS_WAY))
        is_as_it_came = part._version == version and not getattr(part, "is_touched", False)
        return norm if is_as_it_came else None


# ---- This rank's part of one buffer's reduced gradients, on the device or at a home ----


# NOTE(shards): the memory of a reduced gradient is kept when the gradient is dropped. Giving it
# back and faulting its pages in again cost 5% of a step on the CPU; release_buffers() gives it
# back.


@define(eq=False)
class ReducedShard:
    """Memory for it, and what `shard_params` have of it as their gradients."""

    buffer: FlatBuffer
    home: GradientHome | None = None  # where it rests; on the device when None
    memory: Tensor | None = field(default=None, init=False)  # 1-D; see NOTE(shards)
    parts: tuple[Tensor, ...] = field(default=(), init=False)  # of it, by position
    norms: EarlyNorms = field(factory=EarlyNorms, init=False)  # of what has left the device

    def ensure(self) -> Tensor:
        """The memory, made at first use."""
        if self.memory is None:
            buffer = self.buffer
            numel, dtype = buffer.shard_numel, buffer.training.dtype
            if self.home is not None:
                self.memory = self.home.allocate(numel, dtype)
            else:
                self.memory = torch.zeros(numel, dtype=dtype, device=buffer.group.device)
            parts = buffer.parts_of(self.memory)
            self.parts = tuple(GradientShard.over(part, buffer.group) for part in parts)
        return self.memory

    def release(self) -> None:
        """Give the memory back."""
        self.memory, self.parts = None, ()

    def room(self, *, has_gradient: bool) -> Tensor:
        """Where a reduction may end, in the dtype that travels: here, or in memory of its own."""
        memory, dtype = self.ensure(), self.buffer.wire_dtype
        if has_gradient or self.home is not None or dtype != memory.dtype:
            return torch.empty(memory.numel(), dtype=dtype, device=self.buffer.group.device)
        return memory

    def put(self, position: int, value: Tensor) -> None:
        """Replace a part by that of a whole gradient. Local."""
        self.ensure()
        piece = self.buffer.piece_of(position)
        if piece is not None:
            part = self.parts[position]
            part.copy_(value.reshape(-1)[piece.in_tensor.as_slice()].view(part.shape))

    def take(self, received: Tensor) -> None:
        """Add what a reduction gave to what the optimizer has; the first becomes that itself."""
        if received is self.memory:
            return
        shard, params = self.ensure(), self.buffer.shard_params
        self.norms.clear()
        has_first = [param.grad is None for param in params]
        for param, part in zip(params, self.parts, strict=True):
            if param.grad is not None and param.grad.data_ptr() != part.data_ptr():
                part.copy_(param.grad)  # the user put another there
        if self.home is not None and len(set(has_first)) == 1:
            if has_first[0] and received.dtype == shard.dtype:
                self.norms.take(self.buffer.parts_of(received))
            self.home.deliver(received, shard, adds=not has_first[0])
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

    def norm_of(self, position: int) -> Tensor | None:
        """Of order 2, of a gradient that has left the device and is as it came; else None."""
        part = self.parts[position] if self.parts else None
        if part is None or self.buffer.shard_params[position].grad is not part:
            return None
        return self.norms.of(position, part)


# ---- What an optimizer is shown in the place of gradient shards while it steps ----


# NOTE(lending): an optimizer that needs more than single elements may take norms, which gradient
# shards refuse, and may divide by a size, which is zero for an empty shard. So while it steps, the
# gradients of parameters with a cut of their own are plain tensors, and None where this rank keeps
# nothing: every optimizer skips a parameter without a gradient. Before and after the step they are
# all there, so that ranks make the same calls (GradScaler's check for inf is a collective).


@define(eq=False)
class Lending:
    """Of one buffer's gradients; see NOTE(lending)."""

    result: ReducedShard
    _structured: tuple[int, ...] = field(init=False)  # parameters with a cut of their own
    _lent: dict[int, Tensor | None] = field(factory=dict, init=False)
    _has_closure: bool = field(default=False, init=False)  # it steps now, and runs backwards

    def __attrs_post_init__(self) -> None:
        plans = enumerate(self.result.buffer.plan.params)
        self._structured = tuple(i for i, plan in plans if plan.cut != Cut.FLAT)

    def begin(self, *, has_closure: bool) -> None:
        """The optimizer steps now, maybe after backwards of its own."""
        self._has_closure = has_closure
        self._lent.clear()
        parts, params = self.result.parts, self.result.buffer.shard_params
        self._lend(i for i in (self._structured if parts else ()) if params[i].grad is parts[i])

    def follow(self, positions: Iterable[int]) -> None:
        """Gradients were handed over: by the backward of a closure, they are lent as well."""
        if self._has_closure:
            self._lend(position for position in positions if position in self._structured)

    def end(self) -> None:
        """The optimizer has stepped."""
        self._has_closure = False
        for position, plain in self._lent.items():
            param = self.result.buffer.shard_params[position]
            if param.grad is plain:  # else the optimizer has dropped it
                param.grad = self.result.parts[position]
        self._lent.clear()

    def forget(self) -> None:
        """The gradients are dropped."""
        self._lent.clear()

    def _lend(self, positions: Iterable[int]) -> None:
        buffer = self.result.buffer
        for position in positions:
            part, shape = self.result.parts[position], buffer.plan.params[position].shape
            is_absent = shape.numel() and not part.numel()
            self._lent[position] = None if is_absent else part.as_subclass(Tensor)
            buffer.shard_params[position].grad = self._lent[position]


# ---- The gradients of one flat buffer: taken from autograd, reduced, handed to the optimizer ----


# NOTE(arrival): autograd gives away a gradient it has just made when `param.grad` is None, and adds
# into what it finds otherwise. We let it give away, and copy into the flat buffer: 8 bytes of
# memory traffic per element where a zero-filled buffer that autograd adds into costs 16
# (docs/decisions/0004-gradients-are-copied-on-arrival.md).

# NOTE(waiting): a copy by itself costs a Python call, and as much as all the rest of a tiny layer's
# backward. So gradients of small parameters wait in `param.grad` and are copied together: as soon
# as no more is missing, or MAX_WAITING wait, or a large one arrives, or backward has ended. At most
# MAX_WAITING x SMALL_BYTES of a buffer wait (docs/decisions/0015-small-gradients-wait.md).

# NOTE(carrying): at stage 0 `param.grad` is where the next backward adds to, so that what was
# reduced before is reduced again with what came since, as DDP does. A mean of equal numbers is
# that number. A sum of them is not, so it is refused.

SMALL_BYTES: Final = 2**14  # gradients up to this size may wait
MAX_WAITING: Final = 64  # so many of them, in one buffer; what was just made is still in the cache


@define(eq=False)
class BufferGradients:
    """Gradients of the parameters of one flat buffer, on their way."""

    buffer: FlatBuffer
    unit: Unit
    shards_state: bool  # whether the optimizer works on shards (every stage but zero)
    route: GradientRoute  # to the other ranks
    result: ReducedShard  # of stages that shard state; at stage 0 the accumulator is the result
    lending: Lending = field(init=False)
    accumulator: Tensor | None = field(default=None, init=False)  # whole and local; maybe a slot
    views: tuple[Tensor, ...] = field(default=(), init=False)  # of it, kept: a slot may come back
    views_at: int = field(default=0, init=False)  # its address
    slot: Slot[BufferGradients] | None = field(default=None, init=False)
    filled: list[bool] = field(init=False)  # holds a local gradient that was not reduced yet
    guarded: list[bool] = field(init=False)  # we put a guard into `param.grad`
    waiting: list[int] = field(factory=list, init=False)  # arrived, still in `param.grad`
    room: int = field(init=False)  # when so many wait, they are taken
    arrived: set[int] = field(factory=set, init=False)  # taken in this backward, since the launch
    from_outside: set[int] = field(factory=set, init=False)  # used outside the unit: no slot read
    launched: bool = field(default=False, init=False)  # in this backward
    reduced: set[int] = field(factory=set, init=False)  # handed over in this backward
    carried: set[int] = field(factory=set, init=False)  # equal on all ranks; see NOTE(carrying)

    def __attrs_post_init__(self) -> None:
        self.filled = [False] * len(self.buffer.params)
        self.guarded = [False] * len(self.buffer.params)
        self._make_room()
        self.lending = Lending(self.result)

    @property
    def targets(self) -> tuple[nn.Parameter, ...]:
        """The parameters whose gradient the optimizer reads."""
        return self.buffer.shard_params if self.shards_state else self.buffer.params

    @property
    def shard(self) -> Tensor | None:
        """This rank's part of them once reduced, 1-D, where there is memory for it."""
        return self.result.memory

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Of the shard: what `shard_params` have as gradients."""
        return self.result.parts

    @property
    def wire_bytes(self) -> int:
        """Of the whole buffer's gradients as they travel, padding included."""
        return self.buffer.plan.layout.numel * self.buffer.wire_dtype.itemsize

    @property
    def has_local(self) -> bool:
        """Whether a gradient waits to be reduced."""
        return any(self.filled)

    @property
    def is_in_flight(self) -> bool:
        """Whether they are being reduced."""
        return self.route.is_in_flight

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

    def launch(self) -> None:
        """Start the reduction; parameters without a gradient count as zero. Collective."""
        assert self.accumulator is not None, "the reducer gives one first"
        if not all(self.filled):
            for position, filled in enumerate(self.filled):
                if not filled and not self._accumulates_in_place(position):
                    self.views[position].zero_()
        self.launched = True
        self._forget_arrivals()
        holds = self.holds_gradients
        into = self.result.room(has_gradient=holds) if self.shards_state else None
        self.route.launch(self.accumulator, into=into)

    def copy_whole(self, position: int, value: Tensor) -> None:
        """Replace the gradient that the optimizer reads by its part of a whole one. Local."""
        param = self.targets[position]
        if not self.shards_state:
            self.views[position].copy_(value)
            param.grad = self.views[position]
            self.carried.add(position)
            return
        self.result.put(position, value)
        param.grad = self.parts[position]
        self.buffer.params[position].grad = self.buffer.guards[position]
        self.guarded[position] = True

    def finish(self) -> None:
        """Wait for the reduction, and add it to what the optimizer has."""
        reduced = self.route.finish()
        if self.shards_state:
            self.result.take(reduced)
        self.hand_over([position for position, filled in enumerate(self.filled) if filled])
        self.forget_local()

    def hand_over(self, positions: Collection[int]) -> None:
        """What was reduced becomes the gradients that the optimizer reads."""
        values = self.parts if self.shards_state else self.views
        targets = self.targets
        self.reduced.update(positions)
        if not self.shards_state:
            self.carried.update(positions)
        for position in positions:
            targets[position].grad = values[position]
        self.lending.follow(positions)

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
        if self.route.precision.reduces_mean or self.buffer.group.world_size == 1:
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
        self.lending.forget()
        for param in (*self.buffer.params, *self.buffer.shard_params):
            param.grad = None

    def _forget_arrivals(self) -> None:
        self.arrived.clear()
        self._make_room()

    def _make_room(self) -> None:
        missing = len(self.filled) - len(self.arrived)
        self.room = min(missing, MAX_WAITING) or 1  # 1: all are here, and one comes again

    def _accumulates_in_place(self, position: int) -> bool:
        grad = None if self.shards_state else self.buffer.params[position].grad
        return grad is not None and grad.data_ptr() == self.views[position].data_ptr()


# ---- Shards at a home, in memory for as long as they are stepped ----


@define(eq=False)
class OpenShards:
    """Opens them as their targets come, and closes those whose targets come no more.

    Args:
        buffer_of: By target.
        is_overwritten: Whether every element of a buffer's shard is going to be written.
    """

    buffer_of: Mapping[nn.Parameter, FlatBuffer]
    is_overwritten: Callable[[FlatBuffer], bool]
    _open: dict[int, FlatBuffer] = field(factory=dict, init=False)

    def open(self, targets: Sequence[nn.Parameter]) -> None:
        """These are written next. Blocks where values are read; with none, until all are kept."""
        wanted = {
            buffer.index: buffer
            for buffer in (self.buffer_of[target] for target in targets)
            if isinstance(buffer.resting, AtHome)
        }
        for index in self._open.keys() - wanted.keys():
            self._close(index)
        for index, buffer in wanted.items():
            if index not in self._open:
                assert isinstance(buffer.resting, AtHome), "chosen above"
                reads = not self.is_overwritten(buffer)
                shard = buffer.resting.home.open(index, reads=reads)
                if not reads:
                    _clear_padding(buffer, shard)
                buffer.point_targets(shard)
                self._open[index] = buffer
        for home in self._homes() if not targets else ():
            home.settle()

    def abandon(self) -> None:
        """Close all after an error, whatever it raises."""
        for index in list(self._open):
            with contextlib.suppress(Exception):
                self._close(index)
        for home in self._homes():
            with contextlib.suppress(Exception):
                home.settle()

    def _close(self, index: int) -> None:
        buffer = self._open.pop(index)
        assert isinstance(buffer.resting, AtHome), "opened above"
        try:
            buffer.resting.home.close(index)
        finally:
            buffer.point_targets(None)

    def _homes(self) -> set[TensorHome]:
        resting = (buffer.resting for buffer in self.buffer_of.values())
        return {rest.home for rest in resting if isinstance(rest, AtHome)}


def _clear_padding(buffer: FlatBuffer, shard: Tensor) -> None:
    """What no parameter is written to must not be what the memory held before."""
    stop = 0
    for piece in sorted(buffer.pieces, key=lambda piece: piece.in_shard.start):
        shard[stop : piece.in_shard.start].zero_()
        stop = piece.in_shard.stop
    shard[stop:].zero_()
