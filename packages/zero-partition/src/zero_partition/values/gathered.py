"""GatheredParameters: parameters whole in a context, and changed there by one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from itertools import groupby
from types import TracebackType
from typing import Any, Final, TypeVar, final
from weakref import ReferenceType, finalize, ref

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from zero_comm import Group, Handle, all_gather_flat, broadcast_flat, collective

from zero_partition.errors import LostEditError, OverlapError, StateError
from zero_partition.init.early_shard import CURRENT, EarlyShard, find_early
from zero_partition.memory.seams import ParamOffload
from zero_partition.plan.stages import Placement
from zero_partition.run.hooks import find_sharded
from zero_partition.run.sharded_model import (
    ParamRef,
    ShardedModel,
    find_param_ref,
    launch_buffer,
    launch_whole,
    param_ref_of,
    sort_places,
    write_whole,
)
from zero_partition.run.unit import ShardState
from zero_partition.stand_in import Bound, StateKind
from zero_partition.torch_private import plainly, version_of


class _ParamOutcome(IntEnum):
    """State in which a rank leaves a parameter, or the context; sent as one byte."""

    FINE = 0
    # Changed, in a context without a modifier.
    EDITED = 1
    # Left with another shape, dtype or device.
    MISSHAPEN = 2
    # An exception passes through the context.
    RAISED = 3


@frozen(eq=False)
class _Whole:
    """A gathered parameter, as it was when its context was entered."""

    name: str
    param: nn.Parameter
    # Memory of its values that the context gave it, or that it had if it is replicated.
    memory: Tensor
    version: int
    checksum: int

    @property
    def views_memory(self) -> bool:
        """Return whether the parameter still views the memory that the context gave it."""
        data = self.param.data
        return data.data_ptr() == self.memory.data_ptr() and data.is_contiguous()


def _checksum(data: Tensor) -> int:
    """Return a checksum of the bits, so that NaN is a value like others."""
    data = torch.view_as_real(data) if data.is_complex() else data
    return int(data.contiguous().view(_INTEGERS[data.element_size()]).sum(dtype=torch.int64))


_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@define(eq=False)
class EarlyParams:
    """Parameters of one group that `Init` has sharded and that no sharded model has yet."""

    # In the same order on every rank.
    shards: Sequence[EarlyShard]

    def find_gathered(self) -> str | None:
        """Return the label of one that a context has gathered already, if any."""
        return next((early.label for early in self.shards if early.is_gathered), None)

    def check(self, what: str, modifier_rank: int | None) -> None:
        """Raise if something else prevents gathering them. Local."""
        for early in self.shards:
            early.check_untouched(early.parameter, early.label)

    def open(self, what: str) -> list[tuple[str, nn.Parameter, Tensor]]:
        """Gather them; return names, parameters and the memory of their values. Collective."""
        found = [(early.label, early.parameter, early.whole()) for early in self.shards]
        for early, (_, _, whole) in zip(self.shards, found, strict=True):
            early.show(whole)
        return found

    def set_values(self, values: Iterable[Tensor]) -> None:
        """Set their values, which are the same on every rank."""
        for early, value in zip(self.shards, values, strict=True):
            early.keep_part_of(value)

    def close(self, what: str) -> None:
        """Keep this rank's part only."""
        for early in self.shards:
            early.hide()


