"""Any elementwise torch optimizer, working on shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._errors import PartitionError
from ._flat_buffer import FlatBuffer
from ._layout import Piece
from ._unit import Unit


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise PartitionError unless every parameter of the optimizer is one of the model's."""
    known = {id(param) for param in model.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) not in known:
                raise PartitionError(
                    f"param group {index} of the {type(optimizer).__name__}: parameter {position} "
                    f"of shape {tuple(param.shape)} is not in the model; build the optimizer from "
                    "model.parameters() of the very model that is sharded, and shard once"
                )
    for name, value in vars(optimizer).items():
        if isinstance(value, list | tuple) and any(id(item) in known for item in value):
            raise PartitionError(
                f"a {type(optimizer).__name__} keeps parameters in its attribute {name!r}, outside "
                "param_groups, and would go on updating the unsharded ones; use an elementwise "
                "optimizer (SGD, Adam, AdamW, Adagrad, Lion, ...)"
            )


def param_group_of(optimizer: torch.optim.Optimizer | None) -> dict[int, int]:
    """Parameter id to the index of its param group."""
    groups = optimizer.param_groups if optimizer is not None else []
    return {id(param): i for i, group in enumerate(groups) for param in group["params"]}


def describe_optimizer(optimizer: torch.optim.Optimizer | None) -> dict[str, str]:
    """What ranks must agree on about it, by name."""
    if optimizer is None:
        return {"optimizer": "none"}
    facts = {"optimizer": type(optimizer).__name__}
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key == "params":
                facts[f"optimizer param group {index}"] = f"{len(value)} parameters"
            elif isinstance(value, int | float | str | bool | tuple | None):
                facts[f"optimizer param group {index}, {key}"] = repr(value)
    return facts


def shard_optimizer(optimizer: torch.optim.Optimizer, units: Sequence[Unit]) -> None:
    """Put shards in place of the parameters, and keep this rank's part of the state. Local.

    Param-group dicts and the optimizer keep their identity, so a scheduler built before goes on
    working. The order of parameters is kept; a shard may be empty.

    Raises:
        PartitionError: A state tensor is neither a scalar nor shaped like its parameter.
    """
    places = {
        id(param): (buffer, position)
        for unit in units
        for buffer in unit.buffers
        for position, param in enumerate(buffer.params)
    }
    for group in optimizer.param_groups:
        shards = []
        for param in group["params"]:
            buffer, position = places[id(param)]
            shard = buffer.shard_params[position]
            if param in optimizer.state:
                state = optimizer.state.pop(param)
                optimizer.state[shard] = _shard_state(state, buffer, position)
            shards.append(shard)
        group["params"][:] = shards


def _shard_state(state: dict[str, Any], buffer: FlatBuffer, position: int) -> dict[str, Any]:
    plan = buffer.plan.params[position]
    piece = next((p for p in buffer.pieces if p.index == position), None)
    return {
        key: _shard_value(key, value, plan.shape, plan.name, piece) for key, value in state.items()
    }


def _shard_value(key: str, value: Any, shape: torch.Size, name: str, piece: Piece | None) -> Any:
    if not isinstance(value, Tensor) or key == "step" or (value.dim() == 0 and shape):
        return value
    if value.shape != shape:
        raise PartitionError(
            f"parameter {name!r}: optimizer state {key!r} has shape {tuple(value.shape)}, expected "
            f"a scalar or the parameter's shape {tuple(shape)}; only elementwise optimizers can be "
            "cut anywhere"
        )
    flat = value.reshape(-1)
    return flat[piece.in_tensor.as_slice()].clone() if piece is not None else flat[:0].clone()
