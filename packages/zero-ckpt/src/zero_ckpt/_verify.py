"""Verified recomputation: what backward gets is what forward had, or the operator is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from attrs import define, field, frozen
from torch import Tensor

from ._checksums import Checksums, Seen
from ._errors import CheckpointError, NondeterminismError
from ._second_run import SecondRun
from ._steps import Run, Step, Watch
from ._torch_compat import storage_of
from ._turn import Turn

# NOTE(verify): gradients depend on the second run through saved tensors and nothing else, so an
# error is raised if and only if one of these has other bits. Operators are noted to say why: the
# first one that differs is one whose result does, although nothing that went into it was the result
# of another that differs. So a counter of batches, or a table that only the first run has to make,
# disturbs nobody.


@final
@frozen
class Verification:
    """How often recomputation is verified.

    A verified call reads every tensor that its operators take and make, in both runs, and keeps 8
    bytes for each of those; no host waits for a device before backward. In backward it waits after
    each operator.

    Args:
        every: Of how many calls of a layer one is verified. Layers take turns, so that calls of a
            different layer each are verified one after the other.

    Raises:
        CheckpointError: It is not a whole number above 0.
    """

    every: int = 1

    def __attrs_post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise CheckpointError(
                f"Verification(every=): expected a whole number of calls, 1 or more, got "
                f"{self.every!r}; to verify none, Checkpointer(verifies=None)"
            )

    def picks(self, layer_index: int, num_calls: int) -> bool:
        """Whether a layer is to be verified that was called so often before."""
        return (layer_index + num_calls) % self.every == 0


@frozen(eq=False)
class _Noted:
    """A tensor that autograd saved in forward."""

    seen: Seen
    position: int  # how many steps came before


@define(eq=False)
class Witness:
    """Sees both runs of one call. Keeps sums, shapes and names."""

    _layer: str
    _function: Callable[..., Any]
    _checksums: Checksums
    _turn: Turn
    _steps: list[Step] = field(factory=list, init=False)
    _noted: list[_Noted] = field(factory=list, init=False)
    _first: Run = field(init=False)
    _again: SecondRun | None = field(default=None, init=False)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the first run."""
        self._first = run = Run(self._checksums)

        def take(func: Any, args: Any, kwargs: Any) -> Any:
            result, step, _ = run.step(func, args, kwargs, None)
            self._steps.append(step)
            return result

        with Watch(take, self._turn):
            yield
        run.made.clear()

    def note(self, tensor: Tensor) -> None:
        """Autograd saves it, in the first run."""
        self._noted.append(_Noted(self._first.see(tensor), len(self._steps)))

    @contextmanager
    def recompute(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Around each later run, of the function with these inputs."""
        self._first.settle()
        given = [storage_of(tensor) for tensor in inputs]
        self._again = again = SecondRun(
            self._function, self._steps, self._first.values, Run(self._checksums), given
        )
        with Watch(again.take, self._turn):
            yield

    def compare(self, index: int, tensor: Tensor, is_same_memory: bool) -> None:
        """Autograd saves it, in a later run.

        Args:
            index: How many it has saved before.
            tensor: It.
            is_same_memory: Whether it lies where it did in forward. What the function did not make
                is then what backward would have got without a checkpoint: its value of now.

        Raises:
            NondeterminismError: Its bits are others than in forward.
        """
        assert self._again is not None, "compare() outside a run"
        run = self._again.run
        if is_same_memory and not run.is_made(tensor):
            return
        old = self._noted[index].seen
        new = run.see(tensor, old)
        if old.number is None or new.number is None:
            return
        run.settle()
        if run.values[new.number] != self._first.values[old.number]:
            raise NondeterminismError(
                f"{self._layer}: saved tensor {index} of {len(self._noted)}, {new}, has other "
                f"values than in forward. {self.why(index, tensor)}"
            )

    def why(self, index: int | None = None, tensor: Tensor | None = None) -> str:
        """Which operator differs, where it was called and what that usually means.

        Args:
            index: Of the saved tensor that shows it; None if there are too many or too few.
            tensor: That tensor, in the second run.
        """
        assert self._again is not None, "why() before a second run"
        again = self._again
        root = again.root_of(tensor) if tensor is not None else again.root_of_the_way()
        if root is not None:
            return root.text
        if index is None or tensor is None:
            return again.describe_end()
        position = min(self._noted[index].position, len(self._steps) - 1)
        return again.describe_outside(position, tensor)