@define(eq=False)
class ShardedParams:
    """Parameters of one sharded model."""

    sharded: ShardedModel
    # In the same order on every rank.
    param_refs: Sequence[ParamRef]

    def find_gathered(self) -> str | None:
        """Return the name of one that a context has gathered already, if any."""
        gathered = self.sharded.gathered
        return next(
            (param_ref.name for param_ref in self.param_refs if param_ref in gathered), None
        )

    def check(self, what: str, modifier_rank: int | None) -> None:
        """Raise if something else prevents gathering them. Local."""
        is_for_reading = modifier_rank is None
        masters = () if is_for_reading else (StateKind.MASTERS,)
        self.sharded.require(what, StateKind.PARAMS, *masters)
        if not is_for_reading and any(param_ref.buffer.plan.ranks for param_ref in self.param_refs):
            self.sharded.refuse_own_ranks(f"{what} with modifier_rank={modifier_rank}")
        self.sharded.follow_shard_writes()
        for param_ref in self.param_refs:
            if not is_for_reading and self.sharded.is_in_use(param_ref.unit):
                raise StateError(
                    f"{what}: parameter {param_ref.name!r} cannot be modified while its unit "
                    f"{param_ref.unit.name!r} runs forward or backward (rank "
                    f"{param_ref.whole.rank}); leave out modifier_rank, or modify it between steps"
                )

    def open(self, what: str) -> list[tuple[str, nn.Parameter, Tensor]]:
        """Gather them; return names, parameters and the memory of their values. Collective."""
        self.sharded.open_contexts.append(what)
        self.sharded.gathered.update(self.param_refs)
        if not self.sharded.is_exact:
            self._gather(what)
        return [
            (param_ref.name, param_ref.param, _memory_of(param_ref))
            for param_ref in self.param_refs
        ]

    def set_values(self, values: Iterable[Tensor]) -> None:
        """Set their values, which are the same on every rank."""
        for param_ref, value in zip(self.param_refs, values, strict=True):
            if self.sharded.is_exact:
                param_ref.param.data = value
            write_whole(param_ref, value)

    def close(self, what: str) -> None:
        """Shard them again."""
        self.sharded.open_contexts.remove(what)
        self.sharded.gathered.difference_update(self.param_refs)
        for unit in {
            param_ref.unit: None
            for param_ref in self.param_refs
            if param_ref.unit.has_gathered_values
        }:
            unit.mark_gathered(is_gathered=False)
            # Its parameters view memory of this context, not a slot.
            if unit.state is ShardState.UNSHARDED:
                unit.reshard()
        for buffer in {
            param_ref.buffer: None for param_ref in self.param_refs if param_ref.is_gathered
        }:
            buffer.unpin(
                [param_ref.position for param_ref in self.param_refs if param_ref.buffer is buffer]
            )

    def _gather(self, what: str) -> None:
        """Gather whole buffers in one message each, and single parameters in one each."""
        self.sharded.compare_launches(what, at_once=True)
        waits: list[tuple[list[ParamRef], Callable[[], Tensor | tuple[Tensor, ...]]]] = []
        for buffer, chosen in groupby(self.param_refs, key=lambda param_ref: param_ref.buffer):
            mine = list(chosen)
            if len(mine) == len(buffer.params):
                waits.append((mine, launch_buffer(buffer)))
            else:
                waits += [([param_ref], launch_whole(param_ref)) for param_ref in mine]
        values: dict[ParamRef, Tensor] = {}
        for mine, wait in waits:
            found = wait()
            values |= zip(mine, (found,) if isinstance(found, Tensor) else found, strict=True)
        for buffer, chosen in groupby(self.param_refs, key=lambda param_ref: param_ref.buffer):
            buffer.pin({param_ref.position: values[param_ref] for param_ref in chosen})
        for unit in {param_ref.unit: None for param_ref in self.param_refs}:
            is_whole = all(len(buffer.pinned) == len(buffer.params) for buffer in unit.buffers)
            if is_whole and unit.state is not ShardState.UNSHARDED:
                # Ends a gather that was launched ahead, which is not needed.
                unit.reshard()
                unit.mark_gathered(is_gathered=True)


def _memory_of(param_ref: ParamRef) -> Tensor:
    """Return the memory of a parameter that is gathered or replicated."""
    buffer = param_ref.buffer
    if param_ref.is_gathered:
        return buffer.pinned[param_ref.position]
    assert buffer.whole is not None, "neither gathered nor replicated"
    return buffer.views_of(buffer.whole)[param_ref.position]


