"""The only place that names private functions and attributes of torch, or ones newer than 2.11.

Each exists in every version that `docs/versions.md` lists, unless a comment says which have it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch, _pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode

Func = TypeVar("Func", bound=Callable[..., Any])
T = TypeVar("T", bound=Tensor)

pytree: Final = _pytree  # trees of containers; no version has a public module for them

# What is called for every unit and every gradient has no Python function around it.

# Getters in C, which cost a call of a Python function less than one of our own.
# How often a tensor's memory was written in place.
version_of: Final = attrgetter("_version")
# Equal for all storage objects of one memory.
storage_key: Final = attrgetter("_cdata")
# A module's own parameters, buffers and children, by name.
own_parameters: Final = attrgetter("_parameters")
own_buffers: Final = attrgetter("_buffers")
own_modules: Final = attrgetter("_modules")
# Names of a module's buffers that a state dict leaves out.
non_persistent_buffers: Final = attrgetter("_non_persistent_buffers_set")
# Hooks of a module, by id: before its forward, before and after `state_dict()`, and before and
# after `load_state_dict()`.
forward_pre_hooks: Final = attrgetter("_forward_pre_hooks")
state_dict_pre_hooks: Final = attrgetter("_state_dict_pre_hooks")
state_dict_hooks: Final = attrgetter("_state_dict_hooks")
before_load_hooks: Final = attrgetter("_load_state_dict_pre_hooks")
after_load_hooks: Final = attrgetter("_load_state_dict_post_hooks")
# Hooks of an optimizer, by id: before its step, and after `state_dict()`.
step_pre_hooks: Final = attrgetter("_optimizer_step_pre_hooks")
state_dict_post_hooks: Final = attrgetter("_optimizer_state_dict_post_hooks")
# A module's hooks and forward.
hooked_call: Final = attrgetter("_call_impl")
# What `to`, `half`, `cuda` of a module go through.
conversion: Final = attrgetter("_apply")

# Returns the transform of torch.func (grad, vmap, jvp, ...) that is being taken now, or None.
is_in_functional_transform: Final = torch._C._functorch.peek_interpreter_stack

# Returns how many modes watch the operators that this thread calls.
has_dispatch_modes: Final = torch._C._len_torch_dispatch_stack

# Base of modes that see every operator that is called inside.
DispatchMode = _python_dispatch.TorchDispatchMode

# Returns the innermost pair of functions through which nodes save tensors, or None.
saved_tensors_hooks_on_top: Final = partial(
    torch._C._autograd._top_saved_tensors_default_hooks,
    # False, so that functions that only trace do not count.
    False,
)

# Returns whether there may be such a pair: code may forbid it for a while.
may_hook_saved_tensors: Final = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]

# Returns the number that the next autograd node of this thread will have.
next_sequence_number: Final = torch._C._autograd._get_sequence_nr


def call_hooks_around_step(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer's step call its hooks, also where it did not call torch's constructor."""
    optimizer._patch_step_function()


# Inside this context, our code uses tensors of subclasses as plain tensors.
plain_access: Final = torch._C.DisableTorchFunctionSubclass

# Each takes a list of tensors in one call, as torch's own optimizers do.
foreach_add_: Final = torch._foreach_add_
foreach_copy_: Final = torch._foreach_copy_
foreach_mul_: Final = torch._foreach_mul_
foreach_norm: Final = torch._foreach_norm

# Base of all batch norms and instance norms; `running_mean` is None where one keeps no statistics.
NormBase: Final = nn.modules.batchnorm._NormBase

