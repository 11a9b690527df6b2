"""A checkpointed call does what the call does, and keeps none of its activations."""

from __future__ import annotations

import dataclasses
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from same_numbers import Run, changing, everything, nested, no_collector, plainly, slope
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from zero_ckpt import Checkpointer, CheckpointError, NondeterminismError, PackedSaver
from zero_comm.testing import equal

checkpoint = Checkpointer().checkpoint
RUNS = pytest.mark.parametrize("run", [checkpoint, nested(checkpoint)], ids=["flat", "nested"])


# ---- Arguments and results ----


class _Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class _Bundle:
    tensors: list[Tensor]
    note: str


def _mix(x: Tensor, bundle: _Bundle, none: None, **options: Any) -> Any:
    pair, opaque = options["pair"], options["opaque"]
    total = (x * bundle.tensors[0]).sin() * pair.right["deep"][0].exp() + opaque.tensor.tanh()
    total = torch.where(options["mask"], total, total.square())
    index = total.argmax()
    rest = total * pair.left, [index > 1, "text"], none
    return OrderedDict(loss=total.sum() * options["factor"], index=index, rest=rest)


def _mixed(run: Run) -> tuple[Any, list[Any]]:
    torch.manual_seed(3)
    leaves = [torch.randn(5, requires_grad=index != 2) for index in range(5)]
    a, b, c, d, e = (leaf * 1 for leaf in leaves)
    options = {
        "pair": _Pair(a, {"deep": (b, 3)}),
        "opaque": SimpleNamespace(tensor=c),
        "mask": torch.tensor([True, False, True, False, True]),
        "factor": 0.5,
    }
    out = run(_mix, d, _Bundle([e], "five"), None, **options)
    (out["loss"] + out["rest"][0].sum()).backward()
    return out, [leaf.grad for leaf in leaves if leaf.requires_grad]


def test_tensors_anywhere_in_arguments_and_results_are_found() -> None:
    """Existing code passes masks, None, dataclasses and keywords, and unpacks what it gets."""
    expected, gradients = _mixed(plainly)

    found, found_gradients = _mixed(checkpoint)

    assert type(found) is OrderedDict and list(found) == list(expected)
    assert torch.equal(found["loss"], expected["loss"])
    assert torch.equal(found["index"], expected["index"])
    _, (flag, text), none = found["rest"]
    assert not found["index"].requires_grad and not flag.requires_grad
    assert (text, none) == ("text", None)
    assert all(map(equal, found_gradients, gradients))


def test_arguments_arrive_as_the_very_objects_that_were_passed() -> None:
    """A function may look at identity, and its caller at what it wrote into a dict."""
    seen: list[Any] = []
    x = torch.randn(2, requires_grad=True)
    options = {"x": x, "log": [], "bundle": _Bundle([x], "one"), "pair": _Pair(None, (x,))}

    def note(options: dict[str, Any]) -> Tensor:
        seen.append(options)
        return options["x"].sin().exp()

    checkpoint(note, options).sum().backward()

    first, second = seen
    assert first is options
    assert second is not options and second["log"] is not options["log"]  # nothing is put in twice
    assert second["x"] is second["bundle"].tensors[0] is second["pair"].right[0] is not x


# ---- What is kept ----


def test_activations_are_dropped_until_backward() -> None:
    """An inner call's input is an activation of the outer one, and goes as the others do."""
    activations: list[StorageWeakRef] = []

    def deep(x: Tensor, run: Run) -> Tensor:
        for _ in range(4):
            x = x.exp().sigmoid()
            activations.append(StorageWeakRef(x.untyped_storage()))
            x = run(torch.sin, x)
        return x.sum()

    x = torch.randn(3, requires_grad=True)
    for outer, inner, num_alive in (
        (plainly, plainly, 4),
        (plainly, checkpoint, 4),
        (checkpoint, plainly, 0),
        (checkpoint, checkpoint, 0),
    ):
        activations.clear()
        y = outer(deep, x, inner)
        assert sum(not activation.expired() for activation in activations) == num_alive
        y.backward()


