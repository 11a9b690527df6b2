"""Optimizers whose state is offloaded: their steps, and the `optimizer.state` that users see."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, cast

import torch
from attrs import define, field
from torch import Tensor, nn

from zero_partition.chained import members_of
from zero_partition.errors import PartitionError, StateError
from zero_partition.memory.flat_buffer import FlatBuffer
from zero_partition.memory.seams import MASTER, DelayedOffload, OptimizerOffload, ParamOffload
from zero_partition.stand_in import find_owner
from zero_partition.torch_private import checkpoint_call

from .gradients import BufferGradients
from .residence import ModelOffload
from .unit import Unit


def step_offloaded(
    residence: ModelOffload,
    gradients: Sequence[BufferGradients],
    optimizer: torch.optim.Optimizer,
) -> list[tuple[nn.Parameter, Tensor]]:
    """Step every shard that has a gradient, where its state is. Local.

    The update of a delayed step is applied first. `grad_scale` and `found_inf` of the optimizer
    mean the same as for torch's fused optimizers.

    Returns:
        Shards and the gradients taken from them, which the optimizer's own step must not find.
    """
    offload = residence.offload
    assert offload is not None, "asked before"
    apply_delayed_update(residence, gradients)
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
            for target, param in zip(g.buffer.offloaded_params, g.buffer.shard_params, strict=True):
                if param.grad is not None and residence.is_stepped(target):
                    grads[target] = param.grad.as_subclass(Tensor)
                    buffer_of[target] = g.buffer
        # Only `OpenShards` needs to know this, and only if parameters are offloaded.
        written_only = set() if residence.param_offload is None else set(offload.written_only())
        overwritten = written_only & grads.keys()
        with OpenShards(residence.param_offload, buffer_of, overwritten) as opening:
            factor = 1.0 if scale is None else 1.0 / float(scale)
            offload.step(optimizer.param_groups, grads, factor=factor, opening=opening)
            # Each is read as soon as its slot is written, so that the disk does not idle.
            offload.read_ahead()
    for param, _ in hidden:
        param.grad = None
    return hidden


def apply_delayed_update(residence: ModelOffload, gradients: Sequence[BufferGradients]) -> None:
    """Write the values that a delayed step has computed to the shards. Local, blocking."""
    if not residence.backends.is_delayed:
        return
    offload = cast(DelayedOffload, residence.offload)
    pending_params = set(offload.pending_params())
    if not pending_params:
        return
    buffer_of = {target: g.buffer for g in gradients for target in g.buffer.offloaded_params}
    with OpenShards(residence.param_offload, buffer_of, pending_params) as opening:
        offload.apply_delayed_update(opening)


def move_state_to_offload(
    optimizer: torch.optim.Optimizer, offload: OptimizerOffload, units: Sequence[Unit]
) -> None:
    """Move the values of `optimizer.state` to the offload, and replace it by a view of them."""
    buffers = [buffer for unit in units for buffer in unit.buffers]
    target_of = {
        shard: target
        for buffer in buffers
        for shard, target in zip(buffer.shard_params, buffer.offloaded_params, strict=False)
    }
    for member in members_of(optimizer):
        strange = [key for key in member.state if not isinstance(key, Tensor)]
        if strange:
            raise PartitionError(
                f"optimizer state of a {type(member).__name__} cannot be offloaded: it has entries "
                f"of no parameter, {', '.join(map(repr, strange))}; leave it on the device"
            )
        own = chain.from_iterable(group["params"] for group in member.param_groups)
        view = UpdatedState(offload, {p: target_of[p] for p in own if p in target_of})
        states = view.take({param: state for param, state in member.state.items() if state})
        if states:
            offload.write(states, replaces=False)
        member.state = view  # type: ignore[assignment]


def restore_state(optimizer: torch.optim.Optimizer) -> None:
    """Undo `move_state_to_offload`: put the state, on the host, into `optimizer.state`."""
    for member in members_of(optimizer):
        # State that other code has set since then stays.
        if isinstance(member.state, UpdatedState):
            member.state = defaultdict(dict, dict(member.state.items()))


@define(eq=False)
class UpdatedState(MutableMapping[Any, dict[str, Any]]):
    """`optimizer.state` by shard: copies on the host, made at each access; assigning writes."""

    offload: OptimizerOffload
    target_of: Mapping[nn.Parameter, nn.Parameter]
    # Shard -> state, of shards without a target, which are never stepped.
    _others: dict[Any, dict[str, Any]] = field(factory=dict, init=False)

    def take(self, states: Mapping[Any, dict[str, Any]]) -> dict[nn.Parameter, dict[str, Any]]:
        """Return states by target; store those of shards without one, which are never stepped."""
        self._others = {p: dict(s) for p, s in states.items() if p not in self.target_of}
        return {self.target_of[p]: s for p, s in states.items() if p in self.target_of}

    def __getitem__(self, shard: Any) -> dict[str, Any]:
        """A copy of a shard's state."""
        refuse_parameter(shard)
        if shard in self._others:
            return self._others[shard]
        target = self.target_of[shard]
        if target not in self._started():
            return MappingProxyType({})  # type: ignore[return-value]  (nothing can be added to it)
        return self._visible(target, self.offload.read([target])[target])

    def __setitem__(self, shard: Any, state: dict[str, Any]) -> None:
        """Replace these entries; other entries of the shard stay."""
        if shard in self.target_of:
            self.offload.write({self.target_of[shard]: state}, replaces=False)
        else:
            self._others.setdefault(shard, {}).update(state)

    def __delitem__(self, shard: Any) -> None:
        """Forget the state of a shard that is not stepped; others cannot be deleted."""
        if shard in self.target_of:
            raise TypeError("offloaded optimizer state cannot be deleted for one shard")
        del self._others[shard]

    def __contains__(self, shard: object) -> bool:
        """Return whether a shard has state."""
        refuse_parameter(shard)
        return shard in set(self)

    def __iter__(self) -> Iterator[nn.Parameter]:
        """Shards that have state."""
        started = self._started()
        mine = [shard for shard, target in self.target_of.items() if target in started]
        return iter([*mine, *self._others])

    def __bool__(self) -> bool:
        """See `has_state`."""
        return has_state(len(self))

    def __len__(self) -> int:
        """Return the number of shards that have state."""
        return len(list(iter(self)))

    def items(self) -> Any:
        """Return every shard with its state, all read in one call."""
        targets = {p: self.target_of[p] for p in self if p not in self._others}
        found = self.offload.read(targets.values())
        mine = {shard: self._visible(target, found[target]) for shard, target in targets.items()}
        return (mine | self._others).items()

    def _started(self) -> set[nn.Parameter]:
        return set(self.offload.started(besides=(MASTER,)))

    def _visible(self, target: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        hidden = MASTER if self.offload.hides_master(target) else None
        return {name: value for name, value in state.items() if name != hidden}


def has_state(num_entries: int) -> bool:
    """Return whether an optimizer has state; always true for torch.distributed.checkpoint.

    That would make missing state by a step, which one rank must not take alone.

    Raises:
        StateError: The caller is its `set_optimizer_state_dict()`, which looks for the optimizer's
            parameters in the model, where there are no shards.
    """
    call = checkpoint_call()
    if call is not None and {"optimizers", "state_dict"} <= call.keys():
        raise StateError(
            "set_optimizer_state_dict() of torch.distributed.checkpoint cannot find in the model "
            "the shards that a sharded optimizer has; call "
            "zero_engine.load_full_optimizer_state_dict(model, state_dict) on every rank, which "
            "takes what get_optimizer_state_dict() gives"
        )
    return num_entries > 0 or call is not None


def refuse_parameter(key: object) -> None:
    """Raise StateError where state is asked for by a parameter of the model, not by its shard."""
    owner = find_owner(key) if isinstance(key, Tensor) else None
    if owner is not None and owner.is_trainable:
        raise StateError(
            f"optimizer.state was asked for parameter {owner.name!r}: since shard() its keys are "
            "this rank's shards, those of optimizer.param_groups[i]['params'][j]. Of the whole "
            "parameter: zero_engine.full_optimizer_state(param, 'exp_avg') on every rank; of this "
            "rank's part: local_optimizer_state(param, 'exp_avg')"
        )


@define(eq=False)
class OpenShards:
    """Offloaded shards that are open while the optimizer steps them, a few at a time.

    Args:
        param_offload: Where shards of parameters are offloaded; None: there is nothing to open.
        buffer_of: By target.
        overwritten: Targets that are going to be written, and not read.
    """

    param_offload: ParamOffload | None
    buffer_of: Mapping[nn.Parameter, FlatBuffer]
    overwritten: Collection[nn.Parameter]
    _open: dict[int, FlatBuffer] = field(factory=dict, init=False)

    def open(self, targets: Sequence[nn.Parameter]) -> None:
        """Open the shards of these targets, which are written next, and close all others.

        Blocks where values are read. Without targets it blocks until all closed shards are written.
        """
        if self.param_offload is None:
            return
        wanted = {
            buffer.index: buffer
            for buffer in (self.buffer_of[target] for target in targets)
            if buffer.model_shard.param_offload is not None
        }
        for index in self._open.keys() - wanted.keys():
            self._close(index)
        for index, buffer in wanted.items():
            if index not in self._open:
                reads = any(
                    buffer.offloaded_params[piece.index] not in self.overwritten
                    for piece in buffer.pieces
                )
                shard = self.param_offload.open(index, reads=reads)
                if not reads:
                    _clear_padding(buffer, shard)
                buffer.point_targets(shard)
                self._open[index] = buffer
        if not targets:
            self.param_offload.flush()

    def __enter__(self) -> Callable[[Sequence[nn.Parameter]], None]:
        return self.open

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close all after an error, whatever that raises."""
        if kind is None or self.param_offload is None:
            return
        for index in list(self._open):
            with contextlib.suppress(Exception):
                self._close(index)
        with contextlib.suppress(Exception):
            self.param_offload.flush()

    def _close(self, index: int) -> None:
        buffer = self._open.pop(index)
        assert self.param_offload is not None, "opened there"
        try:
            self.param_offload.close(index)
        finally:
            buffer.point_targets(None)


def _clear_padding(buffer: FlatBuffer, shard: Tensor) -> None:
    """Zero the padding of a shard whose memory was opened without its values."""
    stop = 0
    for piece in sorted(buffer.pieces, key=lambda piece: piece.in_shard.start):
        shard[stop : piece.in_shard.start].zero_()
        stop = piece.in_shard.stop
    shard[stop:].zero_()
