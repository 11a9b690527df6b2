"""Inputs that are split over ranks, moved to the host, or kept in permanent memory: PackedSaver."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple, final
from weakref import WeakValueDictionary

import torch
from attrs import define, field, frozen
from torch import Tensor

from zero_ckpt.errors import CheckpointError
from zero_ckpt.torch_private import hooks_save_tensors, set_version, version_of

from .savers import AbstractKept, AbstractSaver, AsTheyAre, Measuring, stays_as_it_is
from .split import Split

if TYPE_CHECKING:
    from zero_comm import Group


@frozen
class Form:
    """Shape and strides over a flat tensor that has an element for every place in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the flat tensor: fewer than the shape has, where some are repeated."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in steps)

    def over(self, flat: Tensor) -> Tensor:
        """A view of a flat tensor. Local."""
        return flat.as_strided(self.shape, self.strides)


def flatten(tensor: Tensor) -> tuple[Tensor, Form]:
    """Its elements in the order of memory, and their form. Local.

    A view, of transposed, expanded and overlapping tensors too; a copy where the memory between
    its elements is not its own. The form has the tensor's strides, or those of the copy, in the
    same order.
    """
    form = Form(tuple(tensor.shape), tensor.stride())
    if form.numel > tensor.numel():
        tensor = _without_gaps(tensor)
        form = Form(form.shape, tensor.stride())
    return tensor.as_strided((form.numel,), (1,)), form


def _without_gaps(tensor: Tensor) -> Tensor:
    core = tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:  # expanded: once is enough
            core = core.narrow(dim, 0, 1)
    return core.clone(memory_format=torch.preserve_format).expand(tensor.shape)


# ---- Copies between a device and pinned host memory, beside the computation ----


# NOTE(copies): a copy runs on a stream of its own, and reads or writes memory of the device that
# was allocated on the stream of the computation. That memory is held until the latter stream has
# been told to wait for the copy: from then on whoever is given it next comes after the copy.


@define(eq=False)
class Copy:
    """One copy on its way. Both tensors live until it is settled."""

    target: Tensor
    source: Tensor | None  # None once it is settled
    _wait: Callable[[], None]
    stream: Any = None  # of the computation that made the tensor, and will use it
    is_torn: bool = field(default=False, init=False)  # the source was written in place meanwhile
    _version: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._version = -1 if self.source is None else version_of(self.source)

    def settle(self) -> Tensor:
        """Whatever the stream of the computation does from now on comes after the copy.

        Local; blocks no host thread.
        """
        if self.source is not None:
            self._wait()
            self.is_torn = version_of(self.source) != self._version
            self.source = None
        return self.target

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.settle()


class AbstractHost(ABC):
    """Who copies."""

    @abstractmethod
    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor lies somewhere else than on the host."""

    @abstractmethod
    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the host to copy to."""

    @abstractmethod
    def away(self, source: Tensor, target: Tensor) -> Copy:
        """Begin to copy to memory that `allocate` gave."""

    @abstractmethod
    def back(self, copy: Copy) -> Copy:
        """Begin to copy what went away to new memory of the device that it came from."""


@final
@define(eq=False)
class PinnedHost(AbstractHost):
    """One more stream per device, on which copies follow one another in both directions."""

    _sides: dict[torch.device, torch.Stream] = field(factory=dict, init=False)

    def takes(self, tensor: Tensor) -> bool:
        """All but those on the CPU."""
        return tensor.device.type != "cpu"

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Pinned."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def away(self, source: Tensor, target: Tensor) -> Copy:
        """After all that the current stream has been given so far."""
        stream = torch.accelerator.current_stream(source.device)
        return self._copy(source, target, stream, source.device)

    def back(self, copy: Copy) -> Copy:
        """After all that the stream of the computation has been given so far."""
        with copy.stream:
            target = torch.empty_like(copy.target, device=copy.stream.device, pin_memory=False)
        return self._copy(copy.target, target, copy.stream, target.device)

    def _copy(
        self, source: Tensor, target: Tensor, stream: torch.Stream, device: torch.device
    ) -> Copy:
        if device not in self._sides:
            self._sides[device] = torch.Stream(device)
        side = self._sides[device]
        side.wait_stream(stream)
        with side:
            target.copy_(source, non_blocking=True)
        done = side.record_event()
        return Copy(target, source, lambda: stream.wait_event(done), stream)


