"""Parameters made whole on demand, apart from their units, and what was done to them meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import define, field
from torch import Tensor
from zero_comm import CommError, Handle, all_gather_flat, broadcast_flat

from ._edits import Verdict, Watch, data_of, home_of, raise_on
from ._errors import OverlapError, StateError
from ._parked import StateKind
from ._places import Place
from ._shard_state import ShardState
from ._sharded_model import ShardedModel
from ._unit import Unit
from ._whole import launch_buffer, launch_whole, write_whole


@define(eq=False)
class Gather:
    """The parameters of one model that one context keeps whole."""

    sharded: ShardedModel
    places: Sequence[Place]  # sorted
    what: str  # users call it
    modifier_rank: int | None = None
    compares_bytes: bool = False
    _values: dict[tuple[int, int, int], Tensor] = field(factory=dict, init=False)
    _watch: Watch = field(init=False)
    _fully_held: list[Unit] = field(factory=list, init=False)
    _report: Handle[Tensor] | None = field(default=None, init=False)
    _is_open: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._watch = Watch(self.compares_bytes)

    def check(self) -> None:
        """Raise, before anything is sent, what `GatheredParameters` documents. Local."""
        group = self.sharded.whole
        modifier = self.modifier_rank
        self.sharded.refuse_parked(self.what, StateKind.PARAMS)
        if modifier is not None:
            self.sharded.refuse_parked(self.what, StateKind.MASTERS)
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
            if not self.sharded.is_exact:
                self._gather()
        except BaseException:
            self.close()
            raise
        self._watch.start(self.places)

    def report(self, *, has_raised: bool) -> None:
        """Tell the others how this rank leaves. Launches only: they may be far behind, or gone."""
        group = self.sharded.whole
        if self._report is not None or not self._is_open:
            return
        said = [Verdict.RAISED if has_raised else self._judge(place) for place in self.places]
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
        group = self.sharded.whole
        assert self._report is not None, "report() comes first"
        self.sharded.unread.remove(self._report)
        reports = self._report.wait().view(group.world_size, -1).tolist()
        for rank, said in enumerate(reports):
            for place, verdict in zip(self.places, said, strict=True):
                raise_on(
                    Verdict(verdict),
                    place.name,
                    place.buffer.plan.params[place.position],
                    seen_on=group.rank,
                    rank=rank,
                    modifier=self.modifier_rank,
                    what=self.what,
                )
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
        if self.sharded.is_exact:
            return []
        return [place.name for place in self.places if self._judge(place) != Verdict.FINE]

    def _gather(self) -> None:
        """Whole buffers in one message each, single parameters in one each."""
        waits: list[tuple[list[Place], Callable[[], Tensor | tuple[Tensor, ...]]]] = []
        for buffer in {id(place.buffer): place.buffer for place in self.places}.values():
            mine = [place for place in self.places if place.buffer is buffer]
            if len(mine) == len(buffer.params):
                waits.append((mine, launch_buffer(buffer)))
            else:
                waits += [([place], launch_whole(place)) for place in mine]
        for mine, wait in waits:
            try:
                result = wait()
            except CommError as error:
                raise CommError(f"{self.what}, unit {mine[0].unit.name!r}: {error}") from error
            values = (result,) if isinstance(result, Tensor) else result
            self._values.update({p.key: v for p, v in zip(mine, values, strict=True)})
        for mine, _ in waits:
            mine[0].buffer.hold({place.position: self._values[place.key] for place in mine})
        for unit in {place.unit_index: place.unit for place in self.places}.values():
            is_whole = all(len(buffer.held) == len(buffer.params) for buffer in unit.buffers)
            if is_whole and unit.state is not ShardState.UNSHARDED:
                unit.reshard()  # a gather that was launched ahead is not needed
                unit.is_held = True
                self._fully_held.append(unit)

    def _judge(self, place: Place) -> Verdict:
        return self._watch.judge(place, may_edit=self.modifier_rank is not None)

    def _keep_changes(self, modifier: int) -> None:
        group = self.sharded.whole
        self.sharded.schedule.settle()  # nobody reads the shards that we write
        handles = []
        for place in self.places:
            home = home_of(place)
            if group.rank == modifier:
                data = data_of(place)
                if data.data_ptr() != home.data_ptr() or not data.is_contiguous():
                    home.copy_(data)
            if home.numel():
                handles.append(broadcast_flat(home.view(-1), src=modifier, group=group))
        for handle in handles:
            handle.wait()
        for place in self.places:
            home = home_of(place)
            if self.sharded.is_exact:
                place.buffer.params[place.position].data = home
            write_whole(place, home)
