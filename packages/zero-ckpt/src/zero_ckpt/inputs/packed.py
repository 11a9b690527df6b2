"""Inputs that are split over ranks, moved to the host, or kept in permanent memory: PackedSaver."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from threading import RLock
from typing import TYPE_CHECKING, Any, final
from weakref import WeakValueDictionary, finalize

import torch
from attrs import Factory, define, field
from torch import Tensor

from zero_ckpt.errors import CheckpointError
from zero_ckpt.torch_private import hooks_save_tensors, set_version, version_of

from .memory import Storages, storages_in
from .savers import AbstractKept, AbstractSaver, KeepSaver, Measuring, stays_as_it_is
from .split import EvenSplit, group_class

if TYPE_CHECKING:
    from zero_comm import Group


# NOTE(copies): a copy runs on a side stream, and reads or writes memory of the device that was
# allocated on the stream of the computation. That memory is not freed before the latter stream
# waits for the copy: whatever uses the memory next is then ordered after the copy.


@define(eq=False)
class Copy:
    """One asynchronous copy. Both tensors live until `wait` is called."""

    target: Tensor
    source: Tensor | None  # None once `wait` has returned
    _wait: Callable[[], None]
    # The stream on which the source was computed, and on which `wait` makes the copy usable.
    stream: Any = None
    # Whether the source was written in place between the start of the copy and `wait`.
    is_torn: bool = field(default=False, init=False)
    _version: int = field(
        default=Factory(lambda self: version_of(self.source), takes_self=True), init=False
    )

    def wait(self) -> Tensor:
        """Make the stream of the computation wait for the copy, and return the target.

        The source is no longer referred to; `is_torn` says whether it was written in place
        meanwhile. Local; blocks no host thread.
        """
        if self.source is not None:
            self._wait()
            self.is_torn = version_of(self.source) != self._version
            self.source = None
        return self.target

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.wait()


@final
@define(eq=False)
class PinnedHost:
    """Pinned host memory; one side stream per device makes copies in both directions, in order."""

    _sides: dict[torch.device, torch.Stream] = field(factory=dict, init=False)

    def takes(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on a device other than the CPU."""
        return tensor.device.type != "cpu"

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return pinned host memory to copy to."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True, device="cpu")

    def to_host(self, source: Tensor, target: Tensor) -> Copy:
        """Start a copy to memory of `allocate`, after the work that is on the current stream."""
        stream = torch.accelerator.current_stream(source.device)
        return self._copy(source, target, stream)

    def to_device(self, copy: Copy) -> Copy:
        """Start a copy from the host to new memory of the device that the data came from.

        The copy comes after the work that is on the stream of the computation so far.
        """
        with copy.stream:
            target = torch.empty_like(copy.target, device=copy.stream.device, pin_memory=False)
        return self._copy(copy.target, target, copy.stream)

    def _copy(self, source: Tensor, target: Tensor, stream: torch.Stream) -> Copy:
        if stream.device not in self._sides:
            self._sides[stream.device] = torch.Stream(stream.device)
        side = self._sides[stream.device]
        side.wait_stream(stream)
        with side:
            target.copy_(source, non_blocking=True)
        done = side.record_event()
        return Copy(target, source, lambda: stream.wait_event(done), stream)


@define(eq=False)
class _Slab:
    """Slots for inputs at one position of a call, of one device; layers have the same sizes."""

    memory: Tensor  # [slots, elements of a slot]
    free: list[int]
    # Slot -> the stream that used it last; for memory of a device only.
    users: dict[int, Any] = field(factory=dict, init=False)


