"""Park a model's training state between phases, and bring it back."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from zero_comm import collective
from zero_comm.logs import warn_user

from zero_partition.chained import members_of, with_state_dict_hooks
from zero_partition.errors import StateError
from zero_partition.memory.store import Rounded
from zero_partition.nested import map_tensors
from zero_partition.run.hooks import require_sharded
from zero_partition.run.sharded_model import ModelPhase, ShardedModel
from zero_partition.stand_in import (
    Backup,
    GradientGuard,
    Parked,
    ParkedStorage,
    StateKind,
    View,
)
from zero_partition.torch_private import plain_access, storage_key


@collective
def offload_states(
    model: nn.Module,
    backup: Backup,
    kinds: Collection[StateKind] = tuple(StateKind),
    *,
    non_blocking: bool = False,
) -> None:
    """Free the memory of training state until `reload_states`; a backup keeps the bytes.

    Collective, with the same kinds on every rank. Between steps or micro-batches, with gradients
    waiting or not. If a backup raises, nothing is parked, on any rank.

    Tensors keep their identity, and raise StateError when they are used; so does every call that
    needs them. Other calls still work: forwards without the optimizer's state, say. `zero_grad()`
    and `memory_report()` always work. Not parked are single numbers, tensors outside the group's
    device, memory that torch cannot free, and, with a warning, memory that a graph or a tensor of
    other code views.

    Args:
        model: The very module that was sharded.
        backup: Of this call only; closed when its bytes are back.
        kinds: What to park.
        non_blocking: Whether copies may be left to the current stream when this returns; the memory
            is free for what follows there.

    Raises:
        StateError: Not sharded, parked already, inside a forward, a backward or a context that
            gathers, or after a backward that an exception ended; or the backup of another rank
            has raised.
        zero_comm.CommError: A rank did not take part in time.
    """
    sharded, kinds = require_sharded(model), frozenset(kinds)
    try:
        _check_idle(sharded)
        sharded.await_readers()
        if StateKind.BUFFERS in kinds:
            sharded.release_buffers()
        if StateKind.PARAMS in kinds:
            sharded.outside.forget()
            if sharded.residence.offload is not None:
                sharded.residence.offload.drop_views()
            # From here on, no peer reads our shards.
            if sharded.exposure is not None:
                sharded.exposure.begin_write("offload_states()")
        with torch.inference_mode(False), torch.no_grad(), plain_access():
            if StateKind.MASTERS in kinds and StateKind.PARAMS not in kinds:
                for store in _rounded(sharded):
                    store.materialize()
            storages = _find_storages(sharded, kinds)
            _move_out(sharded, storages, backup, non_blocking=non_blocking)
    except BaseException:
        for store in _rounded(sharded):
            store.drop()
        backup.close()
        raise
    parked = Parked(kinds - {StateKind.BUFFERS}, backup, storages)
    # Buffers alone are not reloaded: they are allocated again when they are needed.
    if not parked.kinds:
        backup.close()
        return
    _refuse_state_dicts(sharded, parked)
    sharded.park(parked)
    _tell_what_stays(storages)


@collective
def reload_states(model: nn.Module, *, non_blocking: bool = False) -> None:
    """Bring back the state that `offload_states` has parked, in new memory. Every rank calls it.

    Collective if parameters are sharded and peers read the shards from memory; otherwise local.

    Every tensor views its values again: the optimizer's state, gradients, parameters, graphs made
    before. If nothing is parked, it does nothing. After an error in the backup it can be called
    again.

    Args:
        model: The very module that was sharded.
        non_blocking: As for `offload_states`.

    Raises:
        StateError: Not sharded.
        zero_comm.CommError: A rank did not take part in time.
    """
    sharded = require_sharded(model)
    parked = sharded.parked
    if parked is None:
        return
    with torch.inference_mode(False), torch.no_grad(), plain_access():
        # One by one, so that another call after an error continues with those that are left.
        while parked.storages:
            parked.storages[0].put_back(parked.backup, non_blocking=non_blocking)
            del parked.storages[0]
        _have_moved(sharded)
    for store in _rounded(sharded):
        store.drop()
    for remove in parked.removers:
        remove()
    sharded.park(None)
    parked.backup.close()


def _rounded(sharded: ShardedModel) -> list[Rounded]:
    """Return the stores of sharded parameters that exist only as masters, which are rounded."""
    stores = [buffer.model_shard for buffer in sharded.buffers if buffer.whole is None]
    return [store for store in stores if isinstance(store, Rounded)]


def _check_idle(sharded: ShardedModel) -> None:
    what, rank = "offload_states()", sharded.whole.rank
    if sharded.parked is not None:
        kinds = ", ".join(kind.value for kind in StateKind if kind in sharded.parked.kinds)
        raise StateError(
            f"{what}: state of this model is parked already: {kinds} (rank {rank}); call "
            "zero_engine.reload_states(model) first, and then park all that should be, at once"
        )
    if sharded.is_in_use():
        raise StateError(
            f"{what} during a forward or backward of the model (rank {rank}); call it between them"
        )
    sharded.require(what, no=(ModelPhase.FAILED, ModelPhase.GATHERED))


def _move_out(
    sharded: ShardedModel, storages: list[ParkedStorage], backup: Backup, *, non_blocking: bool
) -> None:
    """Park all storages on all ranks or, after an error on any rank, none. Collective."""
    error: Exception | None = None
    free: list[ParkedStorage] = []
    try:
        try:
            for storage in storages:
                storage.replace_by_placeholders()
            # A reference cycle, such as an exception and its traceback, may keep a graph alive.
            if not all(storage.is_free for storage in storages):
                gc.collect()
            free = [storage for storage in storages if storage.is_free]
            backup.allocate({storage.key: storage.num_bytes for storage in free})
            for storage in () if non_blocking else free:
                storage.give_up(backup, non_blocking=False)
        except Exception as caught:
            error = caught
        if sharded.reducer.is_true_anywhere(error is not None):
            raise error or StateError(
                f"offload_states(): another rank could not park its state, and says why (rank "
                f"{sharded.whole.rank}); on every rank all is where it was"
            )
        # After the agreement, for which the host waits: it would wait for copies before it, too.
        for storage in free if non_blocking else ():
            storage.give_up(backup, non_blocking=True)
    except BaseException:
        for storage in storages:
            storage.put_back(backup, non_blocking=False)
        _have_moved(sharded)
        raise


def _tell_what_stays(storages: Iterable[ParkedStorage]) -> None:
    """Warn about memory that stays. Called last, as a filter of warnings may make it an error."""
    stay = [storage for storage in storages if storage.storage is not None]
    if stay:
        warn_user(
            f"offload_states(): {sum(s.num_bytes for s in stay)} bytes stay in memory, since "
            "something besides the model and its optimizer views them: a graph whose backward has "
            f"not run, or a `.data` that other code keeps ({', '.join(s.key for s in stay[:3])}, "
            "...)",
        )


def _have_moved(sharded: ShardedModel) -> None:
    """Forget old addresses of buffers, and let peers read the shards at their new ones.

    Collective where peers were kept from reading.
    """
    for buffer in sharded.buffers:
        buffer.forget_addresses()
    if sharded.exposure is not None and sharded.exposure.is_writing:
        sharded.exposure.move()
        # Units keep their versions, since no value has changed.
        sharded.exposure.end_write()


def _find_storages(sharded: ShardedModel, kinds: Collection[StateKind]) -> list[ParkedStorage]:
    """Return this rank's storages of these kinds that may be freed, each once."""
    tensors = list(_tensors_of(sharded))
    # Storage -> id of a tensor -> the tensor.
    views: dict[int, dict[int, Tensor]] = {}
    for _, _, tensor in tensors:
        views.setdefault(storage_key(tensor.untyped_storage()), {})[id(tensor)] = tensor
    found: dict[int, ParkedStorage] = {}
    for kind, name, root in tensors:
        storage = root.untyped_storage()
        memory = storage_key(storage)
        is_new = kind in kinds and memory not in found
        if kind is None or not is_new or not _may_go(root, sharded):
            continue
        found[memory] = ParkedStorage(
            key=f"{kind.value} {len(found)} of {name}",
            kind=kind,
            num_bytes=storage.nbytes(),
            device=root.device,
            views=[View.of(tensor) for tensor in views[memory].values()],
            storage=storage,
        )
    return list(found.values())


