"""Verified recomputation: what backward gets is what forward had, or the operator is named."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final, final

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import CheckpointError, NondeterminismError
from .layers import module_of
from .rng import get_state
from .surroundings import Turn
from .torch_private import inner_tensors, is_plain, storage_of, without_modes

_CHUNK_NUMEL: Final = 1 << 19  # words of 8 bytes that are mixed at a time, in 4 MiB
_ODD: Final = (-0x61C8864680B583EB, -0x3B314601E57A13AD)  # they spread bits, and are invertible


@frozen
class Seen:
    """How a tensor was when a run saw it."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    order: tuple[int, ...]  # of its dimensions in memory; a later sum follows the same
    number: int | None  # of its sum in the run; None where values are not looked at

    def looks_like(self, other: Seen) -> bool:
        """All but the values."""
        mine, its = (self.shape, self.dtype, self.device), (other.shape, other.dtype, other.device)
        return mine == its

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype} on {self.device}"


@final
@define(eq=False)
class Checksums:
    """Makes sums, with tables that are kept for the next."""

    _weights: dict[torch.device, Tensor] = field(factory=dict, init=False)

    def of(self, tensor: Tensor, order: Sequence[int]) -> Tensor | None:
        """A sum over the bits of a tensor, which depends on where each bit is. Waits for nothing.

        Args:
            tensor: Of any shape and dtype. Read only.
            order: What `order_of` gave, for this or for the tensor to compare with.

        Returns:
            int64, of no dimensions, on the tensor's device. None for what has no bits to look at:
            meta tensors, and layouts other than strided (sparse).
        """
        with without_modes(), torch.no_grad():
            parts = inner_tensors(tensor)
            if parts is not None:
                sums = [self.of(part, order_of(part)) for part in parts]
                present = [one for one in sums if one is not None]
                return self._mixed(torch.stack(present)) if present else None
            if not is_plain(tensor):
                return None
            return self._mixed(_words(_dense(tensor, order)))

    def _mixed(self, words: Tensor) -> Tensor:
        weights = self._weights_on(words.device)
        # A flip of the highest bit alone would vanish with the next such flip: it is spread first.
        sums = [
            (chunk.bitwise_xor(chunk >> 32).mul_(weights[: chunk.numel()])).sum()
            for chunk in words.split(_CHUNK_NUMEL)
        ]
        return sums[0] if len(sums) == 1 else self._mixed(torch.stack(sums))

    def _weights_on(self, device: torch.device) -> Tensor:
        if device not in self._weights:
            weights = torch.arange(1, _CHUNK_NUMEL + 1, device=device)
            for factor in _ODD:
                weights.mul_(factor)
                weights.bitwise_xor_(weights >> 31)
            self._weights[device] = weights.bitwise_or_(1)
        return self._weights[device]


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions along which memory moves, the slowest first."""
    if not is_plain(tensor):
        return ()
    strides = tensor.stride()
    moving = [i for i, size in enumerate(tensor.shape) if size != 1 and strides[i] != 0]
    return tuple(sorted(moving, key=lambda i: -strides[i]))


def read(sums: Sequence[Tensor]) -> list[int]:
    """All of them on the host, with one wait for each device."""
    values = [0] * len(sums)
    by_device: dict[torch.device, list[int]] = {}
    for index, one in enumerate(sums):
        by_device.setdefault(one.device, []).append(index)
    with without_modes():
        for indexes in by_device.values():
            found = torch.stack([sums[index] for index in indexes]).tolist()
            for index, value in zip(indexes, found, strict=True):
                values[index] = value
    return values


def _dense(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Its elements as one dimension; a copy only where memory has gaps."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return tensor.reshape(-1)
    rest = [i for i in range(tensor.dim()) if i not in order]
    for dim in rest:  # of size 1, or all along it is the same memory
        tensor = tensor.narrow(dim, 0, 1)
    tensor = tensor.permute((*rest, *order)).contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))  # a lone element may have any stride


def _words(flat: Tensor) -> Tensor:
    """The same bits as int64; zeros are added where they end within a word."""
    itemsize = flat.element_size()
    if flat.nbytes % 8 == 0 and flat.storage_offset() * itemsize % 8 == 0:
        return flat.view(torch.int64)
    whole = flat.new_zeros(-(-max(flat.nbytes, 1) // 8), dtype=torch.int64)
    whole.view(torch.uint8)[: flat.nbytes].copy_(flat.view(torch.uint8))
    return whole


# ---- Where in the user's code an operator is called, and what they call a tensor ----


_TORCH: Final = str(Path(torch.__file__).parent)
_OURS: Final = str(Path(__file__).parent)


@frozen
class Line:
    """Of source code, and the module whose forward led there."""

    file: str
    number: int
    function: str
    module: str | None

    def __str__(self) -> str:
        where = f"{self.file}:{self.number} in {self.function}"
        return where if self.module is None else f"in a {self.module}, {where}"


def line_of_now() -> Line | None:
    """The innermost line being run that is neither torch's nor ours; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    module = None
    while frame is not None:
        code = frame.f_code
        if module is None and code.co_name == "_call_impl":
            module = type(frame.f_locals.get("self")).__name__
        if not code.co_filename.startswith((_TORCH, _OURS, "<frozen")):
            return Line(Path(code.co_filename).name, frame.f_lineno, code.co_qualname, module)
        frame = frame.f_back
    return None