@RUNS
@pytest.mark.parametrize("has_backward", [False, True])
def test_a_graph_that_is_gone_takes_everything_along(run: Run, has_backward: bool) -> None:
    """Autograd's own cycles are seen by no collector: memory would grow from step to step."""
    function = partial(lambda x: x.sigmoid().softmax(-1).exp().relu())  # which save their results
    hidden = torch.randn(2, 4, requires_grad=True) * 1
    refs, y = (weakref.ref(function), weakref.ref(hidden)), run(function, hidden)
    with no_collector():
        if has_backward:
            y.sum().backward()
        del function, hidden, y

        assert [ref() for ref in refs] == [None, None]


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_where_gradients_are_off(off: Callable[[], Any]) -> None:
    """Evaluation has no backward that would free it, nor give a slot back."""
    x, saver = torch.randn(3), PackedSaver(num_slots=1)
    checkpointer = Checkpointer(saver=saver, keeps=everything)

    with off():
        for _ in range(2):
            assert torch.equal(checkpointer.checkpoint(torch.sin, x), x.sin())

    assert saver.kept_bytes() == saver.reserved_bytes() == {}
    assert checkpointer.kept_bytes == 0


# ---- How often it runs ----


@pytest.mark.parametrize(("stops_early", "again"), [(True, 3), (False, 5)])
def test_each_backward_computes_again_what_it_needs(stops_early: bool, again: int) -> None:
    """The last projection of a block is a third of its time, and a branch may have no loss."""
    operators: list[int] = []  # of each run

    def function(x: Tensor) -> Tensor:
        operators.append(0)
        for _ in range(4):
            x = x.sin()
            operators[-1] += 1
        x = x + 1  # needs nothing for its gradient
        operators[-1] += 1
        return x

    x = torch.randn(3, requires_grad=True)
    y = Checkpointer(stops_early=stops_early).checkpoint(function, x)
    x.square().sum().backward()
    assert operators == [5]

    first = torch.autograd.grad(y.sum(), x, retain_graph=True)
    second = torch.autograd.grad(y.sum(), x)

    assert torch.equal(first[0], second[0])
    assert operators == [5, again, again]


# ---- What goes wrong ----


@RUNS
@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_after_an_exception_all_goes_on_as_without(run: Run, fails_in: str) -> None:
    """Who catches it (out of memory, say) draws the same numbers, and may try backward again."""
    is_failing = fails_in == "forward"

    def moody(x: Tensor) -> Tensor:
        x = F.dropout(x.sin(), 0.5).exp()
        if is_failing:
            raise MemoryError("batch 3")
        return x.cos().sin()

    def caught(run: Run) -> list[Tensor]:
        nonlocal is_failing
        torch.manual_seed(0)
        x = torch.ones(8, requires_grad=True)
        if fails_in == "forward":
            with pytest.raises(MemoryError, match="batch 3"):
                run(moody, x)
            return [torch.get_rng_state(), slope(partial(run, torch.sin), x)]
        y = run(moody, x).sum()
        is_failing = run is not plainly
        if is_failing:
            with pytest.raises(MemoryError, match="batch 3"):
                torch.autograd.grad(y, x, retain_graph=True)
        is_failing = False
        return [torch.get_rng_state(), *torch.autograd.grad(y, x)]

    for one, other in zip(caught(run), caught(plainly), strict=True):
        assert torch.equal(one, other)


def test_the_stop_passes_through_code_that_catches_exceptions() -> None:
    """Retry loops and loggers around a layer must not swallow it."""
    caught: list[Exception] = []

    def careful(x: Tensor) -> Tensor:
        try:
            return x.sin().exp() + 1
        except Exception as error:
            caught.append(error)
            return x

    x = torch.randn(3, requires_grad=True)

    assert torch.equal(slope(partial(checkpoint, careful), x), slope(careful, x))
    assert not caught


def _writes(x: Tensor) -> Tensor:
    return x.mul_(2).sin()