# ---- Permanent memory for the inputs of layers that are alike, which calls take turns to use ----


class _Key(NamedTuple):
    """Inputs at the same place of layers on the same device are alike."""

    position: int
    device: torch.device


@define(eq=False)
class _Slab:
    memory: Tensor  # (slots, elements of one)
    free: list[int]  # slots that nobody uses
    users: dict[int, Any] = field(factory=dict, init=False)  # streams that used them last


@define(eq=False)
class Slot:
    """Memory for one input of one call. Given back when this object dies."""

    tensor: Tensor
    _slab: _Slab
    _index: int

    def __del__(self) -> None:
        self._slab.free.append(self._index)


@final
@define(eq=False)
class Slots:
    """As many of each kind as there are layers; allocated when the first one comes."""

    _num_slots: int
    _slabs: dict[_Key, _Slab] = field(factory=dict, init=False)

    def take(self, position: int, like: Tensor, layer: str, host: AbstractHost | None) -> Slot:
        """A slot for a 1-D tensor, not yet written. Local.

        Args:
            position: Of the input among those of its call.
            like: Of the same numel and dtype, and of the same device if there is no host.
            layer: Whose input, for errors.
            host: Whose memory it is to be; the tensor's device's when None.

        Raises:
            CheckpointError: All slots are taken, or those of this position are of another kind.
        """
        key = _Key(position, like.device)
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
                "set_num_layers()), run what has no backward under no_grad(), or let go of outputs "
                "whose backward will not come, and reset()"
            )
        index = slab.free.pop()
        if slab.memory.device.type != "cpu":
            stream = torch.accelerator.current_stream(slab.memory.device)
            if slab.users.get(index, stream) != stream:
                stream.wait_stream(slab.users[index])
            slab.users[index] = stream
        # .data: a write to one slot is none to the others, as versions count
        return Slot(slab.memory.data[index], slab, index)

    def reset(self) -> None:
        """Allocate anew when the next input comes; slots in use stay what they are. Local."""
        self._slabs.clear()

    @property
    def reserved(self) -> list[Tensor]:
        """All memory, whether it is in use or not."""
        return [slab.memory for slab in self._slabs.values()]


# ---- Inputs that are split over ranks, moved to the host, or kept in permanent memory ----


