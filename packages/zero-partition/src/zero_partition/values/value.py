"""One way to a parameter's values, gradient and optimizer state: whole, or this rank's part."""

# ruff: noqa: D102 - `Value` says it

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from zero_comm import all_gather_json, broadcast_flat

from zero_partition.dtensors import outer_of, part_of_whole, plain_of, whole_over_mesh
from zero_partition.errors import StateError
from zero_partition.nested import keys_of_entry, set_entry
from zero_partition.optimizer.shards import Entry, PerRankEntry, PlainEntry
from zero_partition.plan.layout import Span
from zero_partition.plan.stages import Placement
from zero_partition.run.gradients import ACCUMULATED, BufferGradients
from zero_partition.run.sharded_model import (
    ModelPhase,
    ShardedModel,
    launch_whole,
    param_ref_of,
    part_of,
    write_whole,
)
from zero_partition.stand_in import StateKind
from zero_partition.torch_private import plain_access

from .runs import (
    entry_on_each,
    gather_state_info,
    launch_entry,
    owner_of,
    plan_state,
    states_in_optimizer,
)


class Value(ABC):
    """One value of a parameter: a tensor of which each rank has a part, or all of it.

    Each kind has `set_full(value, from_rank)` and `set_local(value)` besides. All of them refuse
    what cannot be done now.
    """

    def __init__(self, param: nn.Parameter, what: str, key: str = "") -> None:
        """Find the value of this very object.

        Args:
            param: The model's own Parameter object.
            what: The call that errors name.
            key: Name of an entry of optimizer state.
        """
        self.what, self.key = what, key
        self.param_ref = param_ref_of(param, what=what)
        self.sharded, self.buffer = self.param_ref.sharded, self.param_ref.buffer
        self.rank = self.param_ref.whole.rank

    @abstractmethod
    def launch(self) -> Callable[..., Any] | None:
        """Launch the gather; return a call that waits, None if there is no value. Collective."""

    @abstractmethod
    def part(self) -> Any:
        """Return this rank's part, to look at; None if there is no value. Local."""

    def full(self, to_rank: int | None) -> Any:
        """Return the whole on `to_rank`, or on all ranks when that is None; else None.

        Collective, and over a mesh, too, if the parameter is a part of a DTensor.
        """
        wait = self.launch()
        value = None if wait is None else wait()
        if isinstance(value, Tensor) and value.shape == self.param_ref.plan.shape:
            value = whole_over_mesh(self.param_ref.param, value)
        return value if to_rank in (None, self.rank) else None

    def local(self) -> Any:
        """Return a copy of this rank's part. Local."""
        part = self.part()
        return part.detach().clone() if isinstance(part, Tensor) else part

    def refusal(self, reason: str) -> StateError:
        """Return an error about this parameter."""
        return StateError(f"{self.what}: parameter {self.param_ref.name!r}{reason}")

    def said_by(self, from_rank: int | None, own: Any) -> Any:
        """Return `own` of rank `from_rank`, sent as JSON, or this rank's when that is None."""
        group = self.param_ref.whole
        if from_rank is None:
            return own
        if not 0 <= from_rank < group.world_size:
            raise StateError(
                f"{self.what}: expected from_rank in 0..{group.world_size - 1}, got {from_rank} "
                f"(rank {group.rank})"
            )
        mine, tag = own if group.rank == from_rank else None, self.sharded.access_tag
        return all_gather_json(mine, group=group, tag=tag)[from_rank]

    def agreed(
        self, value: Any, from_rank: int | None, shape: torch.Size, dtype: torch.dtype
    ) -> Tensor:
        """Return the whole that every rank writes, checked on all. Collective with `from_rank`."""
        group, value = self.param_ref.whole, plain_of(value)
        if is_of_param := shape == self.param_ref.plan.shape:
            shape = outer_of(self.param_ref.param).shape
        own = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        got = self.said_by(from_rank, own)
        if got != f"shape {tuple(shape)}":
            whose = group.rank if from_rank is None else from_rank
            raise self.refusal(
                f": expected a tensor of shape {tuple(shape)}, got {got} on rank {whose} (seen on "
                f"rank {group.rank})"
            )
        if from_rank is None:
            whole = value.detach().as_subclass(Tensor).to(group.device, dtype)
        else:
            whole = torch.empty(shape, dtype=dtype, device=group.device)
            if group.rank == from_rank:
                whole.copy_(value.detach())
            if whole.numel():
                broadcast_flat(whole.view(-1).view(torch.uint8), src=from_rank, group=group).wait()
        return part_of_whole(self.param_ref.param, whole) if is_of_param else whole

    def copy_to(self, part: Tensor, value: Any) -> None:
        """Copy what was given as this rank's part into that part. Local."""
        if not isinstance(value, Tensor) or value.numel() != part.numel():
            got = f"{value.numel()} elements" if isinstance(value, Tensor) else repr(value)
            raise self.refusal(
                f": expected this rank's part, a tensor of {part.numel()} elements, got {got} "
                f"(rank {self.rank})"
            )
        with torch.no_grad():
            part.copy_(value.detach().view(part.shape))


