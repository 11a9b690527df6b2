"""offload_states() and reload_states(): training state makes room between phases."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping
from itertools import accumulate
from pathlib import Path
from threading import Thread
from typing import Any, Final, Literal, final

import torch
import zero_partition
import zero_partition.seams
from attrs import define, field
from torch import Tensor, nn
from zero_comm import collective
from zero_offload import DiskStore, HostArena
from zero_partition import StateKind
from zero_partition.seams import AbstractKeeper, find_sharded

from .checks import check_flag, check_names
from .errors import ConfigError
from .offload import our_word

_ALIGN_BYTES: Final = 64


@final
@define(eq=False)
class HostKeeper(AbstractKeeper):
    """Keeps bytes in one piece of host memory, which goes when all is back."""

    pin: bool
    _places: dict[str, slice] = field(factory=dict, init=False)
    _memory: Tensor | None = field(default=None, init=False)
    _last_copy: torch.cuda.Event | None = field(default=None, init=False)  # nobody waited for it

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """See `AbstractKeeper.reserve`."""
        rooms = [-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in sizes.values()]
        starts = accumulate(rooms, initial=0)
        self._places = {
            key: slice(start, start + size)
            for (key, size), start in zip(sizes.items(), starts, strict=False)
        }
        self._memory = HostArena("parked training state", is_pinned=self.pin).allocate(sum(rooms))

    def keep(self, key: str, source: Tensor, *, waits: bool) -> None:
        """See `AbstractKeeper.keep`."""
        self._copy(self._place(key), source, waits=waits)
        if not waits and source.is_cuda:  # its memory may be another stream's
            source.record_stream(torch.cuda.current_stream(source.device))

    def give_back(self, key: str, into: Tensor, *, waits: bool) -> None:
        """See `AbstractKeeper.give_back`."""
        self._copy(into, self._place(key), waits=waits)

    def close(self) -> None:
        """See `AbstractKeeper.close`. Waits for no copy: the memory goes after the last."""
        memory, self._memory = self._memory, None
        if self._last_copy is not None and not self._last_copy.query():
            Thread(target=_let_go, args=(memory, self._last_copy), daemon=True).start()

    def _place(self, key: str) -> Tensor:
        assert self._memory is not None, "reserve() comes first"
        return self._memory[self._places[key]]

    def _copy(self, into: Tensor, source: Tensor, *, waits: bool) -> None:
        into.copy_(source, non_blocking=not waits)
        device = into.device if into.is_cuda else source.device
        if not waits and device.type == "cuda":
            self._last_copy = torch.cuda.Event()
            self._last_copy.record(torch.cuda.current_stream(device))


def _let_go(memory: Tensor, last_copy: torch.cuda.Event) -> None:
    last_copy.synchronize()
    del memory


@final
@define(eq=False)
class DiskKeeper(AbstractKeeper):
    """Keeps bytes in files. Copies are done when it returns; a device's go through the host."""

    store: DiskStore

    @classmethod
    def below(cls, path: Path) -> DiskKeeper:
        """One with a private folder in this one."""
        return cls(DiskStore(path))

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """See `AbstractKeeper.reserve`."""
        self.store.allocate(sizes)

    def keep(self, key: str, source: Tensor, *, waits: bool) -> None:
        """See `AbstractKeeper.keep`."""
        self.store.write(key, source.cpu()).result()

    def give_back(self, key: str, into: Tensor, *, waits: bool) -> None:
        """See `AbstractKeeper.give_back`."""
        on_host = into if into.device.type == "cpu" else torch.empty_like(into, device="cpu")
        self.store.read(key, on_host).result()
        if on_host is not into:
            into.copy_(on_host)

    def close(self) -> None:
        """See `AbstractKeeper.close`."""
        self.store.close()


# ---- offload_states() and reload_states(): training state makes room between phases ----


Kind = Literal["params", "masters", "grads", "optim", "buffers"]

_OF_DEEPSPEED: Final = {
    "lp_params": StateKind.PARAMS,
    "hp_params": StateKind.MASTERS,
    "lp_grads": StateKind.GRADS,
    "optim_states": StateKind.OPTIM,
    "contiguous_grad_buffer": StateKind.BUFFERS,
}