def _may_go(tensor: Tensor, sharded: ShardedModel) -> bool:
    """Return whether the memory of a tensor may be freed.

    Left where they are: stand-ins, tensors on the host already, and memory of an arena.
    """
    storage = tensor.untyped_storage()
    is_stand_in = storage.nbytes() < tensor.nbytes
    is_here = tensor.device == sharded.group.device
    return bool(tensor.nbytes) and not is_stand_in and is_here and storage.resizable()


def _tensors_of(sharded: ShardedModel) -> Iterator[tuple[StateKind | None, str, Tensor]]:
    """Yield tensors that may view parked memory: kind (None for views), owner and tensor."""
    for unit in sharded.units:
        for buffer in unit.buffers:
            for params in (buffer.whole, buffer.model_shard.memory):
                if params is not None:
                    yield StateKind.PARAMS, unit.name, params
            if buffer.has_masters and buffer.main_shard.memory is not None:
                yield StateKind.MASTERS, unit.name, buffer.main_shard.memory
            yield from ((None, unit.name, tensor) for tensor in buffer.param_tensors())
    for g in sharded.reducer.gradients:
        if g.has_local and g.accumulator is not None:
            yield StateKind.GRADS, g.unit.name, g.accumulator
        for param in (*g.stepped_params, *g.buffer.params):
            if param.grad is not None and not isinstance(param.grad, GradientGuard):
                yield StateKind.GRADS, g.unit.name, param.grad
        views = (g.shard, g.accumulator, *g.parts, *g.views)
        yield from ((None, g.unit.name, tensor) for tensor in views if tensor is not None)
    state: list[Tensor] = []
    for member in members_of(sharded.optimizer):
        # Otherwise it is a view of state that is offloaded already.
        if isinstance(member.state, dict):
            map_tensors(list(member.state.values()), state.append)
    yield from ((StateKind.OPTIM, "the optimizer", tensor) for tensor in state if tensor.dim())


def _refuse_state_dicts(sharded: ShardedModel, parked: Parked) -> None:
    """Make the optimizer's state dict calls raise while its state is parked.

    A state dict would contain the parked tensors themselves.
    """

    def refuse(what: str, *_: Any) -> None:
        sharded.require(what, StateKind.OPTIM)

    for member in members_of(sharded.optimizer):
        hooked = with_state_dict_hooks(member)
        for install, what in (
            (hooked.register_state_dict_pre_hook, "optimizer.state_dict()"),
            (hooked.register_load_state_dict_pre_hook, "optimizer.load_state_dict()"),
        ):
            parked.removers.append(install(partial(refuse, what), prepend=True).remove)
