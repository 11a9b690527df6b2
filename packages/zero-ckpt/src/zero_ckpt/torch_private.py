"""The only place that names private functions and attributes of torch, or ones newer than 2.11.

Each exists in every version that `docs/versions.md` lists, unless a comment says which have it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

Func = TypeVar("Func", bound=Callable[..., Any])

# The classes of `torch.ops.aten.add.Tensor` and of `torch.ops.aten.add`.
OpOverload: TypeAlias = torch._ops.OpOverload
OpOverloadPacket: TypeAlias = torch._ops.OpOverloadPacket

# Getters in C, which save the call of a Python function. The first two return dicts of a module's
# own buffers and children by name, without those of its children; the others an operator's schema
# (name, arguments and returns) and the name of its overload.
own_buffers: Final = attrgetter("_buffers")
own_modules: Final = attrgetter("_modules")
schema_of: Final = attrgetter("_schema")
overload_name: Final = attrgetter("_overloadname")


# Returns the sequence number of the autograd node that this thread makes next.
next_sequence_number: Final = torch._C._autograd._get_sequence_nr


def accelerator() -> torch.device | None:
    """Return the type of accelerator this process can use, without an index; None: only a CPU.

    A torch that is built for CUDA names that accelerator on a machine without a GPU too, unless it
    is asked to look. `torch.accelerator.current_device_index()` has the index, and initializes the
    device.
    """
    return torch.accelerator.current_accelerator(check_available=True)


def current_backward() -> int:
    """Return the number of the backward that is running on this thread; -1 if none is."""
    return torch._C._current_graph_task_id()


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor's memory was written in place; -1 for an inference tensor."""
    return -1 if tensor.is_inference() else tensor._version


def set_version(tensor: Tensor, version: int) -> None:
    """Set the version counter of a tensor; -1 leaves it as it is."""
    if version != -1:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def hooks_save_tensors() -> bool:
    """Return whether saved-tensor hooks are active, of an enclosing checkpoint or any other."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def is_transformed() -> bool:
    """Return whether this thread is inside a transform of torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def uncompiled(function: Func) -> Func:
    """Exclude a function, and all that it calls, from torch.compile: it runs eagerly.

    Unlike `torch.compiler.disable` it does not import the compiler, which takes a second.
    """
    return torch._disable_dynamo(function)  # type: ignore[return-value]


def without_modes() -> AbstractContextManager[Any]:
    """Return a context in which no dispatch mode sees operators, neither ours nor others'."""
    return _disable_current_modes()


def inner_tensors(tensor: Tensor) -> list[Tensor] | None:
    """Return the tensors inside a wrapper (DTensor, a jagged tensor); None if it is no wrapper."""
    if not is_traceable_wrapper_subclass(tensor):
        return None
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is strided, and not meta, quantized or fake."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
        # By name, as the module of FakeTensor takes long to import.
        and "FakeTensor" not in type(tensor).__name__
    )


def storage_of(tensor: Tensor) -> StorageWeakRef | None:
    """Return a tensor's storage as a weak key; None for wrappers and layouts other than strided.

    Views have the same key, and no other storage has it while the key lives.
    """
    if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
        return None
    return StorageWeakRef(tensor.untyped_storage())


def untraced(function: Func) -> Func:
    """Exclude a function from torch.compile as `uncompiled` does, by a mark on its code.

    The mark adds no cost to a call. It is for functions that no traced function calls.
    """
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP  # type: ignore[attr-defined]
    strategy = dynamo._FrameExecStrategy(skip, skip)  # type: ignore[attr-defined]
    dynamo.set_code_exec_strategy(function.__code__, strategy)  # type: ignore[attr-defined]
    return function


class OperatorMode(TorchDispatchMode):
    """Sees every operator below autograd; mark its `__torch_dispatch__` with `untraced`."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled code runs compiled inside the mode, which does not see it."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # If True, torch wraps `__torch_dispatch__` in a function that imports the compiler.
        return False


def modules_being_called() -> Iterator[nn.Module]:
    """Yield the modules whose calls this thread is inside of, innermost first. Needs no hook."""
    frame = sys._getframe()
    while frame := frame.f_back:
        if frame.f_code is nn.Module._call_impl.__code__:
            yield frame.f_locals["self"]


@functools.cache
def can_be_kept(operator: Any) -> bool:
    """Return whether an operator only makes new tensors, by its schema and name.

    Casts do not count: autocast caches those of weights, so that the second run may make more of
    them than the first.
    """
    if not isinstance(operator, OpOverload) or operator._schema.name == "aten::_to_copy":
        return False
    returns = operator._schema.returns
    is_new = all(value.alias_info is None for value in returns)
    writes = operator._schema.is_mutable or writes_unseen(operator)
    return bool(returns) and is_new and not writes


@functools.cache
def writes_unseen(operator: Any) -> bool:
    """Return whether an operator writes to its arguments without a sign in schema or version.

    Operators of torch.distributed do; only the "_" at the end of their names shows it.
    """
    if not isinstance(operator, OpOverload) or operator._schema.is_mutable:
        return False
    return operator._schema.name.endswith("_") and not operator._schema.name.endswith("__")


@functools.cache
def _written_places(operator: Any) -> tuple[tuple[int, str], ...]:
    if not isinstance(operator, OpOverload):
        return ()
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def written_by(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that a call writes to; all if the operator's schema does not say."""
    if writes_unseen(operator):
        return [args, kwargs]
    places = _written_places(operator)
    return [args[place] if place < len(args) else kwargs.get(name) for place, name in places]


_UNSAFE_VIEWS: Final = {"aten::_unsafe_view", "aten::unsafe_split", "aten::unsafe_split_with_sizes"}


@functools.cache
def views_unseen(operator: Any) -> bool:
    """Return whether an operator returns views that its schema and their versions do not show.

    A batched matrix product ends with such an operator, and a GRU splits its gates by one.
    """
    return isinstance(operator, OpOverload) and operator._schema.name in _UNSAFE_VIEWS


@functools.cache
def is_made_of_others(operator: OpOverload) -> bool:
    """Return whether an operator calls others, and so never runs itself below autograd."""
    key = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)


@functools.cache
def may_draw(operator: OpOverload) -> bool:
    """Return whether an operator may draw random numbers.

    Those of aten have a tag for it; all others are assumed to draw.
    """
    return operator.namespace != "aten" or torch.Tag.nondeterministic_seeded in operator.tags


def alias_of(tensor: Tensor) -> Tensor:
    """Return an alias of a tensor, made below autograd, that shares its version counter."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def keeps_graph() -> bool:
    """Return whether the backward that runs on this thread retains its graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()
