"""A recording fake of CUDA's streams, on the CPU: who uses memory that another is not done with?

Inside `recording()` tensors that are put on "cuda" are ordinary tensors of the CPU that say they
are on `cuda:0`. Every operation of torch runs at once, and is noted with the stream that it was
given to. What CUDA would order is kept as vector clocks: a stream does one thing after another,
after the host has launched it; events and waits order streams; `synchronize`, `item()` and blocking
copies order the host. Two uses of the same bytes, at least one of them a write, that nothing orders
are a problem, and so is memory that dies while another stream than the one it was allocated on may
still use it, which torch's allocator would hand to the next who asks.

A `DiskStore` uses memory when it is asked to.

What it cannot see: code that reads memory by its address (compiled kernels); orders between threads
of the host, which count as one; memory of the host that dies. Copies with
`non_blocking=True` count as such even from and to memory that is not page-locked, which is the
stricter reading. Code that asks `torch.cuda.is_available()` is told the truth.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from zero_offload import DiskStore

CUDA: Final = torch.device("cuda", 0)
CPU: Final = torch.device("cpu")
_REAL_DEVICE: Final = torch._C.TensorBase.device
_REAL_NUM_MODES: Final = torch._C._len_torch_dispatch_stack
Clock = dict[str, int]  # how far each timeline is known to have come, by its name


@frozen
class _Use:
    """Of some bytes of one piece of memory."""

    start: int
    stop: int
    writes: bool
    timeline: str
    at: int  # of that timeline
    what: str


@define(eq=False)
class _Memory:
    """One storage."""

    name: str
    device: torch.device
    stream: str  # on which it was allocated
    uses: list[_Use] = field(factory=list)
    recorded: set[str] = field(factory=set)  # streams that the allocator was told of


@define(eq=False)
class Recorder:
    """What was done, in which order, and what nothing orders."""

    problems: list[str] = field(factory=list)
    num_collectives: int = 0
    copies: list[str] = field(factory=list)  # the streams that copied between host and device
    _clocks: dict[str, Clock] = field(factory=dict)
    _memory: dict[int, _Memory] = field(factory=dict)  # by the address of the storage's object
    _lock: Any = field(factory=threading.RLock)

    def clock(self, timeline: str) -> Clock:
        """Of what comes next there."""
        return self._clocks.setdefault(timeline, {})

    def join(self, timeline: str, clock: Clock) -> None:
        """What comes next there comes after all that the clock knows."""
        own = self.clock(timeline)
        for name, at in clock.items():
            own[name] = max(own.get(name, 0), at)

    def tick(self, timeline: str) -> int:
        """One more thing is done there."""
        own = self.clock(timeline)
        if timeline != "host":  # it was launched by the host
            self.join(timeline, self.clock("host"))
        own[timeline] = own.get(timeline, 0) + 1
        return own[timeline]

    def memory_of(self, tensor: Tensor) -> _Memory | None:
        """Of a tensor with memory of its own; noted when it is first seen."""
        with torch._C.DisableTorchFunction():
            if _REAL_DEVICE.__get__(tensor) != CPU or tensor.layout is not torch.strided:
                return None
            storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._memory.get(key)
        if found is None:
            found = _Memory(f"memory {len(self._memory)}", CPU, "host")
            self._memory[key] = found
            weakref.finalize(storage, self._die, key)
        return found

    def place(self, tensor: Tensor, device: torch.device) -> None:
        """Say where it was allocated."""
        memory = self.memory_of(tensor)
        if memory is not None and not memory.uses:
            memory.device = device
            memory.stream = _current_stream().name if device == CUDA else "host"

    def use(self, tensor: Tensor, timeline: str, at: int, *, writes: bool, what: str) -> None:
        """Note it, and what it is not ordered with."""
        memory = self.memory_of(tensor)
        if memory is None or not tensor.numel():
            return
        size, start = tensor.element_size(), tensor.storage_offset() * tensor.element_size()
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        use = _Use(start, start + (reach + 1) * size, writes, timeline, at, what)
        known, kept = self.clock(timeline), []
        for other in memory.uses:
            overlaps = other.start < use.stop and use.start < other.stop
            is_before = other.at <= known.get(other.timeline, 0)
            if overlaps and not is_before and (other.writes or writes):
                self.problems.append(
                    f"{_said(use)} of {memory.name} on {memory.device}, which {_said(other)}: "
                    "nothing orders the two"
                )
            is_within = use.start <= other.start and other.stop <= use.stop
            if not (is_within and is_before and (writes or not other.writes)):
                kept.append(other)
        memory.uses = [*kept, use]

    def _die(self, key: int) -> None:
        with self._lock:
            memory = self._memory.pop(key, None)
            if memory is None or memory.device == CPU:
                return
            # Whoever asks next is given it on the stream where it was allocated, from now on.
            known = dict(self.clock("host"))
            for name, at in self.clock(memory.stream).items():
                known[name] = max(known.get(name, 0), at)
            for use in memory.uses:
                if use.at > known.get(use.timeline, 0) and use.timeline not in memory.recorded:
                    self.problems.append(
                        f"{memory.name} of {memory.stream} was let go of while it is still in use: "
                        f"{_said(use)}, and no record_stream() tells of that"
                    )


def _said(use: _Use) -> str:
    verb = "writes" if use.writes else "reads"
    return f"{use.what} on {use.timeline} {verb} bytes {use.start} to {use.stop}"


# ---- Streams and events ----


class _Event:
    """A moment of a stream."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = device
        self._clock: Clock = {}

    def record(self, stream: _Stream | None = None) -> None:
        name = (stream or _current_stream()).name
        _the_recorder().tick(name)
        self._clock = dict(_the_recorder().clock(name))

    def synchronize(self) -> None:
        _the_recorder().join("host", self._clock)

    def query(self) -> bool:
        """Whether the host knows already that it is over: nothing is done sooner than it must."""
        host = _the_recorder().clock("host")
        return all(host.get(name, 0) >= at for name, at in self._clock.items())


