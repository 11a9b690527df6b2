"""Each private function of torch that we name still does what we need."""

import weakref

import torch
from zero_partition import _torch_compat


def test_is_in_backward() -> None:
    """torch._C._current_graph_task_id tells a running backward from none."""
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(_torch_compat.is_in_backward()))
    y.sum().backward()

    assert seen == [True]
    assert not _torch_compat.is_in_backward()


def test_call_after_backward() -> None:
    """The engine's queue_callback runs once, after the last gradient."""
    events = []
    x = torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    y = x * 2
    y.register_hook(lambda grad: _torch_compat.call_after_backward(lambda: events.append("end")))
    y.sum().backward()

    assert events == ["gradient", "end"]


def test_hooks_of_later_calls_have_run_when_an_earlier_output_is_reached() -> None:
    """Autograd runs ready nodes latest-created first: NOTE(backward order) rests on it."""
    events = []
    x = torch.ones(2, requires_grad=True)
    first = x * 2
    second, aside = first * 3, first * 5
    for name, tensor in (("first", first), ("second", second), ("aside", aside)):
        tensor.register_hook(lambda grad, name=name: events.append(name))
    (second.sum() + aside.sum()).backward()

    assert events[-1] == "first"


def test_as_subclass_sharing_memory() -> None:
    """Tensor._make_subclass makes no copy."""
    memory = torch.zeros(3)
    other = _torch_compat.as_subclass_sharing_memory(torch.nn.Buffer, memory)

    assert other.data_ptr() == memory.data_ptr()


def test_plain_call() -> None:
    """DisableTorchFunctionSubclass keeps a subclass from seeing its own call again."""

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("seen")

    loud = _torch_compat.as_subclass_sharing_memory(Loud, torch.ones(2))
    result = _torch_compat.plain_call(torch.add, (loud, 1), {})

    assert type(result) in (torch.Tensor, Loud)


def test_plainly() -> None:
    """torch._C.DisableTorchFunction turns modes off, also those that choose a device."""
    with torch.device("meta"), _torch_compat.plainly():
        assert torch.empty(2).device.type == "cpu"


def test_is_viewed() -> None:
    """torch._C._storage_Use_Count counts tensors, and arrays by the tensor that they keep."""
    param = torch.nn.Parameter(torch.zeros(2, 3))
    assert not _torch_compat.is_viewed(param)

    view = param.data[0]
    assert _torch_compat.is_viewed(param)

    array = view.numpy()
    del view
    assert _torch_compat.is_viewed(param)

    del array
    assert not _torch_compat.is_viewed(param)


def test_swap_memory() -> None:
    """torch._C._swap_tensor_impl keeps the object, its attributes and weak references to it."""
    tensor = torch.nn.Parameter(torch.empty(2, device="meta"))
    tensor.mark = "mine"
    known = weakref.ref(tensor)

    _torch_compat.swap_memory(tensor, torch.nn.Parameter(torch.ones(2)))

    assert known() is tensor
    assert tensor.mark == "mine"
    assert tensor.requires_grad
    assert torch.equal(tensor.detach(), torch.ones(2))
