"""The gradients of one flat buffer: taken from autograd, reduced, handed to the optimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import torch
from attrs import define, field
from torch import Tensor, nn

from ._errors import StateError
from ._flat_buffer import FlatBuffer
from ._gradient_route import GradientRoute
from ._lending import Lending
from ._reduced_shard import ReducedShard
from ._slots import Slot
from ._torch_compat import foreach_add_, foreach_copy_
from ._unit import Unit

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