class ParamValue(Value):
    """The values of a parameter as they are updated: its masters, if it has some."""

    def launch(self) -> Callable[..., Tensor]:
        param_ref, buffer = self.param_ref, self.buffer
        self._require()
        self.sharded.compare_launches(self.what, at_once=True)
        self.sharded.follow_shard_writes()
        buffer.follow_writes()
        if buffer.has_masters:
            return launch_whole(param_ref, part_of(param_ref, buffer.trained))
        if buffer.whole is None or buffer.codec is not None:
            return launch_whole(param_ref)
        return buffer.views_of(buffer.whole)[param_ref.position].detach().clone

    def set_full(self, value: Any, from_rank: int | None) -> None:
        dtype = self.buffer.main_shard.dtype
        whole = self.agreed(value, from_rank, self.param_ref.plan.shape, dtype)
        self._check_free()
        write_whole(self.param_ref, whole)

    def part(self) -> Tensor:
        self._require()
        self.buffer.follow_writes()
        if self.sharded.shards_state:
            return part_of(self.param_ref, self.buffer.trained)
        assert self.buffer.whole is not None, "replicated parameters have a whole buffer"
        return self.buffer.views_of(self.buffer.whole)[self.param_ref.position]

    def set_local(self, value: Any) -> None:
        param_ref, buffer = self.param_ref, self.buffer
        if not self.sharded.shards_state:
            raise self.refusal(
                f" is whole on every rank at stage 0 (rank {self.rank}), and the ranks would "
                "differ; use set_full_param()"
            )
        self._check_free()
        if param_ref.unit.placement is Placement.REPLICATED:
            part = torch.empty_like(part_of(param_ref, buffer.trained))
            self.copy_to(part, value)
            write_whole(param_ref, launch_whole(param_ref, part)())
            return
        self.sharded.begin_write()
        for store in dict.fromkeys((buffer.main_shard, buffer.model_shard)):
            with store.edit() as shard:
                self.copy_to(part_of(param_ref, shard), value)
        self.sharded.end_write(param_ref.unit)

    def _require(self) -> None:
        kind = StateKind.MASTERS if self.buffer.has_masters else StateKind.PARAMS
        self.sharded.require(self.what, kind)

    def _check_free(self) -> None:
        unit = self.param_ref.unit
        if self.sharded.is_in_use(unit):
            raise self.refusal(
                f" is in use by a forward or backward of its unit {unit.name!r} (rank "
                f"{self.rank}); write it between steps"
            )
        if self.param_ref in self.sharded.gathered:
            raise self.refusal(
                f" is gathered (rank {self.rank}), and the value written would be out of date; "
                "write to param.data there, with modifier_rank, or leave first"
            )


def has_gradients(sharded: ShardedModel) -> bool:
    """Reduce what `no_sync` has left, unless inside it; return whether there are gradients."""
    reducer = sharded.reducer
    with plain_access():
        # Also forgets gradients that the user has dropped.
        if reducer.sync:
            reducer.before_step()
        return any(g.has_local or g.has_gradients for g in reducer.gradients)


class GradValue(Value):
    """The gradient of a parameter: averaged over the ranks, or this rank's inside `no_sync`."""

    def launch(self) -> Callable[..., Tensor] | None:
        g, position = self._gradients(), self.param_ref.position
        if g is None:
            return None
        with plain_access():
            if not self.sharded.reducer.sync:
                return g.views[position].clone if g.states[position] is ACCUMULATED else None
            grad = g.stepped_params[position].grad
            if grad is None:
                return None
            if not g.shards_state:
                return grad.detach().clone
            return launch_whole(self.param_ref, grad.as_subclass(Tensor).detach().view(-1))

    def set_full(self, value: Any, from_rank: int | None) -> None:
        plan = self.param_ref.plan
        whole = self.agreed(value, from_rank, plan.shape, plan.dtype)
        if not self.param_ref.is_trainable:
            raise self.refusal(
                " was frozen when it was sharded, and has no memory for a gradient; unfreeze it, "
                "and call the model"
            )
        gradients = self._gradients()
        assert gradients is not None, "it trains"
        with plain_access():
            self.sharded.reducer.set_whole(gradients, self.param_ref.position, whole)

    def part(self) -> Tensor | None:
        if any(g.has_local for g in self.sharded.reducer.gradients):
            raise self.refusal(
                ": inside no_sync, and until the gradients it left are reduced, no rank has its "
                f"part (rank {self.rank}); call full_grad(param)"
            )
        g = self._gradients()
        with plain_access():
            grad = None if g is None else g.stepped_params[self.param_ref.position].grad
        return None if grad is None else grad.as_subclass(Tensor).view(-1)

    def set_local(self, value: Any) -> None:
        part = self.part()
        if part is None:
            raise self.refusal(f" has no gradient (rank {self.rank}); set_full_grad() makes one")
        self.copy_to(part, value)

    def _gradients(self) -> BufferGradients | None:
        """Return the gradients of the parameter's buffer; None if it is frozen. Collective."""
        no = (ModelPhase.BACKWARD, ModelPhase.FAILED)
        self.sharded.require(self.what, StateKind.GRADS, no=no)
        if not has_gradients(self.sharded):
            raise self.refusal(
                f": there are no gradients now (rank {self.rank}); they are there from the end of "
                "loss.backward() until zero_grad()"
            )
        return next((g for g in self.sharded.reducer.gradients if g.buffer is self.buffer), None)


