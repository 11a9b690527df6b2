"""A checkpointed call does what the call does, and keeps none of its activations."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from same_numbers import Run, plainly
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from zero_ckpt import Checkpointer, CheckpointError, NondeterminismError, PackedSaver

checkpoint = Checkpointer().checkpoint


def _nested(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(partial(checkpoint, function), *args, **kwargs)


# ---- Arguments and results ----


class _Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclasses.dataclass(frozen=True)
class _Bundle:
    tensors: list[Tensor]
    note: str


class _Opaque:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _mix(x: Tensor, *rest: Any, **options: Any) -> Any:
    bundle, pair, opaque = rest[0], options["pair"], options["opaque"]
    total = (x * bundle.tensors[0]).sin() * pair.right["deep"][0].exp() + opaque.tensor.tanh()
    total = torch.where(options["mask"], total, total.square())
    index = total.argmax()
    return OrderedDict(
        loss=total.sum() * options["factor"],
        index=index,
        none=None,
        rest=(total * pair.left, [index > 1, "text"], options["nothing"]),
    )


def _arguments() -> tuple[list[Tensor], tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(3)
    leaves = [torch.randn(5, requires_grad=index != 2) for index in range(5)]
    a, b, c, d, e = (leaf * 1 for leaf in leaves)
    options = {
        "pair": _Pair(a, {"deep": (b, 3)}),
        "opaque": _Opaque(c),
        "mask": torch.tensor([True, False, True, False, True]),
        "factor": 0.5,
        "nothing": None,
    }
    return leaves, (d, _Bundle([e], "five"), None), options


def _gradients(run: Run, function: Callable[..., Any]) -> tuple[Any, list[Any]]:
    leaves, args, kwargs = _arguments()
    out = run(function, *args, **kwargs)
    (out["loss"] + out["rest"][0].sum()).backward()
    return out, [leaf.grad for leaf in leaves]


def test_tensors_anywhere_in_arguments_and_results_are_found() -> None:
    """Existing code passes masks, None, dataclasses and keywords, and unpacks what it gets."""
    expected, gradients = _gradients(plainly, _mix)

    found, found_gradients = _gradients(checkpoint, _mix)

    assert type(found) is OrderedDict and list(found) == list(expected)
    assert torch.equal(found["loss"], expected["loss"])
    assert torch.equal(found["index"], expected["index"])
    assert not found["index"].requires_grad and not found["rest"][1][0].requires_grad
    assert found["none"] is None and found["rest"][1][1] == "text" and found["rest"][2] is None
    for one, other in zip(found_gradients, gradients, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_arguments_arrive_as_the_very_objects_that_were_passed() -> None:
    """A function may look at identity, and its caller at what it wrote into a dict."""
    seen: list[Any] = []
    options = {"x": torch.randn(2, requires_grad=True), "log": []}

    def note(options: dict[str, Any]) -> Tensor:
        seen.append(options)
        return options["x"].sin().exp()

    checkpoint(note, options).sum().backward()

    assert seen[0] is options
    assert seen[1] is not options and seen[1]["log"] is options["log"]


# ---- What is kept ----


def _watch_memory(run: Run) -> tuple[int, Tensor]:
    """How many activations of a call are alive after it."""
    alive: list[weakref.ref[Tensor]] = []

    def deep(x: Tensor) -> Tensor:
        for _ in range(5):
            x = x.sin()
            alive.append(weakref.ref(x))
        return x

    x = torch.randn(3, requires_grad=True)
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        y = run(deep, x)
    return sum(ref() is not None for ref in alive), y


def test_activations_are_dropped_until_backward() -> None:
    """It is what a checkpoint is for."""
    kept_without, _ = _watch_memory(plainly)
    assert kept_without == 5

    kept, y = _watch_memory(checkpoint)

    assert kept == 1  # the output
    y.sum().backward()


def test_an_inner_checkpoint_hides_nothing_from_the_outer_one() -> None:
    """Its input is an activation of the outer call, and has to go as the others do."""
    alive: list[weakref.ref[Tensor]] = []

    def inner(x: Tensor) -> Tensor:
        return x.sin().cos()

    def outer(x: Tensor) -> Tensor:
        for _ in range(4):
            x = checkpoint(inner, x.exp().sigmoid())
            alive.append(weakref.ref(x.untyped_storage()))
        return x.sum()

    x = torch.randn(3, requires_grad=True)
    y = checkpoint(outer, x)
    gc.collect()

    assert not any(ref() is not None for ref in alive)
    y.backward()


@pytest.mark.parametrize("run", [checkpoint, _nested])
@pytest.mark.parametrize("has_backward", [False, True])
def test_a_graph_that_is_gone_takes_everything_along(run: Run, has_backward: bool) -> None:
    """Autograd's own cycles are seen by no collector: memory would grow from step to step."""

    def saves_its_result(x: Tensor) -> Tensor:
        return x.sigmoid().softmax(-1).exp().relu()

    function = partial(saves_its_result)
    x = torch.randn(2, 4, requires_grad=True)
    hidden = x * 1
    refs, y = (weakref.ref(function), weakref.ref(hidden)), run(function, hidden)
    if has_backward:
        y.sum().backward()
    del function, hidden, y

    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_no_collector_is_needed_for_that() -> None:
    """It comes late, and memory of a GPU is full by then."""
    function = partial(torch.nn.functional.gelu)
    ref, x = weakref.ref(function), torch.randn(3, requires_grad=True)
    gc.disable()
    try:
        checkpoint(function, x).sum().backward()
        del function
        assert ref() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_where_gradients_are_off(off: Callable[[], Any]) -> None:
    """Evaluation has no backward that would free it, nor give a slot back."""
    x, saver = torch.randn(3), PackedSaver(num_slots=1)

    with off():
        for _ in range(2):
            assert torch.equal(Checkpointer(saver=saver).checkpoint(torch.sin, x), x.sin())

    assert saver.kept_bytes() == saver.reserved_bytes() == {}