def name_in_module(function: Callable[..., Any], tensor: Tensor) -> str | None:
    """Such as "weight 'fc.weight'", if it lies in the memory of one of the module's tensors."""
    module, key = module_of(function), storage_of(tensor)
    if module is None or key is None:
        return None
    for kind, named in (
        ("weight", module.named_parameters()),
        ("buffer", module.named_buffers()),
    ):
        for name, one in named:
            other = storage_of(one)
            if other is not None and other.cdata == key.cdata:
                return f"{kind} {name!r}"
    return None


# ---- The operators of one run of a function, one after the other, with fingerprints of each ----


_COMPUTE_NOTHING: Final = {"aten::detach", "aten::lift_fresh", "aten::alias"}
_LEAVE_BLANK: Final = ("aten::empty", "aten::new_empty", "aten::resize_", "aten::_empty")


@frozen
class Step:
    """One operator, as it was called."""

    name: str
    plain: str  # its arguments, without the values of tensors
    seeds: tuple[Seen | None, str | None]  # the generator it draws from, and in words which it is
    outside: dict[int, Seen]  # tensors that no earlier operator of the run made, by position
    results: tuple[Seen | str, ...]  # a string where it gives no tensor


@frozen(eq=False)
class Touched:
    """The tensors of a step while it runs; not kept."""

    inputs: list[Tensor]
    results: list[Tensor]
    is_view: bool  # it writes to no input


@define(eq=False)
class Run:
    """What one run of a function did so far. Keeps sums and keys; no tensor of the function."""

    _checksums: Checksums
    values: list[int] = field(factory=list, init=False)  # of sums, by number; see settle()
    _sums: list[Tensor] = field(factory=list, init=False)
    made: dict[int, StorageWeakRef] = field(factory=dict, init=False)
    _opaque: dict[int, StorageWeakRef] = field(factory=dict, init=False)

    def see(self, tensor: Tensor, like: Seen | None = None) -> Seen:
        """A fingerprint, to compare with the one it is to be like."""
        order = order_of(tensor)
        if like is not None and like.shape == tensor.shape:
            order = like.order
        key = storage_of(tensor)
        is_blank = key is not None and key.cdata in self._opaque
        total = None if is_blank else self._checksums.of(tensor, order)
        number = None
        if total is not None:
            number = len(self.values) + len(self._sums)
            self._sums.append(total)
        return Seen(tensor.shape, tensor.dtype, tensor.device, order, number)

    def settle(self) -> None:
        """Let `values` hold every sum so far. Waits for the devices."""
        self.values += read(self._sums)
        self._sums.clear()

    def is_made(self, tensor: Tensor) -> bool:
        """Whether an operator of this run has made it."""
        key = storage_of(tensor)
        return key is not None and self.has_made(key)

    def has_made(self, key: StorageWeakRef) -> bool:
        """Likewise, of memory."""
        return key.cdata in self.made

    def step(self, func: Any, args: Any, kwargs: Any, like: Step | None) -> tuple[Any, Step, Any]:
        """Call an operator. Returns its result, what was seen, and what it touched."""
        name = name_of(func)
        inputs = list(_tensors_in((args, tuple(kwargs.values()))))
        drawn, source = self._seeds(func, inputs, (args, tuple(kwargs.values())))
        outside = {
            i: self.see(tensor, None if like is None else like.outside.get(i))
            for i, tensor in enumerate(inputs)
            if not self.is_made(tensor)
        }
        result = func(*args, **kwargs)
        written = list(_written(func, args, kwargs))
        results = list(_tensors_in((result, tuple(written))))
        read = {key.cdata for key in map(storage_of, inputs) if key is not None}
        for tensor in results:
            key = storage_of(tensor)
            if key is not None and key.cdata not in read:
                self.made[key.cdata] = key
                if _is_opaque(name, tensor):
                    self._opaque[key.cdata] = key
        seen: list[Seen | str] = []
        for i, tensor in enumerate(results):
            old = like.results[i] if like is not None and i < len(like.results) else None
            if name.startswith(_LEAVE_BLANK):
                seen.append(Seen(tensor.shape, tensor.dtype, tensor.device, (), None))
            else:
                seen.append(self.see(tensor, old if isinstance(old, Seen) else None))
        if not results:
            seen.append(repr(result))
        plain = ", ".join(
            [*map(_in_words, args), *(f"{k}={_in_words(v)}" for k, v in kwargs.items())]
        )
        step = Step(name, plain, (drawn, source), outside, tuple(seen))
        return result, step, Touched(inputs, results, not written)

    def _seeds(self, func: Any, inputs: list[Tensor], args: Any) -> tuple[Seen | None, str | None]:
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return None, None
        own = next(_of_kind(args, torch.Generator), None)
        if own is not None:
            return self.see(own.get_state()), None
        found = [t.device for t in inputs] or list(_of_kind(args, torch.device))
        device = found[0] if found else torch.device("cpu")
        if device.type == "meta":
            return None, None
        return self.see(get_state(device)), f"the default generator of {device}"


