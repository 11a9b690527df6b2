"""One partitioned model: its units, their schedule, its gradients and its optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from typing import Any, Final, NoReturn, final
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from zero_comm import CommError, Exposure, Group, Handle, Traffic, all_gather_flat, ranges
from zero_comm.calls import in_lines
from zero_comm.ranges import is_profiled, ranged

from zero_partition.chained import members_of
from zero_partition.dtensors import like, outer_of
from zero_partition.errors import ShardedParamError, StateError
from zero_partition.memory.flat_buffer import FlatBuffer
from zero_partition.plan.config import StateDictKind
from zero_partition.plan.layout import ParameterPlan, Piece, Span
from zero_partition.plan.stages import Placement, Placements, shown
from zero_partition.plan.wire import Routes
from zero_partition.stand_in import (
    GradientGuard,
    ParamShard,
    Parked,
    ShardedParamData,
    StateKind,
    Unpublished,
    find_owner,
    late_optimizer,
    record_owner,
    stand_in_type,
)
from zero_partition.torch_private import (
    call_after_backward,
    is_in_backward,
    is_in_ddp_forward,
    is_in_ddp_init,
    modules_being_called,
    own_modules,
    own_parameters,
    pipeline_that_splits_backward,
    plain_access,
    storage_key,
    version_of,
    will_accumulate,
)

from .gradients import GradientReducer
from .residence import ModelOffload
from .schedule import ForwardCall, Schedule
from .step import apply_delayed_update, step_offloaded
from .unit import ShardState, Unit, publish

_requires_grad_of: Final = attrgetter("requires_grad")


class ModelPhase(Enum):
    """Phases of a model; each value is the text of the error for a call refused in that phase.

    `ShardedModel.require` raises it. A forward may run inside a context that gathers parameters, so
    several phases can apply at a time. Of IDLE, BACKWARD and FAILED exactly one does;
    BACKWARD_MOVES has the legal changes between these.
    """

    IDLE = ""
    BACKWARD = (
        "{what} was called while a backward is running; gradients are there when backward() has "
        "returned (rank {rank})"
    )
    FORWARD = "{what} was called while a forward is running; call it between steps"
    FAILED = (
        "{what} after a backward that an exception ended: its gradients are incomplete. Call "
        "optimizer.zero_grad() and run forward and backward again."
    )
    GATHERED = (
        "{what} inside {context}: the parameters that are whole there would be out of date or "
        "lost; leave the context first (rank {rank})"
    )
    OFFLOADED = (
        "{what} needs state that offload_states() has parked: {kinds} (rank {rank}); call "
        "zero_engine.reload_states(model) on every rank first"
    )


BACKWARD_MOVES: Final = {
    ModelPhase.IDLE: {ModelPhase.IDLE, ModelPhase.BACKWARD},
    # The backward has ended, or an exception has ended it.
    ModelPhase.BACKWARD: {ModelPhase.IDLE, ModelPhase.FAILED},
    # Its gradients are dropped.
    ModelPhase.FAILED: {ModelPhase.IDLE},
}


@frozen(eq=False)
class ParamRef:
    """A parameter of a sharded model, and its place in a flat buffer there."""

    sharded: ShardedModel
    unit: Unit
    buffer: FlatBuffer
    # Position among the buffer's parameters.
    position: int
    param: nn.Parameter
    plan: ParameterPlan

    @property
    def name(self) -> str:
        """The first of the parameter's names."""
        return self.plan.name

    @property
    def saved_name(self) -> str:
        """Return the name in checkpoints: with a number where other ranks use it for another."""
        own = self.sharded.routes.of(self.buffer.plan).own
        return f"{self.name}@{own.index}" if own is not None and own.shares_names else self.name

    @property
    def group(self) -> Group:
        """The ranks it is sharded over."""
        return self.buffer.group

    @property
    def whole(self) -> Group:
        """All ranks that train it."""
        return self.sharded.routes.of(self.buffer.plan).whole

    @property
    def piece(self) -> Piece | None:
        """The part of it that this rank keeps, None if there is none."""
        return self.buffer.piece_of(self.position)

    @property
    def kept(self) -> Span:
        """The elements of it that this rank keeps; maybe none."""
        return Span(0, 0) if self.piece is None else self.piece.in_tensor

    @property
    def is_trainable(self) -> bool:
        """Return whether it required a gradient when the model was sharded."""
        return self.buffer.plan.trainable

    @property
    def is_gathered(self) -> bool:
        """Return whether a context has gathered its full values, in memory of their own."""
        return self.position in self.buffer.pinned


def find_param_ref(param: Tensor) -> ParamRef | None:
    """Return the `ParamRef` of this very object, None if it belongs to no sharded model."""
    return find_owner(param)


def param_ref_of(param: Tensor, *, what: str) -> ParamRef:
    """Return the `ParamRef` of this very object.

    Raises:
        StateError: It is no tensor, or belongs to no sharded model; `what` names the user's call.
    """
    param_ref = find_param_ref(param) if isinstance(param, Tensor) else None
    if param_ref is None:
        got = shown(param)
        if isinstance(param, Tensor):
            got = f"a {type(param).__name__} of shape {tuple(param.shape)}"
        raise StateError(
            f"{what}: expected a Parameter of a sharded model, got {got} that belongs to none; "
            "pass the model's own object, such as model.layer.weight, not a copy, a view or the "
            "optimizer's shard"
        )
    return param_ref


def sort_places(param_refs: Iterable[ParamRef]) -> list[ParamRef]:
    """Return each place once, in the same order on every rank."""
    return sorted(
        set(param_refs), key=lambda param_ref: (param_ref.buffer.index, param_ref.position)
    )


def part_of(param_ref: ParamRef, shard: Tensor | None = None) -> Tensor:
    """This rank's part of a parameter, as a 1-D view, maybe empty.

    Args:
        param_ref: The parameter.
        shard: Any flat shard of the buffer's layout; the buffer's own shard when None.
    """
    source = param_ref.buffer.shard if shard is None else shard
    piece = param_ref.piece
    return source[:0] if piece is None else source[piece.in_shard.as_slice()]


