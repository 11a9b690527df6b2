"""What is to be kept outside the device of one rank's shards. Planning only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import field, frozen
from torch import nn

from ._buffer_plan import BufferPlan, UnitPlan
from ._placement import Placement
from ._precision import Precision
from ._rest_plan import RestPlan
from ._shard_home import ShardSize

Targets = tuple[nn.Parameter, ...]


@frozen(eq=False)
class RoomPlan:
    """Sizes of what a home keeps, and what an updater steps."""

    sizes: dict[int, ShardSize] = field(factory=dict)  # of shards at home, by number of the buffer
    targets: dict[int, Targets] = field(factory=dict)  # likewise
    positions: dict[nn.Parameter, int] = field(factory=dict)  # of targets: their param groups
    masters: dict[torch.dtype, torch.dtype] = field(factory=dict)  # by dtype of targets


def plan_room(
    plans: Sequence[UnitPlan],
    placements: Sequence[Placement],
    *,
    rests: RestPlan,
    precision: Precision,
    rank: int,
    device: torch.device,
    group_of: Mapping[str, int],
    first_index: int = 0,
) -> RoomPlan:
    """Say what rests elsewhere of these units on this rank.

    Args:
        plans: Of the units.
        placements: Of the parameters of each.
        rests: What rests elsewhere.
        precision: Says which have masters.
        rank: Whose.
        device: Of what rests on the device; meta for one that is not here.
        group_of: Param group by name of the parameter.
        first_index: Number of the first buffer.
    """
    room, index = RoomPlan(), first_index
    for unit, placement in zip(plans, placements, strict=True):
        for buffer in unit.buffers:
            at_home = rests.params and placement is Placement.SHARDED
            if at_home:
                room.sizes[index] = ShardSize(buffer.layout.splits[rank], buffer.dtype)
            if rests.state and buffer.trainable:
                at = torch.device("cpu") if at_home else device
                room.targets[index] = targets_of(buffer, rank, at)
                for param, target in zip(buffer.params, room.targets[index], strict=True):
                    if param.name in group_of:
                        room.positions[target] = group_of[param.name]
                master = rests.master_of(precision, buffer, placement)
                if master is not None:
                    room.masters[buffer.dtype] = master
            index += 1
    return room


def targets_of(plan: BufferPlan, rank: int, device: torch.device) -> Targets:
    """What stands for each parameter's shard: of its shape, without memory."""
    numels = {piece.index: piece.in_tensor.numel for piece in plan.layout.pieces(rank)}
    return tuple(
        nn.Parameter(
            torch.empty((), dtype=plan.dtype, device=device).expand(
                param.cut.shard_shape(param.shape, numels.get(position, 0))
            )
        )
        for position, param in enumerate(plan.params)
    )
