"""Optimizer state that zero-offload keeps, as what the partition asks of an updater."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from attrs import define, field
from torch import Tensor, nn
from zero_offload import OffloadedState
from zero_partition import MASTER
from zero_partition.seams import Opening, OptimizerOffload, UpdaterReport

from zero_engine.offload import Offload

from .shards import Disk

_SMALL_BYTES = 2**20  # sub-groups with less state stay in memory


def shares_of(offload: Offload) -> dict[str, Any]:
    """Where how much of the state rests, as `OffloadedState.like` takes it."""
    return {
        "state": "host" if offload.optimizer == "host" else "disk",
        "fraction": {"device": 1 - offload.fraction},
        "subgroup_bytes": offload.subgroup_bytes,
        "small_bytes": min(_SMALL_BYTES, offload.subgroup_bytes // 2),
    }


@final
@define(eq=False)
class OffloadedUpdater(OptimizerOffload):
    """Steps shards where their state rests.

    Args:
        offload: What rests where.
        disk: Where some of it rests, if it does.
        taken_bytes: Of the host budget, by others.
    """

    offload: Offload
    disk: Disk | None
    taken_bytes: Callable[[], int]
    _optimizer: torch.optim.Optimizer | None = field(default=None, init=False)
    _kept: OffloadedState | None = field(default=None, init=False)
    _closes: bool = field(default=False, init=False)  # the disk, at the end

    def plan(
        self,
        targets: Mapping[nn.Parameter, int],
        optimizer: torch.optim.Optimizer,
        *,
        masters: Mapping[torch.dtype, torch.dtype],
    ) -> None:
        """See `OptimizerOffload.plan`."""
        offload = self.offload
        budget = offload.budget_bytes
        self._optimizer = optimizer
        store = None if self.disk is None else self.disk.open()
        self._closes = self.disk is not None
        self._kept = OffloadedState.like(
            optimizer,
            store=store,
            own_masters=masters,
            budget_bytes=None if budget is None else max(0, budget - self.taken_bytes()),
            is_pinned=offload.pin,
            **shares_of(offload),
        )
        self._kept.add(targets, optimizer.param_groups)

    def step(
        self, grads: Mapping[nn.Parameter, Tensor], *, factor: float, opening: Opening
    ) -> None:
        """See `OptimizerOffload.step`."""
        self.step_with(self.groups, grads, factor=factor, opening=opening)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The param groups, with the numbers that they have now."""
        assert self._optimizer is not None, "planned with it"
        return self._optimizer.param_groups

    def step_with(
        self,
        groups: Sequence[dict[str, Any]],
        grads: Mapping[nn.Parameter, Tensor],
        *,
        factor: float,
        opening: Opening,
    ) -> None:
        """The same with the numbers of these groups."""
        self._state.step(groups, grads, factor=factor, opening=opening)
        self._state.read_ahead()  # each as soon as its slot is written: the disk need not wait

    @property
    def is_delayed(self) -> bool:
        """See `OptimizerOffload.is_delayed`."""
        return False

    def held_back(self) -> Collection[nn.Parameter]:
        """See `OptimizerOffload.held_back`: `step` writes targets itself."""
        return ()

    def bring_in(self, opening: Opening) -> None:
        """See `OptimizerOffload.bring_in`: there is nothing."""

    def begin_backward(self) -> None:
        """See `OptimizerOffload.begin_backward`."""
        self._state.read_ahead()

    def started(self) -> Collection[nn.Parameter]:
        """See `OptimizerOffload.started`."""
        return self._state.started(besides=(MASTER,))

    def written_only(self) -> Collection[nn.Parameter]:
        """See `OptimizerOffload.written_only`."""
        return self._state.written_only()

    def hides_master(self, target: nn.Parameter) -> bool:
        """See `OptimizerOffload.hides_master`."""
        return self._state.hides_master(target)

    def read(
        self, targets: Iterable[nn.Parameter], names: Collection[str] | None = None
    ) -> dict[nn.Parameter, dict[str, Any]]:
        """See `OptimizerOffload.read`."""
        return self._state.read(targets, names)

    def describe(self, targets: Iterable[nn.Parameter]) -> dict[nn.Parameter, dict[str, Any]]:
        """See `OptimizerOffload.describe`."""
        started = set(self.started())
        return self._state.describe(target for target in targets if target in started)

    def write(self, states: Mapping[nn.Parameter, Mapping[str, Any]], *, replaces: bool) -> None:
        """See `OptimizerOffload.write`."""
        if replaces:
            self._state.mend()
        self._state.write(states, replaces=replaces)

    def let_go(self) -> None:
        """See `OptimizerOffload.let_go`."""
        self._state.let_go()

    @property
    def report(self) -> UpdaterReport:
        """See `OptimizerOffload.report`."""
        footprint = self._state.footprint
        return UpdaterReport(
            device_bytes=footprint.device_bytes,
            host_bytes=footprint.host_bytes,
            disk_bytes=footprint.disk_bytes,
        )

    def end(self) -> None:
        """See `OptimizerOffload.end`."""
        if self._kept is not None:
            self._kept.close(keeps_store=False)
        if self.disk is not None and self._closes:
            self.disk.close()
        self._kept, self._optimizer, self._closes = None, None, False

    @property
    def _state(self) -> OffloadedState:
        assert self._kept is not None, "plan() comes first, and end() last"
        return self._kept