@collective
def offload_states(
    model: nn.Module,
    include: Collection[Kind] | None = None,
    *,
    to: Literal["host", "disk"] = "host",
    path: Path | str | None = None,
    pin: bool = True,
    non_blocking: bool = False,
) -> None:
    """Put training state elsewhere between phases, and give its memory back. Collective.

    For generation between training phases, or several models that take turns. Between steps or
    micro-batches, gradients waiting or not; with the same `include` on every rank. Until
    `reload_states(model)`, what needs state that is gone raises StateError; what does not goes on
    working: without "optim", "masters" and "grads", forwards. `memory_report` says in
    `parked_bytes` what was given back; memory that a graph or a kept `.data` views stays, with a
    warning. Where one rank has no room, all is where it was, on every rank.

    On the host, what a device had is gained there. A model on the CPU is copied within the same
    memory, which gains nothing but the slots and reduction buffers: its state gains room by
    `to="disk"`.

    Args:
        model: The very module that `shard` returned.
        include: Of "params" (what rests of them: shards at stage 3, all of them elsewhere),
            "masters", "grads", "optim" (the optimizer's tensors) and "buffers" (slots and reduction
            buffers, which are just released); all when None.
        to: Where to.
        path: An existing folder on the disk to use, for files of this job's own.
        pin: Page-lock host memory, where there is CUDA. It is taken from the host budget.
        non_blocking: Return before a device's copies are done. The memory is free for what follows
            on the current stream, and torch keeps it; else it goes back to the device.

    Raises:
        ConfigError: Another kind or place, or a place that does not go with the rest.
        zero_partition.StateError: Not sharded, parked already, during a forward or backward, inside
            a context that gathers, or after a backward that an exception ended; or another rank
            had no room.
        zero_offload.OffloadError: The host or the disk has no room.
        zero_comm.CommError: A rank did not take part in time.
    """
    where = "offload_states()"
    kinds = _kinds_of(where, include, {kind.value: kind for kind in StateKind})
    park(model, kinds, _keeper_for(where, to, path, pin, non_blocking), non_blocking=non_blocking)


@collective
def reload_states(model: nn.Module, *, non_blocking: bool = False) -> None:
    """Bring back what `offload_states` has put elsewhere. Every rank calls it.

    Collective for parameters at stage 3 where ranks read each other's memory, else local.

    Every tensor is right again, objects that were taken from the model or the optimizer before
    included: parameters, gradients, the optimizer's state. Does nothing where nothing is parked.

    Args:
        model: The very module that `shard` returned.
        non_blocking: Return before a device's copies from pinned memory are done; what follows on
            the current stream waits for them.

    Raises:
        zero_partition.StateError: Not sharded.
        zero_offload.StoreError: The disk fails; what was not read yet can be tried again.
        zero_comm.CommError: A rank did not take part in time.
    """
    zero_partition.seams.unpark(model, waits=not non_blocking)


def offload_as_deepspeed(
    model: nn.Module, include: Any, device: Any, *, pin_memory: Any, non_blocking: Any
) -> None:
    """What `Engine.offload_states` documents."""
    where = "Engine.offload_states()"
    device = getattr(device, "value", device)
    if device != "cpu":
        raise ConfigError(
            f"{where}: expected device 'cpu', got {device!r}; "
            "zero_engine.offload_states(engine.module, to='disk', path=...) goes to a disk"
        )
    pin, non_blocking = check_flag(where, pin_memory), check_flag(where, non_blocking)
    kinds = _kinds_of(where, include, _OF_DEEPSPEED)
    park(model, kinds, HostKeeper(pin), non_blocking=non_blocking)


def park(
    model: nn.Module, kinds: Collection[StateKind], keeper: AbstractKeeper, *, non_blocking: bool
) -> None:
    """Park, and hand what torch has no use for to whoever else is on the machine."""
    zero_partition.seams.park(model, keeper, kinds, waits=not non_blocking)
    if non_blocking:
        return
    sharded = find_sharded(model)
    if sharded is not None and sharded.group.device.type == "cuda":
        torch.cuda.empty_cache()
    elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)  # glibc keeps small pieces of what was freed; other allocators do not


def _kinds_of(where: str, include: Any, known: dict[str, StateKind]) -> frozenset[StateKind]:
    if include is None:
        return frozenset(StateKind)
    if isinstance(include, str) or not isinstance(include, Collection):
        raise ConfigError(
            f"{where}: expected include to be a collection of {', '.join(known)}, or None for all "
            f"of them, got {include!r}"
        )
    names = [getattr(kind, "value", kind) for kind in include]
    check_names(f"{where}: include", names, known)
    return frozenset(known[name] for name in names)


def _keeper_for(
    where: str, to: Any, path: Path | str | None, pin: Any, non_blocking: Any
) -> AbstractKeeper:
    pin, non_blocking = check_flag(where, pin), check_flag(where, non_blocking)
    if to not in ("host", "disk"):
        raise ConfigError(f"{where}: expected to='host' or to='disk', got {to!r}" + our_word(to))
    if (to == "disk") != (path is not None):
        raise ConfigError(
            f"{where}: expected path, an existing folder, with to='disk' and only there, got "
            f"to={to!r} and path={path!r}"
        )
    if path is None:
        return HostKeeper(pin)
    if non_blocking:
        raise ConfigError(
            f"{where}: expected non_blocking=False with to='disk', got True: memory is given back "
            "when its bytes are in the file"
        )
    return DiskKeeper.below(Path(path))