@final
class PackedSaver(AbstractSaver):
    """Keeps inputs in less memory of the device: split over ranks, on the host, in permanent slots.

    Any of these together. They concern inputs of floating point. All others, parameters, and
    tensors with an attribute `no_checkpointing = True` are kept as `KeepSaver` does.

    An enclosing checkpoint drops what is saved inside it, as activations of its own; other
    saved-tensor hooks may keep it elsewhere. So inside of any, inputs are split, and where they
    rest is left to the hooks: neither slots nor the host are used, and nothing is counted.

    Args:
        group: Ranks that are called with the same inputs, as those of a model-parallel group are.
            Each keeps a shard of every input, 1/N of its elements (shards differ by one element
            at most), and gathers it for the second run: one message per dtype and call. Inputs
            with fewer elements than ranks stay whole. All ranks make the same checkpointed calls.
        on_host: Whether inputs on a device are copied to pinned host memory, on a stream of its
            own, and back while the layer after it (the one before it in backward) is computed.
        num_slots: How many layers keep inputs at a time. Memory is allocated once for so many, for
            each position among the inputs of a call, so that a long training does not fragment it.
            Inputs at one position have the same dtype and number of elements in all layers. A slot
            is free again as soon as the graph of its call is.

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
        _check_types(group, on_host, num_slots)
        self._split = None if group is None or group.world_size == 1 else Split(group)
        self._host: AbstractHost | None = PinnedHost() if on_host else None
        self._slots = None if num_slots is None else Slots(num_slots)
        self._live: WeakValueDictionary[int, _Packed] = WeakValueDictionary()  # by number
        self._num_calls = 0
        self._lock = RLock()

    def save(self, inputs: Sequence[Tensor], layer: str) -> AbstractKept:
        """Pack what can be. Local.

        Raises:
            CheckpointError: Slots are for inputs of another kind, or all are taken; an input lies
                on another device than the group's.
        """
        is_hooked = hooks_save_tensors()
        with self._lock:
            if not is_hooked:
                self._settle()
            number, self._num_calls = self._num_calls, self._num_calls + 1
            values, copied = list(inputs), {}
            for index, tensor in enumerate(inputs):
                found = self._pack(index, tensor, layer, is_hooked=is_hooked)
                if found is not None:
                    values[index], copied[index] = found
            storages = {} if is_hooked else _storages(values, copied)
            held = AsTheyAre.of(values, layer)
            packed = _Packed(self, number, layer, held, copied, storages, is_hooked)
            if not is_hooked:
                self._live[number] = packed
            return packed

    def kept_bytes(self) -> dict[torch.device, int]:
        """Bytes of this rank that calls keep now, by device; the host's is `cpu`. Local.

        Each storage counts once, and as a whole where part of it is an input that is kept as it is;
        of slots those count that are in use. Of dense tensors only.
        """
        with self._lock:
            storages = {k: v for kept in self._live.values() for k, v in kept.storages().items()}
        return _by_device(storages)

    def reserved_bytes(self) -> dict[torch.device, int]:
        """Bytes of all slots, whether they are in use or not, by device. Local."""
        slabs = [] if self._slots is None else self._slots.reserved
        return _by_device({(slab.device, slab.data_ptr()): slab.nbytes for slab in slabs})

    def reset(self) -> None:
        """Allocate slots anew for the next call, of any shape and dtype. Local.

        What is kept already stays where it is.
        """
        if self._slots is not None:
            self._slots.reset()

    def _pack(
        self, index: int, tensor: Tensor, layer: str, *, is_hooked: bool
    ) -> tuple[Tensor, _Copied] | None:
        """What to keep instead of an input; None for the input itself."""
        if not _can_be_copied(tensor):
            return None
        slots = None if is_hooked else self._slots
        host = self._host if self._host and not is_hooked and self._host.takes(tensor) else None
        if slots is None and host is None and self._split is None:
            return None
        flat, form = flatten(tensor)
        splits = None if self._split is None else self._split.splits(flat, form.numel, layer)
        if slots is None and host is None and splits is None:
            return None
        shard = flat if splits is None or self._split is None else self._split.own(flat, splits)
        version = version_of(tensor)
        slot = None if slots is None else slots.take(index, shard, layer, host)
        if host is None:
            value = shard.clone() if slot is None else slot.tensor.copy_(shard)
            return value, _Copied(form, splits, version, slot)
        target = host.allocate(shard.shape, shard.dtype) if slot is None else slot.tensor
        return target, _Copied(form, splits, version, slot, host, host.away(shard, target))

    def _settle(self) -> None:
        """Let go of the inputs that were copied away last: their copies had a layer's time."""
        last = self._before(self._num_calls)
        if last is not None:
            last.settle()

    def _before(self, number: int) -> _Packed | None:
        """Of the calls that still keep something here, the last one before a number."""
        with self._lock:
            return self._live.get(max((n for n in self._live if n < number), default=-1))


@define(eq=False)
class _Copied:
    """An input in another form."""

    form: Form
    splits: tuple[int, ...] | None  # elements per rank, if this is a shard
    version: int  # of the input
    slot: Slot | None = None
    host: AbstractHost | None = None
    leaving: Copy | None = None  # to the host
    arriving: Copy | None = field(default=None, init=False)  # from there, ahead of use

    def settle(self) -> None:
        """Nobody reads the input any more."""
        if self.leaving is not None:
            self.leaving.settle()

    def prefetch(self) -> None:
        """Begin to copy it back."""
        if self.host is not None and self.leaving is not None and self.arriving is None:
            self.arriving = self.host.back(self.leaving)

    def fetch(self, value: Tensor) -> Tensor:
        """The flat tensor, or this rank's shard of it, where it is needed: for good, if not split.

        Not the slot itself: a graph that is kept longer than this call may refer to it.
        """
        if self.leaving is not None:
            self.prefetch()
            arriving, self.arriving = self.arriving, None
            assert arriving is not None, "just begun"
            return arriving.settle()
        return value.clone() if self.slot is not None and self.splits is None else value

    def on_device(self) -> list[Tensor]:
        """What lies on the device for the time of a copy."""
        leaving = None if self.leaving is None else self.leaving.source
        arriving = None if self.arriving is None else self.arriving.target
        return [tensor for tensor in (leaving, arriving) if tensor is not None]