# NOTE(gathers): beside units in their slots, there are two kinds of whole values: one parameter is
# gathered from the ranks' parts of it, or a flat buffer from their shards. Both get memory of their
# own.


def launch_whole(param_ref: ParamRef, part: Tensor | None = None) -> Callable[..., Tensor]:
    """Launch the gather of one parameter from the ranks' parts.

    Collective, unless `part` is None and the shards are exposed or the unit has a whole copy: then
    the values are read at once.

    Args:
        param_ref: The parameter.
        part: This rank's values, 1-D, as many as its part of the parameter has; those of the
            buffer's own shard when None.

    Returns:
        Call it once, with `timeout_s` if need be, to wait; gives the whole in the parameter's
        shape, memory of its own.
    """
    buffer, group, unit = param_ref.buffer, param_ref.group, param_ref.unit
    layout = buffer.plan.layout
    span = layout.spans[param_ref.position]
    overlaps = [span.overlap(shard) or Span(shard.start, shard.start) for shard in layout.shards]
    splits = [overlap.numel for overlap in overlaps]
    dtype = buffer.model_shard.dtype if part is None else part.dtype
    whole = torch.empty(span.numel, dtype=dtype, device=group.device)
    handle: Handle[Tensor] | None = None
    if part is None and unit.unsharded_cache is not None:
        full = torch.empty(layout.numel, dtype=dtype, device=group.device)
        unit.unsharded_cache.read(buffer.index, full).wait()
        whole.copy_(full[span.as_slice()])
    elif part is None and unit.exposure is not None:
        pairs = zip(overlaps, layout.shards, strict=True)
        starts = [overlap.start - shard.start for overlap, shard in pairs]
        unit.exposure.gather(buffer.shard, whole, splits=splits, starts=starts)
    elif whole.numel():
        part = part_of(param_ref) if part is None else part.to(group.device)
        handle = all_gather_flat(
            whole, splits=splits, group=group, shard=part, tag=buffer.gather_tag
        )

    def wait(timeout_s: float | None = None) -> Tensor:
        if handle is not None:
            try:
                handle.wait(timeout_s=timeout_s)
            except CommError as error:
                raise CommError(
                    f"gathering parameter {param_ref.name!r} (rank {group.rank}): {error}"
                ) from error.__cause__
        return whole.view(param_ref.plan.shape)

    return wait


def launch_buffer(
    buffer: FlatBuffer, shard: Tensor | None = None
) -> Callable[[], tuple[Tensor, ...]]:
    """Launch the gather of all parameters of a flat buffer as one. Collective.

    Args:
        buffer: Flat buffer of the parameters.
        shard: Any flat shard of its layout; its own shard when None.

    Returns:
        Call it once to wait; gives each parameter's value, views of one new tensor.
    """
    shard = buffer.shard if shard is None else shard
    full = shard.new_empty(buffer.plan.layout.numel)
    handle = buffer.all_gather(full, shard=shard, is_exact=True)
    return lambda: buffer.views_of(handle.wait())


def launch_trained_buffer(buffer: FlatBuffer) -> Callable[[], tuple[Tensor, ...]]:
    """Launch the gather of all parameters of a flat buffer as they are updated. Collective.

    As `launch_buffer`; of masters, if there are some. Where parameters are replicated without
    masters or a codec, nothing is sent and the result is views of the buffer itself.
    """
    buffer.follow_writes()
    if buffer.whole is None or buffer.has_masters or buffer.codec is not None:
        return launch_buffer(buffer, buffer.trained.to(buffer.group.device))
    return partial(buffer.views_of, buffer.whole)


def write_whole(param_ref: ParamRef, value: Tensor) -> None:
    """Make `value`, the same on every rank, the parameter's. Every rank calls it."""
    param_ref.sharded.begin_write()
    param_ref.buffer.fill(param_ref.position, value)
    param_ref.sharded.end_write(param_ref.unit)


def refuse_ddp() -> NoReturn:
    """Raise StateError for a sharded model that DistributedDataParallel wraps. Local."""
    raise StateError(
        "a sharded model inside DistributedDataParallel: both would reduce its gradients. "
        "zero_engine.shard() does what the wrapper does, so call the model itself. Trainer of "
        "transformers and prepare() of accelerate wrap models: use ZeroTrainer and ZeroAccelerator "
        "of zero_engine.integrations"
    )


# NOTE(outside): a parameter that is used outside its unit is not gathered into the unit's slot,
# since the unit's forward and backward take and leave that by their own rules. It gets memory of
# its own, which autograd keeps for as long as a graph needs it. It enters the graph through a node
# of ours, so that operations save that memory and never the Parameter, which is sharded again when
# backward runs.

# NOTE(parts): `generate()` of an encoder-decoder model calls the encoder alone, `peft` calls the
# model inside, CLIP's `get_image_features` one tower. Such a call is a forward like the model's:
# all ranks make it, since gathers of the units inside need all ranks. Hooks on every module that is
# no unit would cost time in each of their calls. Instead we look at the stack, and only before we
# would raise an error. The result is not kept, since no hook of ours sees the end of such a call.

# Seconds to wait for a gather outside forward and backward, which some ranks may not make.
_PATIENCE_S: Final = 60.0


