"""Undo partition(): the plain model and the plain optimizer, with nothing of ours on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from zero_comm import all_gather_flat, check_agreement

from ._chained import members_of
from ._errors import StateError
from ._flat_buffer import FlatBuffer
from ._placement import Placement
from ._places import forget_places
from ._sharded_model import ShardedModel
from ._torch_compat import plain_access

_TIMEOUT_S = 60.0


def unpartition(sharded: ShardedModel) -> None:
    """What the public `unpartition` documents."""
    _check_idle(sharded)
    sharded.refuse_while_gathered("unpartition()")
    buffers = [buffer for unit in sharded.units for buffer in unit.buffers]
    states = [_states_of(buffer, sharded.optimizer) for buffer in buffers]
    facts = {
        f"optimizer state of {plan.name!r}": ", ".join(sorted(state))
        for buffer, of_buffer in zip(buffers, states, strict=True)
        for plan, state in zip(buffer.plan.params, of_buffer, strict=True)
    }
    check_agreement(facts, group=sharded.group, timeout_s=_TIMEOUT_S)
    sharded.begin_write()
    with plain_access():
        sharded.reducer.before_forward()  # takes guards away
    for buffer, of_buffer in zip(buffers, states, strict=True):
        whole = _gather(buffer, buffer.shard) if buffer.whole is None else buffer.whole
        # Memory of their own, as before: tensors of one storage look tied to who saves them.
        buffer.install([view.clone() for view in buffer.views_of(whole)])
        if sharded.placements.optim is Placement.SHARDED and sharded.optimizer is not None:
            _return_state(buffer, of_buffer, sharded.optimizer)
    for remove in sharded.removers:
        remove()
    sharded.removers.clear()
    forget_places(sharded)
    sharded.end_write()  # backward of a graph that was made before says so


def _check_idle(sharded: ShardedModel) -> None:
    in_use = next((unit for unit in sharded.units if unit.depth), None)
    if in_use is not None:
        raise StateError(
            f"unpartition() was called while the forward of unit {in_use.name!r} is running; call "
            "it between steps"
        )
    if sharded.reducer.shards_state and any(
        g.has_local or g.in_flight is not None or g.holds_gradients
        for g in sharded.reducer.gradients
    ):
        raise StateError(
            "unpartition() was called while sharded gradients wait for the optimizer; call "
            "optimizer.step() or optimizer.zero_grad() first"
        )


def _gather(buffer: FlatBuffer, shard: Tensor) -> Tensor:
    """The flat buffer whose part on this rank is `shard`, of any dtype. Collective."""
    layout = buffer.plan.layout
    return all_gather_flat(
        shard.new_zeros(layout.numel),
        splits=layout.splits,
        payload=layout.payload_splits,
        group=buffer.group,
        shard=shard,
        tag=buffer.gather_tag,
    ).wait()


def _states_of(buffer: FlatBuffer, optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    if optimizer is None:
        return [{} for _ in buffer.shard_params]
    return [optimizer.state.get(shard, {}) for shard in buffer.shard_params]


def _return_state(
    buffer: FlatBuffer, states: list[dict[str, Any]], optimizer: torch.optim.Optimizer
) -> None:
    """Put the parameters back in the shards' place, and gather what the optimizer knows of them."""
    whole: list[dict[str, Any]] = [dict(state) for state in states]
    kinds = {
        (key, value.dtype): None
        for state, shard in zip(states, buffer.shard_params, strict=True)
        for key, value in state.items()
        if _is_elementwise(key, value, shard)
    }
    for key, dtype in sorted(kinds, key=str):
        mine = torch.zeros_like(buffer.shard, dtype=dtype)
        for part, state in zip(buffer.parts_of(mine), states, strict=True):
            if key in state and state[key].dtype == dtype:
                part.copy_(state[key])
        views = buffer.views_of(_gather(buffer, mine))
        for view, state, shard in zip(views, whole, buffer.shard_params, strict=True):
            value = state.get(key)
            if (
                isinstance(value, Tensor)
                and value.dtype == dtype
                and _is_elementwise(key, value, shard)
            ):
                state[key] = view.clone()
    params = dict(zip(map(id, buffer.shard_params), buffer.params, strict=True))
    for group in optimizer.param_groups:
        group["params"][:] = [params.get(id(param), param) for param in group["params"]]
    for shard, param, state in zip(buffer.shard_params, buffer.params, whole, strict=True):
        for member in members_of(optimizer):  # the state of a chain of them is to read
            if member.state.pop(shard, None) is not None:
                member.state[param] = state


def _is_elementwise(key: str, value: Any, shard: nn.Parameter) -> bool:
    """Whether it is one value per element, as opposed to a scalar of the whole parameter."""
    return isinstance(value, Tensor) and key != "step" and value.shape == shard.shape
