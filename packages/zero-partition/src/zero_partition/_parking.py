"""Park a model's training state between phases, and bring it back."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._chained import members_of
from ._errors import StateError
from ._gradients import BufferGradients
from ._parked import AbstractKeeper, Parked, ParkedStorage, StateKind
from ._parked_tensor import View
from ._sharded_model import ShardedModel
from ._torch_compat import is_in_backward, plain_access


def park(
    sharded: ShardedModel, keeper: AbstractKeeper, kinds: Collection[StateKind], *, waits: bool
) -> None:
    """What the public `park` documents."""
    what = "offload_states()"
    _check_idle(sharded, what)
    kinds = frozenset(kinds)
    if StateKind.BUFFERS in kinds:
        sharded.release_buffers()
    is_read_by_peers = StateKind.PARAMS in kinds and sharded.exposure is not None
    if StateKind.PARAMS in kinds:
        sharded.outside.forget()
        sharded.schedule.settle()
        if sharded.exposure is not None:
            sharded.exposure.begin_write()  # no peer reads our shards from here on
    parked = None
    try:
        with torch.inference_mode(False), torch.no_grad(), plain_access():
            storages = _find_storages(sharded, kinds)
            _keep(storages, keeper, waits=waits)
            parked = Parked(kinds - {StateKind.BUFFERS}, keeper, storages)
    finally:
        if parked is None and is_read_by_peers:
            _open_again(sharded)
    _refuse_state_dicts(sharded, parked)
    sharded.parked = parked


def unpark(sharded: ShardedModel, *, waits: bool) -> None:
    """What the public `unpark` documents."""
    parked = sharded.parked
    if parked is None:
        return
    with torch.inference_mode(False), torch.no_grad(), plain_access():
        while parked.storages:  # one by one: after an error the others are there to try again
            parked.storages[0].put_back(parked.keeper, waits=waits)
            del parked.storages[0]
        for unit in sharded.units:
            for buffer in unit.buffers:
                buffer.forget_addresses()
        for g in sharded.reducer.gradients:
            g.forget_address()
    if StateKind.PARAMS in parked.kinds and sharded.exposure is not None:
        _open_again(sharded)
    for remove in parked.removers:
        remove()
    sharded.parked = None
    parked.keeper.close()


def _check_idle(sharded: ShardedModel, what: str) -> None:
    rank = sharded.group.rank
    if sharded.parked is not None:
        kinds = ", ".join(kind.value for kind in StateKind if kind in sharded.parked.kinds)
        raise StateError(
            f"{what}: state of this model is parked already: {kinds} (rank {rank}); call "
            "zero_engine.reload_states(model) first, and then park all that should be, at once"
        )
    if sharded.forwards or is_in_backward() or any(unit.depth for unit in sharded.units):
        raise StateError(
            f"{what} during a forward or backward of the model (rank {rank}); call it between them"
        )
    sharded.refuse_incomplete_gradients(what)
    sharded.refuse_while_gathered(what)


def _open_again(sharded: ShardedModel) -> None:
    """Peers may read our shards, wherever they lie now. Versions stay: no value has changed."""
    assert sharded.exposure is not None, "asked for where there is one"
    sharded.exposure.move()
    sharded.exposure.end_write()


def _keep(storages: list[ParkedStorage], keeper: AbstractKeeper, *, waits: bool) -> None:
    """All of it or, after an error, nothing."""
    try:
        free = [storage for storage in storages if storage.take_away()]
        keeper.reserve({storage.key: storage.num_bytes for storage in free})
        for storage in free:
            storage.keep(keeper, waits=waits)
    except BaseException:
        for storage in storages:
            storage.put_back(keeper, waits=True)
        keeper.close()
        raise
    stay = [storage for storage in storages if storage.storage is not None]
    if stay:
        warnings.warn(
            f"offload_states(): {sum(s.num_bytes for s in stay)} bytes stay in memory, since "
            "something besides the model and its optimizer views them: a graph whose backward has "
            f"not run, or `.data` that somebody keeps ({', '.join(s.key for s in stay[:3])}, ...)",
            stacklevel=5,
        )


def _find_storages(sharded: ShardedModel, kinds: Collection[StateKind]) -> list[ParkedStorage]:
    """What these kinds consist of on this rank, each storage once."""
    views: dict[int, dict[int, Tensor]] = {}  # by storage, then by tensor
    for tensor in _tensors_of(sharded):
        views.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
    found: dict[int, ParkedStorage] = {}
    for kind, name, root in _roots_of(sharded):
        storage = root.untyped_storage()
        if kind not in kinds or storage._cdata in found or not _may_go(root, sharded):
            continue
        found[storage._cdata] = ParkedStorage(
            key=f"{kind.value} {len(found)} of {name}",
            kind=kind,
            num_bytes=storage.nbytes(),
            device=root.device,
            views=[View.of(tensor) for tensor in views[storage._cdata].values()],
            storage=storage,
        )
    return list(found.values())


def _may_go(tensor: Tensor, sharded: ShardedModel) -> bool:
    """Not what stands in for something, rests on the host already, or belongs to an arena."""
    storage = tensor.untyped_storage()
    is_stand_in = storage.nbytes() < tensor.nbytes
    is_here = tensor.device == sharded.group.device
    return bool(tensor.nbytes) and not is_stand_in and is_here and storage.resizable()


def _roots_of(sharded: ShardedModel) -> Iterator[tuple[StateKind, str, Tensor]]:
    """A tensor of every storage that may be parked, its kind and what it belongs to."""
    for unit in sharded.units:
        for buffer in unit.buffers:
            yield (
                StateKind.PARAMS,
                unit.name,
                buffer.whole if buffer.whole is not None else buffer.shard,
            )
            if buffer.master is not None:
                yield StateKind.MASTERS, unit.name, buffer.master
    for g in sharded.reducer.gradients:
        if g.has_local and g.accumulator is not None:
            yield StateKind.GRADS, g.unit.name, g.accumulator
        for grad in _grads_of(g):
            yield StateKind.GRADS, g.unit.name, grad
    for tensor in _state_of(sharded):
        yield StateKind.OPTIM, "the optimizer", tensor


def _tensors_of(sharded: ShardedModel) -> Iterator[Tensor]:
    """Every tensor of ours that may view them."""
    for unit in sharded.units:
        for buffer in unit.buffers:
            yield from buffer.resting_tensors()
    for g in sharded.reducer.gradients:
        yield from (t for t in (g.shard, g.accumulator, *g.parts, *g.views) if t is not None)
        yield from _grads_of(g)
    yield from _state_of(sharded)


def _grads_of(g: BufferGradients) -> Iterator[Tensor]:
    for param in (*g.targets, *g.buffer.params):
        if param.grad is not None:
            yield param.grad


def _state_of(sharded: ShardedModel) -> Iterator[Tensor]:
    for member in members_of(sharded.optimizer):
        for state in member.state.values():
            yield from (tensor for tensor in _tensors_in(state) if tensor.dim())


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _refuse_state_dicts(sharded: ShardedModel, parked: Parked) -> None:
    """An optimizer's state dict holds the tensors themselves: nobody should take it now."""

    def refuse(what: str, *_: Any) -> None:
        parked.refuse(what, {StateKind.OPTIM}, rank=sharded.group.rank)

    for member in members_of(sharded.optimizer):
        for handle in (
            member.register_state_dict_pre_hook(partial(refuse, "optimizer.state_dict()")),
            member.register_load_state_dict_pre_hook(partial(refuse, "load_state_dict()")),
        ):
            parked.removers.append(handle.remove)
