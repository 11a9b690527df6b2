"""An optimizer whose state an updater keeps: its steps, and what it shows of the state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from attrs import define
from torch import Tensor, nn

from ._gradients import BufferGradients
from ._open_shards import OpenShards
from ._optimizer import refuse_parameter
from ._residence import Residence
from ._unit import Unit
from ._updater import MASTER, AbstractUpdater


def step_elsewhere(
    residence: Residence,
    gradients: Sequence[BufferGradients],
    optimizer: torch.optim.Optimizer | None,
) -> list[tuple[Tensor, Tensor]]:
    """Step every shard that has a gradient, where its state is. Local.

    What a delayed step has held back comes in first. `grad_scale` and `found_inf` of the optimizer
    mean what they do to torch's fused ones.

    Returns:
        Shards and the gradients taken from them, which the optimizer's own step must not find.
    """
    updater = residence.updater
    assert updater is not None, "asked before"
    bring_in(residence, gradients)
    hidden = [
        (param, param.grad)
        for g in gradients
        for param in g.buffer.shard_params
        if param.grad is not None
    ]
    found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if found_inf is None or not float(found_inf):
        grads, buffer_of = {}, {}
        for g in gradients:
            for target, param in zip(g.buffer.targets, g.buffer.shard_params, strict=True):
                if param.grad is not None and residence.is_updated(target):
                    grads[target] = param.grad.as_subclass(Tensor)
                    buffer_of[target] = g.buffer
        # Only what is opened at a home needs to know; without one this is not looked for.
        started = set() if residence.home is None else set(updater.started())
        opened = OpenShards(
            buffer_of,
            lambda buffer: all(
                buffer.targets[piece.index] in grads and buffer.targets[piece.index] in started
                for piece in buffer.pieces
            ),
        )
        try:
            factor = 1.0 if scale is None else 1.0 / float(scale)
            updater.step(grads, factor=factor, opening=opened.open)
        finally:
            opened.close()
        if residence.home is not None:
            residence.home.settle()
    for param, _ in hidden:
        param.grad = None
    return hidden


def bring_in(residence: Residence, gradients: Sequence[BufferGradients]) -> None:
    """Let shards have the values that a delayed step has held back. Local, blocking."""
    updater = residence.updater
    assert updater is not None, "asked before"
    held_back = set(updater.held_back())
    if not held_back:
        return
    opened = OpenShards(
        {target: g.buffer for g in gradients for target in g.buffer.targets},
        lambda buffer: all(buffer.targets[piece.index] in held_back for piece in buffer.pieces),
    )
    try:
        updater.bring_in(opened.open)
    finally:
        opened.close()
    if residence.home is not None:
        residence.home.settle()


def hand_over_state(
    optimizer: torch.optim.Optimizer, updater: AbstractUpdater, units: Sequence[Unit]
) -> None:
    """Move what `optimizer.state` has to the updater, and leave a view of that in its place."""
    target_of = _targets_by_shard(units)
    states = {target_of[param]: state for param, state in optimizer.state.items() if state}
    if states:
        updater.write(states, replaces=False)
    optimizer.state = UpdatedState(updater, target_of)  # type: ignore[assignment]


def load_elsewhere(
    updater: AbstractUpdater, units: Sequence[Unit], optimizer: torch.optim.Optimizer
) -> None:
    """The optimizer has loaded a state dict: the updater's states are those, and no others."""
    target_of = _targets_by_shard(units)
    loaded = {target_of[param]: state for param, state in optimizer.state.items()}
    started = {target: {} for target in updater.started()}
    updater.write({**started, **loaded}, replaces=True)
    optimizer.state = UpdatedState(updater, target_of)  # type: ignore[assignment]


def _targets_by_shard(units: Sequence[Unit]) -> dict[nn.Parameter, nn.Parameter]:
    return {
        param: target
        for unit in units
        for buffer in unit.buffers
        for param, target in zip(buffer.shard_params, buffer.targets, strict=False)
    }


def bring_back_state(optimizer: torch.optim.Optimizer) -> None:
    """The opposite: `optimizer.state` holds it again, on the host."""
    view = optimizer.state
    if isinstance(view, UpdatedState):
        optimizer.state = defaultdict(dict, dict(view.items()))


@define(eq=False)
class UpdatedState(MutableMapping[Any, dict[str, Any]]):
    """`optimizer.state` by shard: copies on the host, made at each access; assigning writes."""

    updater: AbstractUpdater
    target_of: Mapping[nn.Parameter, nn.Parameter]

    def __getitem__(self, shard: Any) -> dict[str, Any]:
        """A copy of a shard's state."""
        refuse_parameter(shard)
        target = self.target_of[shard]
        if target not in set(self.updater.started()):
            raise KeyError(f"a shard of shape {tuple(shard.shape)} without state")
        return _visible(self.updater.read([target])[target])

    def __setitem__(self, shard: Any, state: dict[str, Any]) -> None:
        """Put these entries in the place of those that there are."""
        self.updater.write({self.target_of[shard]: state}, replaces=False)

    def __delitem__(self, shard: Any) -> None:
        """Forget a shard's state; its master stays."""
        raise TypeError("state that rests outside the device is not deleted by shard")

    def __contains__(self, shard: object) -> bool:
        """Whether a shard has state."""
        refuse_parameter(shard)
        return shard in set(self)

    def __iter__(self) -> Iterator[nn.Parameter]:
        """Shards that have state."""
        started = set(self.updater.started())
        return iter([shard for shard, target in self.target_of.items() if target in started])

    def __len__(self) -> int:
        """How many have."""
        return len(list(iter(self)))

    def items(self) -> Any:
        """All of it, read once."""
        shards = list(self)
        found = self.updater.read([self.target_of[shard] for shard in shards])
        return {shard: _visible(found[self.target_of[shard]]) for shard in shards}.items()


def _visible(state: dict[str, Any]) -> dict[str, Any]:
    """Masters are values of parameters, and no entry of the optimizer's."""
    return {name: value for name, value in state.items() if name != MASTER}
