"""Parameters made whole on demand, for as long as a context is open."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Final, final

import torch
from attrs import define, field
from torch import Tensor, nn
from zero_comm import CommError, Handle, all_gather_flat, broadcast_flat

from ._errors import LostEditError, OverlapError, StateError
from ._external import register_external_parameter
from ._placement import Placement
from ._places import Place, find_place, sort_places
from ._shard_state import ShardState
from ._sharded_model import ShardedModel
from ._torch_compat import plain_access
from ._unit import Unit
from ._whole import launch_whole, write_whole

Params = nn.Module | nn.Parameter | Iterable[nn.Parameter]

_FINE, _EDITED, _MISSHAPEN, _RAISED = range(4)  # how a rank left the context


@final
class GatheredParameters:
    """A context in which parameters are whole, in their own Parameter objects. Collective.

    Every rank enters and leaves it, with the same parameters. `param.data` is then the whole value,
    in memory of its own; modules run as usual. Parameters that belong to no sharded model, or rest
    whole, are left as they are.

    - Without `modifier_rank` the values are for reading. A write that autograd counts (any in-place
      function on the parameter), or a new `param.data`, raises LostEditError on every rank at the
      end; a write through `param.data` is looked for where `sanity_checks` asks, and dropped.
    - With `modifier_rank`, what that rank has written is every rank's at the end; what the others
      wrote is dropped. Where parameters rest whole (stages 0 to 2), it is sent to all ranks too.

    An exception inside drops all changes of sharded parameters; the other ranks, at the end of
    theirs, learn of it by a StateError. Inside, `optimizer.step()`, `load_state_dict()` and
    `release_buffers()` raise.

    Args:
        params: A Parameter, a module, or any iterable of Parameters, in any order; each counts
            once.
        modifier_rank: Whose changes are kept, a rank of the group; None keeps nobody's.
        fwd_module: Uses the parameters in its forward: see `register_external_parameter`.
        enabled: Do nothing at all when False.
        sanity_checks: Compare checksums over all bytes, to find what was written through
            `param.data`.

    Raises:
        TypeError: `params` holds something else than Parameters.
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
        self._gathers: list[Gather] = []
        if not enabled:
            return
        chosen = _as_list(params)
        places = [place for param in chosen if (place := find_place(param)) is not None]
        for sharded in {id(place.sharded): place.sharded for place in places}.values():
            mine = sort_places(place for place in places if place.sharded is sharded)
            is_sharded = sharded.placements.params is Placement.SHARDED
            if is_sharded or modifier_rank is not None:
                self._gathers.append(
                    Gather(sharded, mine, "GatheredParameters", modifier_rank, sanity_checks)
                )
        for param in chosen:
            if fwd_module is not None and find_place(param) is not None:
                register_external_parameter(fwd_module, param)

    def __enter__(self) -> GatheredParameters:
        opened: list[Gather] = []
        try:
            for gather in self._gathers:
                gather.check()
                gather.open()
                opened.append(gather)
        except BaseException:
            for gather in reversed(opened):
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
                    gather.settle()
        finally:
            for gather in reversed(self._gathers):
                gather.close()


