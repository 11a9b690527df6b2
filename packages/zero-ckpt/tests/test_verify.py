"""Verified recomputation raises where gradients would be wrong, and names the tensor and line."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from same_numbers import assert_equal
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
)
from zero_ckpt import (
    AbstractKept,
    AbstractSaver,
    Checkpointer,
    CheckpointError,
    NondeterminismError,
    Verification,
)


def _verified(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return Checkpointer(verifies=Verification()).checkpoint(function, *args, **kwargs)


def _x() -> Tensor:
    return torch.arange(1.0, 7.0).reshape(2, 3).requires_grad_()


# ---- Each cause, as someone would write it ----


DIFFERS = r"saved tensor \d+ of \d+, .* on cpu, has other values than in forward\. "
HERE = DIFFERS + r"It is saved .*at test_verify\.py:\d+ in "


_NUMBERS = itertools.count(1)
_SCALES = itertools.cycle((1.0, 1.0, 2.0))  # forward, the recomputation within it, the later one
_GENERATOR = torch.Generator()


def counted(x: Tensor) -> Tensor:
    return (x.exp() * (0.1 * next(_NUMBERS))).sin()


def masked(x: Tensor) -> Tensor:
    return (x * torch.rand(x.shape, generator=_GENERATOR)).sin()


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(next(_NUMBERS))
    return nn.functional.dropout(x, 0.5).sin()


def branching(x: Tensor) -> Tensor:
    y = x.exp()
    return (y.sin() if next(_NUMBERS) % 2 else y.cos()).exp()


def force(x: Tensor) -> Tensor:
    """What a recomputation within the first run saves is not saved by that run."""
    y = x.exp()
    scale = next(_SCALES)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return (grad * scale).sin()


@pytest.mark.parametrize("function", [counted, masked, seeded, branching, force])
def test_the_tensor_its_line_and_what_may_cause_it_are_named(
    function: Callable[[Tensor], Tensor],
) -> None:
    """Counters, generators that nobody restores, branches: all that users have written."""
    name = function.__name__
    words = r"\(a counter, a cache, .*use_deterministic_algorithms\(True\)"
    with pytest.raises(NondeterminismError, match=rf"{name}: {HERE}{name}\. .*{words}"):
        _verified(function, _x()).sum().backward()


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_weight_that_an_optimizer_stepped_is_found(is_counted: bool) -> None:
    """Some optimizers write behind the version's back, where torch itself notices nothing."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Tanh())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = _x()
    output = _verified(net, x)
    net(x).sum().backward()
    if is_counted:
        optimizer.step()
    else:
        for param in net.parameters():
            param.data.sub_(0.1 * param.grad)

    found = "written in place .*by an optimizer's step" if is_counted else DIFFERS + ".*in a Tanh"
    with pytest.raises(CheckpointError, match=rf"checkpoint of Sequential: .*{found}"):
        output.sum().backward()


class _Keeping(AbstractSaver):
    """Keeps `change(input)` of each, and gives back `restore` of that; asks nothing later."""

    def __init__(
        self,
        change: Callable[[Tensor], Tensor],
        restore: Callable[[Tensor], Tensor] = Tensor.detach,
    ) -> None:
        self.change, self.restore = change, restore

    def save(self, inputs: Sequence[Tensor], layer: str) -> AbstractKept:
        kept, restore = [self.change(tensor) for tensor in inputs], self.restore

        class Kept(AbstractKept):
            def restore(self) -> Sequence[Tensor]:
                return [restore(tensor) for tensor in kept]

        return Kept()


def _square_of_sine(x: Tensor) -> Tensor:
    return x.sin().square()


@pytest.mark.parametrize(
    ("change", "is_written", "cause"),
    [
        (lambda t: t.bfloat16().float(), False, "by a saver"),  # loses digits
        (lambda t: t, True, "written in place"),  # through .data, which bumps no version
        (torch.clone, True, None),  # data loaders write their buffers again, as is their right
        (lambda t: t.t().contiguous().t(), False, None),  # gradients depend on values alone
    ],
)
def test_an_input_that_comes_back_with_other_values_is_found(
    change: Callable[[Tensor], Tensor], is_written: bool, cause: str | None
) -> None:
    """A saver that packs into fewer bits gives gradients of another function."""
    x = torch.rand(3, 4).requires_grad_()
    (expected,) = torch.autograd.grad(_square_of_sine(x).sum(), x)
    y = Checkpointer(saver=_Keeping(change), verifies=Verification()).checkpoint(_square_of_sine, x)
    if is_written:
        x.data.add_(1)

    message = f"{HERE}_square_of_sine.*{cause}"
    with nullcontext() if cause is None else pytest.raises(NondeterminismError, match=message):
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