@define(eq=False)
class GatheredContext:
    """Parameters that one context has gathered, and what ranks do to them meanwhile."""

    # Name of the context in error messages.
    what: str
    modifier_rank: int | None
    # Whether to compare checksums of all bytes, to find writes that autograd does not count.
    compares_bytes: bool
    params: EarlyParams | ShardedParams
    # Ranks over which the parameters are sharded or replicated.
    group: Group
    # Tag of the collective in which ranks report how they leave.
    tag: int = 0
    # Reports that `commit` has not read. They stay if an exception ends the context.
    unread: list[Handle[Tensor]] = field(factory=list)
    _wholes: list[_Whole] = field(factory=list, init=False)
    _report: Handle[Tensor] | None = field(default=None, init=False)
    _is_open: bool = field(default=False, init=False)

    def check(self) -> None:
        """Raise, before anything is sent, what `GatheredParameters` documents. Local."""
        modifier, group = self.modifier_rank, self.group
        if modifier is not None and not 0 <= modifier < group.world_size:
            raise StateError(
                f"{self.what}: expected modifier_rank in 0..{group.world_size - 1}, a rank of the "
                f"group, got {modifier} (rank {group.rank})"
            )
        name = self.params.find_gathered()
        if name is not None:
            raise OverlapError(
                f"{self.what}: parameter {name!r} is gathered already by an enclosing context "
                f"(rank {group.rank}), and two could not both have the last word; use the values "
                "that are there, or leave that context first"
            )
        self.params.check(self.what, modifier)

    def open(self) -> None:
        """Gather the parameters; from now on writes to them are noticed. Collective."""
        self._is_open = True
        found = self.params.open(self.what)
        with plainly():
            for name, param, memory in found:
                checksum = _checksum(memory) if self.compares_bytes else 0
                self._wholes.append(_Whole(name, param, memory, version_of(param), checksum))

    def report(self, *, has_raised: bool) -> None:
        """Tell the others how this rank leaves, once. Launches only: they may be gone."""
        if self._report is not None or not self._wholes:
            return
        # Reports of an earlier context, which every rank has left by now.
        while self.unread:
            self.unread.pop().wait()
        said = [_ParamOutcome.RAISED for _ in self._wholes] if has_raised else self._judge_all()
        mine = torch.tensor(said, dtype=torch.uint8, device=self.group.device)
        self._report = all_gather_flat(
            mine.new_empty(self.group.world_size * len(said)),
            splits=[len(said)] * self.group.world_size,
            group=self.group,
            shard=mine,
            tag=self.tag,
            control=True,
        )
        self.unread.append(self._report)

    def commit(self) -> None:
        """Agree on what was changed, and keep or refuse it. Collective."""
        self.unread.clear()
        assert self._report is not None, "report() comes first"
        reports = self._report.wait().view(self.group.world_size, -1).tolist()
        for rank, said in enumerate(reports):
            for whole, verdict in zip(self._wholes, said, strict=True):
                self._raise_on(_ParamOutcome(verdict), whole, rank)
        if self.modifier_rank is not None:
            self._send_changes(self.modifier_rank)
            with plainly():
                self.params.set_values([whole.memory for whole in self._wholes])

    def close(self) -> None:
        """Shard the parameters again, whatever happened. Local."""
        if self._is_open:
            self.params.close(self.what)
        self._wholes, self._report, self._is_open = [], None, False

    def edited(self) -> list[str]:
        """Names of the parameters that this rank was seen to change. Local."""
        verdicts = zip(self._wholes, self._judge_all(), strict=True)
        return [whole.name for whole, verdict in verdicts if verdict is not _ParamOutcome.FINE]

    def _judge_all(self) -> list[_ParamOutcome]:
        with plainly():
            return [self._judge(whole) for whole in self._wholes]

    def _send_changes(self, modifier: int) -> None:
        """Broadcast the modifier's values into the gathered memory of all ranks. Collective."""
        handles = []
        with plainly():
            for whole in self._wholes:
                if self.group.rank == modifier and not whole.views_memory:
                    whole.memory.copy_(whole.param.data)
                if whole.memory.numel():
                    flat = whole.memory.view(-1)
                    handles.append(broadcast_flat(flat, src=modifier, group=self.group))
            for handle in handles:
                handle.wait()

    def _judge(self, whole: _Whole) -> _ParamOutcome:
        data, memory = whole.param.data, whole.memory
        kinds = [(each.shape, each.dtype, each.device) for each in (data, memory)]
        if kinds[0] != kinds[1]:
            return _ParamOutcome.MISSHAPEN
        if self.modifier_rank is not None:
            return _ParamOutcome.FINE
        is_same = whole.views_memory and version_of(whole.param) == whole.version
        if is_same and self.compares_bytes:
            is_same = _checksum(data) == whole.checksum
        return _ParamOutcome.FINE if is_same else _ParamOutcome.EDITED

    def _raise_on(self, verdict: _ParamOutcome, whole: _Whole, rank: int) -> None:
        what, mine = self.what, f"(seen on rank {self.group.rank})"
        if verdict is _ParamOutcome.RAISED:
            raise StateError(
                f"{what}: rank {rank} left the context with an exception {mine}, so all changes "
                "are dropped; its own message says why"
            )
        if verdict is _ParamOutcome.EDITED:
            raise LostEditError(
                f"{what}: rank {rank} changed parameter {whole.name!r} {mine}; without "
                "modifier_rank changes are dropped. Pass modifier_rank=... to keep those of one "
                "rank, or change a copy"
            )
        if verdict is _ParamOutcome.MISSHAPEN and self.modifier_rank in (None, rank):
            raise StateError(
                f"{what}: rank {rank} left parameter {whole.name!r} with another shape, dtype or "
                f"device {mine}; expected shape {tuple(whole.memory.shape)}, {whole.memory.dtype}. "
                "A sharded model keeps its shapes: change them before shard()"
            )


