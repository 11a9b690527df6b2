"""Gradients: taken from autograd, reduced in one order on every rank, handed to the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from typing import Any, Final, TypeVar
from weakref import ReferenceType, ref

import torch
from attrs import define, evolve, field
from torch import Tensor, nn
from zero_comm import (
    AbstractCodec,
    CommError,
    DivergenceError,
    Group,
    Handle,
    LocoErrors,
    Reduction,
    all_gather_flat,
    all_reduce_flat,
    even_splits,
    reduce_scatter_by_levels,
    reduce_scatter_flat,
)
from zero_comm.errors import named
from zero_comm.logs import warn_user
from zero_comm.ranges import ranged

from zero_partition.errors import StateError
from zero_partition.memory.flat_buffer import FlatBuffer
from zero_partition.memory.seams import GradOffload
from zero_partition.plan.config import PartitionConfig
from zero_partition.plan.cuts import Cut
from zero_partition.plan.precision import Scaling
from zero_partition.plan.slots import (
    Slot,
    SlotPool,
    is_hardly_more,
    keeps_free_memory,
    reduction_slots,
)
from zero_partition.plan.stages import Placement
from zero_partition.plan.wire import Routes
from zero_partition.stand_in import (
    GradientGuard,
    GradientShard,
    note_new_gradient,
    note_own_write,
)
from zero_partition.torch_private import foreach_add_, foreach_copy_, foreach_norm, version_of

from .unit import RETURN_OUTPUTS, ShardState, Unit

T = TypeVar("T")

# NOTE(arrival): autograd gives away a gradient it has just made when `param.grad` is None, and adds
# into what it finds otherwise. We let it give away, and copy into the flat buffer: 8 bytes of
# memory traffic per element where a zero-filled buffer that autograd adds into costs 16
# (docs/decisions/0004-gradients-are-copied-on-arrival.md). A gradient that is all of its buffer is
# not copied: it is the accumulator, and a reduction to shards only reads it.

# NOTE(waiting): a copy by itself costs a Python call, and as much as all the rest of a tiny layer's
# backward. So gradients of small parameters wait in `param.grad` and are copied together: as soon
# as no more is missing, or MAX_WAITING wait, or a large one arrives, or backward has ended. At most
# MAX_WAITING x SMALL_BYTES of a buffer wait (docs/decisions/0015-small-gradients-wait.md). Where
# memory is not kept between uses (see NOTE(free memory) in plan.slots) large ones wait too: their
# slot is taken when what they were computed from is free, and the reduction before has ended.

# NOTE(guards): between backwards a guard stands in `param.grad` of each gradient that is sharded or
# waits to be. It is taken away when a backward begins, so that autograd gives its gradients away;
# the first one arrives before we know that a backward runs, and the guard keeps what autograd adds
# to it. Where we left a guard and find something else, the user has dropped the gradient. Nothing
# of this depends on whose call made the graph.

# NOTE(carrying): at stage 0 the next backward adds to `param.grad`, so that gradients that were
# reduced before are reduced again with the new ones, as DDP does. The mean of equal numbers is that
# number. Their sum is not, so it is refused. While the buffer is being reduced, a guard is in
# `param.grad`, too: what arrives then is added when the reduction has ended.

# NOTE(norms): gradients that are offloaded are measured while they are still on the device. Such a
# norm is valid as long as no other code has had access to the gradient's elements and its version
# has not changed. A further backward, which adds to the gradient, makes it invalid.

# NOTE(plain grads): an optimizer that needs more than single elements may take norms, which
# gradient shards refuse, and may divide by a size, which is zero for an empty shard. So while it
# steps, the gradients of parameters with a cut of their own are plain tensors, and None where this
# rank keeps nothing: every optimizer skips a parameter without a gradient. Before and after the
# step they are all there, so that ranks make the same calls (GradScaler's check for inf is a
# collective).

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
# (docs/decisions/0038-reductions-advance-in-step.md). A buffer that is tiny beside what is in
# flight, such as that of a last norm after the head's, fills in no time, and nothing advances.

# NOTE(grad offload): if gradients are offloaded, a reduced shard leaves the device as soon as it
# has arrived, while backward goes on, and the end of backward waits for the last. From then on
# `grad` of a shard is an ordinary tensor of the host.


class GradState(Enum):
    """State of one parameter's gradient on this rank; MOVES has the legal changes."""

    NONE = auto()
    # In the accumulator, of this rank's data, from the backward that runs now.
    LOCAL = auto()
    # In the accumulator, of this rank's data, from backwards inside no_sync that have ended.
    ACCUMULATED = auto()
    # The reduction of its buffer has been launched.
    IN_FLIGHT = auto()
    # The optimizer can read it: in the shard, or at stage 0 in the accumulator.
    REDUCED = auto()


# State -> states that may follow. Besides, each may stay, and becomes NONE when it is dropped.
MOVES: Final = {
    GradState.NONE: {GradState.LOCAL, GradState.ACCUMULATED, GradState.REDUCED},
    GradState.LOCAL: {GradState.ACCUMULATED, GradState.IN_FLIGHT},
    GradState.ACCUMULATED: {GradState.LOCAL, GradState.IN_FLIGHT, GradState.REDUCED},
    GradState.IN_FLIGHT: {GradState.REDUCED},
    GradState.REDUCED: {GradState.LOCAL, GradState.ACCUMULATED},
}

# The members as globals: looking them up in the class takes longer than comparing them.
NONE, LOCAL, ACCUMULATED, IN_FLIGHT, REDUCED = GradState


class CheckedStates(list[GradState]):
    """States that compare each change with MOVES: what the sanitizer asks for."""

    def __setitem__(self, at: Any, to: Any) -> None:
        changes = zip(self[at], to, strict=True) if isinstance(at, slice) else [(self[at], to)]
        for old, new in changes:
            if new is not old and new is not NONE and new not in MOVES[old]:
                raise StateError(f"a gradient that is {old.name} becomes {new.name}: report this")
        super().__setitem__(at, to)


