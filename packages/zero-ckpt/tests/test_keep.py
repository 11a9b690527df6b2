"""Outputs that are kept stand in for their operators, and change no bit of anything."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from same_numbers import Block, Random, Run, Stack, assert_equal, plainly, train
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from zero_ckpt import (
    MATMULS,
    Checkpointer,
    NondeterminismError,
    OperatorCall,
    OperatorPolicy,
    by_name,
    by_operator,
    by_type,
    inside,
    within_bytes,
)
from zero_comm import Group

pytestmark = pytest.mark.xdist_group("ranks")


def everything(call: OperatorCall) -> bool:
    return True


class _Counting(TorchDispatchMode):
    """Sees what runs: a mode entered before another is below it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    with _Counting() as counting:
        yield counting.calls


def _linears(count: int = 2, *, bias: bool = True) -> nn.Sequential:
    """Each calls `addmm` in forward (`mm` without a bias), and only `mm` in backward."""
    torch.manual_seed(0)
    layers = [layer for _ in range(count) for layer in (nn.Linear(8, 8, bias=bias), nn.GELU())]
    return nn.Sequential(*layers)


BYTES = 4 * 8 * 4  # of one output, for an input of 4 rows


# ---- The law ----


@pytest.mark.parametrize(
    "policy",
    [
        everything,
        by_operator("native_dropout"),
        by_operator("rand_like", "zero_ckpt_tests::noise"),
        by_operator("_scaled_dot_product_flash_attention_for_cpu", "bmm", "bernoulli"),
    ],
)
def test_generators_move_past_operators_that_did_not_run(policy: OperatorPolicy) -> None:
    """The next dropout would get the numbers of the one before, silently."""
    expected = train(plainly, Random)

    assert_equal(train(Checkpointer(keeps=policy).checkpoint, Random), expected)


# ---- What runs ----


def test_what_is_kept_runs_once_and_the_rest_twice() -> None:
    """The point of it."""
    model, x = _linears(3), torch.randn(4, 8)
    expected = {"addmm": 3, "gelu": 6}

    for keeps, addmm in ((MATMULS, 3), (None, 6), (by_operator("gelu"), 6)):
        with counted() as calls:
            run = Checkpointer(keeps=keeps, stops_early=False).checkpoint
            run(model, x).sum().backward()
        gelu = 3 if addmm == 6 and keeps is not None else 6
        assert {name: calls[name] for name in expected} == {"addmm": addmm, "gelu": gelu}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"])
def test_fused_attention_draws_once_and_its_output_is_kept(backend: str) -> None:
    """Its masks are numbers of the device's generator, which the next dropout goes on from."""

    def function(x: Tensor) -> Tensor:
        x = F.scaled_dot_product_attention(x.relu(), x, x, dropout_p=0.3)
        return F.dropout(x, 0.2).sin() * torch.rand_like(x)

    def numbers(run: Run) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(2, 2, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with nn.attention.sdpa_kernel(getattr(nn.attention.SDPBackend, backend)):
            y = run(function, x)
            (grad,) = torch.autograd.grad(y.float().square().sum(), x)
        return [y.detach(), grad, torch.cuda.get_rng_state(), torch.rand(3, device="cuda")]

    for policy in (MATMULS, everything):
        assert_equal(numbers(Checkpointer(keeps=policy).checkpoint), numbers(plainly))


def test_convolutions_and_attention_are_kept() -> None:
    """The dearest of all, and they return more than one tensor."""
    conv = nn.Conv1d(4, 4, 3, padding=1)

    def function(x: Tensor) -> Tensor:
        x = conv(x)[None]
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).relu()

    x = torch.randn(2, 4, 8, requires_grad=True)
    with counted() as calls:
        run = Checkpointer(keeps=MATMULS, stops_early=False).checkpoint
        (found,) = torch.autograd.grad(run(function, x).square().sum(), x)
    (expected,) = torch.autograd.grad(function(x).square().sum(), x)

    assert calls["convolution"] == calls["_scaled_dot_product_flash_attention_for_cpu"] == 1
    assert torch.equal(found, expected)


def test_calls_inside_a_module_are_kept_whatever_they_are() -> None:
    """Of a block that is computed again, its attention is not."""
    for policy in (by_name("blocks.*.attention"), by_type(nn.MultiheadAttention)):
        model, x = Stack(), torch.randn(2, 4, 8, requires_grad=True)
        run = Checkpointer(keeps=inside(model, policy), stops_early=False).checkpoint
        torch.manual_seed(0)
        (expected,) = torch.autograd.grad(model(x, plainly).sum(), x)
        torch.manual_seed(0)
        with counted() as calls:
            (found,) = torch.autograd.grad(model(x, run).sum(), x)

        assert torch.equal(found, expected)
        assert calls["_safe_softmax"] == 3
        assert calls["native_layer_norm"] == 6


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block.forward(x))