_Storages = Mapping[tuple[torch.device, int], int]  # bytes, by device and address


@define(eq=False)
class _Packed(AbstractKept):
    _saver: PackedSaver
    _number: int
    _layer: str
    _held: AsTheyAre
    _copied: Mapping[int, _Copied]
    _storages: _Storages
    _is_hooked: bool
    _measuring: Measuring = field(default=nullcontext, init=False)

    def restore(self) -> Sequence[Tensor]:
        self._saver._settle()
        self.prefetch()
        before = None if self._is_hooked else self._saver._before(self._number)
        if before is not None:
            before.prefetch()
        values = list(self._held.restore())
        for index, copied in self._copied.items():
            if copied.leaving is not None and copied.leaving.is_torn:
                raise CheckpointError(
                    f"{self._layer}: its input {index} was written in place while it was being "
                    "copied to the host, so it cannot be computed again; give it a clone, or "
                    "write to a clone"
                )
            values[index] = copied.fetch(values[index])
        self._gather(values)
        for index, copied in self._copied.items():
            values[index] = copied.form.over(values[index])
            set_version(values[index], copied.version)
        return values

    def prefetch(self) -> None:
        for copied in self._copied.values():
            copied.prefetch()

    def measures_gathers(self, measuring: Measuring) -> None:
        self._measuring = measuring

    def settle(self) -> None:
        for copied in self._copied.values():
            copied.settle()

    def storages(self) -> _Storages:
        on_device = [t for copied in self._copied.values() for t in copied.on_device()]
        return {**self._storages, **_storages(on_device, {})}

    def _gather(self, values: list[Tensor]) -> None:
        """In place of each shard, all of it."""
        splits = {i: c.splits for i, c in self._copied.items() if c.splits is not None}
        if self._saver._split is None or not splits:
            return
        with self._measuring():
            whole = self._saver._split.gather(
                [values[i] for i in splits],
                list(splits.values()),
                number=self._number,
                layer=self._layer,
            )
        for index, flat in zip(splits, whole, strict=True):
            values[index] = flat


def _can_be_copied(tensor: Tensor) -> bool:
    return (
        tensor.is_floating_point()
        and _is_dense(tensor)
        and tensor.numel() > 0
        and not tensor.is_neg()  # a copy is not: operators would be called on it otherwise
        and not stays_as_it_is(tensor)
    )


def _is_dense(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta


def _storages(values: Sequence[Tensor], copied: Mapping[int, _Copied]) -> _Storages:
    found: dict[tuple[torch.device, int], int] = {}
    for index, tensor in enumerate(values):
        if index in copied and copied[index].slot is not None:
            found[tensor.device, tensor.data_ptr()] = tensor.nbytes
        elif _is_dense(tensor):
            storage = tensor.untyped_storage()
            found[tensor.device, storage.data_ptr()] = storage.nbytes()
    return found


def _by_device(storages: _Storages) -> dict[torch.device, int]:
    found: Counter[torch.device] = Counter()
    for (device, _), num_bytes in storages.items():
        found[device] += num_bytes
    return dict(+found)


def _check_types(group: Any, on_host: Any, num_slots: Any) -> None:
    if group is not None:
        from zero_comm import Group  # noqa: PLC0415

        if not isinstance(group, Group):
            raise CheckpointError(
                f"PackedSaver(group=): expected a zero_comm.Group or None, got {group!r}; "
                "zero_comm.Group.from_process_group() makes one"
            )
    if not isinstance(on_host, bool):
        raise CheckpointError(f"PackedSaver(on_host=): expected True or False, got {on_host!r}")
    is_count = isinstance(num_slots, int) and not isinstance(num_slots, bool) and num_slots > 0
    if num_slots is not None and not is_count:
        raise CheckpointError(
            "PackedSaver(num_slots=): expected the number of layers that keep inputs at a time, 1 "
            f"or more, or None, got {num_slots!r}"
        )