class StateValue(Value):
    """One entry of a parameter's optimizer state, which need not be a tensor."""

    def launch(self) -> Callable[..., Any]:
        state, entry = self._agree()
        if not self.sharded.shards_state:
            own = state[self.key]
            return own.detach().clone if isinstance(own, Tensor) else lambda: own
        return launch_entry(self.param_ref, self.key, entry, state)

    def set_full(self, value: Any, from_rank: int | None) -> None:
        key, (state, entry) = self.key, self._agree()
        if isinstance(entry, PlainEntry):
            value = self.said_by(from_rank, value)
            if key in state:
                self._keep(value)
            return
        if isinstance(entry, PerRankEntry):
            raise StateError(
                f"{self.what}: {key!r} of parameter {self.param_ref.name!r} is no tensor and no "
                "number, and only its owner has it; set_local_optimizer_state(param, key, value) "
                "writes it there"
            )
        if isinstance(value, int | float) and not entry.shape:
            value = torch.tensor(value, dtype=entry.dtype, device="cpu")
        whole = self.agreed(value, from_rank, entry.shape, entry.dtype)
        is_sharded = self.sharded.shards_state
        span = entry.spans[self.param_ref.group.rank] if is_sharded else Span(0, whole.numel())
        if span.numel:
            part = whole.reshape(-1)[span.as_slice()].view(state[key].shape)
            self._keep(state[key].copy_(part))

    def part(self) -> Any:
        state = self._state()
        if not state and self.sharded.shards_state and self.param_ref.piece is None:
            raise StateError(
                f"{self.what}: rank {self.rank} keeps no part of parameter "
                f"{self.param_ref.name!r}, and its optimizer no state of it; local_param(param) is "
                "empty there, and full_optimizer_state(param, key) asks the others"
            )
        self._check_known(state)
        return state[self.key]

    def set_local(self, value: Any) -> None:
        part = self.part()
        if not isinstance(part, Tensor):
            self._keep(value)
            return
        if isinstance(value, int | float) and not part.dim():
            value = torch.tensor(value, device="cpu")
        self.copy_to(part, value)
        self._keep(part)

    def _keep(self, value: Any) -> None:
        """Set the entry in the optimizer's state, and write it back where that is offloaded."""
        assert self.sharded.optimizer is not None, "it has state"
        states, owner = self.sharded.optimizer.state, owner_of(self.param_ref)
        state = states[owner]
        set_entry(state, self.key, value)
        if self.sharded.residence.offload is not None:
            root = keys_of_entry(self.key)[0]
            states[owner] = {root: state[root]}

    def _state(self) -> Mapping[str, Any]:
        """Return this rank's state of the parameter, empty where it has none. Local."""
        self.sharded.require(self.what, StateKind.OPTIM)
        if self.sharded.optimizer is None:
            raise StateError(
                f"{self.what}: the model was sharded without an optimizer (rank {self.rank})"
            )
        return states_in_optimizer(self.sharded, [self.param_ref])[self.param_ref]

    def _agree(self) -> tuple[Mapping[str, Any], Entry]:
        """Return this rank's state, and how the entry is divided over all ranks. Collective."""
        state, key, group = self._state(), self.key, self.param_ref.group
        if not self.sharded.shards_state:
            self._check_known(state)
            return state, entry_on_each(state[key], group.world_size)
        tag = self.sharded.access_tag
        (infos,) = gather_state_info([state], group=group, tag=tag)
        self._check_known(chain.from_iterable(infos))
        chosen = [{key: of[key]} if key in of else {} for of in infos]
        try:
            return state, plan_state(self.param_ref, chosen)[key]
        except StateError as error:
            raise StateError(f"{self.what}: {error} (seen on rank {group.rank})") from error

    def _check_known(self, keys: Iterable[str]) -> None:
        known, here = set(keys), f"(rank {self.rank})"
        if not known:
            raise StateError(
                f"{self.what}: the optimizer has no state for parameter {self.param_ref.name!r} "
                f"{here}: it is frozen or in no param group, or no step has had a gradient "
                "for it yet"
            )
        if self.key not in known:
            raise self.refusal(f": expected one of {sorted(known)}, got {self.key!r} {here}")
