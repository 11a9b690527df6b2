"""Each private function of torch that we name still does what we need."""
# Names a private module: what it holds are private names of torch, each looked up in one place.

import copy
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._python_dispatch import TorchDispatchMode
from zero_partition import torch_private as compat


def test_moments_of_a_backward() -> None:
    """torch._C._current_graph_task_id tells it from none; queue_callback runs once, at its end.

    Autograd runs ready nodes latest-created first: NOTE(backward order) rests on it.
    """
    events: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    first = x * 2
    second, aside = first * 3, first * 5
    for name, tensor in (("first", first), ("second", second), ("aside", aside)):
        tensor.register_hook(lambda grad, name=name: events.append(name))
    first.register_hook(lambda _: compat.call_after_backward(lambda: events.append("end")))
    first.register_hook(lambda _: events.append(compat.is_in_backward()))
    (second.sum() + aside.sum()).backward()

    assert sorted(events[:2]) == ["aside", "second"]
    assert events[2:] == ["first", True, "gradient", "end"]
    assert not compat.is_in_backward()


def test_norm_base() -> None:
    """_NormBase is what batch norms and instance norms have in common, and others have not."""
    for norm in (torch.nn.BatchNorm2d(1), torch.nn.SyncBatchNorm(1), torch.nn.InstanceNorm1d(1)):
        assert isinstance(norm, compat.NormBase)
    assert torch.nn.InstanceNorm1d(1).running_mean is None
    assert not isinstance(torch.nn.GroupNorm(1, 1), compat.NormBase)


def test_subclasses_and_modes_are_left_out() -> None:
    """Tensor._make_subclass makes no copy; DisableTorchFunctionSubclass and DisableTorchFunction.

    The one keeps a subclass from seeing its own call again, the other turns off modes that choose
    a device, too.
    """

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("seen")

    memory = torch.ones(2)
    loud = compat.as_subclass_sharing_memory(Loud, memory)
    result = compat.plain_call(torch.add, (loud, 1), {})

    assert type(loud) is Loud and type(result) in (torch.Tensor, Loud)
    with torch.device("meta"), compat.plainly():
        assert loud.data_ptr() == memory.data_ptr()
        assert torch.empty(2).device.type == "cpu"


def test_who_shares_memory_is_counted() -> None:
    """torch._C._storage_Use_Count counts tensors, and arrays by the tensor that they keep."""
    param = torch.nn.Parameter(torch.zeros(2, 3))
    assert compat.num_viewers(param) == 1
    view = param.detach()
    assert compat.num_viewers(param) == 2
    array = view.numpy()
    del view
    assert compat.num_viewers(param) == 2
    del array
    assert compat.num_viewers(param) == 1

    whole = torch.ones(4)
    part, storage = whole[1:], whole.untyped_storage()
    whole.data = torch.zeros(4)
    assert compat.has_views(storage)
    part.data = torch.zeros(3)
    assert not compat.has_views(storage)


def test_swap_memory() -> None:
    """torch._C._swap_tensor_impl keeps the object, its attributes and weak references to it."""
    tensor = torch.nn.Parameter(torch.empty(2, device="meta"))
    tensor.mark = "mine"
    known = weakref.ref(tensor)

    compat.swap_memory(tensor, torch.nn.Parameter(torch.ones(2)))

    assert known() is tensor
    assert tensor.mark == "mine"
    assert tensor.requires_grad
    assert torch.equal(tensor.detach(), torch.ones(2))


def test_a_replaced_call_is_what_a_module_calls() -> None:
    """nn.Module._compiled_call_impl stands before hooks and forward, and is not copied."""
    module = torch.nn.Linear(1, 1)
    assert compat.call_of(module) is None
    compat.set_call_of(module, lambda x: ("around", x))

    assert module(3) == ("around", 3)
    assert copy.copy(module)(torch.ones(1)).shape == (1,)
    module.compile(backend="eager")
    assert compat.call_of(module).__name__ != "<lambda>"
    compat.set_call_of(module, None)
    assert compat.call_of(module) is None


def test_modules_being_called() -> None:
    """Module._call_impl is on the stack of every call, with the module as its `self`."""
    seen = []
    inner = torch.nn.ReLU()
    inner.register_forward_hook(lambda *_: seen.extend(compat.modules_being_called()))
    outer = torch.nn.Sequential(inner)
    outer(torch.ones(1))

    assert [id(module) for module in seen] == [id(inner), id(outer)]
    assert not list(compat.modules_being_called())


def test_checkpoint_call() -> None:
    """_get_model_state_dict, _get_optim_state_dict and _load_optim_state_dict have these locals."""
    seen: list[Any] = []

    def look(*_: Any) -> None:
        seen.append(dict(compat.checkpoint_call() or {}))

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.register_state_dict_pre_hook(look)
    optimizer.register_state_dict_pre_hook(look)
    optimizer.register_load_state_dict_pre_hook(look)
    model.state_dict()
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))

    plain, of_model, of_optimizer, _ = seen
    assert plain == {}
    assert of_model["info"].full_state_dict and not of_optimizer["info"].full_state_dict
    assert of_optimizer["optim_state_dict"].keys() == {"state", "param_groups"}
    has_both = [{"optimizers", "state_dict"} <= each.keys() for each in seen]
    assert has_both == [False, False, False, True]


