"""Around each call of a unit's module: whole before it, resharded after it, however it ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from attrs import define
from torch import Tensor, nn

from ._bound import Bound
from ._errors import StateError
from ._outputs import converted, converted_output, tensors_in
from ._outside import keep_views
from ._parked import StateKind
from ._placement import Placement
from ._schedule import Call
from ._torch_compat import (
    call_of,
    has_dispatch_modes,
    is_in_functional_transform,
    next_sequence_number,
    outside_functional_transforms,
    set_call_of,
    skip_frame,
    unseen_by_dispatch_modes,
    untraced,
)
from ._unit import Unit

if TYPE_CHECKING:
    from ._sharded_model import ShardedModel

Result = TypeVar("Result")

# NOTE(around): not a pair of forward hooks. Torch runs `always_call` hooks for an Exception and not
# for a KeyboardInterrupt, and under `Module.compile()` not at all, while the graph breaks at each.
# Around the call there is a `finally`, compiled code stays in one piece, and what the user's own
# hooks read is whole and what they return is what we see (docs/decisions/0008).


@define(eq=False)
class AroundCall(Bound):
    """Stands where `module(...)` looks for what `Module.compile()` made; calls what was there."""

    sharded: ShardedModel
    unit: Unit | None  # None: the model itself, all of whose parameters are in other units
    is_model: bool
    inside: Callable[..., Any]  # the module's own hooks and forward, compiled or not

    @skip_frame
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if self.is_model and self.sharded.input_dtype is not None:
            args, kwargs = converted((args, kwargs), self.sharded.input_dtype)
        first_node = self._begin()
        call, output, raised = None, None, True
        try:
            output = self.inside(*args, **kwargs)
            raised = False
        finally:
            call = self._end(raised)
        self._watch(output, call, first_node)
        output_dtype = self.sharded.output_dtype
        if self.is_model and output_dtype is not None:
            return converted_output(output, output_dtype)
        return output

    @untraced
    def _begin(self) -> int:
        if is_in_functional_transform():
            self._check_transform()
        _undisturbed(self._prepare)
        return next_sequence_number()

    def _prepare(self) -> None:
        if self.is_model:
            self.sharded.begin_forward()
        self.sharded.refuse_parked("a forward", StateKind.PARAMS)  # of a part of the model
        try:
            if self.unit is not None:
                self.sharded.schedule.before_forward(self.unit)
        except BaseException:
            if self.is_model:
                self.sharded.end_forward()
            raise

    @untraced
    def _end(self, raised: bool) -> Call | None:
        return _undisturbed(partial(self._finish, raised))

    def _finish(self, raised: bool) -> Call | None:
        call = None
        if self.unit is not None:
            call = self.sharded.schedule.after_forward(self.unit, raised=raised)
        if self.is_model:
            self.sharded.end_forward()
        return call

    @untraced
    def _watch(self, output: Any, call: Call | None, first_node: int) -> None:
        """Ask the outputs to say when backward comes back."""
        if is_in_functional_transform():
            return
        if self.unit is not None:
            keep_views(self.unit, tensors_in(output))
        if not torch.is_grad_enabled():
            return
        hook = None if call is None else _BeforeBackward(self.sharded, call)
        for tensor in tensors_in(output):
            if tensor.grad_fn is None:
                continue  # on a leaf the hook would stay
            if hook is not None:
                _hook(tensor, hook, first_node)
            if self.is_model:
                # Inside reentrant recomputation each segment is a backward of its own; the
                # outermost is the one that ends ours.
                _hook(tensor, _OpenBackward(self.sharded), first_node)

    def _check_transform(self) -> None:
        if self.sharded.placements.params is Placement.SHARDED and torch.is_grad_enabled():
            name = self.unit.name if self.unit is not None else "(model)"
            raise StateError(
                f"unit {name!r} was called inside a transform of torch.func, whose backward fires "
                "no hook, so it would read parameters at rest. Take vmap, jvp and jacfwd under "
                "torch.no_grad(), and transforms that run backward at stage 2 or lower"
            )


def _undisturbed(action: Callable[[], Result]) -> Result:
    """Do what is none of the call's business, in memory that outlives it: as if outside of it."""
    is_inference = torch.is_inference_mode_enabled()
    if not is_inference and not is_in_functional_transform() and not has_dispatch_modes():
        return action()
    with ExitStack() as stack:
        # Such as one that keeps operators' outputs until they are called again: ours may not be.
        stack.enter_context(unseen_by_dispatch_modes())
        stack.enter_context(outside_functional_transforms())
        if is_inference:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        return action()


def _hook(tensor: Tensor, hook: Callable[[Tensor], None], first_node: int) -> None:
    tensor.register_hook(hook)
    # A view that is then written to gets another node, and its old one, with the hook, is never
    # reached; its base is. What is a view of something older ends no computation of this call.
    base = tensor._base if tensor._is_view() else None
    if base is None or base.grad_fn is None:
        return
    if base.grad_fn._sequence_nr() >= first_node:
        base.register_hook(hook)


@define(eq=False)
class _BeforeBackward:
    sharded: ShardedModel
    call: Call

    @untraced
    def __call__(self, grad: Tensor) -> None:
        self.sharded.before_backward(self.call)

    def __deepcopy__(self, memo: dict) -> _BeforeBackward:
        return self


@define(eq=False)
class _OpenBackward:
    sharded: ShardedModel

    @untraced
    def __call__(self, grad: Tensor) -> None:
        self.sharded.open_backward()

    def __deepcopy__(self, memo: dict) -> _OpenBackward:
        return self


@define(eq=False)
class IsCovered(Bound):
    """A forward pre-hook: the call came through `AroundCall`.

    Being there it also keeps torch.compile of something larger from taking a short cut from the
    call to `forward`.
    """

    around: AroundCall

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Raise StateError where it did not, and parameters may be at rest."""
        if torch.compiler.is_compiling():
            return  # nothing to trace: inside the call, which checked
        unit = self.around.unit
        if unit is not None and not unit.depth:
            raise StateError(
                f"unit {unit.name!r}: a {type(module).__name__} that shares its hooks was called "
                "in its place (a shallow copy?), and its parameters are not whole; call the very "
                "module that was sharded"
            )


def wrap_call(
    module: nn.Module, sharded: ShardedModel, unit: Unit | None, *, is_model: bool
) -> Callable[[], None]:
    """Put an `AroundCall` around the module's calls; returns what takes it away again."""
    before = call_of(module)
    around = AroundCall(sharded, unit, is_model, before or module._call_impl)
    handle = module.register_forward_pre_hook(IsCovered(around), prepend=True)

    def compile_inside(*args: Any, **kwargs: Any) -> None:
        around.inside = torch.compile(module._call_impl, *args, **kwargs)

    set_call_of(module, around)
    has_torchs = type(module).compile is nn.Module.compile and "compile" not in vars(module)
    if has_torchs:  # after shard(), what is compiled must go inside ours
        module.__dict__["compile"] = compile_inside

    def remove() -> None:
        handle.remove()
        set_call_of(module, None if around.inside == module._call_impl else around.inside)
        if has_torchs:
            del module.__dict__["compile"]

    return remove