@final
class PackedSaver(AbstractSaver):
    """Keeps inputs in less memory of the device: split over ranks, on the host, in permanent slots.

    These options may be combined. They apply to dense inputs of floating point. All others,
    parameters, and tensors with an attribute `no_checkpointing = True` are kept as `KeepSaver`
    does.

    An enclosing checkpoint drops the tensors that are saved inside it, as its own activations;
    other saved-tensor hooks may move them to the host or to disk. So inside of any such hooks
    inputs are split and nothing more: neither slots nor the host are used, and nothing is counted.

    Args:
        group: Ranks that are called with the same inputs, as those of a model-parallel group are.
            Each keeps a shard of every input, 1/N of its elements (shards differ by one element
            at most), and gathers it for the second run: one message per dtype and call. Inputs
            with fewer elements than ranks are not split. All ranks make the same checkpointed
            calls.
        on_host: Whether inputs on a device are copied to pinned host memory, on a stream of its
            own, and back while the layer after it (the one before it in backward) is computed.
        num_slots: Number of layers that keep inputs at a time. Memory is allocated once for that
            many, for each position among the inputs of a call, so that a long training does not
            fragment it. Inputs at one position have the same dtype and number of elements in all
            layers. A slot is free again as soon as the graph of its call is freed.

    Raises:
        CheckpointError: An argument is not of its type.
    """

    def __init__(
        self,
        *,
        group: Group | None = None,
        on_host: bool = False,
        num_slots: int | None = None,
    ) -> None:
        if group is not None and not isinstance(group, group_class()):
            raise CheckpointError(
                f"PackedSaver(group=): expected a zero_comm.Group or None, got {group!r}; "
                "zero_comm.Group.from_process_group() makes one"
            )
        if not isinstance(on_host, bool):
            raise CheckpointError(f"PackedSaver(on_host=): expected True or False, got {on_host!r}")
        is_count = isinstance(num_slots, int) and not isinstance(num_slots, bool) and num_slots > 0
        if num_slots is not None and not is_count:
            raise CheckpointError(
                "PackedSaver(num_slots=): expected the number of layers that keep inputs at a "
                f"time, 1 or more, or None, got {num_slots!r}"
            )
        self._split = None if group is None or group.world_size == 1 else EvenSplit(group)
        self._host = PinnedHost() if on_host else None
        self._num_slots = num_slots
        # (position among the inputs of a call, device) -> slots for these inputs.
        self._slabs: dict[tuple[int, torch.device], _Slab] = {}
        # Number of a call -> its inputs, for as long as its graph lives.
        self._live: WeakValueDictionary[int, _PackedInputs] = WeakValueDictionary()
        self._num_calls = 0
        self._lock = RLock()

    def save(self, inputs: Sequence[Tensor], layer: str) -> AbstractKept:
        """Pack the inputs that can be packed, and keep the others as they are. Local.

        Raises:
            CheckpointError: Slots are for inputs of another size or dtype, or all are taken; an
                input is on another device than the group's.
        """
        is_hooked = hooks_save_tensors()
        with self._lock:
            if not is_hooked:
                self._free_copied()
            number, self._num_calls = self._num_calls, self._num_calls + 1
            values, packed = list(inputs), {}
            for index, tensor in enumerate(inputs):
                found = self._pack(index, tensor, layer, is_hooked=is_hooked)
                if found is not None:
                    values[index], packed[index] = found
            held = KeepSaver().save(values, layer)
            storages = {} if is_hooked else _storages(values, packed)
            kept = _PackedInputs(self, number, layer, held, packed, storages, is_hooked)
            if not is_hooked:
                self._live[number] = kept
            return kept

    def kept_bytes(self) -> dict[torch.device, int]:
        """Bytes of this rank that calls keep now, by device; the host's is `cpu`. Local.

        Each storage counts once, and all of it even if an input that is kept as it is uses only a
        part. Slots count while they are in use. Only dense tensors count.
        """
        found: Storages = {}
        with self._lock:
            for kept in self._live.values():
                copied = [t for packed in kept.packed.values() for t in packed.on_device()]
                found |= kept.storages | storages_in(copied)
        return _by_device(found)

    def reserved_bytes(self) -> dict[torch.device, int]:
        """Bytes of all slots, whether they are in use or not, by device. Local."""
        return _by_device(storages_in([slab.memory for slab in self._slabs.values()]))

    def reset(self) -> None:
        """Allocate slots anew for the next call, of any shape and dtype. Local.

        Inputs that are kept already stay in their old slots.
        """
        self._slabs.clear()

    def _pack(
        self, index: int, tensor: Tensor, layer: str, *, is_hooked: bool
    ) -> tuple[Tensor, _PackedInput] | None:
        """Return the tensor to keep instead of an input, and how it is packed; None to keep it."""
        if not _can_be_copied(tensor):
            return None
        host = None if is_hooked or not self._host or not self._host.takes(tensor) else self._host
        has_slots = self._num_slots is not None and not is_hooked
        if self._split is None and host is None and not has_slots:
            return None
        flat, shape, strides = _flatten(tensor)
        shard, splits = (flat, None) if self._split is None else self._split.shard(flat, layer)
        if splits is None and host is None and not has_slots:
            return None
        packed = _PackedInput(shape, strides, version_of(tensor), splits, has_slots)
        if has_slots:
            target = self._take_slot(index, shard, layer, packed, host)
        elif host is None:
            target = torch.empty_like(shard)
        else:
            target = host.allocate(shard.shape, shard.dtype)
        if host is None:
            target.copy_(shard)
        else:
            packed.host, packed.leaving = host, host.to_host(shard, target)
        return target, packed

    def _take_slot(
        self, position: int, like: Tensor, layer: str, user: _PackedInput, host: PinnedHost | None
    ) -> Tensor:
        """Return an unwritten slot for a 1-D tensor, free again when `user` is deleted.

        The slot is on the host, or on the tensor's device if `host` is None.
        """
        assert self._num_slots is not None
        key = position, like.device
        if key not in self._slabs:
            shape = (self._num_slots, like.numel())
            memory = like.new_empty(shape) if host is None else host.allocate(shape, like.dtype)
            self._slabs[key] = _Slab(memory, list(reversed(range(self._num_slots))))
        slab = self._slabs[key]
        _, numel = slab.memory.shape
        if (numel, slab.memory.dtype) != (like.numel(), like.dtype):
            raise CheckpointError(
                f"{layer}: expected {numel} elements of {slab.memory.dtype} to keep of its input "
                f"{position}, as in the first layer, for which contiguous memory was allocated; "
                f"got {like.numel()} of {like.dtype}. Call reset() when shapes change, or leave "
                "out num_slots where layers are not alike"
            )
        if not slab.free:
            raise CheckpointError(
                f"{layer}: expected {self._num_slots} layers at most, as was announced, and the "
                "inputs of so many are kept now. Announce more (num_slots, num_checkpoints, "
                "set_num_layers()), run forwards without a backward under no_grad(), or delete "
                "outputs that no backward will use, and call reset()"
            )
        slot = slab.free.pop()
        finalize(user, slab.free.append, slot)
        if slab.memory.device.type != "cpu":
            stream = torch.accelerator.current_stream(slab.memory.device)
            if slab.users.get(slot, stream) != stream:
                stream.wait_stream(slab.users[slot])
            slab.users[slot] = stream
        # `.data` gives each slot a version of its own: writing to one is no write to the others.
        return slab.memory.data[slot]

    def _free_copied(self) -> None:
        """Free the inputs of the last call that were copied to the host.

        Streams wait for these copies, which had a layer's time to finish.
        """
        last = self._before(self._num_calls)
        if last is not None:
            for packed in last.packed.values():
                if packed.leaving is not None:
                    packed.leaving.wait()

    def _before(self, number: int) -> _PackedInputs | None:
        """Return the last call before a number that still keeps inputs here; None without one."""
        with self._lock:
            return self._live.get(max((n for n in self._live if n < number), default=-1))


