"""A unit at run time: whole or sharded, and how it gets from one to the other."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum, auto
from itertools import chain
from typing import Final

import torch
from attrs import define, field
from torch import Tensor, nn
from zero_comm import AbstractCodec, CommError, DivergenceError, Exposure, Group, Handle
from zero_comm.errors import named
from zero_comm.ranges import ranged

from zero_partition.dtensors import outer_of
from zero_partition.errors import StateError
from zero_partition.memory.flat_buffer import NUM_LOOKS, FlatBuffer, SecondaryShards
from zero_partition.memory.seams import ParamOffload, Pending
from zero_partition.plan.layout import UnitPlan
from zero_partition.plan.slots import ENCODED_IN_FLIGHT, Slot, SlotPool
from zero_partition.plan.stages import Placement
from zero_partition.torch_private import own_parameters, plain_access, version_of

from .source import CachedBuffers, CodecErrors, NodeGather, PeerShards, ShardGather, UnitSource

RETURN_OUTPUTS: Final = (
    "Backward reaches a unit through the tensors that its module returns: return the loss, "
    "if the module keeps it in an attribute. Making the modules involved one unit "
    "(ZeroConfig.units), or stage 2, avoids it, too."
)


class ShardState(Enum):
    """State of a unit's parameters; if they are replicated, always UNSHARDED.

    A unit skips GATHERING if its slot still has its current values, or if they are read without a
    gather. It goes from GATHERING back to SHARDED if a gather launched ahead is not needed.
    """

    # This rank has its shard only; parameters read as NaN.
    SHARDED = auto()
    # The whole buffers have memory, but no defined contents until the gather is waited for.
    GATHERING = auto()
    # The whole buffers have the unit's values, and parameters can be read.
    UNSHARDED = auto()


@define(eq=False, repr=False)
class Unit:
    """Parameters that are unsharded, resharded and reduced together."""

    plan: UnitPlan
    index: int
    group: Group
    placement: Placement
    buffers: tuple[FlatBuffer, ...]
    # Where modules have its parameters: module, attribute, index in `buffers`, position there.
    owners: tuple[tuple[nn.Module, str, int, int], ...]
    # Rounds shards in gathers; None if they are exact; see `Wire.params`.
    codec: AbstractCodec | None = None
    # The node's copy of one version of its values; None without copies.
    secondary: SecondaryShards | None = None
    # Gives access to all ranks' shards without their owners; None: they are gathered.
    exposure: Exposure | None = None
    # Has its whole buffers on the host or on disk for a while; see `use_unsharded_cache`.
    unsharded_cache: ParamOffload | None = None
    state: ShardState = field(init=False)
    # How often its values have changed; changed by `mark_changed` only.
    version: int = 0
    # Number of forwards of its module that are running.
    depth: int = 0
    # Whether what this call saves of its parameters is watched; see NOTE(reads) in hooks.py.
    is_watched: bool = False
    # Assigned at first use or by `Schedule`, until `release_slot`; see NOTE(slots) in slots.py.
    slot: Slot[Unit] | None = None
    # Records what codecs lose of its values; None: not recorded.
    errors: CodecErrors | None = None
    # Whether a context has every parameter whole in other memory, so that no slot is needed.
    has_gathered_values: bool = False
    # Chosen at first use for each version; None: not chosen yet.
    _source: UnitSource | None = field(default=None, init=False)
    # Version of the values in the slot; -1 while they are incomplete or out of date.
    _slot_version: int = field(default=-1, init=False)
    # Number of further forwards after which values are compared; see `find_written`.
    _looks_left: int = field(default=NUM_LOOKS, init=False)
    # Transfers into the slot that were not waited for yet.
    _filling: Sequence[Pending] = field(default=(), init=False)
    # Whole flat buffers in the slot, 1-D, one per buffer; empty while the slot has no memory.
    _full: list[Tensor] = field(factory=list, init=False)
    # For each buffer, views of its parameters in the slot, or in the replicated buffer.
    _views: list[tuple[Tensor, ...]] = field(factory=list, init=False)
    # Parameters as the modules have them, one per owner.
    _params: list[nn.Parameter] = field(init=False)

    def __attrs_post_init__(self) -> None:
        is_sharded = self.placement is Placement.SHARDED
        self.state = ShardState.SHARDED if is_sharded else ShardState.UNSHARDED
        self._params = [outer_of(self.buffers[i].params[at]) for _, _, i, at in self.owners]
        for buffer in self.buffers:
            if is_sharded:
                buffer.install(buffer.stand_ins)
            else:
                assert buffer.whole is not None, "replicated parameters have a whole buffer"
                self._views.append(buffer.views_of(buffer.whole))
                buffer.install(self._views[-1])

    @property
    def name(self) -> str:
        """The module's name, as in `named_modules`."""
        return self.plan.name or "(model)"

    @property
    def is_resident(self) -> bool:
        """Return whether this rank has its current values in full, so that no gather is needed."""
        if self.placement is Placement.REPLICATED or self.has_gathered_values:
            return True
        return (
            self.slot is not None
            and self.slot.owner is self
            and self._slot_version == self.version
            and self.state is not ShardState.GATHERING
        )

    def begin_forward(self, *, is_watched: bool) -> None:
        """Count a forward of its module that begins; one inside another is not watched anew."""
        if self.depth == 0:
            self.is_watched = is_watched
        self.depth += 1

    def end_forward(self) -> None:
        """Count a forward of its module that has ended."""
        self.depth -= 1

    def forget_forwards(self) -> None:
        """Count no forward: an exception has ended them."""
        self.depth = 0

    def mark_changed(self) -> None:
        """Note that its values have changed: whole copies of them are out of date."""
        self.version += 1
        self._source = None

    def assign_slot(self, slot: Slot[Unit]) -> None:
        """Use this slot from now on; it has none."""
        self.slot = slot

    def read_peers_by(self, exposure: Exposure | None) -> None:
        """Read the peers' shards through this exposure; gather them if None."""
        self.exposure, self._source = exposure, None

    def record_errors(self, errors: CodecErrors | None) -> None:
        """Record what codecs lose of it here, until called with None."""
        self.errors, self._source = errors, None

    def mark_gathered(self, *, is_gathered: bool) -> None:
        """Note whether all its parameters are pinned to memory outside of its slot."""
        self.has_gathered_values = is_gathered

    def use_unsharded_cache(self, cache: ParamOffload | None) -> None:
        """Read whole buffers from there, or gather them again if None; forget those in its slot."""
        self.forget_values()
        self.unsharded_cache, self._source = cache, None

    @property
    def source(self) -> UnitSource:
        """Return the source of its whole buffers, which is chosen once per version."""
        if self._source is None:
            if self.unsharded_cache is not None:
                self._source = CachedBuffers(self.buffers, self.unsharded_cache)
            elif self.exposure is not None:
                self._source = PeerShards(self.name, self.buffers, self.exposure)
            elif self.secondary is not None and self.secondary.version == self.version:
                self._source = NodeGather(self.secondary)
            else:
                self._source = ShardGather(self.name, self.buffers, self.version, self.errors)
        return self._source

    def start_unshard(self, pool: SlotPool[Unit]) -> None:
        """Launch the gather, if one is needed. Collective with its peers' same call.

        Nothing is launched if no other rank takes part: peers' shards, or copies, are read later.
        """
        is_sharded = self.state is ShardState.SHARDED
        if is_sharded and self.source.is_collective and not self.is_resident:
            self._begin_to_fill(pool)

    @property
    def encoded_bytes(self) -> int:
        """Bytes of encoded shards that are on their way into the slot."""
        return self.source.encoded_bytes if self.state is ShardState.GATHERING else 0

    def unshard(self, pool: SlotPool[Unit]) -> None:
        """Make the parameters whole; waits. Collective unless they are resident or exposed."""
        if self.state is ShardState.UNSHARDED:
            return
        # GATHERING with nothing to wait for: an exception ended an earlier call halfway.
        is_torn = self.state is ShardState.GATHERING and not self._filling
        if is_torn or (self.state is ShardState.SHARDED and not self.is_resident):
            self._begin_to_fill(pool)
        if self._filling:
            self._wait()
        # Not SHARDED, so that `reshard` undoes it where an exception leaves only some installed.
        self.state = ShardState.GATHERING
        for index, buffer in enumerate(self.buffers):
            # In any order: `install` takes pinned ones by their position.
            pinned = tuple(buffer.pinned.values()) if self.has_gathered_values else ()
            buffer.install(pinned or self._views[index])
        self.state = ShardState.UNSHARDED

    def reshard(self) -> None:
        """Keep the shard only. Local. A gather in flight is waited for and its result ignored."""
        if self.placement is Placement.REPLICATED or self.state is ShardState.SHARDED:
            return
        if self._filling:
            self._wait()
        for buffer in self.buffers:
            buffer.install(buffer.stand_ins)
        self.state = ShardState.SHARDED

    def give_up_slot(self) -> None:
        """Let another unit have the slot's memory. The slot stays assigned; see NOTE(slots)."""
        if self.depth:
            raise StateError(
                f"unit {self.name!r}: its slot was asked for while its forward is running"
            )
        self.reshard()
        has_values = self._slot_version == self.version and self.unsharded_cache is None
        if self.secondary is not None and has_values:
            self.secondary.update(self._full, self.version)
            self._source = None
        self._slot_version = -1

    def forget_values(self) -> None:
        """Reshard, and mark the values in the slot, if it has one, as out of date. Local."""
        self.reshard()
        self._slot_version = -1

    def leave_slot(self) -> None:
        """Reshard, and free the slot's memory if no tensor besides ours views it. Local.

        With secondary shards it is not freed: these are filled when another unit takes the slot.
        """
        self.reshard()
        slot = self.slot
        if slot is None or slot.owner is not self or self.secondary or slot.is_viewed:
            return
        slot.vacate()

    def forget_memory(self) -> None:
        """Forget the memory of its slot, which is freed; the slot stays assigned."""
        self.reshard()
        self._full, self._views, self._slot_version = [], [], -1

    def release_slot(self) -> None:
        """Forget the slot, whose memory is freed."""
        if self.placement is Placement.SHARDED:
            self.forget_memory()
            self.slot = None
        if self.secondary is not None:
            self.secondary.release()
            self._source = None

    def keep_views(self, outputs: Iterable[Tensor]) -> None:
        """Give views of its parameters among its forward's outputs memory of their own.

        They may be read when the slot has other values. The objects, and their place in the graph,
        stay.
        """
        if self.slot is None or self.slot.memory is None:
            return
        address = self.slot.memory.data_ptr()
        for tensor in outputs:
            if type(tensor) is not Tensor:
                continue
            try:
                memory = tensor.untyped_storage()
            except NotImplementedError:
                # Sparse and opaque tensors have no storage, and view no slot.
                continue
            if memory.data_ptr() == address:
                tensor.data = tensor.data.clone()

    @property
    def trains(self) -> bool:
        """Return whether a parameter requires a gradient now."""
        return any(param.requires_grad for param in self._params)

    def check_untouched(self) -> None:
        """Raise StateError where a parameter no longer views our memory, or was written sharded."""
        with plain_access():
            for (module, attribute, index, position), param in zip(
                self.owners, self._params, strict=True
            ):
                found = own_parameters(module).get(attribute)
                if found is not param:
                    raise StateError(self._describe_change(found, self.buffers[index], position))
            for buffer in self.buffers:
                touched = buffer.find_touched()
                if touched is not None:
                    param = buffer.params[touched]
                    raise StateError(self._describe_change(param, buffer, touched))

    def find_written(self) -> str:
        """Return an error about a sharded parameter that a forward has written; else "". Local.

        Most writes change the version. Writes through `data` do not, and are looked for in the
        first forwards. Each rank compares its own part.
        """
        is_sharded = self.placement is Placement.SHARDED and self.state is ShardState.UNSHARDED
        if not is_sharded or self.has_gathered_values or not self._full:
            return ""
        looks, self._looks_left = self._looks_left > 0, self._looks_left - 1
        for index, (buffer, full) in enumerate(zip(self.buffers, self._full, strict=True)):
            if not looks and not buffer.has_touched_whole():
                continue
            position = buffer.find_written(full)
            if position is None:
                continue
            module = next(m for m, _, *at in self.owners if at == [index, position])
            code = inspect.unwrap(type(module).forward).__code__
            return (
                f"unit {self.name!r}, parameter {buffer.plan.params[position].name!r}: "
                f"{type(module).__name__}.forward ({code.co_filename}:{code.co_firstlineno}), or "
                "what it calls, wrote to it, and at stage 3 the change would be lost, since only "
                f"shards are kept (rank {self.group.rank}). Use stage 2, or write between steps: "
                "zero_engine.set_full_param(param, value), or `with GatheredParameters(param, "
                "modifier_rank=0): ...`"
            )
        return ""

    def stop_looking(self) -> None:
        """Compare no values after a forward: the sanitizer does, and knows who wrote."""
        self._looks_left = 0

    def _describe_change(
        self, param: nn.Parameter | None, buffer: FlatBuffer, position: int
    ) -> str:
        plan = buffer.plan.params[position]
        expected = f"expected the {plan.dtype} parameter that was sharded"
        if param is None:
            got = "it is gone from its module"
        elif not isinstance(param, nn.Parameter):
            got = (
                "got a tensor that torch.func.functional_call() put in its place, which works on a "
                "plain copy of the model only"
            )
        elif param is not outer_of(buffer.params[position]):
            got = "got another Parameter object in its place"
        elif param.requires_grad and not plan.trainable:
            expected = "expected the frozen parameter that was sharded without gradient memory"
            got = "it now requires a gradient"
        elif self.placement is Placement.SHARDED and version_of(param) != buffer.versions[position]:
            expected = (
                "expected no write to a sharded parameter, whose values are in the ranks' shards"
            )
            got = (
                "it was changed in place, and the change is lost (a module that writes to its own "
                "parameters, as Embedding(max_norm=...) does, needs stage 2 or lower)"
            )
        else:
            kind = f"shape {tuple(param.shape)}, dtype {param.dtype}, device {param.device}"
            got = f"its memory was replaced ({kind})"
        return (
            f"unit {self.name!r}, parameter {plan.name!r}: {expected}, but {got} "
            f"(rank {self.group.rank}). Convert, move, replace, prune and parametrize parameters "
            "before shard(): .to(), .half() and load_state_dict(assign=True) after it are not "
            "followed; values go in through load_state_dict(). What is unfrozen, the next call of "
            "the model follows."
        )

    def _take_slot(self, pool: SlotPool[Unit]) -> None:
        if self.slot is None:
            # An outer unit is in use while units inside it come and go.
            alone = self.plan.is_outer
            self.slot = pool.acquire(self.plan.num_bytes, alone=alone)
        previous = self.slot.owner
        if previous is self:
            return
        if previous is not None:
            previous.give_up_slot()
        self.slot.occupy(self)
        # Views made in inference mode would not be usable after it, and these are kept.
        with torch.inference_mode(False):
            memory = self.slot.allocate(pool.device, self.plan.num_bytes)
            if not self._full:
                self._view_slot(memory)
                self.slot.count_views(len(self._full) + sum(map(len, self._views)))

    def _view_slot(self, memory: Tensor) -> None:
        self._full = [
            memory[start : start + buffer.plan.num_bytes].view(buffer.plan.dtype)
            for start, buffer in zip(self.plan.offsets, self.buffers, strict=False)
        ]
        self._views = [
            buffer.views_of(full) for buffer, full in zip(self.buffers, self._full, strict=True)
        ]

    @ranged("gather", "name")
    def _begin_to_fill(self, pool: SlotPool[Unit]) -> None:
        """Begin to fill the slot from the unit's source."""
        self.state = ShardState.GATHERING
        self._take_slot(pool)
        self._filling = self.source.start(self._full)
        self._slot_version = self.version

    @ranged("gather wait", "name")
    def _wait(self) -> None:
        filling, self._filling = self._filling, []
        # The slot has no valid version until all transfers have ended.
        version, self._slot_version = self._slot_version, -1
        for pending in filling:
            try:
                pending.wait()
            except DivergenceError:
                raise  # the error names the units
            except CommError as error:
                # The message repeats that of `error`, so the traceback need not.
                raise named(f"gathering unit {self.name!r}", error) from error.__cause__
        self._slot_version = version

    def fill_unsharded_cache(
        self, cache: ParamOffload, full: Sequence[Tensor] | None = None
    ) -> None:
        """Copy its whole buffers, in its slot now when None, to where they can be read alone."""
        for buffer, whole in zip(self.buffers, self._full if full is None else full, strict=True):
            cache.write(buffer.index, whole)