def test_inside_means_in_a_call() -> None:
    """Forward by hand passes by hooks, and so by what watches calls."""
    model = _Twice()
    checkpointer = Checkpointer(keeps=inside(model, by_name("block")), stops_early=False)

    with counted() as calls:
        checkpointer.checkpoint(model, torch.randn(2, 4, 8)).sum().backward()

    assert calls["native_layer_norm"] == 3


def test_a_policy_sees_the_call() -> None:
    """Custom policies decide by shapes, sizes and what is kept already."""
    seen: list[tuple[str, int, int]] = []

    def policy(call: OperatorCall) -> bool:
        seen.append((call.name, call.output_bytes, call.kept_bytes))
        return call.args[-1].shape == (8, 8) if call.name == "aten::addmm" else False

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    with counted() as calls:
        Checkpointer(keeps=policy).checkpoint(model, torch.randn(4, 8)).sum().backward()

    assert seen == [
        ("aten::addmm", BYTES, 0), ("aten::relu", BYTES, BYTES), ("aten::addmm", 32, BYTES)
    ]  # fmt: skip
    assert calls["addmm"] == 2


def test_an_exception_of_the_policy_is_the_callers() -> None:
    """And leaves no mode behind that keeps what comes next."""

    def policy(call: OperatorCall) -> bool:
        raise KeyError("mine")

    checkpointer = Checkpointer(keeps=policy)
    with pytest.raises(KeyError, match="mine"):
        checkpointer.checkpoint(_linears(), torch.randn(4, 8))

    assert checkpointer.kept_bytes == 0
    torch.randn(4) + 1  # asks nobody


# ---- Bytes ----


def test_nested_checkpoints_keep_an_output_once() -> None:
    """The outer's second run calls the inner checkpoint again, between its own operators."""
    model, x = _linears(), torch.randn(4, 8)
    checkpointer = Checkpointer(keeps=MATMULS)
    with counted() as calls:
        loss = checkpointer.checkpoint(lambda x: checkpointer.checkpoint(model, x).sin(), x).sum()
        assert checkpointer.kept_bytes == 2 * BYTES  # though two keep them
        loss.backward()

    assert calls["addmm"] == 2
    assert checkpointer.kept_bytes == 0


