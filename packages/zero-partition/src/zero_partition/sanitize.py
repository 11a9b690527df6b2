"""The sanitizer: poisons the memory of units after their turn, and compares values at each use."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NoReturn, TypeAlias
from weakref import WeakKeyDictionary, ref

import torch
from attrs import define, evolve, field
from torch import Tensor
from zero_comm import AgreementError, Group, all_gather_json
from zero_comm.calls import by_all_ranks
from zero_comm.sanitize import CompareLaunches, check_calls

from .errors import SanitizerError
from .memory.flat_buffer import FlatBuffer
from .plan.slots import Slot, keeps_free_memory
from .plan.stages import Placement
from .run.gradients import BufferGradients
from .run.sharded_model import OutsideUses, ParamRef, ShardedModel
from .run.unit import ShardState, Unit

# NOTE(sanitizer): the ordinary code does not know of the sanitizer, which wraps methods. What a
# slot had when its turn ended is kept beside it, and put back when the unit returns without a
# gather. So ranks launch what they launch without it, and every number is the same.

# A NaN of every floating dtype, if it is in each byte.
_POISON: Final = 0xFF
_CANARY: Final = 0xAB
# A NaN of float32; its other bits say which parameter's poison it is.
_MARK: Final = 0x7FE00000
_ALIAS: Final = "usually an alias of a gathered weight was kept (a view, weight.data)"
_PAST: Final = "usually a write past the end of a view (as_strided, a kernel with a wrong size)"
_FLIP: Final = (
    "usually load_state_dict() inside `if rank == 0:`, a write outside of step() (to .data, to its "
    "shards), a step that an exception has ended, or a flipped bit"
)

# The method that is wrapped.
_Call: TypeAlias = Callable[..., None]
_Use: TypeAlias = Callable[..., Tensor]


def sanitize(sharded: ShardedModel, group: Group) -> None:
    """Check what this model does from now on, and what is launched on this group. Collective.

    - A unit's slot is filled with NaN of a chosen bit pattern, the poison, between the unit's uses,
      until another unit takes it. Writes to poison, and writes to a gathered unit, also between its
      parameters, are found; errors name the parameter there or before. Reads give NaN. In float32
      on the CPU, where arithmetic keeps the bits of NaN, outputs of units and gradients are
      searched for poison, whose bits name the parameter. Slots of gradients are poisoned, too.
    - Gathered values are compared with checksums of the shards after the last step. After writes by
      other means, and inside `unsharded()` where parameters are offloaded, they are not compared.
    - Before each step: numbers in the optimizer's param groups, such as learning rates, and
      `requires_grad` are equal on all ranks; shards and masters in memory were changed through our
      functions only, and replicated parameters are equal on all ranks. An optimizer's state is not
      checked.
    - Stores on disk compare checksums; of an optimizer's state they name the sub-group only.
    - What ranks launch, and calls that read values of other ranks, are compared before they begin:
      see `zero_comm.sanitize.CompareLaunches`.

    Forward, backward and step then raise SanitizerError, which names unit, parameter and rank; or
    zero_comm.AgreementError, where ranks launch different collectives.
    """
    checks = _Checks(sharded.whole.rank)
    check_calls(sharded, "before_step after_step end_write compare_launches", checks)
    check_calls(sharded.outside, "_whole", checks)
    for unit in sharded.units:
        verbs = "start_unshard unshard reshard leave_slot give_up_slot release_slot _take_slot"
        verbs += " keep_views"
        check_calls(unit, verbs, checks)
        unit.stop_looking()
    for gradients in sharded.reducer.gradients:
        check_calls(gradients, "accumulate use_accumulator leave_accumulator", checks)
        gradients.check_moves()
    for param_ref in sharded.param_refs:
        checks.first.setdefault(param_ref.buffer.index, len(checks.names))
        checks.names.append(f"unit {param_ref.unit.name!r}, parameter {param_ref.saved_name!r}")
    checks.noted = checks.sums(sharded)
    checks.announce(sharded)
    # These checks stay, since ranks forget models at different times.
    for each in (group, *sharded.routes.groups):
        check_calls(each, "count", checks.launches if each is sharded.whole else CompareLaunches())
    if sharded.exposure is not None:
        # Reads are counted, too, though they are not collective.
        sharded.exposure.count_on(evolve(sharded.group))


@define(eq=False)
class _Checks:
    """Checksums and slot contents of one model on one rank, with which values are compared."""

    rank: int
    # On the group of all ranks that train the model.
    launches: CompareLaunches = field(factory=CompareLaunches)
    # Names of all parameters; buffer index -> position of its first parameter there.
    names: list[str] = field(factory=list)
    first: dict[int, int] = field(factory=dict)
    # Unit index -> its slot's bytes when it was gathered.
    snapshots: dict[int, Tensor] = field(factory=dict)
    poisoned: set[int] = field(factory=set)
    # Slot of gradients -> reference to the memory that is poison.
    idle: WeakKeyDictionary[Slot, Any] = field(factory=WeakKeyDictionary)
    # What `sums` gave after the last known write.
    noted: dict[str, int] = field(factory=dict)
    # Buffer index -> version, and checksums of each rank's pieces.
    sent: dict[int, tuple[int, list[list[int]]]] = field(factory=dict)

    # ---- Slots of units ----

    def start_unshard(self, call: _Call, unit: Unit, pool: Any) -> None:
        with self.reading(unit):
            call(pool)

    def unshard(self, call: _Call, unit: Unit, pool: Any) -> None:
        if unit.is_resident and not unit.has_gathered_values:
            self.restore(unit)
            self.poisoned.discard(unit.index)
        with self.reading(unit):
            call(pool)
        if (
            unit.slot is not None
            and not unit.has_gathered_values
            and unit.index not in self.snapshots
        ):
            self.keep(unit)

    def reshard(self, call: _Call, unit: Unit) -> None:
        is_whole = unit.state is ShardState.UNSHARDED and not unit.has_gathered_values
        is_whole = is_whole and unit.index in self.snapshots.keys() - self.poisoned
        if is_whole:
            self.check(unit, self.snapshots[unit.index], "what was gathered", _PAST)
        call()
        if is_whole:
            self.poison(unit, _memory(unit))
            self.poisoned.add(unit.index)

    def leave_slot(self, _: _Call, unit: Unit) -> None:
        """Keep the memory until the step, so that uses of it are found."""
        unit.reshard()

    def give_up_slot(self, call: _Call, unit: Unit, *pool: Any) -> None:
        if not unit.depth:
            unit.reshard()
        # Secondary shards are copied from there.
        self.restore(unit)
        self.poisoned.discard(unit.index)
        self.snapshots.pop(unit.index, None)
        call(*pool)

    release_slot = take_slot = give_up_slot

    def keep_views(self, call: _Call, unit: Unit, outputs: Iterable[Tensor]) -> None:
        outputs = tuple(outputs)
        self.restore(unit)
        call(outputs)
        if unit.index in self.poisoned:
            self.poison(unit, _memory(unit))
        self.look_for_poison(outputs, f"the output of unit {unit.name!r}")

    def keep(self, unit: Unit) -> None:
        """Compare gathered values with checksums of their shards, and copy the slot's bytes.

        Gaps between parameters are filled with a canary before. The values stay the same until
        `reshard`.
        """
        memory = _memory(unit)
        for buffer, full in _wholes(unit, memory):
            version, rows = self.sent.get(buffer.index, (-1, []))
            layout, is_known = (
                buffer.plan.layout,
                version == unit.version and unit.unsharded_cache is None,
            )
            for rank, row in enumerate(rows if is_known else ()):
                for piece, expected in zip(layout.pieces(rank), row, strict=True):
                    span = piece.in_shard.shifted(layout.shard(rank).start)
                    if (found := _checksum(full[span.as_slice()])) != expected:
                        what = self.names[self.first[buffer.index] + piece.index]
                        wanted = f"its shard as after the last step (checksum {expected:08x})"
                        _fail(what, rank, wanted, f"{found:08x} on rank {self.rank}", _FLIP)
            # Not where a node's copies are made of the slot, as their padding is sent.
            for gap in layout.gaps if unit.secondary is None else ():
                full[gap.as_slice()].view(torch.uint8).fill_(_CANARY)
        self.snapshots[unit.index] = memory.clone()

    def restore(self, unit: Unit) -> None:
        if unit.slot is not None and not unit.slot.allocated_bytes:
            # The step has given the memory back.
            self.poisoned.discard(unit.index)
        if unit.index in self.poisoned:
            expected = self.poison(unit, torch.empty_like(_memory(unit)))
            self.check(unit, expected, "no use after its turn", _ALIAS)
            _memory(unit).copy_(self.snapshots[unit.index])

    def poison(self, unit: Unit, memory: Tensor) -> Tensor:
        memory.fill_(_POISON)
        for buffer, full in _wholes(unit, memory):
            for number, span in enumerate(buffer.plan.layout.spans, self.first[buffer.index]):
                if full.dtype is torch.float32:
                    full[span.as_slice()].view(torch.int32).fill_(_MARK + number)
        return memory

    def check(self, unit: Unit, expected: Tensor, wanted: str, cause: str) -> None:
        memory, what = _memory(unit), f"unit {unit.name!r}, the rest of its slot"
        if torch.equal(memory, expected):
            return
        byte = int((memory != expected).nonzero()[0])
        for buffer, start in zip(unit.buffers, unit.plan.offsets, strict=False):
            element = (byte - start) // buffer.plan.dtype.itemsize
            for number, span in enumerate(buffer.plan.layout.spans, self.first[buffer.index]):
                # The element is in this span, or in the gap after it.
                if span.start <= element < buffer.plan.layout.numel:
                    what = f"{self.names[number]}, element {element - span.start} of {span.numel}"
        _fail(what, self.rank, wanted, "a write", cause)

    def look_for_poison(self, tensors: Iterable[Tensor], where: str) -> None:
        for tensor in tensors:
            is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
            if is_plain and tensor.dtype is torch.float32 and not tensor.is_nested:
                bits = tensor.detach()[tensor.detach().isnan()].view(torch.int32)
                for number in (bits[bits & _MARK == _MARK] % 2**21)[:1].tolist():
                    # Any other number is no poison.
                    if number < len(self.names):
                        found = f"a read, whose NaN is in {where}"
                        _fail(self.names[number], self.rank, "no use after its turn", found, _ALIAS)

    # ---- Slots of gradients ----

    def accumulate(self, call: _Call, g: BufferGradients, grads: Mapping[int, Tensor]) -> None:
        for position, grad in grads.items():
            name = self.names[self.first[g.buffer.index] + position]
            self.look_for_poison([grad], f"the gradient of {name}")
        call(grads)

    def use_accumulator(self, call: _Call, g: BufferGradients, memory: Tensor, slot: Any) -> None:
        known = None if slot is None else self.idle.pop(slot, None)
        if known is not None and known() is slot.memory and (slot.memory != _POISON).any():
            what = f"unit {g.unit.name!r}, the slot of its gradients"
            _fail(what, self.rank, "no use between turns", "a write", _ALIAS)
        call(memory, slot)

    def leave_accumulator(self, call: _Call, g: BufferGradients) -> None:
        slot = g.slot
        if slot is not None and slot.memory is not None and keeps_free_memory(slot.memory.device):
            slot.memory.fill_(_POISON)
            self.idle[slot] = ref(slot.memory)
        call()

    def compare_launches(
        self, call: _Call, model: ShardedModel, what: str, *, at_once: bool = False
    ) -> None:
        """Compare a call that all ranks must make: alone it might only read its peers' memory."""
        self.compare(what, model)
        call(what, at_once=at_once)

    def whole(
        self,
        call: _Use,
        outside: OutsideUses,
        param_ref: ParamRef,
        what: str,
        *,
        needs_grad: bool,
    ) -> Tensor:
        """Compare a use outside of forwards, such as a penalty; forwards may be made alone.

        Without autograd such a use is refused, on one rank as on all.
        """
        model = outside.sharded
        if needs_grad and not model.is_running and not param_ref.buffer.plan.ranks:
            used = f"{what}() of parameter {param_ref.name!r}"
            remedy = f"{used} gathers it, so every rank must make this use, not only rank 0"
            self.launches.compare(used, model.whole, remedy)
        return call(param_ref, what, needs_grad=needs_grad)

    def compare(self, what: str, model: ShardedModel) -> None:
        self.launches.compare(what, model.whole, by_all_ranks(what))

    # ---- Stored values ----

    def before_step(self, call: _Call, model: ShardedModel, **named: Any) -> None:
        # No remedy of its own: with uneven batches, ranks differ in an earlier reduction.
        self.launches.compare("optimizer.step()", model.whole, "")
        now = {} if model.parked is not None else self.sums(model)
        changed = [
            (name, self.ranks_of(model, name))
            for name, value in now.items()
            if self.noted.get(name, value) != value
        ]
        groups = [] if model.optimizer is None else model.optimizer.param_groups
        options = [
            {name: repr(value) for name, value in group.items() if isinstance(value, int | float)}
            for group in groups
        ]
        frozen = [
            param_ref.name
            for param_ref in model.param_refs
            if not param_ref.param.requires_grad and not param_ref.buffer.plan.ranks
        ]
        said = all_gather_json([changed, now, options, frozen], group=model.whole)
        for rank, (found, theirs, others, of_rank) in enumerate(said):
            _compare_options(said[0][2], others, rank)
            _compare_frozen(said[0][3], of_rank, rank)
            for name, ranks in found:
                if any(said[other][1].get(name) != theirs[name] for other in ranks):
                    _fail(name, rank, "what the last step has left", "other values", _FLIP)
        call(**named)

    def ranks_of(self, model: ShardedModel, name: str) -> list[int]:
        """Return the ranks that have the parameter of an entry of `sums`. Local."""
        for buffer in model.buffers:
            first, own = self.first[buffer.index], model.routes.of(buffer.plan).own
            names = self.names[first : first + len(buffer.params)]
            if own is not None and name.startswith(tuple(names)):
                return [*own.positions]
        return [*range(model.whole.world_size)]

    def after_step(self, call: _Call, model: ShardedModel) -> None:
        call()
        self.noted = self.sums(model)
        self.announce(model)

    def end_write(self, call: _Call, model: ShardedModel, *only: Unit | None) -> None:
        call(*only)
        self.noted = self.sums(model)

    def sums(self, model: ShardedModel) -> dict[str, int]:
        """Return checksums of all values in memory of this rank, by their names in errors."""
        return {
            f"{self.names[self.first[buffer.index] + position]}{kind}": _checksum(values)
            for buffer in model.buffers
            for kind, position, values in _sharded_values(buffer)
        }

    def announce(self, model: ShardedModel) -> None:
        """Tell all ranks the checksums of what this one gives in gathers. Collective."""
        sharded = [unit for unit in model.units if unit.placement is Placement.SHARDED]
        buffers = [(unit, buffer) for unit in sharded for buffer in unit.buffers]
        mine = []
        for unit, buffer in buffers:
            with self.reading(unit):
                values, codec = buffer.shard, buffer.gather_codec
            if codec is not None and buffer.model_shard.codec is None:
                values = codec.decode(codec.encode(values), torch.empty_like(values))
            mine.append([_checksum(values[piece.in_shard.as_slice()]) for piece in buffer.pieces])
        said = all_gather_json(mine, group=model.group) if buffers else []
        for position, (unit, buffer) in enumerate(buffers):
            own = model.routes.of(buffer.plan).own
            rows = said if own is None else [said[rank] for rank in own.positions]
            self.sent[buffer.index] = unit.version, [row[position] for row in rows]

    @contextmanager
    def reading(self, unit: Unit) -> Iterator[None]:
        """Raise SanitizerError with the unit's parameters where a store finds a wrong checksum."""
        try:
            yield
        except OSError as error:
            params = (param.name for buffer in unit.buffers for param in buffer.plan.params)
            what = f"unit {unit.name!r}, parameters {', '.join(params)}"
            _fail(what, self.rank, "what was written last", "other bytes", str(error))


