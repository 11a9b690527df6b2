"""What an optimizer steps on one rank, from layouts alone. Planning only."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from attrs import frozen

from ._buffer_plan import BufferPlan, ParameterPlan
from ._cut import Cut
from ._model_plan import ModelPlan
from ._placement import Placement


@frozen(kw_only=True)
class PlannedStep:
    """Bytes that one rank's optimizer goes through in a step, wherever that is."""

    num_bytes: int  # values, state and gradients read, values and state written
    grads_bytes: int  # of gradients as they are reduced: what goes where an optimizer steps
    params_bytes: int  # of parameters as the model has them: what comes back


def plan_step(plan: ModelPlan, rank: int) -> PlannedStep:
    """Say what a step goes through on one rank, of all that train the model. Local."""
    mine = plan.routes.shard_rank(rank)
    num_bytes = grads_bytes = params_bytes = 0
    for unit, placement in zip(plan.units, plan.resting, strict=True):
        for buffer in unit.buffers:
            if not buffer.trainable:
                continue
            dtype = plan.rests.training_of(plan.precision, buffer, placement)
            wire = plan.precision.wire_of(buffer.dtype)
            for param, shape in stepped_params(plan, buffer, mine):
                if param.name not in plan.group_of:
                    continue
                numel = math.prod(shape)
                state = sum(state_bytes(plan, param, shape, dtype))
                num_bytes += 2 * (numel * dtype.itemsize + state) + numel * dtype.itemsize
                num_bytes += numel * buffer.dtype.itemsize * (dtype != buffer.dtype)
                grads_bytes += numel * wire.itemsize
                params_bytes += numel * buffer.dtype.itemsize
    return PlannedStep(num_bytes=num_bytes, grads_bytes=grads_bytes, params_bytes=params_bytes)


def stepped_params(
    plan: ModelPlan, buffer: BufferPlan, rank: int
) -> Iterator[tuple[ParameterPlan, tuple[int, ...]]]:
    """Parameters of a buffer, and the shape of what is stepped of each on a rank of the shards."""
    if plan.placements.optim is Placement.REPLICATED:
        yield from ((param, tuple(param.shape)) for param in buffer.params)
        return
    pieces = {piece.index: piece for piece in buffer.layout.pieces(rank)}
    for position, param in enumerate(buffer.params):
        piece = pieces.get(position)
        is_absent = piece is None and param.shape.numel() > 0
        if is_absent and param.cut != Cut.FLAT:
            continue  # it has no gradient there, and no state
        numel = 0 if piece is None else piece.in_tensor.numel
        yield param, param.cut.shard_shape(param.shape, numel)


def state_bytes(
    plan: ModelPlan, param: ParameterPlan, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[int, int]:
    """Of the state of a parameter that is stepped so: per element or row, and single numbers."""
    group = plan.group_of.get(param.name)
    return (0, 0) if group is None else plan.state.bytes_of((group, len(shape), dtype), shape)