@final
class Watch(TorchDispatchMode):
    """Hands every operator, below autograd, to `take(func, args, kwargs)`.

    Not those of a recomputation inside: a function may take a gradient, in forward, of what is to
    be computed again for it. The other run need not do so.
    """

    supports_higher_order_operators = True

    def __init__(self, take: Any, turn: Turn) -> None:
        super().__init__()
        self._take, self._turn, self._depth = take, turn, turn.depth

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled stays compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each operator."""
        kwargs = kwargs or {}
        if self._turn.depth != self._depth or name_of(func) in _COMPUTE_NOTHING:
            return func(*args, **kwargs)
        return self._take(func, args, kwargs)


def name_of(func: Any) -> str:
    """Of an operator, without its overload; or of one that takes functions, which has no schema."""
    return func._schema.name if isinstance(func, OpOverload) else str(func)


def _schema_arguments(func: Any) -> Sequence[Any]:
    return func._schema.arguments if isinstance(func, OpOverload) else ()


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for i, argument in enumerate(_schema_arguments(func)):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from _of_kind(value, Tensor)


def _is_opaque(name: str, tensor: Tensor) -> bool:
    """Kernels leave parts of these blank: an rng's seed when there is no dropout; workspaces."""
    if "attention" in name:
        return not tensor.is_floating_point() and tensor.element_size() == 8 and tensor.numel() <= 2
    return "rnn" in name and tensor.dtype is torch.uint8


def _tensors_in(value: Any) -> Iterator[Tensor]:
    seen: set[int] = set()
    for tensor in _of_kind(value, Tensor):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def _of_kind(value: Any, kind: type) -> Iterator[Any]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _of_kind(item, kind)


