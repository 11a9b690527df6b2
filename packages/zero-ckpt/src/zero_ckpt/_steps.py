"""The operators of one run of a function, one after the other, with fingerprints of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, final

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ._checksums import Checksums, Seen, order_of, read
from ._generators import get_state
from ._torch_compat import storage_of
from ._turn import Turn

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