# Gradients up to this size, in bytes, may wait.
SMALL_BYTES: Final = 2**14
# Tag of exchanges over other groups than the model's; buffers have larger ones.
_TAG_OF_OTHERS: Final = 1
# So many of them may wait in one buffer, and are copied while they are still in the cache.
MAX_WAITING: Final = 64


@define(eq=False, repr=False)
class BufferGradients:
    """Gradients of the parameters of one flat buffer, on their way. One reduction at a time."""

    buffer: FlatBuffer
    unit: Unit
    routes: Routes
    config: PartitionConfig
    # Stores the reduced shard; None: it stays on the device.
    grad_offload: GradOffload | None
    # Whether the optimizer works on shards, as at stages 1 to 3.
    shards_state: bool = field(init=False)
    # Encodes gradients when they are sent; see `Wire.gradients`.
    codec: AbstractCodec | None = field(init=False)
    # Encoding errors, which the next reductions compensate; None without LoCo.
    loco_errors: LocoErrors | None = field(init=False)
    # Parameters whose `grad` the optimizer reads: shards, or at stage 0 the model's own.
    stepped_params: tuple[nn.Parameter, ...] = field(init=False)
    # Bytes of the whole buffer as it is sent, padding included.
    wire_bytes: int = field(init=False)
    # State of each parameter's gradient; changed in this class only.
    states: list[GradState] = field(init=False)
    guards: tuple[GradientGuard, ...] = field(init=False)  # see NOTE(guards)
    # Positions of gradients that have arrived and are still in `param.grad`.
    waiting: list[int] = field(factory=list, init=False)
    # Whether the one gradient of the buffer may become the accumulator; see NOTE(arrival).
    adopts: bool = field(init=False)
    # Number of waiting gradients at which they are collected.
    flush_threshold: int = field(init=False)
    # Whether large gradients wait as well, to be copied into a slot together with the others.
    large_wait: bool = field(init=False)
    # Number of parameters whose state is LOCAL.
    num_local: int = field(default=0, init=False)
    # Positions of parameters that were used outside the unit, without its slot.
    from_outside: set[int] = field(factory=set, init=False)
    # Whole gradients of this rank, 1-D, in `slot` or in memory of its own.
    accumulator: Tensor | None = field(default=None, init=False)
    slot: Slot[BufferGradients] | None = field(default=None, init=False)
    # Views of the accumulator, kept when it is left, since the same slot may come again.
    views: tuple[Tensor, ...] = field(default=(), init=False)
    # Whether a reduction was launched in this backward.
    has_launched: bool = field(default=False, init=False)
    # Reduction in flight.
    reduction: Handle[Tensor] | None = field(default=None, init=False)
    # True while `reduction` advances, and after an exception has ended that.
    _advances: bool = field(default=False, init=False)
    # This rank's part of the reduced gradients, 1-D, and views of it, `grad` of `shard_params`.
    shard: Tensor | None = field(default=None, init=False)
    parts: tuple[Tensor, ...] = field(default=(), init=False)
    # Positions of parameters with a cut of their own.
    structured: tuple[int, ...] = field(init=False)
    _most_waiting: int = field(init=False)
    # The memory that `views` are views of: all of the slot, or the accumulator.
    _viewed: Tensor | None = field(default=None, init=False)
    _scaling: Scaling = field(init=False)
    # Position -> norm, and the gradient's version on the host; None until it has arrived there.
    _norms: dict[int, tuple[Tensor, int | None]] = field(factory=dict, init=False)
    # See NOTE(plain grads): position -> plain gradient, None where this rank has no part.
    _plain_grads: dict[int, Tensor | None] = field(factory=dict, init=False)
    # Whether the optimizer steps now with a closure, which may run backwards.
    _has_closure: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        buffer, loco = self.buffer, self.config.wire.loco
        self.codec = self.config.wire.codec_of_gradients(buffer.wire_dtype)
        self.loco_errors = None if self.codec is None or loco is None else LocoErrors(loco)
        self.shards_state = self.config.placements.optim is Placement.SHARDED
        self.stepped_params = buffer.shard_params if self.shards_state else buffer.params
        self.wire_bytes = buffer.plan.layout.numel * buffer.wire_dtype.itemsize
        self._scaling = self.config.precision.scaling_of(self.routes.whole.world_size)
        is_as_it_travels = self._scaling.divisor_before == 1.0 and (
            buffer.wire_dtype == buffer.plan.dtype
        )
        are_sharded = self.config.placements.grads is Placement.SHARDED
        self.large_wait = are_sharded and not keeps_free_memory(buffer.group.device)
        self.adopts = are_sharded and is_as_it_travels and buffer.plan.is_one_param
        plans = enumerate(buffer.plan.params)
        self.structured = tuple(i for i, plan in plans if plan.cut != Cut.FLAT)
        self.flush_threshold = self._most_waiting = min(len(self.stepped_params), MAX_WAITING)
        self.states = [NONE] * len(self.stepped_params)
        own: Any = ref(self)
        self.guards = tuple(
            GradientGuard.like(stand_in, partial(_scale_gradient, own, position))
            for position, stand_in in enumerate(buffer.stand_ins)
        )

    def check_moves(self) -> None:
        """Compare changes of states with MOVES from now on."""
        self.states = CheckedStates(self.states)

    @property
    def has_local(self) -> bool:
        """Return whether a gradient waits to be reduced."""
        return LOCAL in self.states or ACCUMULATED in self.states

    @property
    def is_full(self) -> bool:
        """Return whether all parameters' gradients arrived in this backward, since the launch."""
        return self.num_local == len(self.stepped_params)

    @property
    def has_gradients(self) -> bool:
        """Return whether the optimizer has a gradient of a parameter of this buffer."""
        for param in self.stepped_params:  # noqa: SIM110 - any() would be a call for each
            if param.grad is not None:
                return True
        return False

    # ---- Gradients arrive, and are collected ----

    def use_accumulator(self, memory: Tensor, slot: Slot[BufferGradients] | None) -> None:
        """Collect in this memory, 1-D, of the buffer's numel and dtype."""
        viewed = memory if slot is None else slot.memory
        # Usually it is the same slot again, and the views are right.
        if not self.views or viewed is not self._viewed:
            views = self.buffer.views_of(memory)
            if not self.shards_state and (others := self.routes.others):
                views = tuple(GradientShard.over(view, others) for view in views)
            # In one statement: an interrupt between two would leave views of other memory.
            self.views, self._viewed = views, viewed
        self.accumulator, self.slot = memory, slot

    def adopt(self, grads: Mapping[int, Tensor]) -> bool:
        """Collect in the one gradient that is all of the buffer, if it is; see NOTE(arrival)."""
        if self.accumulator is not None or not self.adopts:
            return False
        (grad,) = grads.values()
        is_ours = type(grad) is Tensor and not grad.requires_grad and grad.is_contiguous()
        if is_ours and grad.dtype == self.buffer.wire_dtype:
            self.use_accumulator(grad.view(-1), None)
        return self.accumulator is not None

    def leave_accumulator(self) -> None:
        """Collect nowhere until `use_accumulator`."""
        if self.slot is not None:
            self.slot.vacate()
        elif self.accumulator is not None:
            # Views must not keep memory alive that nothing else uses.
            self._forget_views()
        self.accumulator, self.slot = None, None

    def _forget_views(self) -> None:
        self.views, self._viewed = (), None

    def find_waiting(self) -> dict[int, Tensor]:
        """Return what autograd left in `param.grad`, by position; it does not wait any more.

        What it found undefined is not there: the same as unused.

        Raises:
            StateError: A gradient is not dense.
        """
        params, found = self.buffer.params, {}
        for position in self.waiting:
            grad, guard = params[position].grad, self.guards[position]
            if grad is guard:
                grad = guard.pop_received()
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

    def accumulate(self, grads: Mapping[int, Tensor]) -> None:
        """Move these, out of `param.grad`, into the accumulator; see NOTE(arrival)."""
        views, params, states = self.views, self.buffer.params, self.states
        # Destinations and sources, of gradients that are copied, and of those that are added.
        first: tuple[list[Tensor], list[Tensor]] = [], []
        again: tuple[list[Tensor], list[Tensor]] = [], []
        for position, grad in grads.items():
            view, state = views[position], states[position]
            # A gradient that is a view of an accumulator outside slots is in place.
            if self.slot is not None or grad.data_ptr() != view.data_ptr():
                is_first = state is NONE or (state is REDUCED and self.shards_state)
                into, out_of = first if is_first else again
                into.append(view)
                out_of.append(grad)
            params[position].grad = None if self.shards_state else view
            self.num_local += state is not LOCAL
            states[position] = LOCAL
        # create_graph=True makes gradients that have a graph.
        with torch.no_grad():
            if first[0]:
                foreach_copy_(*first)
            if again[0]:
                foreach_add_(*again)
        missing = len(self.stepped_params) - self.num_local
        # 1 if none is missing: a gradient that comes again is collected at once.
        self.flush_threshold = min(missing, MAX_WAITING) or 1

    # ---- Gradients are reduced: launches must be in the same order on every rank ----

    @ranged("reduce", "unit.name")
    def launch(self) -> None:
        """Start the reduction; parameters without a gradient count as zero. Collective."""
        values, scaling, buffer = self.accumulator, self._scaling, self.buffer
        assert values is not None, "the reducer gives one first"
        states, sent = self.states, list[int]()
        for position, view in enumerate(self.views):
            if states[position] is LOCAL or states[position] is ACCUMULATED:
                states[position] = IN_FLIGHT
                sent.append(position)
            elif not self._accumulates_in_place(position):
                view.zero_()
        # Autograd must not add to what is being reduced.
        if not self.shards_state:
            self.guard(sent)
        self.has_launched, self.num_local = True, 0
        self.flush_threshold = self._most_waiting
        # Padding with values of another unit would count in the scale of a block.
        if self.codec is not None:
            for gap in buffer.plan.layout.gaps:
                values[gap.as_slice()].zero_()
        if scaling.divisor_before != 1.0:
            values.div_(scaling.divisor_before)
        layout = buffer.plan.layout
        how: dict[str, Any] = {"op": scaling.op, "splits": layout.splits, "tag": buffer.reduce_tag}
        how["payload"] = layout.payload_splits
        if self.shards_state:
            reduction = self._reduce_to_shards(values, how)
        else:
            reduction = all_reduce_flat(values, group=self.routes.shards, **how)
        if scaling.after != 1.0:
            reduction = reduction.map(lambda reduced: reduced.mul_(scaling.after))
        self.reduction = reduction

    @ranged("reduce wait", "unit.name")
    def advance(self) -> bool:
        """Wait for the hop in flight and launch the next; the last is for `finish`. Collective.

        Returns:
            Whether there was a next one, and the accumulator is free.
        """
        assert self.reduction is not None, "the reducer lists what is in flight"
        self._advances = True
        has_next = self._named(self.reduction.advance)
        self._advances = False
        return has_next

    @ranged("reduce wait", "unit.name")
    def finish(self) -> None:
        """Wait for the reduction, and add its result to the gradient that the optimizer has."""
        assert self.reduction is not None, "the reducer lists what is in flight"
        self._advances = True
        reduced = self._named(self.reduction.wait)
        self.reduction, self._advances = None, False
        if self.shards_state and reduced is not self.shard:
            self._add(reduced)
        params, arrived = self.buffer.params, list[int]()
        for position, state in enumerate(self.states):
            if state is not IN_FLIGHT:
                continue
            if self.shards_state or params[position].grad is not None:
                arrived.append(position)
            else:
                # The user dropped it after an exception had ended its backward.
                self._forget(position)
        self.publish_grads(arrived)

    def _reduce_to_shards(self, values: Tensor, how: dict[str, Any]) -> Handle[Tensor]:
        codec, routes, buffer = self.codec, self.routes, self.buffer
        out, wire_dtype = self._ensure_shard(), buffer.wire_dtype
        if self.grad_offload is not None or out.dtype != wire_dtype or self.has_gradients:
            # What arrives is added to the shard, converted, or offloaded, in `finish`.
            out = torch.empty(out.numel(), dtype=wire_dtype, device=buffer.group.device)
        values = values.to(wire_dtype)
        if codec is not None and self.unit.errors is not None:
            parts = values.split(how["splits"])
            self.unit.errors.gradients.note(self.unit.name, codec, parts)
        if codec is not None and routes.hops is not None:
            errors = self.loco_errors
            return reduce_scatter_by_levels(
                values, levels=routes.hops, codec=codec, errors=errors, out=out, **how
            )
        reduction = reduce_scatter_flat(values, group=routes.shards, codec=codec, out=out, **how)
        if routes.replicas is None:
            return reduction
        return reduction.then(lambda shard: self._reduce_over_replicas(shard, how["op"]))

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

    @property
    def is_torn(self) -> bool:
        """Return whether an exception ended a call that launched or advanced its reduction."""
        return self.reduction is None or self._advances

    def drain(self) -> None:
        """Wait for what is in flight of a torn reduction, whose gradients are dropped."""
        reduction, self.reduction, self._advances = self.reduction, None, False
        if reduction is not None:
            self._named(reduction.drain)

    def _named(self, go_on: Callable[[], T]) -> T:
        try:
            return go_on()
        except DivergenceError:
            raise  # the error names the units
        except CommError as error:
            what = f"reducing the gradients of unit {self.unit.name!r}"
            raise named(what, error) from error.__cause__

    def _ensure_shard(self) -> Tensor:
        """Memory for this rank's part, made at first use."""
        if self.shard is None:
            buffer = self.buffer
            numel, dtype = buffer.shard_numel, buffer.main_shard.dtype
            if self.grad_offload is not None:
                self.shard = self.grad_offload.allocate(numel, dtype)
            else:
                self.shard = torch.empty(numel, dtype=dtype, device=buffer.group.device)
            parts = buffer.parts_of(self.shard)
            groups = self.routes.holders
            self.parts = tuple(GradientShard.over(part, groups) for part in parts)
        return self.shard

    def _add(self, received: Tensor) -> None:
        """Add what a reduction gave to what the optimizer has; the first becomes that itself."""
        shard, params = self._ensure_shard(), self.buffer.shard_params
        self._norms.clear()
        adds = [param.grad is not None for param in params]
        for param, part in zip(params, self.parts, strict=True):
            if param.grad is not None and param.grad.data_ptr() != part.data_ptr():
                # The user has put another gradient there.
                part.copy_(param.grad)
        more = self.buffer.parts_of(received)
        if self.grad_offload is not None and len(set(adds)) == 1:
            if not adds[0] and received.dtype == shard.dtype:
                self._cache_norms(more)
            self.grad_offload.deliver(received, shard, adds=adds[0])
            return
        for is_more, part, other in zip(adds, self.parts, more, strict=True):
            if self.grad_offload is not None:
                into = part.as_subclass(Tensor).view(-1)
                self.grad_offload.deliver(other.view(-1), into, adds=is_more)
            elif is_more:
                part.add_(other)
            else:
                part.copy_(other)

    # ---- The optimizer reads gradients ----

    def publish_grads(self, positions: Collection[int]) -> None:
        """Make what was reduced the gradients that the optimizer reads."""
        values = self.parts if self.shards_state else self.views
        for position in positions:
            self.states[position] = REDUCED
            self.stepped_params[position].grad = values[position]
        if self._has_closure:
            self._expose_plain_grads(
                position for position in positions if position in self.structured
            )

    def set_local(self, position: int, value: Tensor) -> None:
        """Replace this rank's local gradient, inside no_sync. Local."""
        self.views[position].copy_(value)
        self.states[position] = ACCUMULATED
        if self.shards_state:
            self.guard((position,))
        else:
            self.buffer.params[position].grad = self.views[position]

    def copy_whole(self, position: int, value: Tensor) -> None:
        """Replace the gradient that the optimizer reads by its part of a whole one. Local."""
        self.states[position] = REDUCED
        if not self.shards_state:
            self.views[position].copy_(value)
            self.stepped_params[position].grad = self.views[position]
            return
        self._ensure_shard()
        part, piece = self.parts[position], self.buffer.piece_of(position)
        if piece is not None:
            part.copy_(value.reshape(-1)[piece.in_tensor.as_slice()].view(part.shape))
        self.stepped_params[position].grad = part
        self.guard((position,))

    def expose_plain_grads(self, *, has_closure: bool) -> None:
        """The optimizer steps now, maybe after backwards of its own; see NOTE(plain grads)."""
        self._has_closure = has_closure
        if self.parts:
            params = self.buffer.shard_params
            self._expose_plain_grads(i for i in self.structured if params[i].grad is self.parts[i])

    def restore_grads(self) -> None:
        """The optimizer has stepped."""
        self._has_closure = False
        for position, plain in self._plain_grads.items():
            param = self.buffer.shard_params[position]
            # Otherwise the optimizer has dropped or replaced it.
            if param.grad is plain:
                param.grad = self.parts[position]
        self._plain_grads.clear()

    def _expose_plain_grads(self, positions: Iterable[int]) -> None:
        for position in positions:
            part, shape = self.parts[position], self.buffer.plan.params[position].shape
            is_absent = shape.numel() and not part.numel()
            self._plain_grads[position] = None if is_absent else part.as_subclass(Tensor)
            self.buffer.shard_params[position].grad = self._plain_grads[position]

    def _cache_norms(self, received: Sequence[Tensor]) -> None:
        """Measure what a reduction has left on the device: in float32 what has 16 bits."""
        full = {position: part for position, part in enumerate(received) if part.numel()}
        if full:
            is_narrow = received[0].dtype.itemsize < torch.float32.itemsize
            wide = torch.float32 if is_narrow else None
            norms = foreach_norm(list(full.values()), 2.0, dtype=wide)
            self._norms = {p: (norm, None) for p, norm in zip(full, norms, strict=True)}

    def record_norm_versions(self) -> None:
        """Record the gradients' versions: all have reached the host.

        A later write to a gradient makes its cached norm invalid.
        """
        for position, (norm, version) in self._norms.items():
            if version is None:
                self._norms[position] = norm, version_of(self.parts[position])
                note_own_write(self.parts[position])

    def norm_of(self, position: int) -> Tensor | None:
        """Return the cached norm, of order 2, of an offloaded gradient.

        None if there is none, or the gradient was modified or replaced since.
        """
        if position not in self._norms:
            return None
        part, (norm, version) = self.parts[position], self._norms[position]
        is_unmodified = version_of(part) == version and not getattr(part, "is_touched", False)
        return norm if is_unmodified and self.stepped_params[position].grad is part else None

    # ---- Between backwards: guards in `param.grad`, and what is dropped ----

    def end_backward(self) -> None:
        """Forget what belongs to one backward; guard what is sharded."""
        self.has_launched = False
        # An exception may have left some.
        self.waiting.clear()
        self.flush_threshold, self.num_local = self._most_waiting, 0
        self.from_outside.clear()
        states, targets, params = self.states, self.stepped_params, self.buffer.params
        for position, state in enumerate(states):
            # This backward ran inside no_sync.
            if state is LOCAL:
                states[position] = ACCUMULATED
                if not self.shards_state:
                    params[position].grad = self.views[position]
            elif self.shards_state and state is not ACCUMULATED:
                # The user may have set or dropped it.
                has_gradient = targets[position].grad is not None
                if has_gradient is not (state is REDUCED):
                    states[position] = REDUCED if has_gradient else NONE
            if self.shards_state and states[position] is not NONE:
                params[position].grad = self.guards[position]

    def guard(self, positions: Iterable[int]) -> None:
        """Put guards where these gradients were; see NOTE(guards)."""
        params, guards = self.buffer.params, self.guards
        for position in positions:
            params[position].grad = guards[position]

    def refuse_to_sum_again(self) -> None:
        """Raise StateError where a reduction would sum what one has summed; see NOTE(carrying)."""
        is_kept = self.config.precision.keeps_equal(self.routes.whole.world_size)
        # With groups, every rank refuses what some ranks must refuse.
        if is_kept and not self.routes.of_groups:
            return
        again = [
            position
            for position, state in enumerate(self.states)
            if state is REDUCED and self._accumulates_in_place(position)
        ]
        if again:
            raise StateError(
                f"parameter {self.buffer.plan.params[min(again)].name!r}: its gradient was summed "
                "over the ranks by a backward before this one, and at stage 0 would be so again "
                "with what has been added to it since, as often as there are ranks "
                f"(rank {self.buffer.group.rank}). Where Precision does not average over all "
                "ranks, or some parameters have ranks of their own (ZeroConfig.groups), run all "
                "micro-batches but the last inside no_sync(model), or use stage 1; to begin anew, "
                "call optimizer.zero_grad()"
            )

    def remove_guards(self) -> None:
        """A backward begins: let autograd give its gradients away; see NOTE(guards)."""
        params, guards = self.buffer.params, self.guards
        for position, state in enumerate(self.states):
            if state is NONE:
                continue
            grad, guard = params[position].grad, guards[position]
            if grad is guard:
                if guard.received is None:
                    params[position].grad = None
            elif self.shards_state or grad is None or not self._accumulates_in_place(position):
                self._forget(position)

    def follow_drops(self) -> bool:
        """Drop the gradients whose guard the user has taken away. Between backwards.

        Returns:
            Whether a gradient waits to be reduced.
        """
        params, waits = self.buffer.params, False
        for position, state in enumerate(self.states):
            if self.shards_state and state is not NONE and params[position].grad is None:
                self._forget(position)
            elif state is ACCUMULATED:
                waits = True
        return waits

    def _forget(self, position: int) -> None:
        """The user has dropped this gradient."""
        self.states[position] = NONE
        if self.shards_state:
            self.stepped_params[position].grad = None

    def drop_local(self, *, set_to_none: bool) -> None:
        """Drop gradients that are not reduced, or make them zero."""
        for position, state in enumerate(self.states):
            if state is ACCUMULATED and not set_to_none:
                self.views[position].zero_()
            elif state is LOCAL or state is ACCUMULATED or state is IN_FLIGHT:
                self._forget(position)
            elif state is REDUCED and not self.shards_state and not set_to_none:
                # It is zero on every rank, and zeros may be summed again.
                self._forget(position)
        self.num_local = 0

    def drop(self) -> None:
        """Drop every gradient, reduced or not."""
        self.states[:], self.num_local = [NONE] * len(self.states), 0
        self._plain_grads.clear()
        for guard in self.guards:
            guard.pop_received()
        for part in self.parts:
            note_new_gradient(part)
        for param in (*self.buffer.params, *self.buffer.shard_params):
            param.grad = None

    def scale(self, position: int, operation: str, operand: Any) -> None:
        """Do `zero_`, `mul_` or `div_` to a gradient, wherever it is; see GradientGuard. Local.

        Raises:
            StateError: It is being reduced.
        """
        state, target = self.states[position], self.stepped_params[position].grad
        if state is IN_FLIGHT:
            raise StateError(
                f"parameter {self.buffer.plan.params[position].name!r}: {operation}() of its "
                f"gradient while that is being reduced (rank {self.buffer.group.rank}); do it when "
                "backward() has returned"
            )
        local = self.views[position] if state is LOCAL or state is ACCUMULATED else None
        waiting = None
        # At stage 0 the waiting gradient is the target.
        if self.shards_state and position in self.waiting:
            waiting = self.buffer.params[position].grad
            if waiting is self.guards[position]:
                waiting = waiting.received
        with torch.no_grad():
            for grad in (local, waiting, target):
                if grad is not None:
                    values = grad.device if isinstance(operand, Tensor) else None
                    operands = [operand.to(values)] if values is not None else [operand]
                    getattr(grad, operation)(*(o for o in operands if o is not None))

    def leave_memory(self) -> None:
        """Free memory without a gradient that is still needed, except for memory of the host."""
        holds = self.has_gradients
        if not self.has_local and (self.shards_state or not holds):
            self.leave_accumulator()
        if not holds and self.grad_offload is None:
            self.shard, self.parts = None, ()

    def release(self) -> None:
        """Free memory as `leave_memory` does, also on the host, and drop views of slots."""
        self.leave_memory()
        if self.accumulator is None:
            self._forget_views()
        if not self.has_gradients:
            self.shard, self.parts = None, ()
            self._norms.clear()

    def _accumulates_in_place(self, position: int) -> bool:
        grad = None if self.shards_state else self.buffer.params[position].grad
        is_plain = grad is not None and grad is not self.guards[position]
        return is_plain and grad.data_ptr() == self.views[position].data_ptr()