def _in_words(value: Any) -> str:
    """Numbers and flags as they are; of tensors, that they are there."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, torch.Generator):
        return "generator"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_in_words, value))})"
    return repr(value)


# ---- A later run of a function beside its first: which operator differs, and why ----


@frozen(eq=False)
class _Root:
    """An operator that differs for a reason of its own."""

    text: str


@define(eq=False)
class SecondRun:
    """A later run, step by step beside the first."""

    function: Callable[..., Any]
    steps: list[Step]
    values: list[int]
    run: Run
    given: Sequence[StorageWeakRef | None]  # where the function's inputs lie
    position: int = field(default=0, init=False)
    _roots: dict[int, tuple[StorageWeakRef, _Root]] = field(factory=dict, init=False)
    _steering: _Root | None = field(default=None, init=False)  # of a number or a shape that differs
    _way: _Root | None = field(default=None, init=False)  # why other operators are called from here

    def take(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operator. A mode's callback."""
        like = None if self._way is not None else self._next(name_of(func))
        result, step, touched = self.run.step(func, args, kwargs, like)
        if self._way is not None:
            self._blame(self._way, touched)
        elif like is None:
            self._way = self._steering or self._root(step, self._other_way(step))
            self._blame(self._way, touched)
        elif self._differs(like, step):
            root = self._inherited(touched)
            if root is None and like.plain != step.plain:
                root = self._steering
            root = root or self._root(step, self._cause(like, step, touched))
            if any(self._steers(a, b) for a, b in zip(like.results, step.results, strict=False)):
                self._steering = self._steering or root
            self._blame(root, touched)
        self.position += 1
        return result

    def _next(self, name: str) -> Step | None:
        if self.position == len(self.steps) or self.steps[self.position].name != name:
            return None
        return self.steps[self.position]

    def root_of(self, tensor: Tensor) -> _Root | None:
        """Why it differs."""
        key = storage_of(tensor)
        found = None if key is None else self._roots.get(key.cdata)
        return self.root_of_the_way() if found is None else found[1]

    def root_of_the_way(self) -> _Root | None:
        """Why other operators were called."""
        return self._way or self._steering

    def describe_end(self) -> str:
        """Where the first run went on."""
        if self.position >= len(self.steps):
            return "Its operators are the same: grad mode, or requires_grad of a weight, is another"
        name = self.steps[self.position].name
        return (
            f"Forward went on with operator {self.position} ({_short(name)}), where the second run "
            "ended: a branch on a counter, a cache or a changed buffer?"
        )

    def describe_outside(self, position: int, tensor: Tensor) -> str:
        """An operator of forward took this, which nothing in the function has made."""
        name = self.steps[position].name if self.steps else "none"
        return _sentence(position, name, line_of_now(), self._outside(tensor))

    def _differs(self, old: Step, new: Step) -> bool:
        if len(old.results) != len(new.results):
            return True
        pairs = zip(old.results, new.results, strict=True)
        return not all(self._is_equal(a, b) for a, b in pairs)

    def _is_equal(self, old: Seen | str, new: Seen | str) -> bool:
        if isinstance(old, str) or isinstance(new, str):
            return old == new
        if not old.looks_like(new):
            return False
        if old.number is None or new.number is None:
            return True
        self.run.settle()
        return self.values[old.number] == self.run.values[new.number]

    @staticmethod
    def _steers(old: Seen | str, new: Seen | str) -> bool:
        """Whether Python can see the difference without an operator."""
        if isinstance(old, str) or isinstance(new, str):
            return old != new
        return old.shape != new.shape

    def _inherited(self, touched: Touched) -> _Root | None:
        keys = [key for key in map(storage_of, touched.inputs) if key is not None]
        return next((self._roots[key.cdata][1] for key in keys if key.cdata in self._roots), None)

    def _blame(self, root: _Root, touched: Touched) -> None:
        for key in map(storage_of, touched.results):
            if key is not None and (self.run.has_made(key) or not touched.is_view):
                self._roots.setdefault(key.cdata, (key, root))

    def _cause(self, old: Step, new: Step, touched: Touched) -> str:
        if old.plain != new.plain:
            return (
                f"its arguments were ({_cut(old.plain)}) in forward and are ({_cut(new.plain)}) "
                "now: a number made in Python (a counter? numpy's or Python's random?)"
            )
        (old_rng, _), (new_rng, source) = old.seeds, new.seeds
        if old_rng and new_rng and not self._is_equal(old_rng, new_rng):
            if source is None:
                return (
                    "it draws from a generator that it was given (generator=), and nobody puts "
                    "that back: draw from the default one, or inside a fork() of the tracker"
                )
            return (
                f"{source} stands elsewhere than in forward: something in the function seeds it or "
                "sets its state, or another thread draws from it"
            )
        for i, seen in new.outside.items():
            before = old.outside.get(i)
            if before is not None and not self._is_equal(before, seen):
                return self._outside(touched.inputs[i])
        return (
            "it got the same and gave something else: its kernel is not deterministic; "
            "torch.use_deterministic_algorithms(True) finds these"
        )

    def _outside(self, tensor: Tensor) -> str:
        key = storage_of(tensor)
        for i, other in enumerate(self.given):
            if key is not None and other is not None and other.cdata == key.cdata:
                return (
                    f"input {i} of the function has other values than in forward: it was written "
                    "in place after the call, or its saver does not give back what it was given"
                )
        name = name_in_module(self.function, tensor)
        what = f"a tensor {tuple(tensor.shape)}" if name is None else name
        return (
            f"{what}, which it reads and which no operator of the function made, has other values "
            "than in forward: written in place meanwhile (a weight by an optimizer's step, a "
            "buffer by forward itself), from a cache, or made of numpy's or Python's random numbers"
        )

    def _other_way(self, new: Step) -> str:
        before = "ended before it"
        if self.position < len(self.steps):
            before = f"called {_short(self.steps[self.position].name)} there"
        return f"forward {before}: a branch on a counter, a cache or a changed buffer?"

    def _root(self, step: Step, cause: str) -> _Root:
        return _Root(_sentence(self.position, step.name, line_of_now(), cause))