# Names of the contexts in error messages.
_GATHERED: Final = "GatheredParameters"
_UNSHARDED: Final = "unsharded()"
Params = nn.Module | nn.Parameter | Iterable[nn.Parameter]


@final
class GatheredParameters:
    """A context in which parameters are whole, in their own Parameter objects. Collective.

    Every rank enters and leaves it, with the same parameters. `param.data` is then the whole value,
    in memory of its own; modules run as usual. Parameters that `Init` sharded may be gathered
    before their model is sharded; inside `Init`, which gathers what is touched, they are left as
    they are. So are other parameters of no sharded model, and replicated ones, unless a codec has
    rounded them (`Wire(params=...)`).

    - Without `modifier_rank` the values are for reading. A write that autograd counts (any in-place
      function on the parameter), or a new `param.data`, raises LostEditError on every rank at the
      end; a write through `param.data` is looked for where `sanity_checks` asks, and dropped.
    - With `modifier_rank`, every rank gets that rank's values at the end; values that other ranks
      wrote are dropped. This holds for replicated parameters (stages 0 to 2), too.

    An exception inside drops all changes of sharded parameters; the other ranks, at the end of
    theirs, learn of it by a StateError. Inside, `optimizer.step()` and `release_buffers()` raise,
    and so does `load_state_dict()` of parameters that are not gathered.

    Args:
        params: A Parameter, a module, or any iterable of Parameters, in any order; each counts
            once.
        modifier_rank: Rank of the group whose changes are kept; None if no rank changes values.
        fwd_module: Uses the parameters in its forward: see `register_external_parameter`.
        enabled: Do nothing at all when False.
        sanity_checks: Compare checksums over all bytes, to find what was written through
            `param.data`.

    Raises:
        TypeError: `params` contains something other than Parameters.
        OverlapError: A parameter is gathered already, by an enclosing context.
        LostEditError: On leaving: a rank changed a parameter without being the modifier.
        StateError: `modifier_rank` is no rank of the group; a parameter to be modified is in use by
            a forward or a backward; on leaving: the modifier left another shape or dtype, or a
            peer left with an exception.
        zero_comm.CommError: A rank did not take part in time.
    """

    def __init__(
        self,
        params: Params,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
        *,
        sanity_checks: bool = False,
    ) -> None:
        self._gathers: list[GatheredContext] = []
        if not enabled:
            return
        chosen = _as_list(params)
        param_refs = [
            param_ref for param in chosen if (param_ref := find_param_ref(param)) is not None
        ]
        make = partial(GatheredContext, _GATHERED, modifier_rank, sanity_checks)
        for sharded in dict.fromkeys(param_ref.sharded for param_ref in param_refs):
            if not sharded.is_exact or modifier_rank is not None:
                mine = sort_places(
                    param_ref for param_ref in param_refs if param_ref.sharded is sharded
                )
                of_model, tag = ShardedParams(sharded, mine), sharded.access_tag
                self._gathers.append(make(of_model, sharded.whole, tag, sharded.unread))
        for shards in _group_early(chosen):
            self._gathers.append(make(EarlyParams(shards), shards[0].group))
        if fwd_module is not None:
            for param_ref in param_refs:
                register_external_parameter(fwd_module, param_ref.param)

    @collective
    def __enter__(self) -> GatheredParameters:
        try:
            for gather in self._gathers:
                gather.check()
                gather.open()
        except BaseException:
            for gather in reversed(self._gathers):
                gather.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            for gather in self._gathers:
                gather.report(has_raised=error is not None)
            if error is None:
                for gather in self._gathers:
                    gather.commit()
        finally:
            for gather in reversed(self._gathers):
                gather.close()


