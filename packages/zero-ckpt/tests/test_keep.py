"""Outputs that are kept stand in for their operators, and change no bit of anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from same_numbers import (
    Block,
    Run,
    assert_equal,
    changing,
    everything,
    linears,
    nested,
    no_collector,
    plainly,
    slope,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from zero_ckpt import (
    MATMULS,
    Checkpointer,
    ModulePolicy,
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
from zero_comm.testing import equal

pytestmark = pytest.mark.xdist_group("ranks")


class Operators(TorchDispatchMode):
    """Counts what runs: a mode entered before another is below it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


BYTES = 4 * 8 * 4  # of one output, for an input of 4 rows


def _x() -> Tensor:
    return torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()


# ---- What runs, and what is kept ----

Kept = tuple[Callable[[Tensor], Tensor], OperatorPolicy | None]  # a function, what of it


def _attention() -> Kept:
    conv = nn.Conv1d(4, 4, 3, padding=1)

    def function(x: Tensor) -> Tensor:
        x = conv(x)[None, None]
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).relu()

    return function, MATMULS


def _of_blocks(policy: ModulePolicy) -> Kept:
    model = nn.Sequential(Block(8), Block(8))
    return lambda x: model(x[None]), inside(model, policy)


def _by_hand() -> Kept:
    block = Block(8)
    return lambda x: block(block.forward(x[None])), inside(block, by_type(Block))


def _views(x: Tensor) -> Tensor:
    return torch.ops.aten._unsafe_view(x.view(-1, 4)[:], [2, 16]).sin()


# The bytes that are kept, and how often operators run in forward and backward together.
ROWS: dict[str, tuple[Callable[[], Kept], int | None, dict[str, int]]] = {
    "matmuls": (lambda: (linears(3), MATMULS), 3 * BYTES, {"addmm": 3, "gelu": 6}),
    "nothing": (lambda: (linears(3), None), 0, {"addmm": 6, "gelu": 6}),
    "an operator": (lambda: (linears(3), by_operator("gelu")), 3 * BYTES, {"addmm": 6, "gelu": 3}),
    "more than one output": (  # of attention, which returns what its softmax added up to, too
        _attention,
        2 * BYTES + 4 * 4,
        {"convolution": 1, "_scaled_dot_product_flash_attention_for_cpu": 1},
    ),
    "modules by name": (
        lambda: _of_blocks(by_name("*.attention")),
        None,
        {"_safe_softmax": 2, "native_layer_norm": 4},
    ),
    "modules by type": (
        lambda: _of_blocks(by_type(nn.MultiheadAttention)),
        None,
        {"_safe_softmax": 2, "native_layer_norm": 4},
    ),
    # Forward by hand passes by hooks, and so by what watches calls.
    "a call and a forward by hand": (_by_hand, None, {"native_layer_norm": 3}),
    # What was written to is no longer what the operator returned: it would be kept for nothing.
    "memory that was written": (
        lambda: (nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)), MATMULS),
        BYTES,
        {"addmm": 3},
    ),
    # Views of what is there are never kept. Some say so in their schema, others do not.
    "views": (lambda: (_views, everything), BYTES, {"_unsafe_view": 2}),
}


@pytest.mark.parametrize("name", ROWS)
def test_what_is_kept_runs_once_and_the_rest_twice(name: str) -> None:
    """The point of it. Numbers stay, and so do random ones."""
    make, num_bytes, expected = ROWS[name]
    function, policy = make()
    checkpointer = Checkpointer(keeps=policy, stops_early=False)

    torch.manual_seed(0)
    gradient = slope(function, x := _x())
    torch.manual_seed(0)
    with Operators() as ran:
        y = checkpointer.checkpoint(function, x)
        assert num_bytes in (checkpointer.kept_bytes, None)
        (found,) = torch.autograd.grad(y.sum(), x)

    assert equal(found, gradient)
    assert {operator: ran.calls[operator] for operator in expected} == expected
    assert checkpointer.kept_bytes == 0


