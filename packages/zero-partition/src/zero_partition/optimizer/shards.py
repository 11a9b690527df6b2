"""Any torch optimizer, working on shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero_partition.chained import attribute_with_params, members_of
from zero_partition.errors import PartitionError
from zero_partition.memory.flat_buffer import FlatBuffer
from zero_partition.plan.cuts import Cut
from zero_partition.plan.layout import Span
from zero_partition.run.step import has_state, refuse_parameter
from zero_partition.run.unit import Unit

from .entries import keys_for_whole, part_of_entry


class ShardStates(defaultdict):
    """An optimizer's state by shard, which knows what is asked of it by parameter.

    Else `state[param]` would be an empty dict, and `param in state` false, without a word.
    """

    def __missing__(self, key: Any) -> Any:
        """Make a shard's state."""
        refuse_parameter(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        """Whether a shard has state."""
        if super().__contains__(key):
            return True
        refuse_parameter(key)
        return False

    def __bool__(self) -> bool:
        """See `has_state`."""
        return has_state(len(self))

    def get(self, key: Any, default: Any = None) -> Any:  # type: ignore[override]
        """A shard's state, if it has one."""
        return super().get(key, default) if key in self else default


def watch_state(optimizer: torch.optim.Optimizer) -> None:
    """Tell a question about a model's parameter in `optimizer.state` where the answer is."""
    if type(optimizer.state) is defaultdict:  # else it is of the optimizer's own kind
        optimizer.state = ShardStates(dict, optimizer.state)


def leave_state(optimizer: torch.optim.Optimizer) -> None:
    """Undo it."""
    if type(optimizer.state) is ShardStates:
        optimizer.state = defaultdict(dict, optimizer.state)


def check_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, *, shards_state: bool
) -> None:
    """Raise PartitionError unless the optimizer is of this model, and can work on shards."""
    known = {id(param) for param in model.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) not in known:
                raise PartitionError(
                    f"param group {index} of the {type(optimizer).__name__}: parameter {position} "
                    f"of shape {tuple(param.shape)} is not in the model; build the optimizer from "
                    "model.parameters() of the very model that is sharded, and shard once"
                )
    given = [param for group in optimizer.param_groups for param in group["params"]]
    if not any(param.requires_grad for param in given):
        raise PartitionError(
            f"expected an optimizer with something to train, got {type(optimizer).__name__} over "
            f"{len(given)} parameters, none of which requires a gradient; unfreeze before shard(), "
            "as later is not followed, or shard(model) without an optimizer for inference"
        )
    for member in members_of(optimizer) if shards_state else ():
        attribute = attribute_with_params(member, known)
        if attribute is not None:
            raise PartitionError(
                f"a {type(member).__name__} keeps parameters in its attribute {attribute!r}, "
                "outside param_groups, and would go on updating the unsharded ones; use an "
                "elementwise optimizer (SGD, Adam, AdamW, Adagrad, Lion, ...), or one that "
                "needs whole tensors and finds them in param_groups (Muon, Adafactor, ...)"
            )


def param_group_of(optimizer: torch.optim.Optimizer | None) -> dict[int, int]:
    """Parameter id to the index of its param group."""
    groups = optimizer.param_groups if optimizer is not None else []
    return {id(param): i for i, group in enumerate(groups) for param in group["params"]}


def describe_optimizer(optimizer: torch.optim.Optimizer | None) -> dict[str, str]:
    """What ranks must agree on about it, by name."""
    if optimizer is None:
        return {"optimizer": "none"}
    facts = {"optimizer": ", ".join(type(member).__name__ for member in members_of(optimizer))}
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key == "params":
                facts[f"optimizer param group {index}"] = f"{len(value)} parameters"
            elif isinstance(value, int | float | str | bool | tuple | None):
                facts[f"optimizer param group {index}, {key}"] = repr(value)
    for index, (param, state) in enumerate(optimizer.state.items()):
        step = state.get("step") if isinstance(state, dict) else None
        step = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
        facts[f"optimizer state {index}"] = f"{tuple(param.shape)}: {sorted(state)}, step {step}"
    return facts


def shard_optimizer(optimizer: torch.optim.Optimizer, units: Sequence[Unit]) -> None:
    """Put shards in place of the parameters, and keep this rank's part of the state. Local.

    Param-group dicts and the optimizer keep their identity, so a scheduler built before goes on
    working. The order of parameters is kept; a shard may be empty.

    Raises:
        PartitionError: A state tensor has a shape that its parameter's cut does not explain.
    """
    places = {
        id(param): (buffer, position)
        for unit in units
        for buffer in unit.buffers
        for position, param in enumerate(buffer.params)
    }
    for member in members_of(optimizer):
        for_whole = keys_for_whole(
            (places[id(param)][0].plan.params[places[id(param)][1]].shape, state)
            for param, state in member.state.items()
            if id(param) in places
        )
        for group in member.param_groups:
            shards = []
            for param in group["params"]:
                buffer, position = places[id(param)]
                shard = buffer.shard_params[position]
                if param in member.state:
                    state = _shard_state(member.state.pop(param), buffer, position, for_whole)
                    if state is not None:
                        member.state[shard] = state
                shards.append(shard)
            group["params"][:] = shards


def _shard_state(
    state: dict[str, Any], buffer: FlatBuffer, position: int, for_whole: Collection[str]
) -> dict[str, Any] | None:
    """This rank's part of it; None where a rank that keeps nothing of the parameter needs none."""
    plan = buffer.plan.params[position]
    piece = buffer.piece_of(position)
    is_absent = piece is None and plan.shape.numel() > 0
    if plan.cut != Cut.FLAT and is_absent:
        return None
    span = piece.in_tensor if piece is not None else Span(0, 0)
    return {k: part_of_entry(plan, k, value, span, for_whole) for k, value in state.items()}
