"""Hooks on the user's module and optimizer; the only file that registers hooks."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import chain
from traceback import walk_stack
from typing import Any, Final, TypeVar, cast
from weakref import ReferenceType, ref

import torch
from attrs import define
from torch import Tensor, nn
from zero_comm.calls import collective_call

from zero_partition.chained import SeparateOptimizers, members_of
from zero_partition.dtensors import local_of, localized
from zero_partition.errors import ShardedParamError, StateError
from zero_partition.nested import converted, converted_output, tensors_in
from zero_partition.plan.precision import ModulePrecision
from zero_partition.plan.stages import Placement, shown
from zero_partition.stand_in import Bound, GradientGuard, ShardedParam, StateKind
from zero_partition.torch_private import (
    base_of,
    call_of,
    conversion,
    forward_pre_hooks,
    frame_compiler,
    has_dispatch_modes,
    hooked_call,
    is_any_autocast_enabled,
    is_in_backward,
    is_in_functional_transform,
    may_hook_saved_tensors,
    next_sequence_number,
    outside_functional_transforms,
    own_modules,
    plain_access,
    saved_tensors_hooks_on_top,
    sequence_number,
    set_call_of,
    skip_frame,
    step_pre_hooks,
    unseen_by_dispatch_modes,
    untraced,
)

from .gradients import SMALL_BYTES, BufferGradients
from .schedule import ForwardCall
from .sharded_model import ModelPhase, ShardedModel, find_param_ref, param_ref_of
from .unit import RETURN_OUTPUTS, ShardState, Unit

Result = TypeVar("Result")

# NOTE(around): the module's call is wrapped, and has no pair of forward hooks. Torch runs
# `always_call` hooks for an Exception and not for a KeyboardInterrupt, and under `Module.compile()`
# not at all, while the graph breaks at each. Around the call there is a `finally`, and compiled
# code stays in one piece. The user's own hooks read whole parameters, and we see what they return
# (docs/decisions/0008).


@define(eq=False)
class ModuleCallWrapper(Bound):
    """Stands where `module(...)` looks for what `Module.compile()` made; calls what was there."""

    sharded: ShardedModel
    # None for the model itself, if all its parameters are in other units.
    unit: Unit | None
    is_model: bool
    # The module's own hooks and forward, compiled or not.
    inside: Callable[..., Any]
    # Whether the call is compiled, by `Module.compile()` or by torch.compile around the module.
    is_compiled: bool

    @skip_frame
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if self.is_model and self.sharded.is_outdated():
            # This takes the wrapper off the model, so the model is called anew.
            self.sharded.partition_again()
            return self.sharded.model(*args, **kwargs)
        if self.is_model and self.sharded.input_dtype is not None:
            args, kwargs = converted((args, kwargs), self.sharded.input_dtype)
        is_compiled = self.is_compiled or frame_compiler() is not None
        first_node = self._begin(is_compiled)
        call, output, raised = None, None, True
        try:
            if self.unit is not None and self.unit.is_watched and not is_compiled:
                with WatchedReads.of(self.unit):
                    output = self.inside(*args, **kwargs)
            else:
                output = self.inside(*args, **kwargs)
            raised = False
        finally:
            call = self._end(raised, is_compiled)
        self._watch(output, call, first_node, (args, kwargs))
        output_dtype = self.sharded.output_dtype
        if self.is_model and output_dtype is not None:
            return converted_output(output, output_dtype)
        return output

    @untraced
    def _begin(self, is_compiled: bool) -> int:
        if is_in_functional_transform():
            self._check_transform()
        _undisturbed(self._prepare)
        if is_compiled and self.unit is not None and self.unit.depth == 1:
            self.sharded.hide_guards(self.unit, is_hidden=True)
        return next_sequence_number()

    def _prepare(self) -> None:
        if self.is_model:
            self.sharded.begin_forward()
        elif not self.sharded.forwards and not is_in_backward():
            # A part of the model is called by itself; see NOTE(parts) in sharded_model.py.
            self.sharded.refuse_split_backward()
            self.sharded.end_broken_calls(beginning=1)
            self.sharded.follow_shard_writes()
        self.sharded.require("a forward", StateKind.PARAMS)
        try:
            if self.unit is not None:
                self.sharded.schedule.before_forward(self.unit)
        except BaseException:
            if self.is_model:
                self.sharded.end_forward()
            raise

    @untraced
    def _end(self, raised: bool, is_compiled: bool) -> ForwardCall | None:
        if is_compiled and self.unit is not None and self.unit.depth == 1:
            self.sharded.hide_guards(self.unit, is_hidden=False)
        return _undisturbed(partial(self._finish, raised))

    def _finish(self, raised: bool) -> ForwardCall | None:
        call, written = None, ""
        try:
            if self.unit is not None:
                if not (raised or is_in_backward()) and self.unit.depth == 1:
                    written = self.unit.find_written()
                call = self.sharded.schedule.after_forward(self.unit, raised=raised)
                if self.unit.placement is Placement.SHARDED and is_any_autocast_enabled():
                    # Autocast would keep a cast of every unit's parameters.
                    torch.clear_autocast_cache()
        finally:
            # Guards are hidden until then, and a backward would take them for gradients dropped.
            if self.is_model:
                self.sharded.end_forward()
        if written:
            raise StateError(written)
        return call

    @untraced
    def _watch(self, output: Any, call: ForwardCall | None, first_node: int, given: Any) -> None:
        """Hook the outputs, to notice when backward reaches the call; it was `given` these."""
        if is_in_functional_transform():
            return
        tensors = (output,) if type(output) is Tensor else tuple(tensors_in(output))
        if self.unit is not None:
            self.unit.keep_views(tensors)
        if torch.is_grad_enabled() and (self.is_model or call is not None):
            hook, is_hooked = _InBackward(self.sharded, call), False
            for tensor in tensors:
                # A hook on a leaf would stay after this backward.
                if tensor.grad_fn is not None:
                    _hook(tensor, hook, first_node)
                    is_hooked = True
            # A frozen unit that is given nothing with a graph makes none.
            if (
                call is not None
                and not is_hooked
                and (call.unit.trains or any(tensor.requires_grad for tensor in tensors_in(given)))
            ):
                self.sharded.schedule.note_unreachable(call.unit)

    def _check_transform(self) -> None:
        if self.sharded.placements.params is Placement.SHARDED and torch.is_grad_enabled():
            name = self.unit.name if self.unit is not None else "(model)"
            raise StateError(
                f"unit {name!r} was called inside a transform of torch.func, whose backward fires "
                "no hook, so it would read sharded parameters. Take vmap, jvp and jacfwd under "
                "torch.no_grad(), and transforms that run backward at stage 2 or lower"
            )


_CALL: Final = inspect.unwrap(ModuleCallWrapper.__call__).__code__


def count_calls(sharded: ShardedModel) -> int:
    """Return how many calls of its modules are on the stacks of this process' threads."""
    frames = chain.from_iterable(map(walk_stack, sys._current_frames().values()))
    calls = (frame.f_locals["self"] for frame, _ in frames if frame.f_code is _CALL)
    return sum(call.sharded is sharded for call in calls)


