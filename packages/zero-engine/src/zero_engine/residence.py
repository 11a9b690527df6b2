"""From what a configuration says of offload to who keeps what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import nn
from zero_offload import (
    AbstractStore,
    DiskSettings,
    DiskStore,
    Footprint,
    HostArena,
    OffloadedState,
)
from zero_offload.residence import DelayedState, HostGradients, OffloadedShards, with_delay
from zero_partition.seams import Homes

from .offload import Offload

_SMALL_BYTES = 2**20  # sub-groups with less state stay in memory


def shares_of(offload: Offload) -> dict[str, Any]:
    """Where how much of the state rests, as `OffloadedState.like` takes it."""
    return {
        "state": "host" if offload.optimizer == "host" else "disk",
        "fraction": {"device": 1 - offload.fraction},
        "subgroup_bytes": offload.subgroup_bytes,
        "small_bytes": min(_SMALL_BYTES, offload.subgroup_bytes // 2),
    }


def _open_disk(offload: Offload) -> AbstractStore:
    assert offload.path is not None, "checked when it was made"
    return DiskStore(offload.path, offload.disk or DiskSettings())


def homes_of(
    offload: Offload | None,
    device: torch.device,
    *,
    open_disk: Callable[[Offload], AbstractStore] = _open_disk,
) -> Homes:
    """As it was configured; nothing is allocated or opened yet. Local.

    Where the device is the CPU, what rests on the host rests on the device. Gradients wait on
    the host where all of the optimizer's state is stepped there.
    """
    if offload is None:
        return Homes()
    is_cpu = device.type == "cpu"
    resources = ExitStack()
    disk = resources.enter_context(ExitStack())  # entered first: closed last
    # Opened when room is first taken: a folder that is missing on one rank is then known to all.
    store = cache(lambda: disk.enter_context(open_disk(offload)))

    def arena(name: str) -> HostArena:
        return HostArena(name, is_pinned=offload.pin)

    params = None
    if offload.params == "disk":
        params = OffloadedShards(
            arena("parameters"),
            store,
            max_host_numel=offload.max_host_numel,
            budget_bytes=offload.budget_bytes,
        )
    elif offload.params == "host" and not is_cpu:
        params = OffloadedShards(arena("parameters"))
    if params is not None:
        resources.callback(params.end)
    has_state = offload.optimizer != "device" and offload.fraction > 0
    grads_on_host = has_state and not is_cpu and offload.fraction == 1

    def open_state(
        optimizer: torch.optim.Optimizer,
        positions: Mapping[nn.Parameter, int],
        own_masters: Mapping[torch.dtype, torch.dtype],
    ) -> OffloadedState | DelayedState:
        budget = offload.budget_bytes
        if budget is not None:
            taken = 0 if params is None else params.host_bytes
            if offload.delayed_update:
                held_back = with_delay(Footprint(), positions, grads_on_host=grads_on_host)
                taken += held_back.host_bytes
            budget = max(0, budget - taken)
        state: OffloadedState | DelayedState
        state = inner = OffloadedState.like(
            optimizer,
            store=store() if offload.optimizer == "disk" else None,
            own_masters=own_masters,
            budget_bytes=budget,
            is_pinned=offload.pin,
            **shares_of(offload),
        )
        if offload.delayed_update:
            state = DelayedState(inner, arena("delayed update"), grads_on_host=grads_on_host)
        resources.callback(state.close, keeps_store=False)
        state.add(positions, optimizer.param_groups)
        return state

    return Homes(
        params=params,
        open_state=open_state if has_state else None,
        is_delayed=has_state and offload.delayed_update,
        gradients=HostGradients(arena("gradients")) if grads_on_host else None,
        place="here" if params is None else offload.params,
        close=resources.close,
    )