# Called on gradients by torch.amp.GradScaler, and by nothing else.
unscale_and_find_inf_: Final = torch._amp_foreach_non_finite_check_and_unscale_


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor that this one is a view of, for autograd; None if it is no view."""
    return tensor._base if tensor._is_view() else None


def sequence_number(node: torch.autograd.graph.Node) -> int:
    """Return the number that the thread gave an autograd node; later ones have higher numbers."""
    return node._sequence_nr()


# Returns whether autocast is on for any type of device.
is_any_autocast_enabled: Final = torch._C._is_any_autocast_enabled

# Returns what compiles the frames that this thread enters now; None where nothing is compiled.
frame_compiler: Final = torch._C._dynamo.eval_frame.get_eval_frame_callback


def current_backward() -> int:
    """Return the number of the backward that autograd runs on this thread now; -1 if none.

    One inside of another, as of a reentrant checkpoint, has a number of its own.
    """
    return torch._C._current_graph_task_id()


def is_in_backward() -> bool:
    """Return whether autograd is running a backward pass on this thread right now."""
    return torch._C._current_graph_task_id() != -1


def call_after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward pass that is running now has ended without an error."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def will_accumulate(param: Tensor) -> bool:
    """Return whether the backward that is running now will add to `param.grad`.

    It will not if it is `torch.autograd.grad`, nor where it recomputes a segment that uses `param`.
    """
    # It may be frozen for this backward, as a GAN does by turns.
    if not param.requires_grad:
        return False
    node = torch.autograd.graph.get_gradient_edge(param).node
    try:
        return torch._C._will_engine_execute_node(node)  # type: ignore[arg-type]
    except RuntimeError:  # autograd.grad(..., inputs=[param])
        return False


def is_in_ddp_forward() -> bool:
    """Return whether a DistributedDataParallel is running the forward of its module."""
    return nn.parallel.DistributedDataParallel._active_ddp_module is not None


def is_in_ddp_init() -> bool:
    """Return whether a DistributedDataParallel is being made by a caller."""
    init, frame = nn.parallel.DistributedDataParallel.__init__, sys._getframe(1)
    while frame is not None and frame.f_code is not init.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def pipeline_that_splits_backward() -> str:
    """Return the class of the pipeline schedule that runs this forward, if it splits backward.

    "" where none runs it, or one that computes all gradients of a backward at once.
    """
    schedules: Any = sys.modules.get("torch.distributed.pipelining.schedules")
    frame = None if schedules is None else sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == schedules.__file__:
            schedule = frame.f_locals.get("self")
            if isinstance(schedule, schedules._PipelineSchedule):
                parts = {schedules.BACKWARD_INPUT, schedules.BACKWARD_WEIGHT}
                order = getattr(schedule, "pipeline_order", {}).values()
                actions = filter(None, chain.from_iterable(order))
                splits = any(action.computation_type in parts for action in actions)
                return type(schedule).__name__ if splits else ""
        frame = frame.f_back
    return ""


def outside_functional_transforms() -> AbstractContextManager[None]:
    """Make and move tensors inside as if no transform of torch.func were being taken."""
    return torch._C._DisableFuncTorch()  # type: ignore[attr-defined]


@contextmanager
def unseen_by_dispatch_modes() -> Iterator[None]:
    """Hide operators inside from the user's dispatch modes, but not from the compiler's tracers."""
    hidden: list[Any] = []
    while (mode := _get_current_dispatch_mode()) is not None and not mode.is_infra_mode():
        hidden.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(hidden):
            _push_mode(mode)


def as_subclass_sharing_memory(cls: type[Tensor], tensor: Tensor) -> Tensor:
    """Return `tensor` as an instance of `cls`, without autograd history."""
    return torch.Tensor._make_subclass(cls, tensor)


def without_memory(cls: type[T], shape: torch.Size, dtype: torch.dtype, device: Any) -> T:
    """Return a contiguous tensor of `cls`, which has a `__torch_dispatch__`, without any memory."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]


def plain_call(func: Callable, args: tuple, kwargs: dict) -> object:
    """Call a torch function as if no argument were of a tensor subclass."""
    with plain_access():
        return func(*args, **kwargs)


def plainly() -> AbstractContextManager[None]:
    """Run torch functions without the torch function modes that are active, `device` included."""
    return torch._C.DisableTorchFunction()


def num_viewers(tensor: Tensor) -> int:
    """Return how many tensors, arrays and graphs have this tensor's memory, itself included."""
    # The storage object counts, too.
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1


def has_views(storage: torch.UntypedStorage) -> bool:
    """Return whether a tensor, an array or a graph still views this memory."""
    # One is the object that was given.
    return torch._C._storage_Use_Count(storage._cdata) > 1