def _undisturbed(action: Callable[[], Result]) -> Result:
    """Run an action outside inference mode, functorch transforms and dispatch modes.

    Tensors that it makes can then be used after the call that is running.
    """
    is_inference = torch.is_inference_mode_enabled()
    if not is_inference and not is_in_functional_transform() and not has_dispatch_modes():
        return action()
    with ExitStack() as stack:
        # One such mode keeps operators' outputs until they are called again; it must not keep ours.
        stack.enter_context(unseen_by_dispatch_modes())
        stack.enter_context(outside_functional_transforms())
        if is_inference:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        return action()


def _hook(tensor: Tensor, hook: Callable[[Tensor], None], first_node: int) -> None:
    tensor.register_hook(hook)
    # A view that is written to afterwards gets another node, and its old one, with the hook, is
    # never reached; its base is. A base that is older than this call does not end a computation of
    # this call.
    base = base_of(tensor)
    if base is None or base.grad_fn is None:
        return
    if sequence_number(base.grad_fn) >= first_node:
        base.register_hook(hook)


@define(eq=False)
class _InBackward:
    """Backward has reached an output, of a unit's call or of the model.

    Inside reentrant recomputation each segment is a backward of its own; the outermost is the one
    that ends ours, and so the model's output asks for a word at the end even if it is no unit's.
    """

    sharded: ShardedModel
    call: ForwardCall | None

    @untraced
    def __call__(self, grad: Tensor) -> None:
        if self.call is None:
            self.sharded.open_backward()
        else:
            self.sharded.before_backward(self.call)

    def __deepcopy__(self, memo: dict) -> _InBackward:
        return self