def _sentence(position: int, name: str, line: Line | None, cause: str) -> str:
    where = "" if line is None else f", {line}"
    return f"The first operator that differs is number {position} ({_short(name)}{where}): {cause}"


def _short(name: str) -> str:
    return name.replace("::", ".")


def _cut(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."


# ---- Verified recomputation ----


# NOTE(verify): gradients depend on the second run through saved tensors and nothing else, so an
# error is raised if and only if one of these has other bits. Operators are noted to say why: the
# first one that differs is one whose result does, although nothing that went into it was the result
# of another that differs. So a counter of batches, or a table that only the first run has to make,
# disturbs nobody.


@final
@frozen
class Verification:
    """How often recomputation is verified.

    A verified call reads every tensor that its operators take and make, in both runs, and keeps 8
    bytes for each of those; no host waits for a device before backward. In backward it waits after
    each operator.

    Args:
        every: Of how many calls of a layer one is verified. Layers take turns, so that calls of a
            different layer each are verified one after the other.

    Raises:
        CheckpointError: It is not a whole number above 0.
    """

    every: int = 1

    def __attrs_post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise CheckpointError(
                f"Verification(every=): expected a whole number of calls, 1 or more, got "
                f"{self.every!r}; to verify none, Checkpointer(verifies=None)"
            )

    def picks(self, layer_index: int, num_calls: int) -> bool:
        """Whether a layer is to be verified that was called so often before."""
        return (layer_index + num_calls) % self.every == 0


@frozen(eq=False)
class _Noted:
    """A tensor that autograd saved in forward."""

    seen: Seen
    position: int  # how many steps came before


@define(eq=False)
class Witness:
    """Sees both runs of one call. Keeps sums, shapes and names."""

    _layer: str
    _function: Callable[..., Any]
    _checksums: Checksums
    _turn: Turn
    _steps: list[Step] = field(factory=list, init=False)
    _noted: list[_Noted] = field(factory=list, init=False)
    _first: Run = field(init=False)
    _again: SecondRun | None = field(default=None, init=False)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the first run."""
        self._first = run = Run(self._checksums)

        def take(func: Any, args: Any, kwargs: Any) -> Any:
            result, step, _ = run.step(func, args, kwargs, None)
            self._steps.append(step)
            return result

        with Watch(take, self._turn):
            yield
        run.made.clear()

    def note(self, tensor: Tensor) -> None:
        """Autograd saves it, in the first run."""
        self._noted.append(_Noted(self._first.see(tensor), len(self._steps)))

    @contextmanager
    def recompute(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Around each later run, of the function with these inputs."""
        self._first.settle()
        given = [storage_of(tensor) for tensor in inputs]
        self._again = again = SecondRun(
            self._function, self._steps, self._first.values, Run(self._checksums), given
        )
        with Watch(again.take, self._turn):
            yield

    def compare(self, index: int, tensor: Tensor, is_same_memory: bool) -> None:
        """Autograd saves it, in a later run.

        Args:
            index: How many it has saved before.
            tensor: It.
            is_same_memory: Whether it lies where it did in forward. What the function did not make
                is then what backward would have got without a checkpoint: its value of now.

        Raises:
            NondeterminismError: Its bits are others than in forward.
        """
        assert self._again is not None, "compare() outside a run"
        run = self._again.run
        if is_same_memory and not run.is_made(tensor):
            return
        old = self._noted[index].seen
        new = run.see(tensor, old)
        if old.number is None or new.number is None:
            return
        run.settle()
        if run.values[new.number] != self._first.values[old.number]:
            raise NondeterminismError(
                f"{self._layer}: saved tensor {index} of {len(self._noted)}, {new}, has other "
                f"values than in forward. {self.why(index, tensor)}"
            )

    def why(self, index: int | None = None, tensor: Tensor | None = None) -> str:
        """Which operator differs, where it was called and what that usually means.

        Args:
            index: Of the saved tensor that shows it; None if there are too many or too few.
            tensor: That tensor, in the second run.
        """
        assert self._again is not None, "why() before a second run"
        again = self._again
        root = again.root_of(tensor) if tensor is not None else again.root_of_the_way()
        if root is not None:
            return root.text
        if index is None or tensor is None:
            return again.describe_end()
        position = min(self._noted[index].position, len(self._steps) - 1)
        return again.describe_outside(position, tensor)
