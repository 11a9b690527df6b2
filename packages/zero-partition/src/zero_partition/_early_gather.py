"""Parameters that Init sharded, made whole on demand before their units are known."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field
from torch import Tensor, nn
from zero_comm import Handle, all_gather_flat, broadcast_flat

from ._early_shard import EarlyShard
from ._edits import Verdict, raise_on, sum_of
from ._errors import OverlapError, StateError
from ._torch_compat import plainly


@define(eq=False)
class EarlyGather:
    """What `Gather` is to a sharded model, for parameters that are on their way into one."""

    shards: Sequence[EarlyShard]  # of one group, sorted
    what: str  # users call it
    modifier_rank: int | None = None
    compares_bytes: bool = False
    _params: list[nn.Parameter] = field(factory=list, init=False)
    _homes: list[Tensor] = field(factory=list, init=False)  # what they view while whole
    _versions: list[int] = field(factory=list, init=False)
    _sums: list[int] = field(factory=list, init=False)
    _report: Handle[Tensor] | None = field(default=None, init=False)

    def check(self) -> None:
        """Raise, before anything is sent, what `GatheredParameters` documents. Local."""
        group, modifier = self.shards[0].group, self.modifier_rank
        if modifier is not None and not 0 <= modifier < group.world_size:
            raise StateError(
                f"{self.what}: expected modifier_rank in 0..{group.world_size - 1}, a rank of the "
                f"group, got {modifier} (rank {group.rank})"
            )
        for early in self.shards:
            if early.is_gathered:
                raise OverlapError(
                    f"{self.what}: parameter {early.label!r} is gathered already by an enclosing "
                    f"context (rank {group.rank}), and two could not both have the last word; use "
                    "the values that are there, or leave that context first"
                )
            early.check_untouched(early.parameter, early.label)

    def open(self) -> None:
        """Make the parameters whole. Collective."""
        for early in self.shards:
            param, home = early.parameter, early.whole()
            self._params.append(param)
            self._homes.append(home)
            self._versions.append(param._version)
            self._sums.append(sum_of(home) if self.compares_bytes else 0)
        for early, param, home in zip(self.shards, self._params, self._homes, strict=True):
            early.is_gathered = True
            param.data = home

    def report(self, *, has_raised: bool) -> None:
        """Tell the others how this rank leaves. Launches only: they may be far behind, or gone."""
        if self._report is not None or not self._params:
            return
        group = self.shards[0].group
        with plainly():
            said = [
                Verdict.RAISED if has_raised else self._judge(index)
                for index in range(len(self._params))
            ]
            mine = torch.tensor(said, dtype=torch.uint8, device=group.device)
            self._report = all_gather_flat(
                mine.new_empty(group.world_size * len(said)),
                splits=[len(said)] * group.world_size,
                group=group,
                shard=mine,
                control=True,
            )

    def settle(self) -> None:
        """Agree on what was changed, and keep or refuse it. Collective."""
        group = self.shards[0].group
        assert self._report is not None, "report() comes first"
        reports = self._report.wait().view(group.world_size, -1).tolist()
        for rank, said in enumerate(reports):
            for early, verdict in zip(self.shards, said, strict=True):
                raise_on(
                    Verdict(verdict),
                    early.label,
                    early.stand_in,
                    seen_on=group.rank,
                    rank=rank,
                    modifier=self.modifier_rank,
                    what=self.what,
                )
        if self.modifier_rank is not None:
            with plainly():
                self._keep_changes(self.modifier_rank)

    def close(self) -> None:
        """Keep this rank's part only, whatever happened. Local."""
        for early, param in zip(self.shards, self._params, strict=False):
            if early.is_gathered:
                early.is_gathered = False
                param.data = early.stand_in
                early.version = param._version
        self._params.clear()
        self._homes.clear()

    def _judge(self, index: int) -> Verdict:
        param, home = self._params[index], self._homes[index]
        data = param.data
        if data.shape != home.shape or data.dtype != home.dtype or data.device != home.device:
            return Verdict.MISSHAPEN
        if self.modifier_rank is not None:
            return Verdict.FINE
        is_same = data.data_ptr() == home.data_ptr() and param._version == self._versions[index]
        if is_same and self.compares_bytes:
            is_same = sum_of(data) == self._sums[index]
        return Verdict.FINE if is_same else Verdict.EDITED

    def _keep_changes(self, modifier: int) -> None:
        for early, param, home in zip(self.shards, self._params, self._homes, strict=True):
            data = param.data
            if early.group.rank == modifier and data.data_ptr() != home.data_ptr():
                home.copy_(data)
            if home.numel():
                broadcast_flat(home.view(-1), src=modifier, group=early.group).wait()
            early.keep_part_of(home)