def test_a_function_that_writes_to_its_argument_is_refused() -> None:
    """The second run would begin with what the first one left."""
    message = r"_writes: it wrote in place to its input 0, .*clone"
    with pytest.raises(CheckpointError, match=message):
        checkpoint(_writes, torch.randn(3, requires_grad=True) * 1)


CONTAINERS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], object]]] = {
    "list": (list, list.append),
    "list of tensors": (lambda: [torch.ones(3)], list.append),
    "dict": (dict, lambda found, h: found.setdefault(len(found), h)),
    "dict of tensors": (lambda: {0: torch.ones(3)}, lambda found, h: found.update({len(found): h})),
    "defaultdict": (lambda: defaultdict(list), lambda found, h: found["a"].append(h)),
    "nested": (lambda: {"a": [[]]}, lambda found, h: found["a"][0].append(h)),
    "in a tuple": (lambda: ([],), lambda found, h: found[0].append(h)),
    "set": (set, set.add),
    "deque": (deque, deque.append),
}


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [tensor for item in items for tensor in _tensors_in(item)]


@pytest.mark.parametrize("container", CONTAINERS)
def test_what_a_function_collects_is_collected_once(container: str) -> None:
    """The second run put its own into the caller's list: torch's checkpoint leaves two."""
    make, put = CONTAINERS[container]

    def collect(x: Tensor, found: Any) -> Tensor:
        put(found, h := x.sin())
        return h.exp()

    grads, sizes = [], []
    for run in (plainly, checkpoint):
        x, found = torch.arange(3.0, requires_grad=True), make()
        y = run(collect, x, found)
        loss = y.sum() + sum(h.square().sum() for h in _tensors_in(found))
        loss.backward(retain_graph=True)
        loss.backward()
        grads.append(x.grad)
        sizes.append(len(_tensors_in(found)))
    assert torch.equal(*grads)
    assert sizes[0] == sizes[1]


def test_a_function_that_collects_in_an_object_is_refused() -> None:
    """It is not copied, and would have each tensor twice."""

    def collect(x: Tensor, into: Any) -> Tensor:
        into.found.append(x.sin())
        into.log.append(1)
        return x.exp()

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(
        CheckpointError, match=r"collect: .*'found' of argument 1 from 0 to 1.*once"
    ):
        checkpoint(collect, x, SimpleNamespace(found=[], log=[]))
    with pytest.raises(CheckpointError, match=r"attribute 'found' of argument 'into'"):
        checkpoint(collect, x, into=SimpleNamespace(found=deque(), log=[]))


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("input", r"written in place after it was called.*clone"),
        ("weight", r"saved tensor .* was written in place between"),
    ],
)
def test_what_is_written_before_backward_is_noticed(written: str, message: str) -> None:
    """Gradients would be those of other values, without a word."""
    layer, hidden = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True) * 1
    y = checkpoint(layer, hidden)
    with torch.no_grad():
        {"input": hidden, "weight": layer.weight}[written].add_(1)

    with pytest.raises(CheckpointError, match=message):
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
    function = changing(lambda x: x.sin().exp(), second)
    y = checkpoint(function, torch.randn(3, requires_grad=True))

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


FILLED_BY_KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "RReLU": nn.RReLU(),
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.9, training=True),
    "in place": lambda x: F.rrelu_(x * 1, 0.1, 0.9, training=True),
    "behind a linear": nn.Sequential(nn.Linear(100, 100), nn.RReLU()),
    "dropout": nn.Dropout(0.5),
    "batch norm": nn.BatchNorm1d(100),
    "normalized": nn.LayerNorm(100),
}


@pytest.mark.parametrize("name", FILLED_BY_KERNELS)
def test_what_a_kernel_fills_after_autograd_saved_it_is_filled_again(name: str) -> None:
    """A second run that ends when the last tensor is saved would leave memory as it was found."""
    function, found = FILLED_BY_KERNELS[name], []
    for call in (function, lambda x: Checkpointer().checkpoint(function, x)):
        torch.manual_seed(1)
        x = torch.linspace(-1, 1, 800).view(8, 100).requires_grad_()
        call(x).square().sum().backward()
        found.append(x.grad)

    assert torch.equal(*found)