# Writes to what a product returned, by views that count writes apart from it.
_WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, w: (x @ w).mul_(2).sin(),
    "parts": lambda x, w: torch.unsafe_split(torch.addmm(x[0], x[0], w), 4, -1)[1].mul_(2).sin(),
    "sizes": lambda x, w: torch.unsafe_split_with_sizes(x @ w, [3, 5], -1)[0].mul_(2).sin(),
    "data": lambda x, w: (y := x[0] @ w, y.data.mul_(2), y.sin())[2],
}


@pytest.mark.parametrize("name", [*_WRITES, "gates"])
def test_what_is_written_by_a_view_that_does_not_say_so_runs_again(name: str) -> None:
    """Gradients would be those of other values, without a word."""
    torch.manual_seed(0)
    x, w, gates = torch.randn(2, 8, 8, requires_grad=True), torch.randn(8, 8), nn.GRU(8, 8)
    function = partial(_WRITES[name], w=w) if name in _WRITES else lambda x: gates(x)[0]
    found = slope(partial(Checkpointer(keeps=MATMULS).checkpoint, function), x)
    assert equal(found, slope(function, x))


@pytest.mark.parametrize("sizes", [(8, 8), (2, 8, 8)])  # of more than two dims it is a view
def test_what_is_written_after_forward_runs_again(sizes: tuple[int, ...]) -> None:
    """By who has it as an output."""
    x, w = torch.randn(sizes, requires_grad=True), torch.randn(8, 8)
    products, sines = Checkpointer(keeps=MATMULS).checkpoint(lambda x: (y := x @ w, y.sin()), x)
    with torch.no_grad():
        products.mul_(2)
    (found,) = torch.autograd.grad(sines.sum(), x)
    assert equal(found, slope(lambda x: (x @ w).sin(), x))


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


def test_subclasses_are_kept_whole_with_their_parts_counted() -> None:
    """Distributed and quantized tensors are made of others. For numbers see `test_numbers.py`."""
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)
    checkpointer = Checkpointer(keeps=MATMULS)

    with Operators() as ran:
        loss = checkpointer.checkpoint(lambda x: (x @ weight).sin().sum(), TwoTensor(x, 2 * x))
        assert checkpointer.kept_bytes == 2 * BYTES
        loss.backward(torch.ones_like(loss))

    assert ran.calls["mm"] == 2  # in forward, and for the weight's gradient


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

    expected = slope(function, x)
    for policy in (MATMULS, everything):
        checkpointer = Checkpointer(keeps=policy)
        loss = checkpointer.checkpoint(function, x).sum()
        if policy is MATMULS:
            assert checkpointer.kept_bytes == BYTES  # of the first, which nobody wrote to
        (found,) = torch.autograd.grad(loss, x)
        assert equal(found, expected)


def test_a_policy_sees_the_call() -> None:
    """Custom policies decide by shapes, sizes and what is kept already. Their errors pass."""
    seen: list[tuple[str, int, int]] = []
    is_failing = False

    def policy(call: OperatorCall) -> bool:
        if is_failing:
            raise KeyError("mine")
        seen.append((call.name, call.output_bytes, call.kept_bytes))
        return call.args[-1].shape == (8, 8) if call.name == "aten::addmm" else False

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    checkpointer = Checkpointer(keeps=policy)
    with Operators() as ran:
        checkpointer.checkpoint(model, torch.randn(4, 8)).sum().backward()

    assert seen == [
        ("aten::addmm", BYTES, 0), ("aten::relu", BYTES, BYTES), ("aten::addmm", 32, BYTES)
    ]  # fmt: skip
    assert ran.calls["addmm"] == 2
    is_failing = True
    with pytest.raises(KeyError, match="mine"):
        checkpointer.checkpoint(model, torch.randn(4, 8))
    assert checkpointer.kept_bytes == 0
    torch.randn(4) + 1  # asks nobody: no mode is left behind


def test_where_nothing_is_kept_writes_count_alike_in_both_runs() -> None:
    """A copy at the address of its first one would be taken for a weight that was written."""
    versions: list[int] = []

    def function(x: Tensor) -> Tensor:
        with torch.inference_mode():
            factor = torch.ones(()) * 2
        factor = factor.clone()
        versions.append(factor._version)
        return x * factor

    Checkpointer(keeps=lambda call: False).checkpoint(function, _x()).sum().backward()

    assert versions[0] == versions[1]