def _scale_gradient(
    gradients: ReferenceType[BufferGradients], position: int, operation: str, operand: Any
) -> None:
    """Do what was done to a guard to its gradient. A guard keeps no gradients alive."""
    if (found := gradients()) is not None:
        found.scale(position, operation, operand)


@define(eq=False, repr=False)
class GradientReducer:
    """Collects gradients per flat buffer and reduces each buffer when its turn comes."""

    units: Sequence[Unit]
    routes: Routes
    config: PartitionConfig
    grad_offload: GradOffload | None = None  # see NOTE(grad offload)
    # Placement of gradients while they accumulate.
    placement: Placement = field(init=False)
    shards_state: bool = field(init=False)
    sync: bool = field(default=True, init=False)  # False inside no_sync
    gradients: tuple[BufferGradients, ...] = field(init=False)
    structured_buffers: tuple[BufferGradients, ...] = field(init=False)  # see NOTE(plain grads)
    pool: SlotPool[BufferGradients] = field(init=False)
    # Tag of exchanges of flags, norms and the order.
    control_tag: int = field(init=False)
    # Whether gradients were collected in this backward.
    has_collected: bool = field(default=False, init=False)
    _of_unit: dict[int, list[BufferGradients]] = field(factory=dict, init=False)
    # Buffers in the order of their reductions; rank 0's if `_has_order`. See NOTE(order).
    _order: list[BufferGradients] = field(init=False)
    _has_order: bool = field(default=False, init=False)
    # Number of buffers in `_order` whose turn has come in this backward, and all that became full.
    _num_taken: int = field(default=0, init=False)
    _became_full: list[BufferGradients] = field(factory=list, init=False)
    # Reductions in flight, the oldest first.
    _in_flight: list[BufferGradients] = field(factory=list, init=False)
    # Exchange of arrivals that this rank has not waited for.
    _flags: Handle[Tensor] | None = field(default=None, init=False)
    # Whether there may be gradients from before this backward.
    _has_earlier: bool = field(default=False, init=False)
    # Shape [ranks, flags], uint8; see `_find_same_params`.
    _same_params: Tensor | None = field(default=None, init=False)
    # Ids of the model's own groups.
    _own_groups: frozenset[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        placements = self.config.placements
        self.placement = placements.grads
        self.shards_state = placements.optim is Placement.SHARDED
        buffers = [(buffer, unit) for unit in self.units for buffer in unit.buffers]
        # Gradients of parameters with ranks of their own are divided by the number of all ranks.
        precision = self.config.precision.over(self.routes.whole.world_size)
        config = evolve(self.config, precision=precision)
        self.gradients = tuple(
            BufferGradients(buffer, unit, self.routes.of(buffer.plan), config, self.grad_offload)
            for buffer, unit in buffers
            if buffer.plan.trainable
        )
        self.structured_buffers = tuple(g for g in self.gradients if g.structured)
        ring = [g.wire_bytes for g in self.gradients if not (g.unit.plan.is_outer or g.adopts)]
        self.pool = SlotPool.plan(
            ring if self.placement is Placement.SHARDED else (),
            num_slots=reduction_slots(keeps_free_memory(self.routes.whole.device)),
            device=self.routes.whole.device,
            is_busy=lambda owner: owner.has_local or owner.reduction is not None,
        )
        self._own_groups = frozenset(map(id, self.routes.groups))
        self.control_tag = 2 * max((buffer.index for buffer, _ in buffers), default=0) + 2
        self._order = list(reversed(self.gradients))
        for g in self.gradients:
            self._of_unit.setdefault(g.unit.index, []).append(g)

    # ---- Gradients come ----

    def begin_backward(self) -> None:
        """Let autograd give gradients away; forget those that the user has dropped."""
        for g in self.gradients:
            g.remove_guards()

    def hide_guards(self, unit: Unit | None, *, is_hidden: bool) -> None:
        """Take a unit's guards away, all units' when None, or put them back."""
        if not self._has_earlier:
            return
        for g in self.gradients if unit is None else self._of_unit.get(unit.index, ()):
            if is_hidden:
                g.remove_guards()
            elif g.shards_state:
                g.guard([i for i, state in enumerate(g.states) if state is not NONE])

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
            f"read other values. {RETURN_OUTPUTS}"
        )

    def collect(self, g: BufferGradients) -> None:
        """Gradients are in `param.grad`: take them, and reduce what is ready."""
        grads = g.find_waiting()
        if not grads:
            return
        # It comes again in one backward, as in a nested backward of a checkpoint.
        if g.reduction is not None:
            self._end(g)
            g.refuse_to_sum_again()
        if not (self.sync and g.adopt(grads)):
            self._ensure_accumulator(g)
        self.has_collected = True
        g.accumulate(grads)
        # Those that were copied are freed before a reduction takes memory for its result.
        grads.clear()
        if self.sync and g.is_full:
            self._became_full.append(g)
            order = self._order
            while self._num_taken < len(order) and order[self._num_taken].is_full:
                self._num_taken += 1
                self._launch(order[self._num_taken - 1])

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients of this rank as they are; a backward after it reduces their sum."""
        before = self.sync
        try:
            try:
                self.sync = False
                yield
            finally:
                self.sync = before
        finally:
            # Once more, since Ctrl-C may have come just before.
            self.sync = before

    def collect_waiting(self) -> None:
        """Backward has ended: take what waits in every buffer."""
        for g in self.gradients:
            if g.waiting:
                self.collect(g)

    def forget_waiting(self) -> None:
        """An exception ended a backward: an arrival from now on is one of another backward."""
        for g in self.gradients:
            g.waiting.clear()

    def set_whole(self, g: BufferGradients, position: int, value: Tensor) -> None:
        """Make `value` the gradient of a parameter; inside no_sync, the local one. Local."""
        if not self.sync or not g.shards_state:
            self._ensure_accumulator(g)
        self._has_earlier = True
        if self.sync:
            g.copy_whole(position, value)
        else:
            g.set_local(position, value)

    def has_all(self, unit: Unit) -> bool:
        """Return whether a gradient of every parameter of a unit has arrived in this backward.

        Then nothing will read them: what autograd keeps of a parameter is the object itself, and
        each node that has one comes before its gradient. Not so of one that does not train.
        """
        gradients = self._of_unit[unit.index]
        return len(gradients) == len(unit.buffers) and all(
            g.has_launched or g.num_local + len(g.waiting) == len(g.stepped_params)
            for g in gradients
        )

    # ---- They are reduced; see NOTE(order) and NOTE(hops). Collective ----

    def finish_without_gradients(self) -> None:
        """Without new gradients, keep the old ones and put their guards back."""
        for g in self.gradients:
            g.end_backward()

    def end_backward(self) -> None:
        """Reduce gradients that are not reduced yet; put all where the optimizer reads them."""
        if self.sync:
            for g in self._order:
                if not g.has_launched or (g.reduction is None and g.has_local):
                    self._launch(g)
            self._flush()
            for g in self.gradients if self.grad_offload is not None else ():
                g.record_norm_versions()
            self._agree_on_arrivals()
            self._adopt_order()
        self._forget_turns()
        self.finish_without_gradients()
        self._has_earlier = True
        self._release_free()

    def before_step(self) -> None:
        """Reduce what `no_sync` left behind; drop what the user dropped."""
        waits = [g.follow_drops() for g in self.gradients]
        if any(waits):
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
        """Begin a reduction; those before it go one hop further, unless it is tiny beside them."""
        if g.reduction is not None:
            self._end(g)
        self._ensure_accumulator(g)
        before = tuple(self._in_flight)
        # Before the launch, so that `_end_torn` finds what an exception leaves of it.
        self._in_flight.append(g)
        g.launch()
        if not is_hardly_more([other.wire_bytes for other in self._in_flight]):
            self._advance(before)

    def _end(self, g: BufferGradients) -> None:
        while g.reduction is not None:
            self._advance(tuple(self._in_flight))

    def _flush(self) -> None:
        while self._in_flight:
            self._advance(tuple(self._in_flight))
        if self.grad_offload is not None:
            self.grad_offload.flush()

    def _end_torn(self) -> None:
        """End reductions of a call that an exception ended, whose gradients are dropped."""
        torn = [g for g in self._in_flight if g.is_torn]
        self._in_flight = [g for g in self._in_flight if not g.is_torn]
        try:
            for g in torn:
                g.drain()
            self._flush()
        finally:
            for g in torn:
                g.drop()
                g.leave_accumulator()
            if torn and not self._in_flight:
                # A failed launch may still write to its tensors, and no code waits for it.
                for g in self.gradients:
                    if g.slot is not None:
                        g.leave_accumulator()
                self.pool.release()

    def _advance(self, reductions: Sequence[BufferGradients]) -> None:
        """Advance these reductions by one hop, or finish them. Collective."""
        for g in [g for g in reductions if not g.advance()]:
            g.finish()
            self._in_flight.remove(g)
        self._leave_accumulators(reductions)

    def _ensure_accumulator(self, g: BufferGradients) -> None:
        if g.accumulator is not None:
            return
        plan, pool, num_bytes = g.buffer.plan, self.pool, g.wire_bytes
        if self.placement is Placement.REPLICATED or not self.sync:
            # Several backwards may be added up here.
            dtype = g.buffer.main_shard.dtype
            memory = torch.empty(plan.layout.numel, dtype=dtype, device=pool.device)
            g.use_accumulator(memory, None)
            return
        alone = g.unit.plan.is_outer
        while not alone and pool.find(num_bytes) is None and any(o.slot for o in self._in_flight):
            self._advance(tuple(self._in_flight))
        slot = pool.acquire(num_bytes, alone=alone, again=True)
        slot.occupy(g)
        memory = slot.allocate(pool.device)[:num_bytes]
        g.use_accumulator(memory.view(g.buffer.wire_dtype), slot)

    def _leave_accumulators(self, gradients: Sequence[BufferGradients]) -> None:
        """Free the accumulators for the next units, unless gradients add up or end there."""
        for g in gradients if self.placement is Placement.SHARDED else ():
            g.leave_accumulator()

    def _adopt_order(self) -> None:
        """Take rank 0's order of becoming full for the backwards to come, once."""
        if self._has_order:
            return
        numbers = {id(g): number for number, g in enumerate(self.gradients)}
        full = [numbers[id(g)] for g in self._became_full]
        full += [-1] * (len(self.gradients) - len(full))
        device = self.routes.whole.device
        mine = torch.tensor(full[: len(self.gradients)], dtype=torch.int64, device=device)
        first = [n for n in self._exchange(mine)[: len(mine)].tolist() if n >= 0]
        # Where nothing became full on rank 0, a later backward decides.
        if first:
            rest = [numbers[id(g)] for g in self._order]
            self._order = [self.gradients[n] for n in dict.fromkeys((*first, *rest))]
            self._has_order = True

    def _forget_turns(self) -> None:
        self._num_taken, self.has_collected = 0, False
        self._became_full.clear()

    # ---- Ranks exchange flags, numbers and norms. Collective ----

    def is_true_anywhere(self, mine: bool) -> bool:
        """Return whether `mine` is true on any rank. Collective."""
        return bool(self._exchange(torch.tensor([mine], dtype=torch.uint8, device="cpu")).any())

    def _exchange(self, mine: Tensor) -> Tensor:
        group = self.routes.whole
        if group.world_size == 1:
            return mine
        # At once, since the host reads the result.
        group.compare_launches("agreeing on gradients", at_once=True)
        return self.launch_exchange(mine, group).wait()

    def launch_exchange(self, mine: Tensor, group: Group) -> Handle[Tensor]:
        """Gather all ranks' tensors of equal size, 1-D, one after the other. Collective.

        Over a group that is not the model's, others may have another part of it, and other tags.
        """
        shard, is_own = mine.to(group.device), id(group) in self._own_groups
        return all_gather_flat(
            shard.new_empty(group.world_size * shard.numel()),
            splits=[shard.numel()] * group.world_size,
            group=group,
            shard=shard,
            tag=self.control_tag if is_own else _TAG_OF_OTHERS,
            control=True,
        )

    def _agree_on_arrivals(self) -> None:
        """Set the reduced gradient of parameters that got one on other ranks only. Collective.

        This rank has added zeros to such a gradient. Every rank sends which parameters got one, and
        only a rank that lacks some needs the answer. So usually no rank waits.
        """
        group = self.routes.whole
        if group.world_size == 1:
            return
        earlier, self._flags = self._flags, None
        if earlier is not None:
            earlier.wait()
        mine = [param.grad is not None for g in self.gradients for param in g.stepped_params]
        if all(mine):
            # Made on the device: for a copy of pageable memory the host would wait.
            present = torch.ones(len(mine), dtype=torch.uint8, device=group.device)
            self._flags = self.launch_exchange(present, group)
            return
        present = torch.tensor(mine, dtype=torch.uint8, device="cpu")
        everyone = self.launch_exchange(present, group).wait().view(group.world_size, -1)
        if self.routes.of_groups:
            if self._same_params is None:
                self._same_params = self._find_same_params().to(everyone.device)
            everyone = everyone * self._same_params
        anyone = iter(everyone.any(dim=0).tolist())
        for g in self.gradients:
            for position, param in enumerate(g.stepped_params):
                if next(anyone) and param.grad is None:
                    g.publish_grads([position])

    def _find_same_params(self) -> Tensor:
        """Return by rank and flag: 1 where that rank has the same parameter as this one, else 0."""
        of_params = [g.routes.own for g in self.gradients for _ in g.stepped_params]
        ranks = range(self.routes.whole.world_size)
        rows = [[own is None or rank in own.positions for own in of_params] for rank in ranks]
        return torch.tensor(rows, dtype=torch.uint8, device="cpu")

    # ---- Gradients are dropped, and memory given back ----

    def abandon(self, *, is_asked_for: bool) -> None:
        """Drop all gradients: an exception ended a backward, and some lack its part.

        At stage 0 reduced gradients are the user's `param.grad` and stay, as in plain torch.

        Args:
            is_asked_for: The user drops them anyway; else earlier ones go with a warning.
        """
        if self._has_earlier and self.shards_state and not is_asked_for:
            warn_user(
                "a backward ended in an exception: the gradients of the backwards before it, "
                "accumulated since zero_grad(), are dropped with its own",
            )
        try:
            self._end_torn()
        finally:
            self._forget_turns()
            for g in self.gradients:
                g.drop() if self.shards_state else g.drop_local(set_to_none=True)
            self._leave_accumulators(self.gradients)
            self._has_earlier = False
            self.finish_without_gradients()
            self._release_free()

    def drop(self, *, set_to_none: bool) -> None:
        """Do what `zero_grad` does to gradients that are not in the optimizer's hands."""
        self._end_torn()
        for g in self.gradients:
            g.drop() if set_to_none else g.drop_local(set_to_none=False)
        self._leave_accumulators(
            self.gradients if set_to_none else [g for g in self.gradients if not g.has_local]
        )
        self._has_earlier = False
        self._release_free()

    def release(self) -> None:
        """Free reduction buffers; gradients that are still needed stay."""
        for g in self.gradients:
            g.release()
        if not any(g.slot for g in self.gradients):
            self.pool.release()

    def _release_free(self) -> None:
        """On a device, free memory that is unused until backward; see NOTE(free memory)."""
        if not keeps_free_memory(self.pool.device):
            for g in self.gradients:
                g.leave_memory()

    # ---- Bytes in use ----

    @property
    def reduction_bytes(self) -> int:
        """Bytes of slots, of whole gradients that accumulate, and of shards without a gradient."""
        own = [g.accumulator for g in self.gradients if g.slot is None]
        idle = [
            g.shard for g in self.gradients if self.grad_offload is None and not g.has_gradients
        ]
        return self.pool.num_bytes + sum(t.nbytes for t in (*own, *idle) if t is not None)

    @property
    def loco_bytes(self) -> int:
        """Bytes of errors of encoding, kept for the next reductions."""
        return sum(g.loco_errors.num_bytes for g in self.gradients if g.loco_errors is not None)

    @property
    def host_bytes(self) -> int:
        """Bytes of memory on the host that has gradients or is kept for them."""
        shards = [g.shard for g in self.gradients if self.grad_offload is not None]
        return sum(shard.nbytes for shard in shards if shard is not None)

    @property
    def flags_bytes(self) -> int:
        """Bytes of the flags of the last exchange, as long as it was not waited for."""
        num_flags = sum(len(g.stepped_params) for g in self.gradients)
        return 0 if self._flags is None else self.routes.whole.world_size * num_flags