def _group_early(params: Iterable[nn.Parameter]) -> list[list[EarlyShard]]:
    """Return the shards of parameters that `Init` sharded, by group, in one order on every rank.

    Each is there once. There are none inside `Init`, which gathers whatever is touched.
    """
    found = {} if CURRENT.get() is not None else {id(e): e for p in params if (e := find_early(p))}
    by_group: dict[int, list[EarlyShard]] = {}
    for early in sorted(found.values(), key=lambda early: early.serial):
        by_group.setdefault(id(early.group), []).append(early)
    return list(by_group.values())


def _as_list(params: Any) -> list[Any]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    chosen = [params] if isinstance(params, Tensor) else list(params)
    for param in chosen:
        if not isinstance(param, Tensor):
            raise TypeError(
                "GatheredParameters: expected a Parameter, a module or an iterable of Parameters, "
                f"got a {type(param).__name__} among them"
            )
    return chosen


def register_external_parameter(module: nn.Module, param: nn.Parameter) -> None:
    """Say that `module`'s forward uses `param`, which another module owns. The same on every rank.

    Without it, a sharded parameter that is used outside its unit is gathered where it is used.
    With it, the gather is launched before the module's forward and overlaps with it. Nothing is
    done for replicated parameters, or when it is called again.

    Args:
        module: A module that runs in the model's forward, or a loss that is called on its output.
        param: The model's own Parameter object.

    Raises:
        StateError: `param` belongs to no sharded model.
    """
    param_ref = param_ref_of(param, what="register_external_parameter()")
    sharded = param_ref.sharded
    ahead = sharded.ahead.get(module)
    if ahead is None:
        ahead = sharded.ahead[module] = _LaunchAhead()
        if param_ref.unit.placement is Placement.SHARDED:
            ahead.handle = module.register_forward_pre_hook(ahead, prepend=True)
            sharded.removers.append(ahead.handle.remove)
            # The module may serve another model when this one was deleted.
            finalize(sharded, ahead.handle.remove).atexit = False  # type: ignore[attr-defined]
    if ref(param_ref) not in ahead.param_refs:
        ahead.param_refs.append(ref(param_ref))


def unregister_external_parameter(module: nn.Module, param: nn.Parameter) -> None:
    """Undo `register_external_parameter`. The same on every rank.

    Raises:
        StateError: `param` belongs to no sharded model, or was not registered for the module.
    """
    param_ref = param_ref_of(param, what="unregister_external_parameter()")
    ahead = param_ref.sharded.ahead.get(module)
    if ahead is None or ref(param_ref) not in ahead.param_refs:
        raise StateError(
            f"unregister_external_parameter(): parameter {param_ref.name!r} is not registered for "
            f"this {type(module).__name__}"
        )
    ahead.param_refs.remove(ref(param_ref))
    if not ahead.param_refs:
        del param_ref.sharded.ahead[module]
        if ahead.handle is not None:
            ahead.handle.remove()


@define(eq=False)
class _LaunchAhead(Bound):
    """Forward pre-hook that launches gathers of a module's external parameters of one model."""

    # A module may outlive the model.
    param_refs: list[ReferenceType[ParamRef]] = field(factory=list)
    handle: RemovableHandle | None = None

    def __call__(self, module: nn.Module, args: Any) -> None:
        for found in self.param_refs:
            if (param_ref := found()) is not None:
                param_ref.sharded.outside.launch(param_ref)


# NOTE(copies): parameters whose shards do not fit on the device do not fit there whole. So each
# rank keeps whole copies of units on the host or on disk, where its shards are offloaded. A unit is
# read from its copy into its slot ahead of its use, as in training. The device needs as much memory
# as in training, and no rank waits for another.