# ---- Bytes ----


def test_nested_checkpoints_keep_an_output_once() -> None:
    """The outer's second run calls the inner checkpoint again, between its own operators."""
    model, x = linears(), torch.randn(4, 8)
    checkpointer = Checkpointer(keeps=MATMULS)
    with Operators() as ran:
        loss = checkpointer.checkpoint(lambda x: checkpointer.checkpoint(model, x).sin(), x).sum()
        assert checkpointer.kept_bytes == 2 * BYTES  # though two keep them
        loss.backward()

    assert ran.calls["addmm"] == 2
    assert checkpointer.kept_bytes == 0


@pytest.mark.parametrize("room", [0, BYTES - 1, BYTES, 3 * BYTES + 5, 100 * BYTES])
def test_a_budget_keeps_what_comes_first(room: int) -> None:
    """Ranks must decide alike, and a limit is a limit."""
    model, x = linears(2), torch.randn(4, 8)
    checkpointer = Checkpointer(keeps=within_bytes(room, MATMULS))
    num_kept = min(room // BYTES, 6)

    for _ in range(2):  # backward gives all of it back
        with Operators() as ran:
            y = x
            for _ in range(3):
                y = checkpointer.checkpoint(model, y)
            assert checkpointer.kept_bytes == num_kept * BYTES
            y.sum().backward()
        assert ran.calls["addmm"] == 6 + 6 - num_kept
        assert checkpointer.kept_bytes == 0


@pytest.mark.parametrize("runs_backward", [True, False])
def test_no_cycle_keeps_outputs_alive(runs_backward: bool) -> None:
    """Nor those of a loss that nobody calls backward on, as in an evaluation with gradients on."""
    memory: list[StorageWeakRef] = []

    def policy(call: OperatorCall) -> bool:
        memory.append(StorageWeakRef(call.output.untyped_storage()))
        return True

    model = linears(bias=False)  # whose operators all return one tensor
    checkpointer = Checkpointer(keeps=policy)
    run = nested(checkpointer.checkpoint)
    with no_collector():
        loss = run(lambda x: run(model, x).sin(), torch.randn(4, 8)).sum()
        assert not all(storage.expired() for storage in memory)
        assert checkpointer.kept_bytes > 0
        if runs_backward:
            loss.backward()
        del loss

        assert all(storage.expired() for storage in memory)
        assert checkpointer.kept_bytes == 0


def test_a_graph_that_is_retained_keeps_them_for_each_backward() -> None:
    """And gives them back at the last one, while no second run's activations stay with them."""
    memory: list[StorageWeakRef] = []
    layers = linears(bias=False)

    def function(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x).sin()
            memory.append(StorageWeakRef(x.untyped_storage()))
        return x

    x = _x()
    expected = slope(function, x)
    checkpointer = Checkpointer(keeps=MATMULS)
    with Operators() as ran, no_collector():
        loss = checkpointer.checkpoint(function, x).sum()
        for retains in (True, True, False):
            memory.clear()
            (found,) = torch.autograd.grad(loss, x, retain_graph=retains)
            assert equal(found, expected)
            assert memory and all(storage.expired() for storage in memory)
            assert checkpointer.kept_bytes == (2 * BYTES if retains else 0)

    assert ran.calls["gelu"] == 2 * 4
    assert ran.calls["mm"] == 2 + 3 * 2  # once, and for the gradient of x


def test_looking_at_saved_tensors_gives_nothing_back() -> None:
    """Debuggers do it, outside of any backward."""
    model, x = linears(1), torch.randn(4, 8)
    checkpointer = Checkpointer(keeps=MATMULS)
    y = checkpointer.checkpoint(model, x)

    assert equal(y.grad_fn._saved_self, model[0](x))
    assert checkpointer.kept_bytes == BYTES
    y.sum().backward()
    assert checkpointer.kept_bytes == 0


# ---- A second run that differs ----


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
    loss = checkpointer.checkpoint(changing(first, second), x).sum()

    with pytest.raises(NondeterminismError, match=message):
        loss.backward()

    del loss
    assert checkpointer.kept_bytes == 0