def publish(units: Sequence[Unit], *, frozen: Collection[FlatBuffer] = ()) -> None:
    """Gather parameters that are replicated from the ranks' shards, in place. Collective; waits.

    Gathers without a codec need no memory besides, and all of them are launched at once.

    Args:
        units: The units whose trainable parameters are gathered.
        frozen: Buffers that do not train, but were written, and are gathered too.
    """
    units = [unit for unit in units if unit.placement is Placement.REPLICATED]
    is_encoded = any(buffer.codec is not None for unit in units for buffer in unit.buffers)
    limit = ENCODED_IN_FLIGHT if is_encoded else len(units)
    in_flight: deque[list[Handle[Tensor]]] = deque()
    for unit in units:
        if len(in_flight) == limit:
            for handle in in_flight.popleft():
                handle.wait()
        if handles := list(_launch(unit, frozen)):
            in_flight.append(handles)
    for handle in chain.from_iterable(in_flight):
        handle.wait()


def _launch(unit: Unit, frozen: Collection[FlatBuffer]) -> Iterator[Handle[Tensor]]:
    for buffer in unit.buffers:
        if buffer.whole is None or not (buffer.plan.trainable or buffer in frozen):
            continue
        if unit.errors is not None and buffer.codec is not None:
            unit.errors.params.note(unit.name, buffer.codec, [buffer.shard])
        yield buffer.publish()
