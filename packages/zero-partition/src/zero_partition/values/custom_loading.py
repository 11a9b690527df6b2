"""Modules that change what a state dict contains: hooks, overridden methods, extra state.

`state_dict()` of such a module may rename entries or add some. Its `load_state_dict()` may resize
buffers, accept the names of an older version, or compute values from others. Both run here on
values that are not in memory. `describe_state_dict` says under which keys parameters
and buffers are saved. `CustomLoading` calls `load_state_dict()` twice: once to find what goes
where, before anything is written, and once when all values are there.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, final

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from zero_comm.logs import warn_user

from zero_partition.dtensors import is_dtensor
from zero_partition.errors import StateError
from zero_partition.memory.seams import AbstractRangeReader
from zero_partition.run.hooks import find_sharded
from zero_partition.run.sharded_model import ShardedModel
from zero_partition.stand_in import NameOnly, StandIn
from zero_partition.torch_private import (
    after_load_hooks,
    before_load_hooks,
    non_persistent_buffers,
    own_buffers,
    own_parameters,
    plain_access,
    state_dict_hooks,
    state_dict_pre_hooks,
    without_memory,
)

_METHODS: Final = (
    *("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict"),
    *("get_extra_state", "set_extra_state"),
)
_HOOKS: Final = (state_dict_pre_hooks, state_dict_hooks, before_load_hooks, after_load_hooks)
# Last part of the key under which torch saves a module's extra state.
_EXTRA: Final = "_extra_state"
# Key of our hook among those of a module; torch's keys are not negative.
_OURS: Final = -1


@frozen(eq=False)
class StateDictLayout:
    """Keys of a `state_dict()`, as far as they are not the names of parameters and buffers."""

    # Key -> name of the parameter or buffer; empty if all keys are these names.
    keys: Mapping[str, str] = field(factory=dict)
    # Key -> entry that is neither a parameter nor a buffer.
    values: Mapping[str, Any] = field(factory=dict)
    # Module -> version; torch's `_metadata`.
    metadata: Mapping[str, Any] = field(factory=dict)


def customizes_state_dict(model: nn.Module) -> bool:
    """Return whether a module of it has methods or hooks of its own for state dicts. Local."""
    return any(
        not getattr(module, name).__module__.startswith("torch.nn.modules.")
        for module in model.modules()
        for name in _METHODS
    ) or any(
        not _is_ours(hook)
        for module in model.modules()
        for hooks_of in _HOOKS
        for hook in hooks_of(module).values()
    )


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("zero_partition.")


def persistent_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers that a module has itself, by attribute. Local."""
    found = {**own_parameters(module), **own_buffers(module)}
    skipped = non_persistent_buffers(module)
    return {key: value for key, value in found.items() if value is not None and key not in skipped}


def describe_state_dict(sharded: ShardedModel) -> StateDictLayout | None:
    """Return under which keys the model's `state_dict()` has parameters and buffers. Local.

    Returns:
        None where `state_dict()` computes with values, which are not there while it runs.
    """
    model = sharded.model
    if not customizes_state_dict(model):
        return StateDictLayout()
    names: dict[int, str] = {}
    tensors: list[Tensor] = []
    for prefix, module in model.named_modules():
        for key, tensor in persistent_tensors(module).items():
            names.setdefault(id(tensor), f"{prefix}.{key}" if prefix else key)
            tensors.append(tensor)
    names |= {id(param_ref.param): param_ref.name for param_ref in sharded.param_refs}
    # `state_dict()` calls `detach()` of each tensor. An attribute of the object precedes the
    # method. So the state dict contains a stand-in that knows its tensor, even under another key.
    for tensor in tensors:
        vars(tensor)["detach"] = partial(NameOnly.of, tensor, "its values are not needed here")
    try:
        with sharded.exporting({}):
            state = model.state_dict()
    except StateError as error:
        warn_user(
            f"state_dict() of {type(model).__name__} computes with values ({error}), so save() "
            "writes parameters and buffers by their own names, and load() will not call the "
            "load_state_dict() that belongs to it",
        )
        return None
    finally:
        for tensor in tensors:
            vars(tensor).pop("detach", None)
    named = {key: value for key, value in state.items() if isinstance(value, NameOnly)}
    return StateDictLayout(
        keys={key: names[id(value.param)] for key, value in named.items()},
        values={key: value for key, value in state.items() if key not in named},
        metadata=dict(getattr(state, "_metadata", None) or {}),
    )