def swap_memory(tensor: Tensor, other: Tensor) -> None:
    """Exchange what two tensors are, whatever their devices; the Python objects stay.

    `torch.utils.swap_tensors` does the same, and also exchanges attributes, and refuses a tensor
    that has weak references, such as the parameters of an LSTM.
    """
    torch._C._swap_tensor_impl(tensor, other)


def untraced(func: Func) -> Func:
    """Keep `func`, and all that it calls, from being compiled when untraced code calls it.

    Such code is autograd, in a backward that runs inside compiled code. This marks the code object,
    and costs a call nothing; `torch.compiler.disable` is a function around it, and costs 1.5 µs.
    """
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP  # type: ignore[attr-defined]
    strategy = dynamo._FrameExecStrategy(skip, skip)  # type: ignore[attr-defined]
    dynamo.set_code_exec_strategy(func.__code__, strategy)  # type: ignore[attr-defined]
    return func


def skip_frame(func: Func) -> Func:
    """Keep torch.compile from compiling `func`; functions that it calls may be compiled.

    Unlike `torch.compiler.disable` it does not import the compiler, which takes a second.
    """
    return torch._disable_dynamo(func, recursive=False)  # type: ignore[return-value]


def call_of(module: nn.Module) -> Callable[..., Any] | None:
    """Return the call of `module(...)` in place of its hooks and forward; None if not changed."""
    return module.__dict__.get("_compiled_call_impl")


def set_call_of(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Let `module(...)` call this instead; None restores its hooks and forward."""
    if call is None:
        module.__dict__.pop("_compiled_call_impl", None)
    else:
        module.__dict__["_compiled_call_impl"] = call


def modules_being_called() -> Iterator[nn.Module]:
    """Yield modules whose calls this thread is inside of, the innermost first. Costs no hook."""
    frame = sys._getframe()
    while frame := frame.f_back:
        if frame.f_code is nn.Module._call_impl.__code__:
            yield frame.f_locals["self"]


def checkpoint_call() -> dict[str, Any] | None:
    """Return the local variables of a call of torch.distributed.checkpoint that runs now, or None.

    That is `get_model_state_dict()` or one like it, where this thread is inside of one. `info` has
    its options, of which the `state_dict()` that it calls is told nothing. Costs no hook.
    """
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if module is None:
        return None
    inner = ("_get_model_state_dict", "_get_optim_state_dict", "_load_optim_state_dict")
    codes = {inspect.unwrap(getattr(module, name)).__code__ for name in inner}
    frame = sys._getframe()
    while frame := frame.f_back:
        if frame.f_code in codes:
            return dict(frame.f_locals)
    return None


# ---- DTensor: its wrapper, and what is in it ----

# This rank's tensor itself, and not a view.
local_tensor_of: Final = attrgetter("_local_tensor")
# Mesh, placements, and shape, strides and dtype of the whole tensor.
spec_of: Final = attrgetter("_spec")


def set_local_tensor(tensor: Any, local: Tensor) -> None:
    """Let a DTensor compute with other memory, of the same shape and dtype."""
    tensor._local_tensor = local


def change_dtype(tensor: Any, local: Tensor) -> None:
    """Give a DTensor, the same object, this local tensor and its dtype."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 (it takes most of a second)

    where = {"shape": tensor.shape, "stride": tensor.stride()}
    other: Any = DTensor.from_local(local, tensor.device_mesh, tensor.placements, **where)
    tensor.data = other
    tensor._spec, tensor._local_tensor = other._spec, other._local_tensor


def dtensor_over(local: Tensor, other: Any) -> Tensor:
    """Return a DTensor with this local tensor, placed as another one; no graph, no copy."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 (it takes most of a second)

    return DTensor(local, other._spec, requires_grad=False)  # type: ignore[call-arg]


def local_part(whole: Tensor, other: Any) -> Tensor:
    """Return this rank's part of a full value that is placed as the DTensor `other`."""
    from torch.distributed.tensor._utils import (  # noqa: PLC0415 (as above)
        compute_local_shape_and_global_offset,
    )

    spec = other._spec
    shape, start = compute_local_shape_and_global_offset(whole.shape, spec.mesh, spec.placements)
    return whole[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))]