@define(eq=False, repr=False)
class OutsideUses:
    """Full values of parameters used outside their unit, while they may be used again."""

    sharded: ShardedModel
    num_gathers: int = field(default=0, init=False)
    _values: dict[ParamRef, Tensor] = field(factory=dict, init=False)
    _in_flight: dict[ParamRef, Callable[..., Tensor]] = field(factory=dict, init=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of the values that are kept here."""
        return sum(value.nbytes for value in self._values.values())

    def launch(self, param_ref: ParamRef) -> None:
        """Launch the gather ahead of the use. Collective."""
        self.sharded.require("a gather ahead of a forward", StateKind.PARAMS)
        is_whole = param_ref.unit.state is ShardState.UNSHARDED or param_ref.is_gathered
        if not is_whole and param_ref not in self._values:
            self._launch(param_ref)

    def value(self, param_ref: ParamRef, tensor: Tensor, what: str, *, needs_grad: bool) -> Tensor:
        """Return a sharded parameter's full values, for a function called with it. Collective.

        Args:
            param_ref: The parameter.
            tensor: The object that was used: the parameter, or its `data`.
            what: The function that is called with it.
            needs_grad: Whether autograd records the call.
        """
        # Of each parameter, to send it to all ranks: of one that is frozen it would be refused.
        if what == "detach" and is_in_ddp_init():
            refuse_ddp()
        whole = self._whole(param_ref, what, needs_grad=needs_grad)
        whole = like(tensor, whole)
        if isinstance(tensor, ShardedParamData) or not (needs_grad and tensor.requires_grad):
            return whole
        return _Enter.apply(tensor, whole, param_ref, param_ref.unit.version)  # type: ignore[no-any-return]

    def forget(self) -> None:
        """Drop the values; graphs keep those that they need. Waits for gathers in flight."""
        while self._in_flight:
            # One at a time, so that a gather that fails is not waited for again.
            self._in_flight.popitem()[1]()
        self._values.clear()

    def refuse_write(self, param_ref: ParamRef, what: str) -> NoReturn:
        """Raise ShardedParamError for a write to a parameter that is sharded."""
        said = (
            f"{what}() would write to parameter {param_ref.name!r} while it is sharded, and the "
            f"change would be lost (rank {self.sharded.whole.rank})"
        )
        if late := late_optimizer():
            raise ShardedParamError(f"{late}{said}")
        raise ShardedParamError(
            f"{said}. To write to it, on every rank: `with GatheredParameters(param, "
            "modifier_rank=0): ...`, set_full_param(param, value), or load_state_dict(). Where a "
            "library writes, as merge_and_unload() of peft does: zero_engine.unshard(model, "
            "optimizer) first. A copy to write to is full_param(param).clone()"
        )

    def _whole(self, param_ref: ParamRef, what: str, *, needs_grad: bool) -> Tensor:
        sharded = self.sharded
        sharded.require(f"{what}() of parameter {param_ref.name!r}", StateKind.PARAMS)
        sharded.follow_shard_writes()
        pinned = param_ref.buffer.pinned.get(param_ref.position)
        if pinned is not None:
            return pinned
        if param_ref in self._values:
            return self._values[param_ref]
        is_inside = sharded.is_running
        is_kept = is_inside or needs_grad
        is_alone = param_ref.group.world_size == 1 or param_ref.unit.unsharded_cache is not None
        if not is_kept and not is_alone:
            own = set(map(id, sharded.model.modules()))
            if not any(id(module) in own for module in modules_being_called()):  # see NOTE(parts)
                self._refuse_read(param_ref, what)
        self._launch(param_ref)
        wait = self._in_flight.pop(param_ref)
        value = wait(timeout_s=None if is_inside else _PATIENCE_S)
        if is_kept:
            self._values[param_ref] = value
        return value

    def _launch(self, param_ref: ParamRef) -> None:
        """Launch the gather of what a unit's would give, so that both are the same values."""
        if param_ref in self._in_flight:
            return
        part, buffer, codec = None, param_ref.buffer, param_ref.buffer.gather_codec
        # A codec encodes blocks of the shard, not of the parameter.
        if codec is not None and param_ref.unit.unsharded_cache is None:
            shard = buffer.shard
            part = part_of(param_ref, codec.decode(codec.encode(shard), torch.empty_like(shard)))
        self.num_gathers += 1
        self._in_flight[param_ref] = launch_whole(param_ref, part)

    def _refuse_read(self, param_ref: ParamRef, what: str) -> NoReturn:
        group = self.sharded.group
        raise ShardedParamError(
            in_lines(
                f"{what}() would read parameter {param_ref.name!r} while it is sharded over "
                f"{group.world_size} ranks (rank {group.rank}). Only calls of the model or of a "
                "module in it, and uses that autograd records, gather it: every rank has to take "
                "part",
                "on every rank: full_param(param), or `with GatheredParameters(param): ...`; of "
                "all at once: `with unsharded(model): ...`",
                "of this rank's part alone: local_param(param)",
                "an average of the weights is ShardedAverage(model, decay=...)",
                "to convert or move a model, do it before shard()",
            )
        )


class _Enter(torch.autograd.Function):
    """Whole values of a parameter enter a graph; their gradient leaves to the parameter."""

    @staticmethod
    def forward(
        ctx: Any, param: Tensor, whole: Tensor, param_ref: ParamRef, version: int
    ) -> Tensor:
        ctx.param_ref, ctx.version = param_ref, version
        return whole.detach()

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, None, None, None]:
        param_ref = ctx.param_ref
        if param_ref.unit.version != ctx.version:
            raise StateError(
                f"parameter {param_ref.name!r}, used outside its unit {param_ref.unit.name!r}: it "
                "was changed between this graph's forward and its backward (by optimizer.step() or "
                "load_state_dict()), so the gradient would be wrong; run the forward again"
            )
        param_ref.sharded.expect_from_outside(param_ref)
        return grad, None, None, None


def _given_by_autograd(param: Tensor) -> Tensor | None:
    """Return the gradient that autograd has just accumulated, which a guard may have received."""
    grad = param.grad
    return grad.received if isinstance(grad, GradientGuard) else grad


@define(eq=False, repr=False)
class _EndOfBackward:
    """Callback for the end of a backward; autograd drops it uncalled after an exception."""

    sharded: ReferenceType[ShardedModel]
    was_called: bool = False

    def __call__(self) -> None:
        if (sharded := self.sharded()) is not None:
            sharded.close_backward()
        self.was_called = True

    def __del__(self) -> None:
        if not self.was_called and (sharded := self.sharded()) is not None:
            sharded.fail_backward()


