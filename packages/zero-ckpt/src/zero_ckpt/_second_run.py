"""A later run of a function beside its first: which operator differs, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, field, frozen
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ._checksums import Seen
from ._origin import Line, line_of_now, name_in_module
from ._steps import Run, Step, Touched, name_of
from ._torch_compat import storage_of


@frozen(eq=False)
class _Root:
    """An operator that differs for a reason of its own."""

    text: str


@define(eq=False)
class SecondRun:
    """A later run, step by step beside the first."""

    function: Callable[..., Any]
    steps: list[Step]
    values: list[int]
    run: Run
    given: Sequence[StorageWeakRef | None]  # where the function's inputs lie
    position: int = field(default=0, init=False)
    _roots: dict[int, tuple[StorageWeakRef, _Root]] = field(factory=dict, init=False)
    _steering: _Root | None = field(default=None, init=False)  # of a number or a shape that differs
    _way: _Root | None = field(default=None, init=False)  # why other operators are called from here

    def take(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operator. A mode's callback."""
        like = None if self._way is not None else self._next(name_of(func))
        result, step, touched = self.run.step(func, args, kwargs, like)
        if self._way is not None:
            self._blame(self._way, touched)
        elif like is None:
            self._way = self._steering or self._root(step, self._other_way(step))
            self._blame(self._way, touched)
        elif self._differs(like, step):
            root = self._inherited(touched)
            if root is None and like.plain != step.plain:
                root = self._steering
            root = root or self._root(step, self._cause(like, step, touched))
            if any(self._steers(a, b) for a, b in zip(like.results, step.results, strict=False)):
                self._steering = self._steering or root
            self._blame(root, touched)
        self.position += 1
        return result

    def _next(self, name: str) -> Step | None:
        if self.position == len(self.steps) or self.steps[self.position].name != name:
            return None
        return self.steps[self.position]

    def root_of(self, tensor: Tensor) -> _Root | None:
        """Why it differs."""
        key = storage_of(tensor)
        found = None if key is None else self._roots.get(key.cdata)
        return self.root_of_the_way() if found is None else found[1]

    def root_of_the_way(self) -> _Root | None:
        """Why other operators were called."""
        return self._way or self._steering

    def describe_end(self) -> str:
        """Where the first run went on."""
        if self.position >= len(self.steps):
            return "Its operators are the same: grad mode, or requires_grad of a weight, is another"
        name = self.steps[self.position].name
        return (
            f"Forward went on with operator {self.position} ({_short(name)}), where the second run "
            "ended: a branch on a counter, a cache or a changed buffer?"
        )

    def describe_outside(self, position: int, tensor: Tensor) -> str:
        """An operator of forward took this, which nothing in the function has made."""
        name = self.steps[position].name if self.steps else "none"
        return _sentence(position, name, line_of_now(), self._outside(tensor))

    def _differs(self, old: Step, new: Step) -> bool:
        if len(old.results) != len(new.results):
            return True
        pairs = zip(old.results, new.results, strict=True)
        return not all(self._is_equal(a, b) for a, b in pairs)

    def _is_equal(self, old: Seen | str, new: Seen | str) -> bool:
        if isinstance(old, str) or isinstance(new, str):
            return old == new
        if not old.looks_like(new):
            return False
        if old.number is None or new.number is None:
            return True
        self.run.settle()
        return self.values[old.number] == self.run.values[new.number]

    @staticmethod
    def _steers(old: Seen | str, new: Seen | str) -> bool:
        """Whether Python can see the difference without an operator."""
        if isinstance(old, str) or isinstance(new, str):
            return old != new
        return old.shape != new.shape

    def _inherited(self, touched: Touched) -> _Root | None:
        keys = [key for key in map(storage_of, touched.inputs) if key is not None]
        return next((self._roots[key.cdata][1] for key in keys if key.cdata in self._roots), None)

    def _blame(self, root: _Root, touched: Touched) -> None:
        for key in map(storage_of, touched.results):
            if key is not None and (self.run.has_made(key) or not touched.is_view):
                self._roots.setdefault(key.cdata, (key, root))

    def _cause(self, old: Step, new: Step, touched: Touched) -> str:
        if old.plain != new.plain:
            return (
                f"its arguments were ({_cut(old.plain)}) in forward and are ({_cut(new.plain)}) "
                "now: a number made in Python (a counter? numpy's or Python's random?)"
            )
        (old_rng, _), (new_rng, source) = old.seeds, new.seeds
        if old_rng and new_rng and not self._is_equal(old_rng, new_rng):
            if source is None:
                return (
                    "it draws from a generator that it was given (generator=), and nobody puts "
                    "that back: draw from the default one, or inside a fork() of the tracker"
                )
            return (
                f"{source} stands elsewhere than in forward: something in the function seeds it or "
                "sets its state, or another thread draws from it"
            )
        for i, seen in new.outside.items():
            before = old.outside.get(i)
            if before is not None and not self._is_equal(before, seen):
                return self._outside(touched.inputs[i])
        return (
            "it got the same and gave something else: its kernel is not deterministic; "
            "torch.use_deterministic_algorithms(True) finds these"
        )

    def _outside(self, tensor: Tensor) -> str:
        key = storage_of(tensor)
        for i, other in enumerate(self.given):
            if key is not None and other is not None and other.cdata == key.cdata:
                return (
                    f"input {i} of the function has other values than in forward: it was written "
                    "in place after the call, or its saver does not give back what it was given"
                )
        name = name_in_module(self.function, tensor)
        what = f"a tensor {tuple(tensor.shape)}" if name is None else name
        return (
            f"{what}, which it reads and which no operator of the function made, has other values "
            "than in forward: written in place meanwhile (a weight by an optimizer's step, a "
            "buffer by forward itself), from a cache, or made of numpy's or Python's random numbers"
        )

    def _other_way(self, new: Step) -> str:
        before = "ended before it"
        if self.position < len(self.steps):
            before = f"called {_short(self.steps[self.position].name)} there"
        return f"forward {before}: a branch on a counter, a cache or a changed buffer?"

    def _root(self, step: Step, cause: str) -> _Root:
        return _Root(_sentence(self.position, step.name, line_of_now(), cause))


def _sentence(position: int, name: str, line: Line | None, cause: str) -> str:
    where = "" if line is None else f", {line}"
    return f"The first operator that differs is number {position} ({_short(name)}{where}): {cause}"


def _short(name: str) -> str:
    return name.replace("::", ".")


def _cut(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."