@define(eq=False)
class _PackedInput:
    """Shape, strides and copies under way of an input that is kept flat, whole or as a shard."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    # The input's version, which the restored tensor gets too.
    version: int
    # Elements per rank if the input is split; None if this rank keeps all of it.
    splits: tuple[int, ...] | None
    is_slot: bool
    # The host that the input is copied to, and that copy. None if it stays where it is.
    host: PinnedHost | None = field(default=None, init=False)
    leaving: Copy | None = field(default=None, init=False)
    # The copy back, from its start, which may be ahead of use, until `fetch`.
    arriving: Copy | None = field(default=None, init=False)

    def prefetch(self) -> None:
        """Start the copy back to the device, if the input is on the host and none was started."""
        if self.host is not None and self.leaving is not None and self.arriving is None:
            self.arriving = self.host.to_device(self.leaving)

    def fetch(self, value: Tensor) -> Tensor:
        """Return the flat tensor, or this rank's shard of it, on the device of the input.

        A slot whose tensor is not split is cloned: a graph that lives longer than this call, and so
        than its slot, may refer to the tensor.
        """
        if self.leaving is not None:
            self.prefetch()
            arriving, self.arriving = self.arriving, None
            assert arriving is not None, "prefetch() has started it"
            return arriving.wait()
        return value.clone() if self.is_slot and self.splits is None else value

    def on_device(self) -> list[Tensor]:
        """Return the device's tensors of copies under way: sources to the host, targets from it."""
        leaving = None if self.leaving is None else self.leaving.source
        arriving = None if self.arriving is None else self.arriving.target
        return [tensor for tensor in (leaving, arriving) if tensor is not None]


