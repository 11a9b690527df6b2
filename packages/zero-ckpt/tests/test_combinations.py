"""The law, for every two choices of a checkpointer together, and for all at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import combinations, product
from typing import Any, Final

import pytest
import torch
from same_numbers import Run, Stack, assert_equal, closure, everything, plainly, train
from zero_ckpt import (
    MATMULS,
    Checkpointer,
    PackedSaver,
    RngTracker,
    Verification,
    by_operator,
    within_bytes,
)
from zero_ckpt.testing import late
from zero_comm import Group

pytestmark = pytest.mark.xdist_group("ranks")

Choices = dict[str, Any]

CHOICES: Final[dict[str, list[Any]]] = {
    "dtype": [torch.float32, torch.bfloat16],
    "num_slots": [None, 16],
    "on_host": [False, True],
    "keeps": [None, MATMULS, within_bytes(2000, everything), by_operator("bernoulli", "mul")],
    "verifies": [None, Verification(1), Verification(2)],
    "profiles": [False, True],
    "synchronizes": [False, True],
    "stops_early": [True, False],
    "depth": [1, 2, 3],  # of checkpoints, each inside the one before
    "is_closure": [False, True],
}


def _sample() -> list[Choices]:
    """Few, among which are every two choices together."""
    drawn = random.Random(0)
    missing = {
        ((one, i), (other, j))
        for one, other in combinations(CHOICES, 2)
        for i, j in product(range(len(CHOICES[one])), range(len(CHOICES[other])))
    }

    def covered(numbers: dict[str, int]) -> set[Any]:
        return missing & set(combinations(numbers.items(), 2))

    found = []
    while missing:
        some = (
            {name: drawn.randrange(len(values)) for name, values in CHOICES.items()}
            for _ in range(20)
        )
        numbers = max(some, key=lambda each: len(covered(each)))
        missing -= covered(numbers)
        found.append({name: CHOICES[name][number] for name, number in numbers.items()})
    return found


def _model(tracker: RngTracker) -> Stack:
    model = Stack(2, tracker=tracker)
    model.blocks[0].up.requires_grad_(False)
    return model


def _run(
    tracker: RngTracker,
    group: Group | None,
    *,
    num_slots: int | None,
    on_host: bool,
    depth: int,
    is_closure: bool,
    **options: Any,
) -> Run:
    saver = PackedSaver(group=group, num_slots=num_slots, on_host=on_host)
    if on_host:
        late(saver)
    checkpointer = Checkpointer(saver=saver, tracker=tracker, **options)

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_closure:
            function = closure(function)
        for _ in range(depth):
            function = partial(checkpointer.checkpoint, function)
        return function(*args, **kwargs)

    return run


def _check(group: Group | None = None) -> None:
    tracker = RngTracker("cpu")
    make = partial(_model, tracker)
    expected = {
        dtype: train(plainly, make, dtype=dtype, tracker=tracker) for dtype in CHOICES["dtype"]
    }
    for choices in _sample():
        dtype = choices.pop("dtype")
        found = train(_run(tracker, group, **choices), make, dtype=dtype, tracker=tracker)
        assert_equal(found, expected[dtype], (dtype, choices))


def test_any_two_choices_leave_numbers_as_they_are() -> None:
    """Each is right alone; users combine them, and wrong gradients say nothing."""
    _check()


@pytest.mark.slow
def test_so_do_choices_over_ranks(group: Group) -> None:
    """Ranks gather inside of all this, and in the same order."""
    _check(group)
