"""Checkpoints inside compiled code, and compiled code inside checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from same_numbers import Run, assert_equal, plainly
from torch import Tensor, nn
from zero_ckpt import MATMULS, Checkpointer, RngTracker, by_name, checkpoint_modules

pytestmark = [
    pytest.mark.slow,
    # Dynamo looks at .grad of whatever it meets.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _model() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))
    return layers, torch.randn(4, 8, requires_grad=True)


def _numbers(layers: nn.Module, x: Tensor, step: Callable[[Tensor], Tensor]) -> list[Tensor]:
    loss = step(x)
    return [loss, *torch.autograd.grad(loss, [x, *layers.parameters()])]


def _twice(layers: nn.Module, run: Run) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        return run(layers, run(layers, x).sin()).square().sum()

    return step


def test_a_compiled_caller_is_one_graph() -> None:
    """The compiler recomputes by itself; a break at each block would lose what it fuses."""
    layers, x = _model()
    step = _twice(layers, Checkpointer().checkpoint)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)

    expected = _numbers(layers, x, _twice(layers, plainly))

    torch.testing.assert_close(_numbers(layers, x, compiled), expected)


def test_rngs_of_a_tracker_break_the_graph_and_nothing_else() -> None:
    """The compiler knows no named rngs: masks must come from the right one all the same."""
    layers, x = _model()
    tracker = RngTracker("cpu")

    def dropped(x: Tensor) -> Tensor:
        with tracker.fork():
            return nn.functional.dropout(layers(x), 0.5)

    def numbers(run: Run, *, is_compiled: bool) -> list[Tensor]:
        tracker.reset()
        tracker.add("model-parallel-rng", 5)

        def step(x: Tensor) -> Tensor:
            return run(dropped, run(dropped, x.sin())).square().sum()

        found = _numbers(layers, x, torch.compile(step, backend="eager") if is_compiled else step)
        return found + list(tracker.get_states().values())

    found = numbers(Checkpointer(tracker=tracker).checkpoint, is_compiled=True)

    assert_equal(found, numbers(plainly, is_compiled=False))


def test_a_compiled_block_is_checkpointed_as_any_function() -> None:
    """What it saves for its backward are tensors like others."""
    layers, x = _model()
    compiled = torch.compile(layers, backend="aot_eager")

    def numbers(run: Run) -> list[Tensor]:
        return _numbers(layers, x, _twice(compiled, run))

    for keeps in (None, MATMULS):
        assert_equal(numbers(Checkpointer(keeps=keeps).checkpoint), numbers(plainly))


def test_a_compiled_caller_has_a_policy_over_operators_honoured() -> None:
    """The compiler would recompute everything."""
    layers, x = _model()
    checkpointer = Checkpointer(keeps=MATMULS)

    loss = torch.compile(lambda x: checkpointer.checkpoint(layers, x).sum(), backend="eager")(x)

    assert checkpointer.kept_bytes == 4 * (16 + 8) * 4  # of both linear layers
    loss.backward()


def test_a_compiled_model_of_checkpointed_modules_computes_the_same() -> None:
    """Its compiler recomputes by itself, or the graph breaks."""
    layers, x = _model()
    expected = _numbers(layers, x, lambda x: layers(x).sum())
    checkpoint_modules(layers, by_name("*"))
    compiled = torch.compile(layers, backend="aot_eager")

    torch.testing.assert_close(_numbers(layers, x, lambda x: compiled(x).sum()), expected)