class Unread(StandIn, Tensor):  # type: ignore[misc]
    """An entry of a state dict whose values are in a file; they are read when they are used."""

    reader: AbstractRangeReader
    source_name: str

    @classmethod
    def of(cls, name: str, reader: AbstractRangeReader) -> Unread:
        """Make one."""
        unread = without_memory(cls, reader.shape, reader.dtype, "cpu")
        unread.source_name, unread.reader = name, reader
        return unread

    def whole(self) -> Tensor:
        """Return all of it, in memory of its own."""
        flat = self.reader.read(0, self.reader.shape.numel())
        return flat.view(self.reader.shape).clone()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute with the values."""
        return func(*_as_read(args), **_as_read(kwargs or {}))

    @classmethod
    def _on_use(cls, func: Any, name: str, attribute: str, args: tuple, kwargs: dict) -> Any:
        return func(*_as_read(args), **_as_read(kwargs))

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return repr(self.whole())


def _as_read(value: Any) -> Any:
    if isinstance(value, Unread):
        with plain_access():
            return value.whole()
    if isinstance(value, dict):
        return {key: _as_read(item) for key, item in value.items()}
    return type(value)(map(_as_read, value)) if type(value) in {list, tuple} else value


@final
@frozen(eq=False)
class MemoryReader(AbstractRangeReader):
    """A tensor that `load_state_dict()` has computed."""

    tensor: Tensor

    @property
    def shape(self) -> torch.Size:
        """Return the tensor's shape."""
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """Return the tensor's dtype."""
        return self.tensor.dtype

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop), as a view."""
        return self.tensor.reshape(-1)[start:stop].cpu()


def _is_equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.dtype == other.dtype and torch.equal(value.cpu(), other.cpu())
    return type(value) is type(other) and bool(value == other)


@define(eq=False)
class CustomLoading:
    """One load through `load_state_dict()` of the model. Local; every rank calls the same."""

    model: nn.Module
    # Name in the source -> reader.
    source: Mapping[str, AbstractRangeReader]
    # Further name of a tied parameter -> its first name.
    ties: Mapping[str, str]
    layout: StateDictLayout
    # Name in the model -> reader; filled by `find`.
    readers: dict[str, AbstractRangeReader] = field(factory=dict, init=False)
    # Name in the source -> name in the model.
    renamed: dict[str, str] = field(factory=dict, init=False)
    # Keys of extra state that modules expect and the source lacks.
    missing: list[str] = field(factory=list, init=False)
    unexpected: list[str] = field(factory=list, init=False)
    problems: list[str] = field(factory=list, init=False)
    # Keys that `_take` removed before torch looked for them.
    _keys: set[str] = field(factory=set, init=False)
    # A tensor of the model, and its new value.
    _found: list[tuple[Tensor, Any]] = field(factory=list, init=False)
    # For each module: its own dict of buffers, and a copy of that.
    _buffers: list[tuple[dict, dict]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        of_all = map(own_buffers, self.model.modules())
        self._buffers = [(own, dict(own)) for own in of_all]

    def find(self) -> None:
        """Find what the model reads for what, without a write to parameters and buffers."""
        try:
            missing, unexpected = self._call(self._take, runs_hooks_after=False)
        except Exception as error:
            kind = type(self.model).__name__
            self.problems.append(f"load_state_dict() of {kind}: {type(error).__name__}: {error}")
            self.readers.update(self.source)
            return
        self.missing = [key for key in missing if key.endswith(_EXTRA)]
        self.unexpected = self._without_own(unexpected)
        names: dict[int, list[str]] = {}
        for prefix, module in self.model.named_modules(remove_duplicate=False):
            for key, tensor in persistent_tensors(module).items():
                names.setdefault(id(tensor), []).append(f"{prefix}.{key}" if prefix else key)
        for tensor, value in self._found:
            unused = iter(names.get(id(tensor), ()))
            name = next(unused, None)
            if not isinstance(value, Tensor):
                self.problems.append(f"{name!r}: expected a tensor, got {type(value).__name__}")
                continue
            reader = value.reader if isinstance(value, Unread) else MemoryReader(value.detach())
            # A tied tensor may have several values, each under a name of its own.
            while name is not None and self.readers.get(name, reader) is not reader:
                name = next(unused, None)
            if name is not None:
                self.readers[name] = reader
            if name is not None and isinstance(value, Unread):
                self.renamed.setdefault(value.source_name, name)

    def _without_own(self, unexpected: list[str]) -> list[str]:
        """Return keys but for entries that the model makes itself, such as scales of quantisation.

        Its `load_state_dict()` does not take them, so they must be what the model has already.
        """
        sharded = find_sharded(self.model)
        if sharded is None or not self.layout.values.keys() & set(unexpected):
            return list(unexpected)
        own = describe_state_dict(sharded)
        made = {} if own is None else own.values
        for key in unexpected:
            if key in made and not _is_equal(made[key], self.layout.values.get(key)):
                self.problems.append(
                    f"{key!r} differs from that of the model, which makes it in state_dict() and "
                    "does not take it in load_state_dict(): build the model from the same weights"
                )
        return [key for key in unexpected if key not in made]

    def finish(self) -> None:
        """Let the model load once more, when its parameters have their values."""
        self._call(self._skip_parameters, runs_hooks_after=True)

    def undo(self) -> None:
        """Give modules the buffers that they had."""
        for own, before in self._buffers:
            own.clear()
            own.update(before)

    def rename(self, of_names: Mapping[str, Any]) -> dict[str, Any]:
        """Return the same by the model's names."""
        return {self.renamed.get(name, name): value for name, value in of_names.items()}

    def _call(self, take: Callable, *, runs_hooks_after: bool) -> tuple[list[str], list[str]]:
        """Call `load_state_dict()`; returns torch's missing and unexpected keys."""
        model, keys = self.model, self.layout.keys
        names = keys or {name: self.ties.get(name, name) for name in (*self.source, *self.ties)}
        state: OrderedDict[str, Any] = OrderedDict()
        for key, name in names.items():
            if name in self.source:
                state[key] = Unread.of(name, self.source[name])
        self.readers |= {n: r for n, r in self.source.items() if n not in {*names.values()}}
        state.update(self.layout.values)
        if self.layout.metadata:
            state._metadata = OrderedDict(self.layout.metadata)  # type: ignore[attr-defined]
        asked = inspect.signature(model.load_state_dict).parameters
        takes_strict = any(p.name == "strict" or p.kind is p.VAR_KEYWORD for p in asked.values())
        options = {"strict": False} if takes_strict else {}
        seen: list[tuple[list[str], list[str]]] = []
        with self._hooked(partial(take, seen), runs_hooks_after=runs_hooks_after):
            model.load_state_dict(state, **options)
        return seen[0] if seen else ([], [])

    @contextmanager
    def _hooked(self, take: Callable, *, runs_hooks_after: bool) -> Iterator[None]:
        """Run `take` after the hooks before a module's loading, and none of the library's own."""
        saved: list[tuple[dict, dict]] = []
        for module in self.model.modules():
            before, after = before_load_hooks(module), after_load_hooks(module)
            saved += [(before, dict(before)), (after, dict(after))]
            for hooks in (before, after):
                for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
                    del hooks[key]
            before[_OURS] = partial(take, module)
            its_own = dict(after) if runs_hooks_after else {}
            after.clear()
            after.update({_OURS: self._forgive, **its_own})
        try:
            yield
        finally:
            for hooks, previous in saved:
                hooks.clear()
                hooks.update(previous)

    def _forgive(self, _: nn.Module, incompatible: Any) -> None:
        """Remove from the missing keys what was taken."""
        missing = incompatible.missing_keys
        missing[:] = [key for key in missing if key not in self._keys]

    def _take(  # noqa: PLR0917 (torch passes them by position)
        self,
        seen: list,
        module: nn.Module,
        state: dict,
        prefix: str,
        metadata: dict,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Take all that the module would load, so that torch writes nothing."""
        seen.append((missing, unexpected))
        for key, tensor in persistent_tensors(module).items():
            if prefix + key in state:
                self._found.append((tensor, state.pop(prefix + key)))
                self._keys.add(prefix + key)
        is_used = type(module).set_extra_state is not nn.Module.set_extra_state
        if is_used and prefix + _EXTRA in state:
            del state[prefix + _EXTRA]
            self._keys.add(prefix + _EXTRA)

    def _skip_parameters(
        self, seen: list, module: nn.Module, state: dict, prefix: str, *_: Any
    ) -> None:
        """Take parameters, which have their values; torch copies buffers and sets extra state.

        DTensors, too, to which torch copies no other tensors.
        """
        for key, tensor in persistent_tensors(module).items():
            if key in own_parameters(module) or is_dtensor(tensor):
                state.pop(prefix + key, None)
