"""Where we hang on to the user's module and optimizer; the only file that registers hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
from attrs import define
from torch import Tensor, nn

from ._bound import Bound
from ._calls import IsCovered, wrap_call
from ._gradients import SMALL_BYTES, BufferGradients
from ._in_step import take_back
from ._optimizer_state_dict import install_state_dict_hooks_of
from ._shard_state import ShardState
from ._torch_compat import untraced

if TYPE_CHECKING:
    from ._sharded_model import ShardedModel

# NOTE(hook cost): one call around that of a unit's module and a tensor hook per unit output. Not
# `register_full_backward_hook`, which wraps inputs and outputs in autograd nodes of their own and
# doubled the time of 500 tiny layers (docs/decisions/0003-hooks-per-unit.md).


def arrival_hook(
    sharded_ref: ReferenceType[ShardedModel],
    gradients_ref: ReferenceType[BufferGradients],
    position: int,
    *,
    is_large: bool,
) -> Callable[[Tensor], None]:
    """What to call when autograd has put a parameter's gradient into `param.grad`.

    Holds nothing alive: Python's garbage collector does not see through this kind of hook, and a
    model that is deleted would never be freed. It is the one piece of ours that runs for each
    parameter: it notes the arrival, and what is done with it is done for many; see NOTE(waiting).
    """
    whole = ShardState.UNSHARDED

    @untraced
    def arrive(param: Tensor) -> None:
        sharded, gradients = sharded_ref(), gradients_ref()
        if sharded is None or gradients is None:
            return
        waiting = gradients.waiting
        if not waiting:
            sharded.open_backward(has_arrived=True)
        if gradients.unit.state is not whole:
            sharded.reducer.check_arrival(gradients, position)
        waiting.append(position)
        if is_large or len(waiting) >= gradients.room:
            sharded.reducer.collect(gradients)

    return arrive


@define(eq=False)
class BeforeStep(Bound):
    """Before the optimizer's step; also how the sharded model is found from its optimizer."""

    sharded: ShardedModel

    def __call__(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        """See that all gradients are there, those of a closure too."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is itself
        self.sharded.before_step(has_closure=callable(closure))
        if not callable(closure):
            self.sharded.update()
            return None
        closure = self.sharded.around_closure(closure)
        if len(args) > 1:
            return (args[0], closure, *args[2:]), kwargs
        return args, kwargs | {"closure": closure}


@define(eq=False)
class AfterStep(Bound):
    """After the optimizer's step."""

    sharded: ShardedModel

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Publish the new values."""
        take_back(self.sharded, optimizer)
        self.sharded.after_step()


def install_module_hooks(model: nn.Module, sharded: ShardedModel) -> None:
    """Hook the model, the modules of its units, and its trainable parameters."""
    modules = dict(model.named_modules())
    units = {unit.plan.name: unit for unit in sharded.units if not unit.plan.rests_whole}
    for name in {"": None, **units}:
        remove = wrap_call(modules[name], sharded, units.get(name), is_model=not name)
        sharded.removers.append(remove)
    for gradients in sharded.reducer.gradients:
        for position, param in enumerate(gradients.buffer.params):
            arrive = arrival_hook(
                ref(sharded), ref(gradients), position, is_large=param.nbytes > SMALL_BYTES
            )
            handle = param.register_post_accumulate_grad_hook(arrive)
            sharded.removers.append(handle.remove)


def install_optimizer_hooks(optimizer: torch.optim.Optimizer, sharded: ShardedModel) -> None:
    """Hook the optimizer's step, and let its zero_grad reach the gradients we hold."""
    handles = [
        optimizer.register_step_pre_hook(BeforeStep(sharded)),
        optimizer.register_step_post_hook(AfterStep(sharded)),
    ]
    if sharded.reducer.shards_state:
        install_state_dict_hooks_of(optimizer, sharded)
    plain_zero_grad = optimizer.zero_grad
    is_patched = "zero_grad" in vars(optimizer)

    @functools.wraps(plain_zero_grad)
    def zero_grad(set_to_none: bool = True) -> None:
        take_back(sharded, optimizer)
        sharded.drop_gradients(set_to_none=set_to_none)
        plain_zero_grad(set_to_none=set_to_none)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def restore_zero_grad() -> None:
        if is_patched:
            optimizer.zero_grad = plain_zero_grad  # type: ignore[method-assign]
        else:
            vars(optimizer).pop("zero_grad", None)

    sharded.removers += [handle.remove for handle in handles] + [restore_zero_grad]


def find_sharded(model: nn.Module) -> ShardedModel | None:
    """What `partition` made of this model, None if it was not partitioned."""
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, IsCovered) and hook.around.is_model:
            return hook.around.sharded
    return None


def find_sharded_by_optimizer(optimizer: torch.optim.Optimizer) -> ShardedModel | None:
    """What `partition` made of the model whose parameters this optimizer updates, if it did."""
    for hook in optimizer._optimizer_step_pre_hooks.values():
        if isinstance(hook, BeforeStep):
            return hook.sharded
    return None