@define(eq=False)
class WrapperGuard(Bound):
    """Forward pre-hook that checks that a call came through `ModuleCallWrapper`.

    Its presence also keeps torch.compile of an outer function from replacing the call by a call of
    `forward`.
    """

    wrapper: ModuleCallWrapper

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Raise StateError if the call did not, as parameters may be sharded."""
        if torch.compiler.is_compiling():
            # Nothing to trace: this is inside the wrapper's call, which has checked.
            return
        unit = self.wrapper.unit
        if unit is not None and not unit.depth:
            raise StateError(
                f"unit {unit.name!r}: a {type(module).__name__} that shares its hooks was called "
                "in its place (a shallow copy?), and its parameters are not whole; call the very "
                "module that was sharded"
            )


def wrap_call(
    module: nn.Module, sharded: ShardedModel, unit: Unit | None, *, is_model: bool
) -> Callable[[], None]:
    """Put an `ModuleCallWrapper` around the module's calls; returns what takes it away again."""
    before = call_of(module)
    is_compiled = before is not None or "_orig_mod" in own_modules(module)
    wrapper = ModuleCallWrapper(sharded, unit, is_model, before or hooked_call(module), is_compiled)
    handle = module.register_forward_pre_hook(WrapperGuard(wrapper), prepend=True)

    def compile_inside(*args: Any, **kwargs: Any) -> None:
        wrapper.inside = torch.compile(hooked_call(module), *args, **kwargs)
        wrapper.is_compiled = True

    set_call_of(module, wrapper)
    has_torchs = type(module).compile is nn.Module.compile and "compile" not in vars(module)
    if has_torchs:
        # After shard(), what is compiled must be inside our wrapper.
        module.__dict__["compile"] = compile_inside

    def remove() -> None:
        handle.remove()
        set_call_of(module, None if wrapper.inside == hooked_call(module) else wrapper.inside)
        if has_torchs:
            del module.__dict__["compile"]

    return remove


# NOTE(reads): a hook on each output of a call makes its unit whole in backward before nodes of the
# call run. It comes too late for nodes of a loss that the module keeps in an attribute and computes
# last, and there is none if the call returns nothing. Such nodes are noticed when a gradient
# arrives while the unit is sharded (`check_arrival`). A unit that is called twice may be whole by
# then for its other call. So from its second call on, nodes of the unit save tensors through
# functions that check the unit's state when a tensor is used; and where one of two calls returned
# nothing, `before_backward` refuses the other. Other calls do without, since users that save
# tensors in their own way, or compile, would meet these functions.


@define(eq=False)
class WatchedReads:
    """Nodes of a unit's call save through `pack`, and use what they saved through `unpack`."""

    unit: Unit
    # Address of the slot's memory.
    address: int

    @classmethod
    def of(cls, unit: Unit) -> AbstractContextManager[Any]:
        """Return a context around a call of the unit; where others watch, it does nothing."""
        on_top = saved_tensors_hooks_on_top()
        is_free = on_top is None or isinstance(getattr(on_top[0], "__self__", None), cls)
        memory = None if unit.slot is None else unit.slot.memory
        if memory is None or not (is_free and may_hook_saved_tensors()):
            return nullcontext()
        made = cls(unit, memory.data_ptr())
        return torch.autograd.graph.saved_tensors_hooks(made.pack, made.unpack)

    def pack(self, tensor: Tensor) -> Any:
        """Mark a view of the unit's memory."""
        try:
            is_read = local_of(tensor).untyped_storage().data_ptr() == self.address
        except RuntimeError:
            # Wrappers, sparse and opaque tensors have no storage.
            is_read = False
        return (tensor,) if is_read else tensor

    def unpack(self, saved: Any) -> Tensor:
        """Raise StateError where one is used while the unit is sharded."""
        if type(saved) is not tuple:
            return saved
        if self.unit.state is not ShardState.UNSHARDED:
            raise StateError(
                f"unit {self.unit.name!r}: backward reads its parameters while they are sharded "
                f"(rank {self.unit.group.rank}). {RETURN_OUTPUTS}"
            )
        return saved[0]


# NOTE(hook cost): there is one wrapper around the call of a unit's module and a tensor hook per
# output. `register_full_backward_hook` wraps inputs and outputs in autograd nodes of its own and
# doubled the time of 500 tiny layers (docs/decisions/0003-hooks-per-unit.md).