# ---- How often it runs ----


class _Count:
    """A function that counts its operators."""

    def __init__(self) -> None:
        self.runs: list[int] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.runs.append(0)
        for _ in range(4):
            x = x.sin()
            self.runs[-1] += 1
        x = x + 1  # needs nothing for its gradient
        self.runs[-1] += 1
        return x


@pytest.mark.parametrize(("stops_early", "operators"), [(True, 3), (False, 5)])
def test_the_second_run_ends_with_the_last_tensor_that_is_needed(
    stops_early: bool, operators: int
) -> None:
    """The last projection of a block is a third of its time."""
    count = _Count()
    x = torch.randn(3, requires_grad=True)

    Checkpointer(stops_early=stops_early).checkpoint(count, x).sum().backward()

    assert count.runs == [5, operators]


def test_a_graph_that_is_retained_is_computed_once_per_backward() -> None:
    """And gives the same gradient each time."""
    count, x = _Count(), torch.randn(3, requires_grad=True)
    y = checkpoint(count, x).sum()

    first = torch.autograd.grad(y, x, retain_graph=True)
    second = torch.autograd.grad(y, x)

    assert torch.equal(first[0], second[0])
    assert len(count.runs) == 3


def test_what_nobody_asks_for_is_not_computed_again() -> None:
    """A branch without a loss costs its forward only."""
    count, x = _Count(), torch.randn(3, requires_grad=True)
    unused = checkpoint(count, x)

    x.square().sum().backward()

    assert len(count.runs) == 1 and unused.requires_grad


# ---- What goes wrong ----