def test_without_verification_the_message_says_how_to_turn_it_on() -> None:
    """Whoever sees the error for the first time does not know the option."""
    sizes = itertools.count(1)

    with pytest.raises(NondeterminismError, match=r"Checkpointer\(verifies=Verification\(\)\)"):
        Checkpointer().checkpoint(lambda x: x[:, : next(sizes)].sin(), _x()).sum().backward()


# ---- No false alarm ----


def test_a_table_that_only_the_first_run_has_to_make_raises_no_alarm() -> None:
    """No gradient depends on how it was made. For statistics see `test_numbers.py`."""
    tables: list[Tensor] = []

    def scaled(x: Tensor) -> Tensor:
        if not tables:
            tables.append(torch.arange(3.0).cos())
        return (x * tables[0]).sin()

    _verified(scaled, _x()).sum().backward()


def test_a_retained_graph_is_verified_each_time() -> None:
    """The checksums outlive the first backward, and a later difference is found too."""
    scale = [2.0]

    def scaled(x: Tensor) -> Tensor:
        return (x * scale[0]).sin()

    x = _x()
    y = _verified(scaled, x).sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    scale[0] = 3.0

    with pytest.raises(NondeterminismError, match=HERE + ".*scaled"):
        y.backward()


def test_a_difference_in_an_inner_checkpoint_is_the_inner_ones() -> None:
    """The outer one's run is right up to its stop: it must not be blamed, nor hide the inner."""
    calls = []

    def inner(x: Tensor) -> Tensor:
        calls.append(1)
        return (x * len(calls)).sin()

    run = Checkpointer(verifies=Verification()).checkpoint

    def outer(x: Tensor) -> Tensor:
        return run(inner, x.exp())

    with pytest.raises(NondeterminismError, match=rf"checkpoint of .*\.inner: {HERE}"):
        run(outer, _x()).sum().backward()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_a_gpu_raise_no_alarm(dtype: torch.dtype, dropout_p: float) -> None:
    """Without dropout some attention kernels leave the seed that they save blank."""
    x = torch.randn(2, 2, 48, 16, device="cuda", dtype=dtype, requires_grad=True)
    layer = nn.LSTM(16, 16, num_layers=2, dropout=dropout_p, device="cuda")

    def function(x: Tensor) -> Tensor:
        y = nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=dropout_p)
        return layer(y.float().flatten(0, 1))[0]

    torch.cuda.set_sync_debug_mode("error")
    try:
        output = _verified(function, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    output.sum().backward()


# ---- What is left behind, and what it costs ----


def test_after_an_error_generators_and_buffers_are_as_before() -> None:
    """A loop that skips a bad batch goes on with the numbers that it would have had."""

    class Flipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return (nn.functional.dropout(self.norm(x)) * self.calls.clone()).sin()

    torch.manual_seed(0)  # a mask that drops everything would hide the difference
    module = Flipping()
    y = _verified(module, _x())
    before = [t.clone() for t in (torch.get_rng_state(), *module.state_dict().values())]

    with pytest.raises(NondeterminismError, match=HERE + ".*Flipping"):
        y.sum().backward()

    assert_equal([torch.get_rng_state(), *module.state_dict().values()], before)
    assert _get_current_dispatch_mode() is None


def test_only_sums_are_kept_of_activations_and_nothing_of_restored_inputs() -> None:
    """A debugging aid that needs the memory that checkpoints save cannot be turned on."""
    storages: list[StorageWeakRef] = []

    def watched(tensor: Tensor) -> Tensor:
        fresh = tensor.clone()
        storages.append(StorageWeakRef(fresh.untyped_storage()))
        return fresh

    checkpointer = Checkpointer(saver=_Keeping(torch.clone, watched), verifies=Verification())
    y = checkpointer.checkpoint(lambda x: watched(x).sin().exp(), _x())
    gc.collect()
    assert [storage.expired() for storage in storages] == [True]

    y.sum().backward(retain_graph=True)
    gc.collect()
    assert [storage.expired() for storage in storages] == [True] * 3


@pytest.mark.parametrize("every", [2, None])
def test_layers_take_turns_and_no_other_call_is_looked_at(every: int | None) -> None:
    """With as many layers as calls between, always the same one would be verified."""
    seen: list[bool] = []

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(_get_current_dispatch_mode() is not None)
            return x.sin()

    layers = [Layer() for _ in range(4)]
    verifies = None if every is None else Verification(every)
    run = Checkpointer(verifies=verifies).checkpoint
    for _ in range(4):
        x = _x()
        for layer in layers:
            x = run(layer, x)

    turns = [every and (layer + step) % every == 0 for step in range(4) for layer in range(4)]
    assert seen == list(map(bool, turns))


def test_calls_made_while_another_is_computed_again_do_not_count() -> None:
    """Backward never asks for them, and an inner layer would miss its turns."""
    seen: list[int] = []
    run = Checkpointer(verifies=Verification(every=3)).checkpoint

    def inner(x: Tensor) -> Tensor:
        seen.append(len(_get_current_dispatch_mode_stack()))
        return x.sin()

    def outer(x: Tensor) -> Tensor:
        return run(inner, x.exp()).cos()

    for step in range(6):
        y = run(outer, _x())
        assert seen[-1] == (step % 3 == 0) + ((1 + step) % 3 == 0)
        y.sum().backward()


# ---- Bits ----


class _Saves(torch.autograd.Function):
    """Multiplies by 1, and has autograd save a tensor that backward asks for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors
        return grads[0], None


def _is_told(first: Tensor, second: Tensor) -> bool:
    """Whether it is an error that the second run saves the one where the first saved the other."""
    runs = iter([first, second])
    run = Checkpointer(verifies=Verification()).checkpoint
    output = run(lambda x: _Saves.apply(x, next(runs)), torch.ones(1, requires_grad=True))
    try:
        output.sum().backward()
    except NondeterminismError:
        return True
    return False


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int8, torch.uint16, torch.float8_e4m3fn, torch.bfloat16, torch.complex64],
)
def test_one_other_bit_is_told(dtype: torch.dtype) -> None:
    """The last bit of a float is what a kernel that adds in another order changes."""
    for shape in ((), (3,), (0,), (2, 0, 3), (5, 7), (3, 1, 9)):
        tensor = (torch.rand(shape) * 3).to(dtype)
        other = tensor.clone()
        assert not _is_told(tensor, other), shape

        if other.numel():
            octets = other.view(-1).view(torch.uint8)
            octets[octets.numel() // 2] ^= 1
            assert _is_told(tensor, other), shape


def test_bits_and_nothing_else_are_told() -> None:
    """A NaN differs from itself by value, and a saver gives inputs back contiguous."""
    mask, floats = torch.arange(64) % 3 == 0, torch.rand(8, dtype=torch.float64)
    signs = torch.tensor([1.0, -1, 1, 1, 1, -1, 1, 1])
    zeros = torch.zeros((1 << 20) + 3, dtype=torch.int64)  # larger than a chunk
    first, last = zeros.clone(), zeros.clone()
    first[0] = last[-1] = 1
    nans = torch.tensor([float("nan")] * 2)
    others = nans.view(torch.int32).add(1).view(torch.float32)
    assert others.isnan().all()
    base = torch.rand(4, 6, 5)
    views = base.transpose(0, 2), base[1:, ::2], base[:, :1].expand(4, 6, 5), base[0, 0, 1]
    blank = torch.empty(3, device="meta"), torch.eye(3).to_sparse()  # no bits, and several tensors

    for one, other in [(mask, mask.roll(1)), (floats, floats * signs), (nans, others)]:
        assert _is_told(one, other)  # in integers that wrap, two signs could cancel
    for one, other in itertools.combinations((zeros, first, last), 2):
        assert _is_told(one, other)
    for same in (nans, *views):
        assert not _is_told(same, same.clone(memory_format=torch.contiguous_format))
    for tensor in blank:
        assert not _is_told(tensor, tensor * 2)


def test_memory_that_is_used_again_is_no_write() -> None:
    """What inference mode makes counts writes in one run only; where it lies is chance."""
    layer = nn.Linear(8, 8)

    def function(x: Tensor) -> Tensor:
        with torch.inference_mode():
            factor = layer(x).mean() + torch.rand(())
        return layer(x) * factor.clone()

    for size in range(130):
        between = [torch.rand(8, 8) for _ in range(size % 13)]
        x = torch.ones(4, 8, requires_grad=True)
        Checkpointer(verifies=Verification()).checkpoint(function, x).sum().backward()
        del between