def arrival_hook(
    sharded_ref: ReferenceType[ShardedModel],
    gradients_ref: ReferenceType[BufferGradients],
    position: int,
    *,
    is_large: bool,
    others: list[Any],
) -> Callable[[Tensor], None]:
    """Return the hook to call when autograd has put a parameter's gradient into `param.grad`.

    The hook has weak references only: Python's garbage collector does not see through this kind of
    hook, and a model that is deleted would never be freed. It is the only code of ours that runs
    for each parameter, so it notes the arrival, and gradients are collected many at a time; see
    NOTE(waiting). `others` refers to the parameter's hooks, of which this one is the first. Those
    that follow, such as optimizers that step in backward, find a guard in place of the gradient of
    this rank alone.
    """
    whole, running = ShardState.UNSHARDED, ModelPhase.BACKWARD

    @untraced
    def arrive(param: Tensor) -> None:
        sharded, gradients = sharded_ref(), gradients_ref()
        if sharded is None or gradients is None:
            return
        waiting = gradients.waiting
        if not waiting and sharded.backward is not running:
            sharded.open_backward(param)
        if gradients.unit.state is not whole and not sharded.schedule.was_reached(gradients.unit):
            sharded.reducer.check_arrival(gradients, position)
        waiting.append(position)
        is_followed = len(others[0]()) > 1
        is_at_once = is_large and not (gradients.large_wait and gradients.accumulator is None)
        if is_at_once or is_followed or len(waiting) >= gradients.flush_threshold:
            if gradients.large_wait and sharded.reducer.has_all(gradients.unit):
                sharded.schedule.end_use(gradients.unit)
            sharded.reducer.collect(gradients)
        if is_followed:
            gradients.guard((position,))

    return arrive