@final
@define(eq=False, repr=False)
class ShardedModel:
    """Run-time state of one sharded model; the hooks on the user's module call its methods.

    These are collective unless they say Local.
    """

    model: nn.Module
    routes: Routes
    placements: Placements
    units: tuple[Unit, ...]
    schedule: Schedule
    reducer: GradientReducer
    residence: ModelOffload
    optimizer: torch.optim.Optimizer | None
    # Gives access to the ranks' sharded parameters; None where peers cannot read them.
    exposure: Exposure | None
    # What `state_dict()` does with parameters that are sharded.
    state_dict: StateDictKind
    # Returns how many calls of the model's modules are on a stack now.
    count_calls: Callable[[ShardedModel], int]
    # Partitions the model anew; None: cannot be done.
    again: Callable[[ShardedModel], None] | None = None
    # Dtypes to which the model's inputs and outputs are converted; None: they stay as they are.
    input_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    # Parameter's id -> value in `state_dict()`, which has others by name alone; see `exporting`.
    exported: Mapping[int, Tensor] | None = field(default=None, init=False)
    # Flat buffers of all units, and references to all parameters, in the units' order.
    buffers: tuple[FlatBuffer, ...] = field(init=False)
    param_refs: tuple[ParamRef, ...] = field(init=False)
    outside: OutsideUses = field(init=False)
    # Number of forwards of the model that are running.
    forwards: int = field(default=0, init=False)
    # Module -> hook that launches gathers before its forward; see `register_external_parameter`.
    ahead: WeakKeyDictionary[nn.Module, Any] = field(factory=WeakKeyDictionary, init=False)
    # Names, as users know them, of contexts that are open, and the parameters that they gathered.
    open_contexts: list[str] = field(factory=list, init=False)
    # Averages of the parameters, in the order in which they were made, the same on each rank.
    averages: WeakKeyDictionary[Any, None] = field(factory=WeakKeyDictionary, init=False)
    gathered: set[ParamRef] = field(factory=set, init=False)
    # Reports of contexts that this rank has not read; see `GatheredContext.unread`.
    unread: list[Handle[Tensor]] = field(factory=list, init=False)
    # Every module's dictionaries of parameters and children, and the objects that were in them.
    _contents: list[dict] = field(init=False)
    _seen: list[Any] = field(init=False)
    # Functions that remove our hooks.
    removers: list[Callable[[], None]] = field(factory=list, init=False)
    # Functions to call once before the next write by any code.
    before_write: list[Callable[[], None]] = field(factory=list, init=False)
    # States that `offload_states` has moved away between phases.
    parked: Parked | None = field(default=None, init=False)
    # Whether the optimizer has stepped, and so has its state.
    has_stepped: bool = field(default=False, init=False)
    # Backwards that have begun since the last step.
    num_backwards: int = field(default=0, init=False)
    _found_inf: Tensor | None = field(default=None, init=False)  # see NOTE(in_step) in norm.py
    # Parameters that the optimizer steps at stages 1 to 3.
    _shards: list[nn.Parameter] = field(init=False)
    # Parameters that did not train when the model was partitioned.
    _frozen: list[nn.Parameter] = field(init=False)
    # Contents of the optimizer's param groups when the model was partitioned.
    _in_groups: list[list[Tensor]] = field(init=False)
    # Whether shards were written outside a step and are not published yet.
    is_shard_written: bool = field(default=False, init=False)
    _is_stepping: bool = field(default=False, init=False)
    _published: list[int] = field(factory=list, init=False)  # see `_has_written`
    _hidden: list[tuple[nn.Parameter, Tensor]] = field(factory=list, init=False)  # see `update`
    # Open while the optimizer steps, if ranges are recorded.
    _step_range: contextlib.ExitStack | None = field(default=None, init=False)
    # IDLE, BACKWARD, or FAILED: an exception ended the last one. Changed by `_move` only.
    backward: ModelPhase = field(default=ModelPhase.IDLE, init=False)
    # Whether this backward has create_graph=True; whether parameters accumulate its gradients.
    _makes_graph: bool = field(default=False, init=False)
    _accumulates: bool = field(default=True, init=False)

    def __attrs_post_init__(self) -> None:
        self.buffers = tuple(buffer for unit in self.units for buffer in unit.buffers)
        self.outside = OutsideUses(self)
        self.param_refs = tuple(
            ParamRef(self, unit, buffer, position, param, plan)
            for unit in self.units
            for buffer in unit.buffers
            for position, (param, plan) in enumerate(
                zip(buffer.params, buffer.plan.params, strict=True)
            )
        )
        for param_ref in self.param_refs:
            record_owner(param_ref.param, param_ref)
            record_owner(outer_of(param_ref.param), param_ref)
        own, shards = ref(self), [p for buffer in self.buffers for p in buffer.shard_params]
        self._shards = shards if self.shards_state and self.optimizer is not None else []
        for shard in self._shards:
            shard.sharded = own  # type: ignore[attr-defined]
        self._watch_shards(is_watched=True)
        frozen = (buffer.params for buffer in self.buffers if not buffer.plan.trainable)
        self._frozen = list(chain.from_iterable(frozen))
        self._in_groups = self._parameters_of_groups()
        self._look_at_modules()

    def _groups(self) -> list[dict[str, Any]]:
        """Return the param groups of the optimizer, or of each of several."""
        return [group for member in members_of(self.optimizer) for group in member.param_groups]

    def _parameters_of_groups(self) -> list[list[Tensor]]:
        return [[*group["params"]] for group in self._groups()]

    def shards_and_params(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Give each parameter of the optimizer's with that of the model which it is a shard of."""
        for buffer in self.buffers if self.shards_state else ():
            yield from zip(buffer.shard_params, buffer.params, strict=True)

    def is_outdated(self) -> bool:
        """Return whether a parameter was unfrozen, or the optimizer got others. Local.

        Asked as a forward of the model begins; the same on every rank. Not while autograd is off:
        adapters are switched on and off around an evaluation, which needs no gradient memory.
        """
        if self.forwards or self.again is None or not torch.is_grad_enabled() or is_in_backward():
            return False
        if True in map(_requires_grad_of, self._frozen):
            return True
        now, then = self._parameters_of_groups(), self._in_groups
        return [*map(len, now)] != [*map(len, then)] or not all(
            map(is_, chain.from_iterable(now), chain.from_iterable(then))
        )

    def partition_again(self) -> None:
        """Lay units and state out anew, for the model and optimizer as they are now. Collective."""
        assert self.again is not None, "asked before"
        self.again(self)

    @property
    def group(self) -> Group:
        """The ranks it is sharded over: all that train it, or those of one replica."""
        return self.routes.shards

    @property
    def whole(self) -> Group:
        """All ranks that train it."""
        return self.routes.whole

    def refuse_own_ranks(self, what: str) -> None:
        """Raise StateError where ranks have different parameters, which `what` has no place for."""
        if self.routes.of_groups:
            raise StateError(
                f"{what} takes rank 0's parameters for those of all ranks, and those of "
                f"{', '.join(self.routes.of_groups)} (ZeroConfig.groups) differ from rank to rank "
                f"(rank {self.whole.rank}). Call zero_engine.save() or load(), or full_param() or "
                "set_full_param() on every rank, each for its own"
            )

    @property
    def shards_state(self) -> bool:
        """Return whether optimizer state is sharded: each rank steps its shards of parameters."""
        return self.placements.optim is Placement.SHARDED

    @property
    def is_exact(self) -> bool:
        """Return whether this rank has all parameters in full, not rounded by a codec."""
        is_whole = self.placements.params is Placement.REPLICATED
        return is_whole and all(unit.codec is None for unit in self.units)

    @property
    def access_tag(self) -> int:
        """Identity of what gathers of single parameters agree on."""
        return self.reducer.control_tag + 1

    def begin_forward(self) -> None:
        """The model's forward starts: clean up after an exception."""
        self.require("a forward", StateKind.PARAMS)
        if not is_in_backward():
            self.end_broken_calls(beginning=1)
            if is_profiled() is not ranges.follows_profiler:
                ranges.follow_profiler()
            self._refuse_callers()
            self._check_modules()
            self._give_up_open_backward()
            self.outside.forget()
            self.follow_shard_writes()
            for buffer in self.buffers:
                if buffer.is_unrounded:
                    buffer.round_whole()
            self.schedule.begin_forward()
            self.hide_guards(is_hidden=True)
        self.forwards += 1

    def end_forward(self) -> None:
        """The model's forward has ended, or was given up."""
        self.forwards = max(0, self.forwards - 1)
        self.hide_guards(is_hidden=False)
        if not self.forwards and not is_in_backward():
            self.outside.forget()

    def end_broken_calls(self, *, beginning: int = 0) -> None:
        """End forwards that an exception has ended before they could say so. Not in a backward.

        Waits for gathers that they have launched.

        Args:
            beginning: So many calls begin now, and are no reason to think that one is running.
        """
        if not self.forwards and not self.schedule.is_running:
            return
        if self.count_calls(self) > beginning:
            return
        self.forwards = 0
        self.schedule.reset()
        self.hide_guards(is_hidden=False)

    def is_in_use(self, unit: Unit | None = None) -> bool:
        """Return whether a forward or backward is running that uses a unit; any unit when None."""
        if not is_in_backward():
            self.end_broken_calls()
        return self.is_running if unit is None else self.schedule.is_in_use(unit)

    @property
    def is_running(self) -> bool:
        """Return whether a forward or backward is running, or a forward is broken."""
        return self.forwards > 0 or is_in_backward() or self.schedule.is_running

    def hide_guards(self, unit: Unit | None = None, *, is_hidden: bool) -> None:
        """Take guards out of `param.grad` during a forward, or put them back. Local.

        Something in the forward may be compiled, and compiled code looks at `param.grad` of what it
        is called with. It knows no guards.

        Args:
            unit: Called by itself; the whole model is called when None, and units inside it leave
                their guards to that.
            is_hidden: Whether the forward begins.
        """
        if not self.forwards and not is_in_backward():
            with plain_access():
                self.reducer.hide_guards(unit, is_hidden=is_hidden)

    def before_backward(self, call: ForwardCall) -> None:
        """Backward has reached an output of a unit."""
        if self.backward is not ModelPhase.BACKWARD:
            self.open_backward()
        if torch.is_grad_enabled() and self.placements.params is Placement.SHARDED:
            self.schedule.disable_reshard(call.unit)
        self.schedule.before_backward(call)

    def expect_from_outside(self, param_ref: ParamRef) -> None:
        """A gradient is on its way to a parameter, from a use outside its unit."""
        self.open_backward()
        self.reducer.expect_from_outside(param_ref.buffer, param_ref.position)

    def open_backward(self, arrived: Tensor | None = None) -> None:
        """Begin a backward, in its first hook, and register the callback for its end.

        Args:
            arrived: A parameter whose gradient has been computed already; that is wrong if this
                raises.
        """
        if self.backward is ModelPhase.BACKWARD:
            return
        if self.backward is ModelPhase.FAILED:
            grad = None if arrived is None else _given_by_autograd(arrived)
            self._give_up_backward()
            if arrived is not None:
                arrived.grad = grad
        # Before the phase changes: the callback also reports a backward that an exception ends.
        call_after_backward(_EndOfBackward(ref(self)))
        self.num_backwards += 1
        self._move(ModelPhase.BACKWARD)
        try:
            self.require("a backward", StateKind.PARAMS, StateKind.GRADS)
        except StateError:
            self._move(ModelPhase.IDLE if arrived is None else ModelPhase.FAILED)
            raise
        self._makes_graph = torch.is_grad_enabled()
        self._watch_shards(is_watched=False)
        with plain_access():
            self.reducer.begin_backward()
            self._accumulates = any(
                will_accumulate(outer_of(p))
                for g in self.reducer.gradients
                for p in g.buffer.params
            )
        if self.residence.offload is not None and self._accumulates:
            self.residence.offload.read_ahead()
        if self._accumulates:
            self.reducer.refuse_to_sum_again()

    def backward_without_batch(self) -> None:
        """Run the collectives of a backward, without gradients of this rank."""
        no = (ModelPhase.BACKWARD, ModelPhase.FAILED)
        self.require("backward_without_batch()", StateKind.GRADS, no=no)
        with plain_access():
            self.reducer.refuse_to_sum_again()
            self.num_backwards += 1
            self._move(ModelPhase.BACKWARD)
            self.reducer.begin_backward()
        self._accumulates, self._makes_graph = True, False
        self.close_backward()

    def before_step(self, *, has_closure: bool) -> None:
        """Reduce the gradients that are left, and wait for readers of what the optimizer writes."""
        if ranges.recorders:
            # A step that an exception ended has left its range open.
            self._end_step_range()
            self._step_range = ranges.enter("step")
        no = (ModelPhase.BACKWARD, ModelPhase.FAILED, ModelPhase.GATHERED)
        self.end_broken_calls()
        self.require("optimizer.step()", *StateKind, no=no)
        if self.schedule.is_running and self.placements.params is Placement.SHARDED:
            raise StateError(
                "optimizer.step() was called while a forward is running, which would go on with "
                f"parameters as they were (rank {self.whole.rank}); call it when that has ended, "
                "or train at stage 2 or lower"
            )
        self._check_params()
        # If an exception ends the reduction, the phase stays BACKWARD.
        self._move(ModelPhase.BACKWARD)
        try:
            with plain_access():
                self.reducer.before_step()
        except StateError:
            # The step was refused, and nothing was done.
            self._move(ModelPhase.IDLE)
            raise
        self._move(ModelPhase.IDLE)
        self.compare_launches("optimizer.step()")
        self.take_gradients()
        self.begin_write()
        self.schedule.leave_memory()
        self._follow_writes()
        self._is_stepping = True
        self._watch_shards(is_watched=False)
        if has_closure:
            self._published = self._shard_versions()
        for g in self.reducer.structured_buffers:
            g.expose_plain_grads(has_closure=has_closure)

    def around_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure's forward reads what the optimizer has written, and its writes come after."""
        stepped = self

        def evaluate() -> Any:
            nonlocal stepped
            if stepped._has_written():
                stepped.publish_params(is_sharded=stepped.shards_state)
                stepped._published = stepped._shard_versions()
            result = closure()
            if (now := stepped._follow_layout()) is stepped:
                stepped.begin_write()
            else:
                # The closure's forward has laid the model out anew, as after an unfreeze.
                stepped = now
                stepped.before_step(has_closure=True)
            stepped.update()
            return result

        return evaluate

    def _follow_layout(self) -> ShardedModel:
        """Return what the model's parameters are sharded by now. Local."""
        found = (find_param_ref(param) for param in self.model.parameters())
        return next((param_ref.sharded for param_ref in found if param_ref is not None), self)

    def take_gradients(self) -> None:
        """Keep this rank's part of whole gradients that the user put into `param.grad`. Local."""
        if not self.reducer.shards_state:
            return
        with plain_access():
            for g in self.reducer.gradients:
                pairs = zip(g.buffer.params, g.guards, strict=True)
                for position, (param, guard) in enumerate(pairs):
                    if param.grad is not None and param.grad is not guard:
                        g.copy_whole(position, param.grad)

    def update(self) -> None:
        """Step shards whose state is offloaded; the optimizer's own step then finds no gradient."""
        if self.residence.offload is not None and self.optimizer is not None:
            self._hidden = step_offloaded(self.residence, self.reducer.gradients, self.optimizer)

    def after_step(self) -> None:
        """End the optimizer's step: publish replicated parameters, which it has changed."""
        for param, grad in self._hidden:
            param.grad = grad
        self._hidden = []
        for g in self.reducer.structured_buffers:
            g.restore_grads()
        self.has_stepped, self._is_stepping = True, False
        self.num_backwards = 0
        # An optimizer may have put other memory in the place of ours.
        if not self.shards_state:
            for buffer in self.buffers:
                buffer.adopt_values()
        self.publish_params(is_sharded=self.shards_state)
        # Gathers from here on belong to the next step.
        self.routes.log[:] = [self.routes.log[-1], Traffic()]
        self._watch_shards(is_watched=True)
        self.schedule.step()
        if self._step_range is not None:
            self._end_step_range()

    @property
    def awaits_step(self) -> bool:
        """Return whether there are gradients that no step has used yet."""
        gradients = self.reducer.gradients
        return self.num_backwards > 0 and any(g.has_local or g.has_gradients for g in gradients)

    def _end_step_range(self) -> None:
        stack, self._step_range = self._step_range, None
        if stack is not None:
            stack.close()

    def finish_update(self) -> None:
        """Do what the public `finish_update` documents."""
        if not self.residence.backends.is_delayed:
            return
        no = (ModelPhase.GATHERED, ModelPhase.FORWARD)
        self.require("finish_update()", StateKind.PARAMS, no=no)
        self.begin_write()
        self._follow_writes()
        apply_delayed_update(self.residence, self.reducer.gradients)
        self.publish_params(is_sharded=self.shards_state)

    def _follow_writes(self) -> None:
        for buffer in self.buffers:
            if buffer.whole is not None:
                buffer.adopt_values()
                buffer.follow_writes()

    @ranged("publish")
    def publish_params(self, *, is_sharded: bool, frozen: Collection[FlatBuffer] = ()) -> None:
        """End a write to what is trained: what the model computes with follows.

        Args:
            is_sharded: Each rank has written its part only. Collective then.
            frozen: Buffers that do not train, and were written all the same.
        """
        for buffer in self.buffers:
            buffer.reclaim()
            buffer.follow_update()
        self.end_write()
        if is_sharded:
            publish(self.units, frozen=frozen)
        if self.residence.param_offload is not None:
            self.residence.param_offload.flush()

    def begin_shard_write(self, written: Sequence[Tensor]) -> None:
        """Prepare for a write to these shards of the optimizer's, or views, outside of its step.

        Examples are a clamp, weight decay by hand, a hook that runs after the step, or an optimizer
        that swaps weights for evaluation. All ranks write to the same parameters, in one order.
        Collective where shards are exposed.

        Raises:
            StateError: The shards' values are offloaded, and the change would be lost; or the model
                runs.
        """
        no = (ModelPhase.BACKWARD, ModelPhase.FORWARD, ModelPhase.GATHERED)
        self.require("a write to the optimizer's parameters", no=no)
        offloaded = [buffer for buffer in self.buffers if buffer.main_shard.memory is None]
        with plain_access():
            memory = {storage_key(tensor.untyped_storage()) for tensor in written if offloaded}
            for buffer in offloaded:
                # The shards of such a buffer view one element.
                if storage_key(buffer.shard_params[0].untyped_storage()) in memory:
                    raise StateError(
                        "a write to a shard in the optimizer's param groups, of "
                        f"{buffer.plan.params[0].name!r} or a parameter of the same unit: the "
                        "values are in offloaded optimizer state, and the change would be lost "
                        f"(rank {self.whole.rank}). Write to the model's parameter: "
                        "zero_engine.set_full_param(param, value), or set_local_param(param, part)"
                    )
        if not self.is_shard_written:
            self.begin_write()
            self._set_shard_written(is_written=True)

    def _set_shard_written(self, *, is_written: bool) -> None:
        self.is_shard_written = is_written
        for buffer in self.buffers:
            pairs = zip(buffer.params, buffer.unsharded_types, strict=True)
            for param, whole_type in pairs if buffer.whole is not None else ():
                # Python cannot change the class of some objects.
                with contextlib.suppress(TypeError):
                    kind = stand_in_type(Unpublished, whole_type) if is_written else whole_type
                    param.__class__ = kind

    @contextlib.contextmanager
    def exporting(self, values: Mapping[int, Tensor]) -> Iterator[None]:
        """Let `state_dict()` give these values, by the parameter's id, and other names. Local.

        Parameters that are replicated and exact are given as they are.
        """
        self.exported = values
        try:
            yield
        finally:
            self.exported = None

    def follow_shard_writes(self) -> None:
        """Publish what was written so. Collective then."""
        if self.is_shard_written:
            self._set_shard_written(is_written=False)
            seen = set(map(id, chain.from_iterable(group["params"] for group in self._groups())))
            frozen = [
                buffer
                for buffer in self.buffers
                if not buffer.plan.trainable and not seen.isdisjoint(map(id, buffer.shard_params))
            ]
            self.publish_params(is_sharded=self.shards_state, frozen=frozen)

    def _watch_shards(self, *, is_watched: bool) -> None:
        """Notice writes to the optimizer's parameters, but not inside of a backward or a step."""
        kind = ParamShard if is_watched and not self._is_stepping else nn.Parameter
        for param in self._shards:
            param.__class__ = kind

    def _has_written(self) -> bool:
        """Return whether any rank's optimizer has changed its shards since they were published.

        Collective. Some optimizers move parameters, evaluate gradients there, and move them back.
        """
        if not self.shards_state:
            return False
        return self.reducer.is_true_anywhere(self._shard_versions() != self._published)

    def _shard_versions(self) -> list[int]:
        """Return by shard how often it was written, then where it lies; no calls of Python's."""
        return [*map(version_of, self._shards), *map(Tensor.data_ptr, self._shards)]

    def compare_launches(self, what: str, *, at_once: bool = False) -> None:
        """Do what `Group.compare_launches` documents, on each of the model's groups."""
        for group in self.routes.groups:
            group.compare_launches(what, at_once=at_once)

    def begin_write(self) -> None:
        """Wait until nothing reads the shards any more. Collective where they are exposed."""
        self.end_broken_calls()
        self.require("a write to parameters", StateKind.PARAMS, StateKind.MASTERS)
        self.follow_shard_writes()
        self.await_readers()
        self.schedule.wait_for_gathers()
        if self.exposure is not None:
            self.exposure.begin_write()

    def await_readers(self) -> None:
        """Wait for who copies values and state on this rank meanwhile. Local."""
        while self.before_write:
            self.before_write.pop()()

    def end_write(self, only: Unit | None = None) -> None:
        """Whole copies of a unit's parameters, all units' when None, are out of date.

        So are graphs made with them.
        """
        if self.exposure is not None:
            self.exposure.end_write()
        self.outside.forget()
        for unit in self.units if only is None else (only,):
            unit.mark_changed()

    def note_state(self) -> None:
        """Note that the optimizer has state, as after a step. Local."""
        self.has_stepped = True

    def note_found_inf(self, found_inf: Tensor) -> None:
        """Note the `found_inf` that the optimizer has for its next step; NOTE(in_step). Local."""
        self._found_inf = found_inf

    def pop_found_inf(self) -> Tensor | None:
        """Return the `found_inf` that the optimizer was given for this step, once. Local."""
        found_inf, self._found_inf = self._found_inf, None
        return found_inf

    def park(self, parked: Parked | None) -> None:
        """Note the states that `offload_states` has parked; None: none any more. Local."""
        self.parked = parked

    def require(self, what: str, *kinds: StateKind, no: Collection[ModelPhase] = ()) -> None:
        """Raise StateError where the model is in no state for what users call `what`. Local.

        Args:
            what: What they call it.
            kinds: State that it needs, and that must not be parked.
            no: In what phases of the model it may not be called.
        """
        for phase in no:
            if self._is_in(phase):
                context = self.open_contexts[-1] if self.open_contexts else ""
                said = phase.value.format(what=what, context=context, rank=self.whole.rank)
                raise StateError(said)
        if self.parked is not None and (gone := self.parked.among(kinds)):
            offloaded, rank = ModelPhase.OFFLOADED.value, self.whole.rank
            raise StateError(offloaded.format(what=what, kinds=", ".join(gone), rank=rank))

    def _is_in(self, phase: ModelPhase) -> bool:
        if phase is ModelPhase.FORWARD:
            self.end_broken_calls()
            return self.schedule.is_running
        if phase is ModelPhase.GATHERED:
            return bool(self.open_contexts)
        return self.phase is phase

    @property
    def phase(self) -> ModelPhase:
        """BACKWARD or FAILED; else FORWARD, or IDLE."""
        if self.backward is ModelPhase.BACKWARD and not is_in_backward():
            # An exception has ended it, which autograd has yet to report.
            return ModelPhase.FAILED
        if self.backward is not ModelPhase.IDLE:
            return self.backward
        is_running = (self.forwards or self.schedule.is_running) and self.count_calls(self)
        return ModelPhase.FORWARD if is_running else ModelPhase.IDLE

    def drop_gradients(self, *, set_to_none: bool) -> None:
        """Do what `optimizer.zero_grad()` does to gradients that are on their way.

        Units that are whole stay so: a loss whose backward follows may have read their parameters.
        """
        # Gradients that are parked can be dropped, but not written to.
        if not set_to_none:
            self.require("zero_grad(set_to_none=False)", StateKind.GRADS)
        self.end_broken_calls()
        self._give_up_open_backward(is_asked_for=True)
        with plain_access():
            self.reducer.drop(set_to_none=set_to_none)
            # A parameter may have a gradient of a backward before it was frozen.
            for param in self._frozen:
                if set_to_none:
                    param.grad = None
                elif param.grad is not None:
                    param.grad.zero_()

    def drop_gradients_of(self, optimizer: torch.optim.Optimizer, *, set_to_none: bool) -> None:
        """Do what `zero_grad()` of one of several optimizers does, which leaves the others'."""
        own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for shard, param in self.shards_and_params():
            if id(shard) not in own or param.grad is None:
                continue
            if set_to_none:
                # Before the step, `follow_drops` drops the shard's gradient too.
                param.grad = None
            else:
                param.grad.zero_()

    def release_buffers(self) -> None:
        """Give slots and reduction buffers back until they are needed again."""
        self.end_broken_calls()
        self.require("release_buffers()", no=(ModelPhase.GATHERED,))
        self._give_up_open_backward()
        self.outside.forget()
        self.schedule.wait_for_gathers()
        self.schedule.release()
        self.reducer.release()

    def close_backward(self) -> None:
        """The outermost backward has ended."""
        with plain_access():
            # If this refuses, the backward has failed.
            self.reducer.collect_waiting()
            if self._accumulates or self.reducer.has_collected:
                self.reducer.end_backward()
            else:
                # autograd.grad() returned this rank's gradients, and `param.grad` is as before.
                self.reducer.finish_without_gradients()
        self._watch_shards(is_watched=True)
        self.outside.forget()
        if not self._makes_graph:
            self.schedule.enable_reshard()
        self.schedule.end_backward()
        self._move(ModelPhase.IDLE)

    def _move(self, to: ModelPhase) -> None:
        assert to in BACKWARD_MOVES[self.backward], f"{self.backward} becomes {to}"
        self.backward = to

    def fail_backward(self) -> None:
        """An exception ended a backward. Waits for no other rank."""
        if self.backward is ModelPhase.BACKWARD:
            self._move(ModelPhase.FAILED)
            self.reducer.forget_waiting()
        # Gathers in flight are left to the next use.
        self.schedule.abandon_backward()

    def _give_up_open_backward(self, *, is_asked_for: bool = False) -> None:
        if self.backward is not ModelPhase.IDLE and not is_in_backward():
            try:
                self._give_up_backward(is_asked_for=is_asked_for)
            finally:
                self.schedule.reset()

    def _give_up_backward(self, *, is_asked_for: bool = False) -> None:
        """Drop the gradients of a backward that an exception ended."""
        self._move(ModelPhase.IDLE)
        try:
            with plain_access():
                self.reducer.abandon(is_asked_for=is_asked_for)
        finally:
            self._watch_shards(is_watched=True)

    def refuse_split_backward(self) -> None:
        """Raise StateError in a forward of a pipeline schedule that splits backward. Local."""
        if schedule := pipeline_that_splits_backward():
            raise StateError(
                f"{schedule} splits backward into a part for inputs and one for weights, whose "
                "gradients it assigns to parameters as they are on this rank: they would never be "
                f"averaged (rank {self.whole.rank}). Use a schedule with whole backwards, such as "
                "Schedule1F1B or ScheduleInterleaved1F1B"
            )

    def _refuse_callers(self) -> None:
        if is_in_ddp_forward():
            refuse_ddp()
        self.refuse_split_backward()
        if torch.jit.is_tracing() and self.placements.params is Placement.SHARDED:
            raise StateError(
                "torch.jit.trace() of a model whose parameters are sharded would record how they "
                "are gathered; trace a plain model with the weights of full_state_dict(), or "
                "zero_engine.unshard() this one first"
            )

    def _look_at_modules(self) -> None:
        modules = list(self.model.modules())
        contents = (content for m in modules for content in (own_parameters(m), own_modules(m)))
        # Scripted modules have no dictionaries.
        self._contents = [found for found in contents if isinstance(found, dict)]
        self._seen = list(chain.from_iterable(map(dict.values, self._contents)))

    def _check_modules(self) -> None:
        """Raise StateError where a parameter was added since. Local.

        Modules without parameters of their own come and go as they please, and so do further uses
        of parameters that were sharded. To compare identities costs a fraction of a microsecond per
        module and forward.
        """
        found = list(chain.from_iterable(map(dict.values, self._contents)))
        if len(found) == len(self._seen) and all(map(is_, found, self._seen)):
            return
        for name, param in self.model.named_parameters():
            param_ref = find_param_ref(param)
            if param_ref is None or param_ref.sharded is not self:
                raise StateError(
                    f"parameter {name!r}: expected one that was sharded, got another Parameter "
                    f"object of shape {tuple(param.shape)}, attached after shard() or one that "
                    f"functional_call() put in its place (rank {self.whole.rank}); each rank would "
                    "train its own. Build the model anew with all its modules, load "
                    "zero_engine.full_state_dict() of this one into it, and shard that"
                )
        self._look_at_modules()

    def _check_params(self) -> None:
        if self.optimizer is None or not self.shards_state:
            return
        known = {id(param) for buffer in self.buffers for param in buffer.shard_params}
        for index, param_group in enumerate(self._groups()):
            for param in param_group["params"]:
                if id(param) not in known:
                    raise StateError(
                        f"param group {index} of the optimizer has a parameter of shape "
                        f"{tuple(param.shape)} that is no shard of the model: call the model "
                        "before this step, which lays it out, or shard() it again"
                    )