@define(eq=False)
class _PackedInputs(AbstractKept):
    """Inputs of one call, some or all of them packed."""

    _saver: PackedSaver
    _number: int
    _layer: str
    # Keeps one tensor for each input: its packed form, or the input itself.
    _held: AbstractKept
    # Position among the inputs -> how the input is packed.
    packed: Mapping[int, _PackedInput]
    storages: Storages
    _is_hooked: bool
    _measuring: Measuring = field(default=nullcontext, init=False)

    def restore(self) -> Sequence[Tensor]:
        self._saver._free_copied()
        self.prefetch()
        before = None if self._is_hooked else self._saver._before(self._number)
        if before is not None:
            before.prefetch()
        values = list(self._held.restore())
        for index, packed in self.packed.items():
            if packed.leaving is not None and packed.leaving.is_torn:
                raise CheckpointError(
                    f"{self._layer}: its input {index} was written in place while it was being "
                    "copied to the host, so it cannot be computed again; give it a clone, or "
                    "write to a clone"
                )
            values[index] = packed.fetch(values[index])
        splits = {i: p.splits for i, p in self.packed.items() if p.splits is not None}
        if splits and self._saver._split is not None:
            shards, sizes = [values[i] for i in splits], list(splits.values())
            with self._measuring():
                whole = self._saver._split.gather(
                    shards, sizes, number=self._number, layer=self._layer
                )
            for index, flat in zip(splits, whole, strict=True):
                values[index] = flat
        for index, packed in self.packed.items():
            values[index] = values[index].as_strided(packed.shape, packed.strides)
            set_version(values[index], packed.version)
        return values

    def prefetch(self) -> None:
        for packed in self.packed.values():
            packed.prefetch()

    def measures_gathers(self, measuring: Measuring) -> None:
        self._measuring = measuring


def _can_be_copied(tensor: Tensor) -> bool:
    return (
        tensor.is_floating_point()
        and _is_dense(tensor)
        and tensor.numel() > 0
        # A copy would not be lazily negated, so the second run would call other operators.
        and not tensor.is_neg()
        and not stays_as_it_is(tensor)
    )


def _is_dense(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta


def _flatten(tensor: Tensor) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """Return a tensor's elements in memory order, and the shape and strides to restore it. Local.

    The elements are a view, also of transposed, expanded and overlapping tensors. They are a copy
    where the memory between them is not the tensor's own; then the strides are those of the copy,
    in the same order.
    """
    numel = _memory_numel(tensor)
    if numel > tensor.numel():
        core = tensor
        for dim, stride in enumerate(tensor.stride()):
            # An expanded dimension has the same memory all along: one element is copied.
            if stride == 0:
                core = core.narrow(dim, 0, 1)
        tensor = core.clone(memory_format=torch.preserve_format).expand(tensor.shape)
        numel = _memory_numel(tensor)
    return tensor.as_strided((numel,), (1,)), tuple(tensor.shape), tensor.stride()


def _memory_numel(tensor: Tensor) -> int:
    """Return the number of elements in memory from a tensor's first element to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _storages(values: Sequence[Tensor], packed: Mapping[int, _PackedInput]) -> Storages:
    slots = {index for index in packed if packed[index].is_slot}
    found = storages_in([v for i, v in enumerate(values) if i not in slots and _is_dense(v)])
    return found | {(values[i].device, values[i].data_ptr()): values[i].nbytes for i in slots}


def _by_device(storages: Storages) -> dict[torch.device, int]:
    found: Counter[torch.device] = Counter()
    for (device, _), num_bytes in storages.items():
        found[device] += num_bytes
    return dict(found)