def _fail(what: str, rank: int, wanted: str, found: str, cause: str) -> NoReturn:
    raise SanitizerError(f"{what} (rank {rank}): expected {wanted}, found {found}; {cause}")


def _checksum(values: Tensor) -> int:
    flat = values.detach().contiguous().view(-1).view(torch.uint8)
    # Of a copy, since NumPy pins what it has seen.
    return zlib.crc32(flat.to("cpu", copy=True).numpy().data)


def _compare_options(first: list[dict[str, str]], others: list[dict[str, str]], rank: int) -> None:
    for index, (one, other) in enumerate(zip(first, others, strict=False)):
        for name in one.keys() & other.keys():
            if one[name] != other[name]:
                raise AgreementError(
                    f"ranks disagree on param_groups[{index}]['{name}'] of the optimizer: rank 0 "
                    f"has {one[name]}, rank {rank} has {other[name]}; change options on all ranks, "
                    "also by a scheduler's step, and not inside `if rank == 0:`"
                )


def _compare_frozen(first: list[str], others: list[str], rank: int) -> None:
    for name in sorted({*first} ^ {*others}):
        is_trained = name in others
        raise AgreementError(
            f"ranks disagree on {name!r}.requires_grad: rank 0 has {is_trained}, rank {rank} has "
            f"{not is_trained}, and the mean counts its gradient as zero where there is none; "
            "freeze and unfreeze on all ranks, and not inside `if rank == 0:`"
        )


def _memory(unit: Unit) -> Tensor:
    assert unit.slot is not None and unit.slot.memory is not None, "it has its slot"
    return unit.slot.memory[: unit.slot.allocated_bytes]


def _wholes(unit: Unit, memory: Tensor) -> Iterator[tuple[FlatBuffer, Tensor]]:
    """Yield the buffers of a unit, and the memory of each in a slot's memory."""
    for start, buffer in zip(unit.plan.offsets, unit.buffers, strict=False):
        yield buffer, memory[start : start + buffer.plan.num_bytes].view(buffer.plan.dtype)


def _sharded_values(buffer: FlatBuffer) -> Iterator[tuple[str, int, Tensor]]:
    """Yield the values in memory of this rank, with kind and position of their parameter."""
    if buffer.whole is not None:
        for position, span in enumerate(buffer.plan.layout.spans):
            yield "", position, buffer.whole[span.as_slice()]
    shard = None if buffer.is_view else buffer.model_shard.memory
    master = buffer.main_shard.memory if buffer.has_masters else None
    for kind, memory in ((", its shard", shard), (", its master", master)):
        if memory is not None:
            for piece in buffer.pieces:
                yield kind, piece.index, memory[piece.in_shard.as_slice()]
