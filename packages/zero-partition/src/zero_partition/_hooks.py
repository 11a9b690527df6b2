"""Where we hang on to the user's module and optimizer; the only file that registers hooks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ReferenceType, ref

import torch
from attrs import define
from torch import Tensor, nn

from ._gradients import BufferGradients
from ._guards import refuse_deepcopy, refuse_pickle
from ._optimizer import install_optimizer_state_hooks
from ._outside import keep_views
from ._schedule import Call
from ._unit import Unit

if TYPE_CHECKING:
    from ._sharded_model import ShardedModel

# NOTE(hook cost): two forward hooks per unit and a tensor hook per unit output. Not
# `register_full_backward_hook`, which wraps inputs and outputs in autograd nodes of their own and
# doubled the time of 500 tiny layers (docs/decisions/0003-hooks-per-unit.md).


class Bound:
    """A hook belongs to one model on one rank: copying or pickling it would share our buffers."""

    def __deepcopy__(self, memo: dict) -> NoReturn:
        refuse_deepcopy()

    def __reduce__(self) -> NoReturn:
        refuse_pickle()


@define(eq=False)
class BeginForward(Bound):
    """Before the model's own forward; also how the sharded model is found again."""

    sharded: ShardedModel

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Start a forward."""
        self.sharded.forwards += 1
        self.sharded.begin_forward()


@define(eq=False)
class EndForward(Bound):
    """After the model's own forward, also when it raised; the outermost backward is to end ours.

    Inside reentrant recomputation each segment is a backward of its own.
    """

    sharded: ShardedModel

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Ask the outputs to say when backward begins."""
        self.sharded.end_forward()
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:  # on a leaf the hook would stay
                    tensor.register_hook(lambda _: self.sharded.open_backward())


@define(eq=False)
class BeforeForward(Bound):
    """Before the forward of a unit's module."""

    sharded: ShardedModel
    unit: Unit

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Make the unit whole."""
        self.sharded.schedule.before_forward(self.unit)


@define(eq=False)
class AfterForward(Bound):
    """After the forward of a unit's module, also when it raised."""

    sharded: ShardedModel
    unit: Unit

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Reshard; ask the outputs to say when backward comes back."""
        if not self.unit.depth:
            return  # its forward hook raised before the forward began
        # torch gives None where forward raised; a forward that returns None has no backward.
        call = self.sharded.schedule.after_forward(self.unit, raised=output is None)
        keep_views(self.unit, tensors_in(output))
        if not torch.is_grad_enabled():
            return
        hook = _BeforeBackward(self.sharded, call)
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(hook)


@define(eq=False)
class _BeforeBackward:
    sharded: ShardedModel
    call: Call

    def __call__(self, grad: Tensor) -> None:
        self.sharded.before_backward(self.call)

    def __deepcopy__(self, memo: dict) -> _BeforeBackward:
        return self


@define(eq=False)
class Arrival(Bound):
    """After autograd has put a parameter's gradient into `param.grad`.

    Holds nothing alive: Python's garbage collector does not see through this kind of hook, and a
    model that is deleted would never be freed.
    """

    sharded: ReferenceType[ShardedModel]
    gradients: ReferenceType[BufferGradients]
    position: int

    def __call__(self, param: Tensor) -> None:
        """Take it."""
        sharded, gradients = self.sharded(), self.gradients()
        if sharded is not None and gradients is not None:
            sharded.open_backward()
            sharded.reducer.collect(gradients, self.position)


@define(eq=False)
class BeforeStep(Bound):
    """Before the optimizer's step; also how the sharded model is found from its optimizer."""

    sharded: ShardedModel

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """See that all gradients are there."""
        has_closure = len(args) > 1 or kwargs.get("closure") is not None  # args[0] is itself
        self.sharded.before_step(has_closure=has_closure)


@define(eq=False)
class AfterStep(Bound):
    """After the optimizer's step."""

    sharded: ShardedModel

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Publish the new values."""
        self.sharded.after_step()


def install_module_hooks(model: nn.Module, sharded: ShardedModel) -> None:
    """Hook the model, the modules of its units, and its trainable parameters."""
    modules = dict(model.named_modules())
    for unit in sharded.units:
        module = modules[unit.plan.name]
        # First: a hook of the user's own (spectral_norm, say) may read the parameters.
        module.register_forward_pre_hook(BeforeForward(sharded, unit), prepend=True)
        module.register_forward_hook(AfterForward(sharded, unit), always_call=True)
    model.register_forward_pre_hook(BeginForward(sharded), prepend=True)
    model.register_forward_hook(EndForward(sharded), always_call=True)
    for gradients in sharded.reducer.gradients:
        for position, param in enumerate(gradients.buffer.params):
            arrival = Arrival(ref(sharded), ref(gradients), position)
            param.register_post_accumulate_grad_hook(arrival)


def install_optimizer_hooks(optimizer: torch.optim.Optimizer, sharded: ShardedModel) -> None:
    """Hook the optimizer's step, and let its zero_grad reach the gradients we hold."""
    optimizer.register_step_pre_hook(BeforeStep(sharded))
    optimizer.register_step_post_hook(AfterStep(sharded))
    if sharded.reducer.shards_state:
        install_optimizer_state_hooks(optimizer, sharded.group)
    plain_zero_grad = optimizer.zero_grad

    @functools.wraps(plain_zero_grad)
    def zero_grad(set_to_none: bool = True) -> None:
        sharded.drop_gradients(set_to_none=set_to_none)
        plain_zero_grad(set_to_none=set_to_none)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


def find_sharded(model: nn.Module) -> ShardedModel | None:
    """What `partition` made of this model, None if it was not partitioned."""
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, BeginForward):
            return hook.sharded
    return None


def find_sharded_by_optimizer(optimizer: torch.optim.Optimizer) -> ShardedModel | None:
    """What `partition` made of the model whose parameters this optimizer updates, if it did."""
    for hook in optimizer._optimizer_step_pre_hooks.values():
        if isinstance(hook, BeforeStep):
            return hook.sharded
    return None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a module's output: nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in_all(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from _tensors_in_all(value)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _tensors_in_all(getattr(value, field.name, None) for field in fields(value))


def _tensors_in_all(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        yield from tensors_in(value)
