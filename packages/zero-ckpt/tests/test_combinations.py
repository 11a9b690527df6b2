"""The law, for every two choices of a checkpointer together, and for all at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import combinations, product
from typing import Any, Final

import pytest
import torch
from same_numbers import Run, Stack, assert_equal, everything, plainly, train
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
    "every": [None, 1, 2],
    "profiles": [False, True],
    "synchronizes": [False, True],
    "stops_early": [True, False],
    "depth": [1, 2, 3],  # of checkpoints, each inside the one before
    "is_closure": [False, True],
}


def _sample() -> list[Choices]:
    """Few, among which are every two choices together; the last of each are the first."""
    drawn = random.Random(0)
    missing = {
        ((one, i), (other, j))
        for one, other in combinations(CHOICES, 2)
        for i, j in product(range(len(CHOICES[one])), range(len(CHOICES[other])))
    }

    def covered(numbers: dict[str, int]) -> set[Any]:
        return missing & set(combinations(numbers.items(), 2))

    numbers, found = {name: len(values) - 1 for name, values in CHOICES.items()}, []
    while missing:
        missing -= covered(numbers)
        found.append({name: CHOICES[name][number] for name, number in numbers.items()})
        some = (
            {name: drawn.randrange(len(values)) for name, values in CHOICES.items()}
            for _ in range(20)
        )
        numbers = max(some, key=lambda each: len(covered(each)))
    return found


def _model(tracker: RngTracker) -> Stack:
    model = Stack(2, tracker=tracker)
    model.blocks[0].up.requires_grad_(False)
    return model


def _run(choices: Choices, tracker: RngTracker, group: Group | None = None) -> Run:
    saver = PackedSaver(group=group, num_slots=choices["num_slots"], on_host=choices["on_host"])
    if choices["on_host"]:
        late(saver)
    every = choices["every"]
    checkpointer = Checkpointer(
        saver=saver,
        tracker=tracker,
        keeps=choices["keeps"],
        verifies=None if every is None else Verification(every),
        **{name: choices[name] for name in ("profiles", "synchronizes", "stops_early")},
    )

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if choices["is_closure"]:
            function = _closure(function)
        for _ in range(choices["depth"]):
            function = partial(checkpointer.checkpoint, function)
        return function(*args, **kwargs)

    return run


def _closure(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _check(group: Group | None = None) -> None:
    tracker = RngTracker("cpu")
    make = partial(_model, tracker)
    expected = {
        dtype: train(plainly, make, dtype=dtype, tracker=tracker) for dtype in CHOICES["dtype"]
    }
    for choices in _sample():
        dtype = choices["dtype"]
        found = train(_run(choices, tracker, group), make, dtype=dtype, tracker=tracker)
        assert_equal(found, expected[dtype], choices)


def test_any_two_choices_leave_numbers_as_they_are() -> None:
    """Each is right alone; users combine them, and wrong gradients say nothing."""
    _check()


@pytest.mark.slow
@pytest.mark.ranks(3)
def test_so_do_choices_over_ranks(group: Group) -> None:
    """Ranks gather inside of all this, and in the same order."""
    _check(group)
