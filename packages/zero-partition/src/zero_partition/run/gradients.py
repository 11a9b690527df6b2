"""The gradients of one flat buffer: taken from autograd, reduced, handed to the optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, TypeVar

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
from zero_partition.plan.stages import Precision, Scaling
from zero_partition.plan.wire import Routes
from zero_partition.stand_in import GradientShard
from zero_partition.torch_private import foreach_add_, foreach_copy_, foreach_norm

from .unit import Unit

T = TypeVar("T")

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

# NOTE(shards): the memory of a reduced gradient is kept when the gradient is dropped. Giving it
# back and faulting its pages in again cost 5% of a step on the CPU; release_buffers() gives it
# back.

# NOTE(norms): gradients that leave the device are measured while they are still there. Such a norm
# holds as long as nobody else has the gradient's elements, and we do not write to it, which its
# version tells; and is void with a further backward, which adds to it.

# NOTE(lending): an optimizer that needs more than single elements may take norms, which gradient
# shards refuse, and may divide by a size, which is zero for an empty shard. So while it steps, the
# gradients of parameters with a cut of their own are plain tensors, and None where this rank keeps
# nothing: every optimizer skips a parameter without a gradient. Before and after the step they are
# all there, so that ranks make the same calls (GradScaler's check for inf is a collective).

SMALL_BYTES: Final = 2**14  # gradients up to this size may wait
MAX_WAITING: Final = 64  # so many of them, in one buffer; what was just made is still in the cache


@define(eq=False)
class BufferGradients:
    """Gradients of the parameters of one flat buffer, on their way. One reduction at a time."""

    buffer: FlatBuffer
    unit: Unit
    routes: Routes
    precision: Precision
    shards_state: bool  # whether the optimizer works on shards (every stage but zero)
    codec: AbstractCodec | None = None  # in which they travel; see `Wire.gradients`
    loco_errors: LocoErrors | None = None  # what that lost before, to be made up for
    home: GradientHome | None = None  # where the reduced shard rests; here when None
    targets: tuple[nn.Parameter, ...] = field(init=False)  # whose gradient the optimizer reads
    wire_bytes: int = field(init=False)  # of all of them as they travel, padding included
    waiting: list[int] = field(factory=list, init=False)  # arrived, still in `param.grad`
    room: int = field(init=False)  # when so many wait, they are taken
    arrived: set[int] = field(factory=set, init=False)  # taken in this backward, since the launch
    from_outside: set[int] = field(factory=set, init=False)  # used outside the unit: no slot read
    accumulator: Tensor | None = field(default=None, init=False)  # whole and local; maybe a slot
    slot: Slot[BufferGradients] | None = field(default=None, init=False)
    views: tuple[Tensor, ...] = field(default=(), init=False)  # of it, kept: a slot may come back
    filled: set[int] = field(factory=set, init=False)  # hold a local gradient, not reduced yet
    launched: bool = field(default=False, init=False)  # in this backward
    reduced: set[int] = field(factory=set, init=False)  # handed over in this backward
    carried: set[int] = field(factory=set, init=False)  # equal on all ranks; see NOTE(carrying)
    shard: Tensor | None = field(default=None, init=False)  # this rank's part, 1-D; NOTE(shards)
    parts: tuple[Tensor, ...] = field(default=(), init=False)  # of it: `grad` of `shard_params`
    guarded: set[int] = field(factory=set, init=False)  # we put a guard into `param.grad`
    _most_waiting: int = field(init=False)
    _views_at: int = field(default=0, init=False)  # address of what they view
    _reduction: Handle[Tensor] | None = field(default=None, init=False)
    _scaling: Scaling = field(init=False)
    _norms: dict[int, tuple[Tensor, int | None]] = field(factory=dict, init=False)  # and version
    _structured: tuple[int, ...] = field(init=False)  # parameters with a cut of their own
    _lent: dict[int, Tensor | None] = field(factory=dict, init=False)  # see NOTE(lending)
    _lends: bool = field(default=False, init=False)  # the optimizer steps, and runs backwards

    def __attrs_post_init__(self) -> None:
        buffer = self.buffer
        self.targets = buffer.shard_params if self.shards_state else buffer.params
        self.wire_bytes = buffer.plan.layout.numel * buffer.wire_dtype.itemsize
        self._scaling = self.precision.scaling_of(self.routes.whole.world_size)
        plans = enumerate(buffer.plan.params)
        self._structured = tuple(i for i, plan in plans if plan.cut != Cut.FLAT)
        self.room = self._most_waiting = min(len(self.targets), MAX_WAITING)

    @property
    def has_local(self) -> bool:
        """Whether a gradient waits to be reduced."""
        return bool(self.filled)

    @property
    def is_in_flight(self) -> bool:
        """Whether they are being reduced."""
        return self._reduction is not None

    @property
    def is_full(self) -> bool:
        """Whether every parameter's gradient has arrived in this backward."""
        return len(self.arrived) == len(self.targets)  # not `filled`, which no_sync leaves full

    @property
    def holds_gradients(self) -> bool:
        """Whether the optimizer has a gradient here."""
        for param in self.targets:  # noqa: SIM110 - any() would be a call for each
            if param.grad is not None:
                return True
        return False

    # ---- They arrive, and are collected ----

    def use_accumulator(self, memory: Tensor, slot: Slot[BufferGradients] | None) -> None:
        """Collect in this memory, 1-D, of the buffer's numel and dtype."""
        if not self.views or memory.data_ptr() != self._views_at:  # usually the same slot again
            self.views, self._views_at = self.buffer.views_of(memory), memory.data_ptr()
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
            self._views_at = self.accumulator.data_ptr()

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
        views, params = self.views, self.buffer.params
        first: tuple[list[Tensor], list[Tensor]] = [], []  # into, from
        again: tuple[list[Tensor], list[Tensor]] = [], []
        for position, grad in grads.items():
            view = views[position]
            if self.shards_state or grad.data_ptr() != view.data_ptr():  # else it is in place
                is_first = position not in self.filled
                if is_first:
                    self.carried.discard(position)
                into, out_of = first if is_first else again
                into.append(view)
                out_of.append(grad)
            params[position].grad = None if self.shards_state else view
        with torch.no_grad():  # create_graph=True makes gradients that have a graph
            if first[0]:
                foreach_copy_(*first)
            if again[0]:
                foreach_add_(*again)
        self.filled.update(grads)
        self.arrived.update(grads)
        missing = len(self.targets) - len(self.arrived)
        self.room = min(missing, MAX_WAITING) or 1  # 1: all are here, and one comes again

    # ---- They are reduced: what is launched must be in the same order on every rank ----

    def launch(self) -> None:
        """Start the reduction; parameters without a gradient count as zero. Collective."""
        values, scaling = self.accumulator, self._scaling
        assert values is not None, "the reducer gives one first"
        for position, view in enumerate(self.views):
            if position not in self.filled and not self._accumulates_in_place(position):
                view.zero_()
        self.launched = True
        self.arrived.clear()
        self.room = self._most_waiting
        if self.codec is not None:  # what another unit left there would count in a block's scale
            for gap in self.buffer.plan.layout.gaps:
                values[gap.as_slice()].zero_()
        if scaling.divisor_before != 1.0:
            values.div_(scaling.divisor_before)
        reduce = self._reduce_to_shards if self.shards_state else self._reduce_whole
        reduction = reduce(values, scaling.op)
        if scaling.after != 1.0:
            reduction = reduction.map(lambda reduced: reduced.mul_(scaling.after))
        self._reduction = reduction

    def advance(self) -> bool:
        """Wait for the hop in flight and launch the next; the last is for `finish`. Collective.

        Returns:
            Whether there was a next one, and the accumulator is free.
        """
        assert self._reduction is not None, "the reducer lists what is in flight"
        return self._named(self._reduction.advance)

    def finish(self) -> None:
        """Wait for what is left of the reduction, and add it to what the optimizer has."""
        assert self._reduction is not None, "the reducer lists what is in flight"
        reduced = self._named(self._reduction.wait)
        self._reduction = None
        if self.shards_state and reduced is not self.shard:
            self._add(reduced)
        self.hand_over(self.filled)
        self.filled.clear()

    def _reduce_whole(self, values: Tensor, op: Reduction) -> Handle[Tensor]:
        layout = self.buffer.plan.layout
        return all_reduce_flat(
            values,
            group=self.routes.shards,
            op=op,
            splits=layout.splits,
            payload=layout.payload_splits,
            tag=self.buffer.reduce_tag,
        )

    def _reduce_to_shards(self, values: Tensor, op: Reduction) -> Handle[Tensor]:
        layout, codec, tag = self.buffer.plan.layout, self.codec, self.buffer.reduce_tag
        splits, payload, out = layout.splits, layout.payload_splits, self._ensure_shard()
        wire_dtype = self.buffer.wire_dtype
        if self.home is not None or out.dtype != wire_dtype or self.holds_gradients:
            device = self.buffer.group.device
            out = torch.empty(out.numel(), dtype=wire_dtype, device=device)  # to be added
        values = values.to(wire_dtype)
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

    def _named(self, go_on: Callable[[], T]) -> T:
        try:
            return go_on()
        except DivergenceError:
            raise  # it names the units
        except CommError as error:
            raise CommError(
                f"reducing the gradients of unit {self.unit.name!r}: {error}"
            ) from error

    def _ensure_shard(self) -> Tensor:
        """Memory for this rank's part, made at first use; see NOTE(shards)."""
        if self.shard is None:
            buffer = self.buffer
            numel, dtype = buffer.shard_numel, buffer.training.dtype
            if self.home is not None:
                self.shard = self.home.allocate(numel, dtype)
            else:
                self.shard = torch.zeros(numel, dtype=dtype, device=buffer.group.device)
            parts = buffer.parts_of(self.shard)
            self.parts = tuple(GradientShard.over(part, buffer.group) for part in parts)
        return self.shard

    def _add(self, received: Tensor) -> None:
        """Add what a reduction gave to what the optimizer has; the first becomes that itself."""
        shard, params = self._ensure_shard(), self.buffer.shard_params
        self._norms.clear()
        adds = [param.grad is not None for param in params]
        for param, part in zip(params, self.parts, strict=True):
            if param.grad is not None and param.grad.data_ptr() != part.data_ptr():
                part.copy_(param.grad)  # the user put another there
        more = self.buffer.parts_of(received)
        if self.home is not None and len(set(adds)) == 1:
            if not adds[0] and received.dtype == shard.dtype:
                self._take_norms(more)
            self.home.deliver(received, shard, adds=adds[0])
            return
        for is_more, part, other in zip(adds, self.parts, more, strict=True):
            if self.home is not None:
                into = part.as_subclass(Tensor).view(-1)
                self.home.deliver(other.view(-1), into, adds=is_more)
            elif is_more:
                part.add_(other)
            else:
                part.copy_(other)

    # ---- The optimizer reads them ----

    def hand_over(self, positions: Collection[int]) -> None:
        """What was reduced becomes the gradients that the optimizer reads."""
        values = self.parts if self.shards_state else self.views
        self.reduced.update(positions)
        if not self.shards_state:
            self.carried.update(positions)
        for position in positions:
            self.targets[position].grad = values[position]
        if self._lends:
            self._lend(position for position in positions if position in self._structured)

    def copy_whole(self, position: int, value: Tensor) -> None:
        """Replace the gradient that the optimizer reads by its part of a whole one. Local."""
        if not self.shards_state:
            self.views[position].copy_(value)
            self.targets[position].grad = self.views[position]
            self.carried.add(position)
            return
        self._ensure_shard()
        part, piece = self.parts[position], self.buffer.piece_of(position)
        if piece is not None:
            part.copy_(value.reshape(-1)[piece.in_tensor.as_slice()].view(part.shape))
        self.targets[position].grad = part
        self._guard((position,))

    def lend(self, *, has_closure: bool) -> None:
        """The optimizer steps now, maybe after backwards of its own; see NOTE(lending)."""
        self._lends = has_closure
        self._lent.clear()
        if self.parts and self._structured:
            params = self.buffer.shard_params
            self._lend(i for i in self._structured if params[i].grad is self.parts[i])

    def take_back(self) -> None:
        """The optimizer has stepped."""
        self._lends = False
        for position, plain in self._lent.items():
            param = self.buffer.shard_params[position]
            if param.grad is plain:  # else the optimizer has dropped it
                param.grad = self.parts[position]
        self._lent.clear()

    def _lend(self, positions: Iterable[int]) -> None:
        for position in positions:
            part, shape = self.parts[position], self.buffer.plan.params[position].shape
            is_absent = shape.numel() and not part.numel()
            self._lent[position] = None if is_absent else part.as_subclass(Tensor)
            self.buffer.shard_params[position].grad = self._lent[position]

    def _take_norms(self, received: Sequence[Tensor]) -> None:
        """Measure what a reduction has left on the device: in float32 what has 16 bits."""
        full = {position: part for position, part in enumerate(received) if part.numel()}
        if full:
            is_narrow = received[0].dtype.itemsize < torch.float32.itemsize
            wide = torch.float32 if is_narrow else None
            norms = foreach_norm(list(full.values()), 2.0, dtype=wide)
            self._norms = {p: (norm, None) for p, norm in zip(full, norms, strict=True)}

    def settle_norms(self) -> None:
        """All of it is where it was to go: from now on a write makes a norm void."""
        for position, (norm, version) in self._norms.items():
            if version is None:
                self._norms[position] = norm, self.parts[position]._version
                self.parts[position].is_touched = False  # type: ignore[attr-defined]

    def norm_of(self, position: int) -> Tensor | None:
        """Of order 2, of a gradient that has left the device and is as it came; else None."""
        if position not in self._norms:
            return None
        part, (norm, version) = self.parts[position], self._norms[position]
        is_as_it_came = part._version == version and not getattr(part, "is_touched", False)
        return norm if is_as_it_came and self.targets[position].grad is part else None

    # ---- Between backwards: guards in `param.grad`, and what is dropped ----

    def end_backward(self) -> None:
        """Forget what belongs to one backward; guard what is sharded."""
        self.launched = False
        self.waiting.clear()  # what an exception left behind
        self.arrived.clear()
        self.room = self._most_waiting
        self.from_outside.clear()
        has_gradient, self.reduced = self.reduced, set()
        if not self.shards_state:
            return
        if len(has_gradient) < len(self.targets):
            has_gradient = self.filled | {
                position for position, param in enumerate(self.targets) if param.grad is not None
            }
        self._guard(has_gradient)

    def _guard(self, positions: Iterable[int]) -> None:
        for position in positions:
            self.buffer.params[position].grad = self.buffer.guards[position]
            self.guarded.add(position)

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

    def clear_guards(self) -> None:
        """Take our stand-ins out of `param.grad`, so that autograd gives its gradients away."""
        self.drop_where_user_did()
        for position in self.guarded:
            self.buffer.params[position].grad = None
        self.guarded.clear()

    def drop_where_user_did(self) -> None:
        """`param.grad = None` and `model.zero_grad()` drop the shard's gradient too."""
        for position in tuple(self.guarded):
            if self.buffer.params[position].grad is None:
                self.targets[position].grad = None
                self.filled.discard(position)
                self.guarded.discard(position)

    def drop(self) -> None:
        """Drop every gradient, reduced or not."""
        for positions in (self.filled, self.guarded, self.reduced, self.carried, self._lent):
            positions.clear()
        for part in self.parts:
            part.is_unscaled = False  # type: ignore[attr-defined]
        for param in (*self.buffer.params, *self.buffer.shard_params):
            param.grad = None

    def release(self) -> None:
        """Give memory back that holds no gradient which somebody waits for."""
        holds = self.holds_gradients
        if not self.filled and (self.shards_state or not holds):
            self.leave_accumulator()
            self.views = ()
        if not holds:
            self.shard, self.parts = None, ()
            self._norms.clear()

    def _accumulates_in_place(self, position: int) -> bool:
        grad = None if self.shards_state else self.buffer.params[position].grad
        return grad is not None and grad.data_ptr() == self.views[position].data_ptr()


@define(eq=False)
class OpenShards:
    """Opens them as their targets come, and closes those whose targets come no more.

    Args:
        buffer_of: By target.
        overwritten: Targets that are going to be written, and not read.
    """

    buffer_of: Mapping[nn.Parameter, FlatBuffer]
    overwritten: Collection[nn.Parameter]
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
                reads = any(
                    buffer.targets[piece.index] not in self.overwritten for piece in buffer.pieces
                )
                shard = buffer.resting.home.open(index, reads=reads)
                if not reads:
                    _clear_padding(buffer, shard)
                buffer.point_targets(shard)
                self._open[index] = buffer
        for home in self._homes() if not targets else ():
            home.settle()

    def __enter__(self) -> Callable[[Sequence[nn.Parameter]], None]:
        return self.open

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close all after an error, whatever that raises."""
        if kind is not None:
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