class _Stream:
    """One thing after another."""

    def __init__(self, device: Any = None, name: str | None = None, **_: Any) -> None:
        _SHARED["number"] += 1
        self.device = CUDA
        self.name = name or f"stream {_SHARED['number']}"

    def wait_stream(self, other: _Stream) -> None:
        _the_recorder().join(self.name, _the_recorder().clock("host"))
        _the_recorder().join(self.name, _the_recorder().clock(other.name))

    def wait_event(self, event: _Event) -> None:
        _the_recorder().join(self.name, event._clock)

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _the_recorder().join("host", _the_recorder().clock(self.name))

    def __enter__(self) -> _Stream:
        seen = contextlib.ExitStack()
        seen.enter_context(_seen())  # a thread that comes along is seen from here on
        _stack().append(self)
        _stack_of_seen().append(seen)
        return self

    def __exit__(self, *_: object) -> None:
        assert _stack().pop() is self
        _stack_of_seen().pop().close()


_STATE: Final = threading.local()
_SHARED: Final[dict[str, Any]] = {"recorder": None, "number": 0, "default": None}


def _the_recorder() -> Recorder:
    return _SHARED["recorder"]


def _stack() -> list[_Stream]:
    if not hasattr(_STATE, "stack"):
        _STATE.stack = []
    return _STATE.stack


def _stack_of_seen() -> list[contextlib.ExitStack]:
    if not hasattr(_STATE, "seen_by_stream"):
        _STATE.seen_by_stream = []
    return _STATE.seen_by_stream


def _current_stream(device: Any = None) -> _Stream:
    """Of this thread."""
    del device
    return _stack()[-1] if _stack() else _SHARED["default"]


@contextlib.contextmanager
def _stream(stream: _Stream | None) -> Iterator[None]:
    """As torch.cuda.stream."""
    with stream or contextlib.nullcontext():
        yield


def _synchronize(device: Any = None) -> None:
    del device
    recorder = _the_recorder()
    for name in list(recorder._clocks):
        recorder.join("host", recorder.clock(name))


# ---- What is done ----

_BLOCKS: Final = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"}