@contextmanager
def streamed(
    sharded: ShardedModel, param_refs: Sequence[ParamRef], param_offload: ParamOffload, what: str
) -> Iterator[None]:
    """A context in which units with these parameters are read whole. Collective to enter.

    Whole copies are allocated where offloaded shards are, and errors of that are passed on.
    """
    units = list(dict.fromkeys(param_ref.unit for param_ref in param_refs))
    units = [unit for unit in units if unit.placement is Placement.SHARDED]
    cache = param_offload.another()
    try:
        blanks = {
            buffer: torch.empty(buffer.plan.layout.numel, dtype=buffer.plan.dtype, device="meta")
            for unit in units
            for buffer in unit.buffers
        }
        cache.allocate({buffer.index: blank for buffer, blank in blanks.items()})
        for unit in units:
            if unit.codec is None:
                unit.unshard(sharded.schedule.pool)
                unit.fill_unsharded_cache(cache)
                unit.reshard()
                continue
            # The slot would get values that the codec has rounded.
            wholes = []
            for buffer in unit.buffers:
                whole = torch.empty_like(blanks[buffer], device=sharded.group.device)
                wholes.append(buffer.all_gather(whole, shard=buffer.shard, is_exact=True).wait())
            unit.fill_unsharded_cache(cache, wholes)
        cache.flush()
        for unit in units:
            unit.use_unsharded_cache(cache)
        sharded.open_contexts.append(what)
        try:
            yield
        finally:
            sharded.open_contexts.remove(what)
    finally:
        # Each rank's slots have other units, and exact values: all of them are forgotten.
        for unit in units:
            unit.use_unsharded_cache(None)
        sharded.outside.forget()
        cache.end()


Model = TypeVar("Model", bound=nn.Module)


@contextmanager
@collective
def unsharded(model: Model, modules: Iterable[str] | None = None) -> Iterator[Model]:
    """A context in which the model's parameters are whole. Collective to enter, local to leave.

    Inside, forwards of what is whole communicate nothing, so that ranks may run as many as each
    likes: to generate, say. It costs the bytes of what is whole, and gathers once. Changes of
    sharded parameters inside are dropped. Afterwards, also after an exception, training continues
    as if the context had not been entered.

    Args:
        model: The very module that was sharded.
        modules: Names of modules, as in `model.named_modules()`: what lies within them becomes
            whole. Everything when None.

    Yields:
        The model.

    Raises:
        StateError: Not sharded, or a name is no module; inside, by `optimizer.step()`,
            `load_state_dict()`, `release_buffers()` and backward of a graph made before.
        OverlapError: A parameter is gathered already.
        LostEditError: On leaving, on this rank: it changed a parameter in place.
        zero_comm.CommError: A rank did not take part in time.
    """
    sharded = find_sharded(model)
    if sharded is None:
        raise StateError(
            f"unsharded(): expected a model that was sharded, got a {type(model).__name__} that "
            "was not; call zero_engine.shard() first, and pass the model that it was given"
        )
    param_refs, param_offload = _places_within(sharded, modules), sharded.residence.param_offload
    gather = GatheredContext(
        _UNSHARDED, None, False, ShardedParams(sharded, param_refs), sharded.whole
    )
    gather.check()
    if param_offload is not None:
        with streamed(sharded, param_refs, param_offload, _UNSHARDED):
            yield model
        return
    try:
        gather.open()
        yield model
        edited = [] if sharded.is_exact else gather.edited()
    finally:
        gather.close()
    if edited:
        raise LostEditError(
            f"unsharded(): parameter {edited[0]!r} was changed inside (rank {sharded.whole.rank}), "
            "and the change is dropped; use GatheredParameters(params, modifier_rank=...) to keep "
            "one rank's changes"
        )


def _places_within(sharded: ShardedModel, modules: Iterable[str] | None) -> list[ParamRef]:
    chosen = [sharded.model]
    if modules is not None:
        known = dict(sharded.model.named_modules())
        names = [modules] if isinstance(modules, str) else list(modules)
        for name in names:
            if name not in known:
                raise StateError(
                    "unsharded(): expected names of modules, as in model.named_modules(), got "
                    f"{name!r}"
                )
        chosen = [known[name] for name in names]
    params = [param for module in chosen for param in module.parameters()]
    return sort_places(
        param_ref for param in params if (param_ref := find_param_ref(param)) is not None
    )