@pytest.mark.parametrize("room", [0, BYTES - 1, BYTES, 3 * BYTES + 5, 100 * BYTES])
def test_a_budget_keeps_what_comes_first(room: int) -> None:
    """Ranks must decide alike, and a limit is a limit."""
    model, x = _linears(2), torch.randn(4, 8)
    checkpointer = Checkpointer(keeps=within_bytes(room, MATMULS))
    num_kept = min(room // BYTES, 6)

    for _ in range(2):  # backward gives all of it back
        with counted() as calls:
            y = x
            for _ in range(3):
                y = checkpointer.checkpoint(model, y)
            assert checkpointer.kept_bytes == num_kept * BYTES
            y.sum().backward()
        assert calls["addmm"] == 6 + 6 - num_kept
        assert checkpointer.kept_bytes == 0


def test_bytes_come_back_with_the_graph() -> None:
    """A loss that nobody calls backward on, as in an evaluation with gradients on."""
    checkpointer = Checkpointer(keeps=MATMULS)
    gc.disable()
    try:
        y = checkpointer.checkpoint(_linears(), torch.randn(4, 8))
        assert checkpointer.kept_bytes == 2 * BYTES
        del y
        assert checkpointer.kept_bytes == 0
    finally:
        gc.enable()


def test_nothing_is_kept_without_gradients() -> None:
    """An evaluation pass must not grow."""
    checkpointer = Checkpointer(keeps=everything)
    with torch.no_grad():
        y = checkpointer.checkpoint(_linears(), torch.randn(4, 8))

    assert y.shape == (4, 8)
    assert checkpointer.kept_bytes == 0


@pytest.mark.parametrize("runs_backward", [True, False])
def test_no_cycle_keeps_outputs_alive(runs_backward: bool) -> None:
    """Activations that wait for the garbage collector are activations that are not dropped."""
    memory: list[weakref.ref[Any]] = []

    def policy(call: OperatorCall) -> bool:
        memory.append(weakref.ref(call.output.untyped_storage()))
        return True

    model = _linears(bias=False)  # whose operators all return one tensor
    gc.disable()
    try:
        run = Checkpointer(keeps=policy).checkpoint
        loss = run(lambda x: run(model, x).sin(), torch.randn(4, 8)).sum()
        assert any(storage() is not None for storage in memory)
        if runs_backward:
            loss.backward()
        del loss
        assert [storage() for storage in memory] == [None] * len(memory)
    finally:
        gc.enable()


def test_a_graph_that_is_retained_keeps_them_for_each_backward() -> None:
    """And gives them back at the last one."""
    model, x = _linears(), torch.randn(4, 8, requires_grad=True)
    checkpointer = Checkpointer(keeps=MATMULS)
    expected = torch.autograd.grad(model(x).sum(), x)
    with counted() as calls:
        loss = checkpointer.checkpoint(model, x).sum()
        for retains in (True, True, False):
            found = torch.autograd.grad(loss, x, retain_graph=retains)
            assert torch.equal(found[0], expected[0])
            assert checkpointer.kept_bytes == (2 * BYTES if retains else 0)

    assert calls["addmm"] == 2


def test_what_stands_in_does_not_hold_the_second_run() -> None:
    """Its graph would stay for as long as the first one is retained, with all activations."""
    memory: list[weakref.ref[Any]] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            output = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.gelu.default:
                memory.append(weakref.ref(output.untyped_storage()))
            return output

    run = Checkpointer(keeps=MATMULS).checkpoint
    loss = run(lambda x: _linears(3)(x).sin(), torch.randn(4, 8)).sum()
    gc.disable()
    try:
        with Watching():
            loss.backward(retain_graph=True)
        assert len(memory) == 3
        assert [storage() for storage in memory] == [None] * 3
    finally:
        gc.enable()


def test_looking_at_saved_tensors_gives_nothing_back() -> None:
    """Debuggers do it, outside of any backward."""
    model, x = _linears(1), torch.randn(4, 8)
    checkpointer = Checkpointer(keeps=MATMULS)
    y = checkpointer.checkpoint(model, x)

    assert torch.equal(y.grad_fn._saved_self, model[0](x))
    assert checkpointer.kept_bytes == BYTES
    y.sum().backward()
    assert checkpointer.kept_bytes == 0


# ---- What cannot be kept ----


def test_memory_that_was_written_is_not_held() -> None:
    """It would be kept for nothing."""
    checkpointer = Checkpointer(keeps=MATMULS)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    x = torch.randn(4, 8)

    y = checkpointer.checkpoint(model, x)

    assert checkpointer.kept_bytes == BYTES
    with counted() as calls:
        y.sum().backward()
    assert calls["addmm"] <= 1


def test_collectives_write_without_saying_so(group: Group) -> None:
    """A row-parallel linear reduces what a matmul returned in place; twice would be wrong."""

    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            dist.all_reduce(x, group=group.process_group)
            return x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    torch.manual_seed(group.rank)
    up, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return Reduce.apply(up(up(x))).sin()

    (expected,) = torch.autograd.grad(function(x).sum(), x)
    for policy in (MATMULS, everything):
        checkpointer = Checkpointer(keeps=policy)
        loss = checkpointer.checkpoint(function, x).sum()
        if policy is MATMULS:
            assert checkpointer.kept_bytes == BYTES  # of the first, which nobody wrote to
        (found,) = torch.autograd.grad(loss, x)
        assert torch.equal(found, expected)


def test_views_of_what_is_there_are_never_kept() -> None:
    """Some say so in their schema, others do not."""
    checkpointer = Checkpointer(keeps=everything)
    x = torch.randn(2, 4, 8, requires_grad=True)
    y = checkpointer.checkpoint(
        lambda x: torch.ops.aten._unsafe_view(x.view(-1, 8)[:], [4, 16]).sin(), x
    )
    assert checkpointer.kept_bytes == y.nbytes
    with counted() as calls:
        y.sum().backward()
    assert calls["_unsafe_view"] == 1


def test_subclasses_are_kept_whole_with_their_parts_counted() -> None:
    """Distributed and quantized tensors are made of others. For numbers see `test_numbers.py`."""
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)
    checkpointer = Checkpointer(keeps=MATMULS)

    with counted() as calls:
        loss = checkpointer.checkpoint(lambda x: (x @ weight).sin().sum(), TwoTensor(x, 2 * x))
        assert checkpointer.kept_bytes == 2 * BYTES
        loss.backward(torch.ones_like(loss))

    assert calls["mm"] == 2  # in forward, and for the weight's gradient


# ---- A second run that differs ----


def _changing(*functions: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    rest = iter(functions)

    def function(x: Tensor) -> Tensor:
        return next(rest)(x)

    return function


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            lambda x: (x @ x).sin() + torch.addmm(x, x, x),
            lambda x: torch.addmm(x, x, x).sin() + x @ x,
            r"aten\.addmm\.default was called.*in forward aten\.mm\.default was",
        ),
        (
            lambda x: (x @ x).sin().cos(),
            lambda x: (x @ (x @ x)).sin().cos(),
            r"aten\.mm\.default was called.*in forward nothing more was",
        ),
        (
            lambda x: (x.detach() @ x.detach()).sum() * x.sin(),
            lambda x: (x[:2].detach() @ x.detach()).sum() * x.sin(),
            r"aten\.mm\.default.*was given \(4, 4\).*and \(2, 4\)",
        ),
    ],
    ids=["order", "count", "shape"],
)
def test_another_operator_is_named(
    first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor], message: str
) -> None:
    """Its output would be taken for that of another, and shapes would fit."""
    checkpointer = Checkpointer(keeps=MATMULS, stops_early=False)
    x = torch.randn(4, 4, requires_grad=True)
    loss = checkpointer.checkpoint(_changing(first, second), x).sum()

    with pytest.raises(NondeterminismError, match=message):
        loss.backward()

    del loss
    assert checkpointer.kept_bytes == 0