class _Operations(TorchDispatchMode):
    """Notes what every operation reads and writes."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if getattr(_STATE, "is_muted", False):
            return result
        with _the_recorder()._lock:
            _note(func, args, kwargs, result)
        return result


def _note(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    recorder, schema = _the_recorder(), func._schema
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for place, argument in enumerate(schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        found = [each for each in tree_iter(value) if isinstance(each, Tensor)]
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if is_written else reads).extend(found)
    made = [each for each in tree_iter(result) if isinstance(each, Tensor)]
    given = {_key(tensor) for tensor in (*reads, *writes)}
    fresh = [tensor for tensor in made if _key(tensor) not in given]
    asked = getattr(_STATE, "device", None)
    inherited = CUDA if any(map(_is_on_device, (*writes, *reads))) else CPU
    for tensor in fresh:
        recorder.place(tensor, asked or inherited)
    is_view = made and not fresh and not writes
    if is_view or "empty" in schema.name:
        return
    touched = [*writes, *reads, *fresh]
    is_device = any(map(_is_on_device, touched))
    timeline = _current_stream().name if is_device else "host"
    at, what = recorder.tick(timeline), schema.name.removeprefix("aten::")
    for tensor in reads:
        recorder.use(tensor, timeline, at, writes=False, what=what)
    for tensor in (*writes, *fresh):
        recorder.use(tensor, timeline, at, writes=True, what=what)
    crosses = is_device and not all(map(_is_on_device, touched))
    if crosses and schema.name in ("aten::copy_", "aten::_to_copy", "aten::clone"):
        recorder.copies.append(timeline)
        is_async = (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)) or getattr(
            _STATE, "non_blocking", False
        )
        if not is_async:
            recorder.join("host", recorder.clock(timeline))
    if is_device and schema.name in _BLOCKS:
        recorder.join("host", recorder.clock(timeline))


def _key(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        try:
            return tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # it has none
            return -1


def _is_on_device(tensor: Tensor) -> bool:
    memory = _the_recorder().memory_of(tensor)
    return memory is not None and memory.device == CUDA


_FACTORIES: Final = (
    *("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "randint"),
    *("as_tensor", "linspace", "empty_strided", "empty_like", "zeros_like", "ones_like"),
    *("full_like", "rand_like", "randn_like"),
)
_METHODS: Final = (
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"),
    "_make_wrapper_subclass",
)


def _factory(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What makes a tensor where it is told, and takes memory of the CPU for it."""

    def made(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.pop("pin_memory", False):
            kwargs.setdefault("device", CPU)
        if kwargs.get("device") is None:
            return make(*args, **kwargs)
        device = torch.device(kwargs["device"])
        if device.type == "cuda":
            kwargs["device"] = CPU
        with _asked({"cuda": CUDA, "cpu": CPU}.get(device.type)):
            return make(*args, **kwargs)

    return made


def _numpy(tensor: Tensor, **kwargs: Any) -> Any:
    """The host may do anything with it."""
    assert not _is_on_device(tensor), "the host cannot read a device's memory"
    recorder = _the_recorder()
    recorder.use(tensor, "host", recorder.tick("host"), writes=True, what="numpy()")
    return _REAL["numpy"](tensor, **kwargs)


@contextlib.contextmanager
def _asked(device: torch.device | None, *, non_blocking: bool = False) -> Iterator[None]:
    before = getattr(_STATE, "device", None), getattr(_STATE, "non_blocking", False)
    _STATE.device, _STATE.non_blocking = device, non_blocking
    try:
        yield
    finally:
        _STATE.device, _STATE.non_blocking = before


def _mover(name: str) -> Callable[..., Tensor]:
    """`.to()`, `.cpu()` and `.cuda()`: another memory where the device is another."""

    def move(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rest = (*args, *kwargs.values())
        places = [torch.device(each) for each in rest if isinstance(each, torch.device | str)]
        places += [each.device for each in rest if isinstance(each, Tensor)]
        places += {"cpu": [CPU], "cuda": [CUDA]}.get(name, [])
        if not places or places[0].type not in ("cpu", "cuda"):
            return _REAL[name](tensor, *args, **kwargs)
        dtypes = [each for each in rest if isinstance(each, torch.dtype)]
        dtypes += [each.dtype for each in rest if isinstance(each, Tensor)]
        to_device = places[0].type == "cuda"
        flags = [each for each in args if isinstance(each, bool)] or [False]
        non_blocking = kwargs.get("non_blocking", flags[0])
        with _asked(CUDA if to_device else CPU, non_blocking=non_blocking):
            is_there = _is_on_device(tensor) == to_device
            moved = tensor if is_there and not kwargs.get("copy") else tensor.clone()
            return _REAL["to"](moved, dtypes[0]) if dtypes else moved

    return move


_REAL: Final = {name: getattr(torch.Tensor, name) for name in ("to", "cpu", "cuda", "numpy")}


def _record(tensor: Tensor, stream: _Stream) -> None:
    memory = _the_recorder().memory_of(tensor)
    if memory is not None:
        memory.recorded.add(stream.name)


@contextlib.contextmanager
def _seen() -> Iterator[None]:
    """In this thread, from here on."""
    if getattr(_STATE, "is_seen", False):
        yield
        return
    _STATE.is_seen = True
    try:
        with _Operations():
            yield
    finally:
        _STATE.is_seen = False


def _num_modes() -> int:
    """Without ours, which code that suspends the modes of others must not suspend."""
    return _REAL_NUM_MODES() - bool(getattr(_STATE, "is_seen", False))


def _device_of(tensor: Tensor) -> torch.device:
    real = _REAL_DEVICE.__get__(tensor)
    return CUDA if real == CPU and _is_on_device(tensor) else real


def _noted(move: Callable[..., Any], *, writes: bool) -> Callable[..., Any]:
    """The disk reads and writes memory by its address."""

    def noted(store: DiskStore, key: str, memory: Tensor) -> Any:
        recorder = _the_recorder()
        with recorder._lock:
            recorder.use(memory, "host", recorder.tick("host"), writes=writes, what="the disk")
        return move(store, key, memory)

    return noted


# ---- Collectives of NCCL ----


class _FakeWork:
    """A collective on a stream of its own; it holds its tensors until it is waited for."""

    def __init__(self, done: _Event, held: Sequence[Tensor]) -> None:
        self._done, self._held = done, held

    def wait(self, timeout: Any = None) -> bool:
        """The current stream waits, and not the host."""
        del timeout
        _current_stream().wait_event(self._done)
        self._held = ()
        return True


# What each writes, what it reads, and what it makes of all that the ranks give, in rank order.
_EXCHANGES: Final[dict[str, Callable[..., tuple[list[Tensor], list[Tensor], Any]]]] = {
    "all_gather": lambda chunks, own: (chunks, [own], lambda every, _: [m for (m,) in every]),
    "reduce_scatter": lambda out, chunks, op=None: (
        [out],
        chunks,
        lambda every, rank: [_reduced([each[rank] for each in every], op)],
    ),
    "all_reduce": lambda buffer, op=None: (
        [buffer],
        [buffer],
        lambda every, _: [_reduced([mine for (mine,) in every], op)],
    ),
    "broadcast": lambda buffer, src: ([buffer], [buffer], lambda every, _: every[src]),
}


def _reduced(values: list[Tensor], op: Any) -> Tensor:
    total = sum(values[1:]) + values[0]
    return total / len(values) if op == dist.ReduceOp.AVG else total


def _collective(name: str) -> Callable[..., _FakeWork]:
    def launch(*args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> _FakeWork:
        recorder, stream = _the_recorder(), _SHARED["nccl"]
        written, read, make = _EXCHANGES[name](*args, **kwargs)
        assert all(map(_is_on_device, (*written, *read))), "NCCL takes tensors of a device"
        recorder.num_collectives += 1
        stream.wait_stream(_current_stream())
        at = recorder.tick(stream.name)
        for tensors, writes in ((read, False), (written, True)):
            for tensor in tensors:
                recorder.use(tensor, stream.name, at, writes=writes, what=name)
        with _unseen(), torch.no_grad():
            every: list[Any] = [None] * dist.get_world_size(group)
            with mock.patch.object(torch.Tensor, "device", _REAL_DEVICE):
                dist.all_gather_object(every, [each.clone() for each in read], group=group)
            for out, value in zip(written, make(every, dist.get_rank(group)), strict=True):
                out.copy_(value)
        work = _FakeWork(stream.record_event(), (*written, *read))
        if not async_op:
            work.wait()
        return work

    return launch


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    _STATE.is_muted = True
    try:
        yield
    finally:
        _STATE.is_muted = False


_COLLECTIVES: Final = {name: _collective(name) for name in _EXCHANGES}

# torch's functions of even pieces are bound where they are imported, and call these of the group;
# before 2.13 by the names in second place.
_EVEN: Final = {
    name: next(found for found in names if hasattr(dist.ProcessGroup, found))
    for name, names in {
        "all_gather": ("all_gather_single", "_allgather_base"),
        "reduce_scatter": ("reduce_scatter_single", "_reduce_scatter_base"),
    }.items()
}


def _of_even_pieces(name: str) -> Callable[..., Any]:
    real, launch = getattr(dist.ProcessGroup, _EVEN[name]), _COLLECTIVES[name]

    def method(group: Any, out: Tensor, own: Tensor, options: Any) -> Any:
        if not _is_on_device(out):  # torch 2.15 gathers pickled objects so
            return real(group, out, own, options)
        how = {"group": group, "async_op": True}
        if name == "all_gather":
            return launch(list(out.chunk(dist.get_world_size(group))), own, **how)
        pieces = list(own.chunk(dist.get_world_size(group)))
        return launch(out, pieces, options.reduceOp, **how)

    return method


_METHODS_OF_GROUPS: Final = {method: _of_even_pieces(name) for name, method in _EVEN.items()}


@contextlib.contextmanager
def recording(*, nccl: bool = False) -> Iterator[Recorder]:
    """Let "cuda" be a fake of one device, and note what is done on its streams.

    Args:
        nccl: Whether torch.distributed's default group, of gloo, passes for one of NCCL.
    """
    recorder = Recorder()
    _SHARED.update(recorder=recorder, number=0)
    _SHARED.update(default=_Stream(name="the default stream"), nccl=_Stream(name="nccl"))
    rng = {"get_rng_state": lambda device=None: torch.zeros(8, dtype=torch.uint8)}
    rng |= {"set_rng_state": lambda state, device=None: None}
    patches = [
        (torch.cuda, {"Stream": _Stream, "Event": _Event, "stream": _stream}),
        (torch.cuda, {"current_stream": _current_stream, "synchronize": _synchronize}),
        (torch.cuda, {"current_device": lambda: 0, "empty_cache": lambda: None, **rng}),
        (torch, {"Stream": _Stream, "Event": _Event}),
        (DiskStore, {"read": _noted(DiskStore.read, writes=True)}),
        (DiskStore, {"write": _noted(DiskStore.write, writes=False)}),
        (torch._C, {"_len_torch_dispatch_stack": _num_modes}),
        (torch.utils._python_dispatch, {"_len_torch_dispatch_stack": _num_modes}),
        (torch.accelerator, {"current_stream": _current_stream, "synchronize": _synchronize}),
        (torch.accelerator, {"current_device_index": lambda: 0, "empty_cache": lambda: None}),
        (dist, {**_COLLECTIVES, "get_backend_config": lambda _=None: "cuda:nccl"} if nccl else {}),
        (dist.ProcessGroup, _METHODS_OF_GROUPS if nccl else {}),
    ]
    with contextlib.ExitStack() as stack:
        for module, names in patches:
            for name, value in names.items():
                stack.enter_context(mock.patch.object(module, name, value))
        for owner, names in ((torch, _FACTORIES), (torch.Tensor, _METHODS)):
            for name in names:
                made = _factory(getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, made))
        for name in ("to", "cpu", "cuda"):
            stack.enter_context(mock.patch.object(torch.Tensor, name, _mover(name)))
        for name, value in (
            ("numpy", _numpy),
            ("record_stream", _record),
            ("device", property(_device_of)),
            ("is_cuda", property(lambda tensor: _device_of(tensor).type == "cuda")),
            ("is_cpu", property(lambda tensor: _device_of(tensor).type == "cpu")),
        ):
            stack.enter_context(mock.patch.object(torch.Tensor, name, value, create=True))
        with _seen():
            yield recorder