@define(eq=False)
class Gather:
    """The parameters of one model that one context keeps whole."""

    sharded: ShardedModel
    places: Sequence[Place]  # sorted
    what: str  # users call it
    modifier_rank: int | None = None
    compares_bytes: bool = False
    _values: dict[tuple[int, int, int], Tensor] = field(factory=dict, init=False)
    _versions: dict[tuple[int, int, int], int] = field(factory=dict, init=False)
    _sums: dict[tuple[int, int, int], int] = field(factory=dict, init=False)
    _fully_held: list[Unit] = field(factory=list, init=False)
    _report: Handle[Tensor] | None = field(default=None, init=False)
    _is_open: bool = field(default=False, init=False)

    @property
    def _is_sharded(self) -> bool:
        return self.sharded.placements.params is Placement.SHARDED

    def check(self) -> None:
        """Raise, before anything is sent, what `GatheredParameters` documents. Local."""
        group = self.sharded.group
        modifier = self.modifier_rank
        if modifier is not None and not 0 <= modifier < group.world_size:
            raise StateError(
                f"{self.what}: expected modifier_rank in 0..{group.world_size - 1}, a rank of the "
                f"group, got {modifier} (rank {group.rank})"
            )
        for place in self.places:
            if place.key in self.sharded.gathered:
                raise OverlapError(
                    f"{self.what}: parameter {place.name!r} is gathered already by an enclosing "
                    f"context (rank {group.rank}), and two could not both have the last word; use "
                    "the values that are there, or leave that context first"
                )
            if modifier is not None and self.sharded.schedule.is_in_use(place.unit):
                raise StateError(
                    f"{self.what}: parameter {place.name!r} cannot be modified while its unit "
                    f"{place.unit.name!r} runs forward or backward (rank {group.rank}); leave out "
                    "modifier_rank, or modify it between steps"
                )

    def open(self) -> None:
        """Make the parameters whole. Collective."""
        self._is_open = True
        self.sharded.gathers.append(self.what)
        self.sharded.gathered.update(place.key for place in self.places)
        try:
            if self._is_sharded:
                self._gather()
        except BaseException:
            self.close()
            raise
        for place in self.places:
            self._versions[place.key] = _version_of(place)
            if self.compares_bytes:
                self._sums[place.key] = _sum_of(_data_of(place))

    def report(self, *, has_raised: bool) -> None:
        """Tell the others how this rank leaves. Launches only: they may be far behind, or gone."""
        group = self.sharded.group
        if self._report is not None or not self._is_open:
            return
        said = [_RAISED if has_raised else self._judge(place) for place in self.places]
        mine = torch.tensor(said, dtype=torch.uint8, device=group.device)
        while self.sharded.unread:  # of an earlier context, which every rank has left by now
            self.sharded.unread.pop().wait()
        self._report = all_gather_flat(
            mine.new_empty(group.world_size * len(said)),
            splits=[len(said)] * group.world_size,
            group=group,
            shard=mine,
            tag=self.sharded.access_tag,
            control=True,
        )
        self.sharded.unread.append(self._report)  # until settle() has read it

    def settle(self) -> None:
        """Agree on what was changed, and keep or refuse it. Collective."""
        group = self.sharded.group
        assert self._report is not None, "report() comes first"
        self.sharded.unread.remove(self._report)
        reports = self._report.wait().view(group.world_size, -1).tolist()
        for rank, said in enumerate(reports):
            for place, verdict in zip(self.places, said, strict=True):
                self._raise_on(rank, place, verdict)
        if self.modifier_rank is not None:
            self._keep_changes(self.modifier_rank)

    def close(self) -> None:
        """Shard the parameters again, whatever happened. Local."""
        if not self._is_open:
            return
        self._is_open, self._report = False, None
        self.sharded.gathers.remove(self.what)
        self.sharded.gathered.difference_update(place.key for place in self.places)
        for unit in self._fully_held:
            unit.is_held = False
            if unit.state is ShardState.UNSHARDED:
                unit.reshard()  # it is whole in our memory only
        for place in self.places:
            if place.position in place.buffer.held:
                place.buffer.let_go([p.position for p in self.places if p.buffer is place.buffer])
        self._values.clear()
        self._fully_held.clear()

    def edited(self) -> list[str]:
        """Names of the parameters that this rank was seen to change in vain. Local."""
        if not self._is_sharded:
            return []
        return [place.name for place in self.places if self._judge(place) != _FINE]

    def _gather(self) -> None:
        """Whole buffers in one message each, single parameters in one each."""
        waits = []
        for buffer in {id(place.buffer): place.buffer for place in self.places}.values():
            mine = [place for place in self.places if place.buffer is buffer]
            if len(mine) == len(buffer.params):
                layout = buffer.plan.layout
                memory = torch.empty(
                    layout.numel, dtype=buffer.plan.dtype, device=self.sharded.group.device
                )
                handle = all_gather_flat(
                    memory,
                    splits=layout.splits,
                    payload=layout.payload_splits,
                    group=self.sharded.group,
                    shard=buffer.shard,
                    tag=buffer.gather_tag,
                )
                views = buffer.views_of(memory)
                waits.append((mine, handle.wait, [views[place.position] for place in mine]))
            else:
                waits += [([place], launch_whole(place), None) for place in mine]
        for mine, wait, views in waits:
            try:
                result = wait()
            except CommError as error:
                raise CommError(f"{self.what}, unit {mine[0].unit.name!r}: {error}") from error
            values = [result] if views is None else views
            self._values.update({p.key: v for p, v in zip(mine, values, strict=True)})
        for mine, _, _ in waits:
            mine[0].buffer.hold({place.position: self._values[place.key] for place in mine})
        for unit in {place.unit_index: place.unit for place in self.places}.values():
            is_whole = all(len(buffer.held) == len(buffer.params) for buffer in unit.buffers)
            if is_whole and unit.state is not ShardState.UNSHARDED:
                unit.reshard()  # a gather that was launched ahead is not needed
                unit.is_held = True
                self._fully_held.append(unit)

    def _judge(self, place: Place) -> int:
        data, value = _data_of(place), _home_of(place)
        if data.shape != value.shape or data.dtype != value.dtype or data.device != value.device:
            return _MISSHAPEN
        if self.modifier_rank is not None:
            return _FINE
        is_same = data.data_ptr() == value.data_ptr() and data.is_contiguous()
        is_same = is_same and _version_of(place) == self._versions[place.key]
        if is_same and self.compares_bytes:
            is_same = _sum_of(data) == self._sums[place.key]
        return _FINE if is_same else _EDITED

    def _raise_on(self, rank: int, place: Place, verdict: int) -> None:
        mine = f"(seen on rank {self.sharded.group.rank})"
        if verdict == _RAISED:
            raise StateError(
                f"{self.what}: rank {rank} left the context with an exception {mine}, so all "
                "changes are dropped; its own message says why"
            )
        if verdict == _EDITED:
            raise LostEditError(
                f"{self.what}: rank {rank} changed parameter {place.name!r} {mine}; without "
                "modifier_rank changes are dropped. Pass modifier_rank=... to keep those of one "
                "rank, or change a copy"
            )
        if verdict == _MISSHAPEN and self.modifier_rank in (None, rank):
            expected = place.buffer.plan.params[place.position]
            raise StateError(
                f"{self.what}: rank {rank} left parameter {place.name!r} with another shape, dtype "
                f"or device {mine}; expected shape {tuple(expected.shape)}, {expected.dtype}. A "
                "sharded model keeps its shapes: change them before shard()"
            )

    def _keep_changes(self, modifier: int) -> None:
        group = self.sharded.group
        self.sharded.schedule.settle()  # nobody reads the shards that we write
        handles = []
        for place in self.places:
            home = _home_of(place)
            if group.rank == modifier:
                data = _data_of(place)
                if data.data_ptr() != home.data_ptr() or not data.is_contiguous():
                    home.copy_(data)
            if home.numel():
                handles.append(broadcast_flat(home.view(-1), src=modifier, group=group))
        for handle in handles:
            handle.wait()
        for place in self.places:
            if self._is_sharded:
                write_whole(place, _home_of(place))
            else:
                place.buffer.params[place.position].data = _home_of(place)
                self.sharded.end_write(place.unit)


def _home_of(place: Place) -> Tensor:
    """The memory in which a parameter that is gathered, or rests whole, belongs."""
    buffer = place.buffer
    if place.position in buffer.held:
        return buffer.held[place.position]
    assert buffer.whole is not None, "neither gathered nor replicated"
    return buffer.views_of(buffer.whole)[place.position]


def _data_of(place: Place) -> Tensor:
    with plain_access():
        return place.buffer.params[place.position].data


def _version_of(place: Place) -> int:
    with plain_access():
        return place.buffer.params[place.position]._version


def _sum_of(data: Tensor) -> int:
    """Over the bits, so that NaN is a value like others."""
    data = torch.view_as_real(data) if data.is_complex() else data
    return int(data.contiguous().view(_INTEGERS[data.element_size()]).sum(dtype=torch.int64))


_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