@pytest.mark.parametrize("fails_in", [0, 1])
@pytest.mark.parametrize("run", [checkpoint, _nested])
def test_an_exception_leaves_generators_as_they_are_without(run: Run, fails_in: int) -> None:
    """Whoever catches it trains on with the numbers of a run in which it was caught as well."""
    calls = 0

    def fail(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        x = F.dropout(x.sin(), 0.5)
        if calls > fails_in:
            raise KeyError("batch 3")
        return x.exp()

    x = torch.randn(4, requires_grad=True)
    if fails_in:
        y = run(fail, x)
        before = torch.get_rng_state()
        with pytest.raises(KeyError, match="batch 3"):
            y.sum().backward()
    else:
        before = torch.get_rng_state()
        F.dropout(x, 0.5)
        before, _ = torch.get_rng_state(), torch.set_rng_state(before)
        with pytest.raises(KeyError, match="batch 3"):
            run(fail, x)
    assert torch.equal(torch.get_rng_state(), before)
    z = checkpoint(torch.sin, x)  # no hook is left behind
    assert torch.equal(torch.autograd.grad(z.sum(), x)[0], x.detach().cos())


def test_a_backward_can_be_tried_again_after_an_exception() -> None:
    """Out of memory, say: half of what it found must not be taken for all."""
    is_failing = False

    def moody(x: Tensor) -> Tensor:
        x = x.sin().exp()
        if is_failing:
            raise MemoryError
        return x.cos().sin()

    x = torch.randn(3, requires_grad=True)
    (expected,) = torch.autograd.grad(moody(x).sum(), x)
    y = checkpoint(moody, x).sum()
    is_failing = True
    with pytest.raises(MemoryError):
        torch.autograd.grad(y, x, retain_graph=True)
    is_failing = False

    assert torch.equal(torch.autograd.grad(y, x)[0], expected)


def test_the_stop_passes_through_code_that_catches_exceptions() -> None:
    """Retry loops and loggers around a layer must not swallow it."""

    def careful(x: Tensor) -> Tensor:
        try:
            return x.sin().exp() + 1
        except Exception:
            return x

    x = torch.randn(3, requires_grad=True)
    (expected,) = torch.autograd.grad(careful(x).sum(), x)

    assert torch.equal(torch.autograd.grad(checkpoint(careful, x).sum(), x)[0], expected)


def _writes(x: Tensor) -> Tensor:
    return x.mul_(2).sin()


def test_a_function_that_writes_to_its_argument_is_refused() -> None:
    """The second run would begin with what the first one left."""
    x = torch.randn(3, requires_grad=True)

    with pytest.raises(
        CheckpointError, match=r"_writes: it wrote in place to its input 0, .*clone"
    ):
        checkpoint(_writes, x * 1)


def test_an_input_that_is_written_before_backward_is_noticed() -> None:
    """Gradients would be those of other inputs, without a word."""
    x = torch.randn(3, requires_grad=True)
    hidden = x * 1
    y = checkpoint(torch.sin, hidden)
    with torch.no_grad():
        hidden.add_(1)

    with pytest.raises(CheckpointError, match=r"written in place after it was called.*clone"):
        y.sum().backward()


def test_a_weight_that_is_written_before_backward_is_noticed() -> None:
    """As it is without a checkpoint."""
    layer, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    y = checkpoint(layer, x)
    with torch.no_grad():
        layer.weight.add_(1)

    with pytest.raises(CheckpointError, match=r"saved tensor .* was written in place between"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda x: x.sin(), r"saved 2 tensors in forward and 1 .*numpy's or Python's random"),
        (lambda x: x[:2].sin().exp(), r"saved tensor 0 of 2 was \(3,\) torch.float32 .* is \(2,\)"),
        (lambda x: x.double().sin().exp(), r"float32 on cpu in forward, and is .*float64"),
    ],
)
def test_a_second_run_that_saves_something_else_says_so(
    second: Callable[[Tensor], Tensor], message: str
) -> None:
    """A gradient made of two different runs belongs to no function at all."""
    functions = [lambda x: x.sin().exp(), second]
    x = torch.randn(3, requires_grad=True)

    def changing(x: Tensor) -> Tensor:
        return functions.pop(0)(x)

    y = checkpoint(changing, x)

    with pytest.raises(NondeterminismError, match=message):
        y.sum().backward()


@pytest.mark.parametrize("stops_early", [True, False])
def test_what_a_function_writes_over_is_no_gradient(stops_early: bool) -> None:
    """Autograd notices a write to what it saved; hooks get the tensor before, and must as well."""

    def careless(x: Tensor) -> Tensor:
        hidden = x.sigmoid()
        hidden.add_(1)
        return hidden.exp()

    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        careless(x).sum().backward()
    y = Checkpointer(stops_early=stops_early).checkpoint(careless, x)

    with pytest.raises(CheckpointError, match=r"saved tensor 0 of 2 .* by the function itself"):
        y.sum().backward()
