"""How many bytes rest outside the device, before anything is allocated: arithmetic only."""

from __future__ import annotations

import torch
from attrs import frozen
from zero_offload import OffloadedState
from zero_partition import ModelPlan, RoomPlan, UpdaterReport, plan_room

from ._held_back import held_back_bytes
from ._offload import Offload
from ._shard_homes import FREE_SHARDS, WRITES_BEHIND, first_that_fit
from ._shard_updater import shares_of


@frozen(kw_only=True)
class ElsewherePlan:
    """What one rank keeps outside the device, by who keeps it."""

    updater: UpdaterReport | None = None  # state and masters, if something keeps them
    home_host_bytes: int = 0  # shards of parameters
    home_disk_bytes: int = 0
    passing_bytes: int = 0  # at most, of host memory through which shards come from and go to disk


def plan_elsewhere(
    planned: ModelPlan,
    rank: int,
    offload: Offload | None,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
) -> ElsewherePlan:
    """What `offload` has this rank keep elsewhere. Local."""
    if offload is None:
        return ElsewherePlan()
    room = plan_room(
        planned.units,
        planned.resting,
        rests=planned.rests,
        precision=planned.precision,
        rank=rank,
        # There need be no such device here: what is on meta is not on the CPU, and that counts.
        device=device if device.type == "cpu" else torch.device("meta"),
        group_of=planned.group_of,
    )
    numel = offload.max_host_numel if offload.params == "disk" else None
    on_host = room.sizes if numel is None else first_that_fit(room.sizes, numel)
    on_disk = [size for index, size in room.sizes.items() if index not in on_host]
    return ElsewherePlan(
        updater=_plan_updater(planned, room, offload, optimizer),
        home_host_bytes=sum(size.num_bytes for size in on_host.values()),
        home_disk_bytes=sum(size.num_bytes for size in on_disk),
        passing_bytes=_passing_bytes([size.num_bytes for size in on_disk], planned, offload),
    )


def _plan_updater(
    planned: ModelPlan, room: RoomPlan, offload: Offload, optimizer: torch.optim.Optimizer | None
) -> UpdaterReport | None:
    if optimizer is None or not planned.rests.state:
        return None
    footprint = OffloadedState.footprint_like(
        optimizer,
        room.positions,
        optimizer.param_groups,
        own_masters=room.masters,
        **shares_of(offload),
    )
    device_bytes = host_bytes = 0
    if planned.rests.is_delayed:
        targets = room.positions.keys()
        device_bytes, host_bytes = held_back_bytes(targets, grads_leave=planned.rests.grads)
    return UpdaterReport(
        device_bytes=footprint.device_bytes + device_bytes,
        host_bytes=footprint.host_bytes + host_bytes,
        disk_bytes=footprint.disk_bytes,
    )


def _passing_bytes(sizes: list[int], planned: ModelPlan, offload: Offload) -> int:
    """Shards read ahead, open for a sub-group's step, written behind, and memory kept for more.

    How much of it is in use hangs on how fast the disk is, so this is a bound.
    """
    largest = max(sizes, default=0)
    of_units = sorted(
        (unit.num_bytes // planned.world_size for unit in planned.units), reverse=True
    )
    ahead = sum(of_units[: offload.read_ahead])
    opened = offload.subgroup_bytes + 2 * largest if planned.rests.state else largest
    return (
        min(sum(sizes), ahead) + min(sum(sizes), opened) + (WRITES_BEHIND + FREE_SHARDS) * largest
    )