def test_nodes_are_numbered_in_order() -> None:
    """torch._C._autograd._get_sequence_nr tells older nodes from those of a call."""
    before = torch.ones(2, requires_grad=True) * 2
    number = compat.next_sequence_number()
    after = before * 2

    assert before.grad_fn._sequence_nr() < number <= after.grad_fn._sequence_nr()


def test_will_accumulate() -> None:
    """torch._C._will_engine_execute_node tells backward() from autograd.grad()."""
    seen = []
    x, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(compat.will_accumulate(x)))
    z = (y + other).sum()
    z.backward(retain_graph=True)
    torch.autograd.grad(z, y, retain_graph=True)
    torch.autograd.grad(z, x, retain_graph=True)
    torch.autograd.grad(z, [y, other])

    assert seen == [True, False, False, False]


def test_functional_transforms_are_seen_and_left() -> None:
    """torch._C._functorch knows of vmap and grad, and _DisableFuncTorch steps outside of them."""
    made = []

    def func(x: torch.Tensor) -> torch.Tensor:
        assert compat.is_in_functional_transform()
        with compat.outside_functional_transforms():
            made.append(torch.zeros(1))
        return x.sum()

    torch.func.grad(func)(torch.ones(2))
    made[0].data_ptr()  # raises for what belongs to a transform
    assert not compat.is_in_functional_transform()


def test_dispatch_modes_are_hidden_from_and_come_back() -> None:
    """The three private functions of torch.utils._python_dispatch that push and pop modes."""
    seen: list[TorchDispatchMode] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(self)
            return func(*args, **(kwargs or {}))

    assert not compat.has_dispatch_modes()
    with Mode() as outer, Mode() as inner:
        assert compat.has_dispatch_modes()
        with pytest.raises(KeyError), compat.unseen_by_dispatch_modes():
            torch.ones(1)
            raise KeyError
        assert not seen
        torch.ones(1)
    assert seen == [inner, outer]
    assert not compat.has_dispatch_modes()


def test_what_is_untraced_runs_as_it_is_under_compile() -> None:
    """A mark on the code, for what autograd calls, and torch._disable_dynamo around the rest."""
    seen = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    @compat.untraced
    def arrive(param: torch.Tensor) -> None:
        inner(param.detach())

    param = torch.nn.Parameter(torch.ones(1))
    param.register_post_accumulate_grad_hook(arrive)
    torch.compile(lambda x: (param * x).sum().backward(), backend="eager")(torch.ones(1))
    assert seen == [False]

    skipped = compat.skip_frame(inner)
    compiled = torch.compile(lambda x: skipped(x * 2) * 2, backend="eager")
    assert compiled(torch.ones(1)) == 6


def test_is_in_ddp_forward() -> None:
    """`DistributedDataParallel._active_ddp_module`."""
    ddp = torch.nn.parallel.DistributedDataParallel
    assert not compat.is_in_ddp_forward()
    with mock.patch.object(ddp, "_active_ddp_module", torch.nn.Linear(1, 1)):
        assert compat.is_in_ddp_forward()


def test_lists_of_tensors_are_worked_on_in_one_call() -> None:
    """torch._foreach_copy_, _foreach_add_, _foreach_mul_ and _foreach_norm, of any sizes."""
    mine, given = ([torch.full((n,), value) for n in (1, 9)] for value in (1.0, 2.0))
    compat.foreach_copy_(mine, given)
    compat.foreach_add_(mine, given)
    compat.foreach_mul_(mine, torch.tensor(0.5))
    assert [tensor.tolist() for tensor in mine] == [[2.0], [2.0] * 9]

    large = [tensor.half() * 2**14 for tensor in given]  # fp16 ends at 65504
    norms = compat.foreach_norm(large, 2.0, dtype=torch.float32)
    assert [norm.item() for norm in norms] == [2.0**15, 3 * 2.0**15]
    assert compat.foreach_norm([torch.tensor([1.0, -3.0])], float("inf"))[0].item() == 3.0


def test_a_grad_scaler_unscales_by_the_call_that_gradient_shards_look_for() -> None:
    """torch._amp_foreach_non_finite_check_and_unscale_, with gradients and found_inf in front."""
    seen = []

    class Watching(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is compat.unscale_and_find_inf_:
                seen.append((len(args[0]), args[1].item()))
            return super().__torch_function__(func, types, args, kwargs or {})

    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.tensor([4.0, float("inf")]).as_subclass(Watching)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    scaler.unscale_(torch.optim.SGD([param]))

    assert seen == [(1, 0.0)]