def clear_grad_scale(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """Remove the `grad_scale` and `found_inf` that we set for this step; see NOTE(in_step). Local.

    Those that others have set, as GradScaler does, are left for them to remove.
    """
    left = sharded.pop_found_inf()
    if left is not None and getattr(optimizer, "found_inf", None) is left:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


@define(eq=False)
class BeforeStep(Bound):
    """Pre-hook of the optimizer's step; the sharded model is found from its optimizer by it."""

    sharded: ShardedModel

    def __call__(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        """See that all gradients are there, those of a closure too."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
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
    """Post-hook of the optimizer's step."""

    sharded: ShardedModel

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Publish the new values."""
        offload = self.sharded.residence.offload
        if offload is not None:
            offload.write_numbers(optimizer.param_groups)
        clear_grad_scale(self.sharded, optimizer)
        self.sharded.after_step()


@define(eq=False)
class _Keeping:
    """A conversion of all but these: what sharded parameters view, and their gradients."""

    fn: Callable[[Tensor], Tensor]
    kept: dict[int, Tensor]

    def __call__(self, tensor: Tensor) -> Tensor:
        """See the class."""
        return tensor if id(tensor) in self.kept else self.fn(tensor)


@define(eq=False)
class AroundConversion:
    """Stands where `module.to()` and its like look for `_apply`: what changes nothing passes.

    Trainers move a model to its device before each phase. Torch's `_apply` would give a parameter
    other memory for "cpu:0" than for "cpu", and convert stand-ins. Copied along with its module.
    """

    module: nn.Module
    # The `_apply` that the module had before.
    inside: Callable[..., nn.Module]

    def __call__(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        """Convert buffers, and parameters that are not sharded.

        Raises:
            StateError: It would convert or move a sharded parameter; nothing was done.
        """
        if isinstance(fn, _Keeping):
            # The module at which the conversion began has checked and guarded everything.
            return self.inside(fn, *args, **kwargs)
        params = [local_of(p) for p in self.module.parameters() if find_param_ref(p) is not None]
        for param in {(p.dim(), p.dtype, p.device): p for p in params}.values():
            _refuse_conversion(param, fn)
        kept = {id(t): t for p in params for t in (p, p.grad) if t is not None}
        guarded = [(p, p.grad) for p in params if isinstance(p.grad, GradientGuard)]
        for param, _ in guarded:
            param.grad = None
        try:
            with localized(self.module, (), lambda: True):
                return self.inside(_Keeping(fn, kept), *args, **kwargs)
        finally:
            for param, guard in guarded:
                param.grad = guard

    def install(self) -> Callable[[], None]:
        """Let the module convert so; returns what takes it away again."""
        own = vars(self.module)
        before = {"_apply": own["_apply"]} if "_apply" in own else {}
        own["_apply"] = self

        def remove() -> None:
            del own["_apply"]
            own.update(before)

        return remove


def _refuse_conversion(param: nn.Parameter, fn: Callable[[Tensor], Tensor]) -> None:
    def face(tensor: Tensor) -> tuple[Any, ...]:
        return tensor.dtype, tensor.device, tensor.stride(), tensor.is_shared()

    probe = torch.empty((2,) * param.dim(), dtype=param.dtype, device=param.device)
    before = face(probe)
    with torch.no_grad():
        after = fn(probe)
    if face(after) == before:
        return
    param_ref = param_ref_of(param, what="conversion")
    kind = ShardedParamError if isinstance(param, ShardedParam) else StateError
    raise kind(
        f"model.to(), .half() or the like after shard() would convert parameter "
        f"{param_ref.name!r} from {probe.dtype} on {probe.device} to {after.dtype} on "
        f"{after.device}, or lay it out anew, and shards would not follow (rank "
        f"{param_ref.whole.rank}). To convert or move a model, "
        "do it before shard(), or after zero_engine.unshard(model, optimizer); for computing in "
        "another dtype, ZeroConfig(precision=Precision(params=...))"
    )


def install_module_hooks(model: nn.Module, sharded: ShardedModel) -> None:
    """Hook the model, the modules of its units, and its trainable parameters."""
    modules = dict(model.named_modules())
    units = {unit.plan.name: unit for unit in sharded.units if not unit.plan.is_replicated}
    for name in {"": None, **units}:
        remove = wrap_call(modules[name], sharded, units.get(name), is_model=not name)
        sharded.removers.append(remove)
    for module in modules.values():
        sharded.removers.append(AroundConversion(module, conversion(module)).install())
    for gradients in sharded.reducer.gradients:
        for position, param in enumerate(gradients.buffer.params):
            is_large, others = param.nbytes > SMALL_BYTES, list[Any]()
            references = ref(sharded), ref(gradients)
            arrive = arrival_hook(*references, position, is_large=is_large, others=others)
            handle = param.register_post_accumulate_grad_hook(arrive)
            others.append(handle.hooks_dict_ref)
            # Ours comes before hooks that were there, which must not see this rank's gradient
            # alone. Autograd calls hooks in the order in which they were put into the dict.
            hooks = others[0]()
            before = {key: hooks.pop(key) for key in list(hooks) if key != handle.id}
            hooks.update(before)
            sharded.removers.append(handle.remove)


@define(eq=False)
class ModuleDtype:
    """A module that computes in another dtype than the model."""

    policy: ModulePrecision
    # Dtype that inputs are converted to; None: they stay as they are.
    dtype: torch.dtype | None
    # Dtype that is restored on outputs where no floating-point tensor was given.
    model_dtype: torch.dtype | None
    # Dtype of the first floating-point tensor given to the call that runs.
    given: torch.dtype | None = None

    def before(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Convert what the module is called with."""
        floating = (t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point())
        self.given = next(floating, self.model_dtype)
        return (args, kwargs) if self.dtype is None else converted((args, kwargs), self.dtype)

    def after(self, _: nn.Module, args: Any, output: Any) -> Any:
        """Convert what the module returns."""
        dtype = self.policy.outputs or (self.given if self.policy.restores else None)
        return output if dtype is None else converted(output, dtype)


def install_dtype_hooks(
    module: nn.Module, policy: ModulePrecision, model_dtype: torch.dtype | None
) -> list[Callable[[], None]]:
    """Hook a module that computes in another dtype than the model; returns what removes it."""
    dtype = (policy.params or model_dtype) if policy.cast_inputs else None
    dtypes = ModuleDtype(policy, dtype, model_dtype)
    return [
        module.register_forward_pre_hook(dtypes.before, with_kwargs=True).remove,
        module.register_forward_hook(dtypes.after, prepend=True).remove,
    ]


# NOTE(format): flat buffers have weights in the order of their shapes, whatever their strides were.
# A convolution with a channels_last weight computes in that format, and its output has it. It gives
# the same bits with a contiguous weight, if its input is in that format.

_CONVOLUTIONS: Final = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def install_format_hooks(model: nn.Module, sharded: ShardedModel) -> None:
    """Let convolutions whose weights were channels_last compute so; see NOTE(format)."""
    formats = {
        id(param_ref.param): param_ref.plan.memory_format for param_ref in sharded.param_refs
    }
    for module in model.modules():
        if isinstance(module, _CONVOLUTIONS):
            # A weight that is computed, as by a parametrization, is none of the parameters.
            own = dict(module.named_parameters(recurse=False))
            memory_format = formats.get(id(own.get("weight")))
            if memory_format is not None:
                hook = partial(_to_format, memory_format)
                handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                sharded.removers.append(handle.remove)


def _to_format(memory_format: torch.memory_format, conv: nn.Module, args: Any, kwargs: Any) -> Any:
    def in_format(inputs: Tensor) -> Tensor:
        # A sample without a batch dimension has no memory format.
        is_batch = inputs.dim() == cast("Tensor", conv.weight).dim()
        # With one channel or one pixel, `contiguous` would leave strides that say no format.
        return inputs.to(memory_format=memory_format) if is_batch else inputs

    if args:
        return (in_format(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "input": in_format(kwargs["input"])}


def install_optimizer_hooks(optimizer: torch.optim.Optimizer, sharded: ShardedModel) -> None:
    """Hook the optimizer's step, and let its zero_grad drop the gradients that we keep.

    Optimizers that are stepped separately are hooked one by one.
    """
    is_several = isinstance(optimizer, SeparateOptimizers)
    for member in members_of(optimizer) if is_several else [optimizer]:
        _hook_optimizer(member, sharded, has_all=not is_several)


def _hook_optimizer(
    optimizer: torch.optim.Optimizer, sharded: ShardedModel, *, has_all: bool
) -> None:
    handles = [
        optimizer.register_step_pre_hook(BeforeStep(sharded)),
        optimizer.register_step_post_hook(AfterStep(sharded)),
    ]
    plain_zero_grad = optimizer.zero_grad
    is_patched = "zero_grad" in vars(optimizer)

    @functools.wraps(plain_zero_grad)
    def zero_grad(set_to_none: bool = True) -> None:
        clear_grad_scale(sharded, optimizer)
        if has_all or sharded.phase is ModelPhase.FAILED:
            sharded.drop_gradients(set_to_none=set_to_none)
        else:
            sharded.drop_gradients_of(optimizer, set_to_none=set_to_none)
        with plain_access():
            plain_zero_grad(set_to_none=set_to_none)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def restore_zero_grad() -> None:
        if is_patched:
            optimizer.zero_grad = plain_zero_grad  # type: ignore[method-assign]
        else:
            vars(optimizer).pop("zero_grad", None)

    sharded.removers.extend([*(handle.remove for handle in handles), restore_zero_grad])


def find_sharded(model: nn.Module) -> ShardedModel | None:
    """Return the `ShardedModel` that `partition` made of this model, None if there is none.

    Raises:
        StateError: It is no module.
    """
    if not isinstance(model, nn.Module):
        raise StateError(
            f"expected a model, which is a torch.nn.Module, got {shown(model)}; are the arguments "
            "in order, as in shard(model, optimizer) and save(folder, model, optimizer, step=...)?"
        )
    for hook in forward_pre_hooks(model).values():
        if isinstance(hook, WrapperGuard) and hook.wrapper.is_model:
            return hook.wrapper.sharded
    return None


def require_sharded(model_or_optimizer: nn.Module | torch.optim.Optimizer) -> ShardedModel:
    """Return the `ShardedModel` of this model, or of the one that this optimizer updates.

    Raises:
        StateError: It was not partitioned.
    """
    if isinstance(model_or_optimizer, torch.optim.Optimizer):
        hooks = step_pre_hooks(model_or_optimizer).values()
        sharded = next((hook.sharded for hook in hooks if isinstance(hook, BeforeStep)), None)
    else:
        sharded = find_sharded(model_or_optimizer)
    if sharded is None:
        # Calls of one rank are not registered: the function that asks is theirs.
        call = collective_call() or f"{sys._getframe(1).f_code.co_name}()"
        raise StateError(
            f"{call}: expected a model or optimizer that was sharded, got a "
            f"{type(model_or_optimizer).__name__} that was not; call zero_engine.shard() first, "
            "and pass the model that it was given"
        )
    return sharded
