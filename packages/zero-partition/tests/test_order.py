"""Who is next."""

import random

import pytest
from zero_partition._order import ExecutionOrder


def _play(order: ExecutionOrder, sequence: list[int]) -> None:
    order.restart()
    for unit in sequence:
        order.observe(unit)


def test_the_second_pass_is_foreseen() -> None:
    """Prefetching is right from the second step on."""
    order, sequence = ExecutionOrder(3), [0, 1, 2, 2, 1, 0]
    _play(order, sequence)
    order.restart()

    foreseen = []
    for unit in sequence:
        foreseen.append(order.upcoming(1)[0])
        order.observe(unit)

    assert foreseen == sequence
    assert order.misses == 0


def test_a_window_names_different_units_and_reaches_into_the_next_step() -> None:
    """The first gathers of a step can be launched at the end of the one before."""
    order = ExecutionOrder(3)
    _play(order, [0, 1, 2, 2, 1, 0])
    _play(order, [0, 1, 2, 2, 1, 0])

    assert order.upcoming(3) == [0, 1, 2]


def test_a_changed_order_is_recorded_again() -> None:
    """Layers that are dropped or added cost one late gather, not an error."""
    order = ExecutionOrder(4)
    _play(order, [0, 1, 2, 3])
    _play(order, [0, 2, 1, 3])
    missed = order.misses
    _play(order, [0, 2, 1, 3])

    assert missed > 0
    assert order.misses == missed


@pytest.mark.parametrize("seed", range(50))
def test_no_sequence_breaks_it(seed: int) -> None:
    """Whatever a model does, the answer is a list of known units without repetition."""
    rng = random.Random(seed)
    order = ExecutionOrder(5)
    for _ in range(200):
        if rng.random() < 0.1:
            order.restart()
        order.observe(rng.randrange(5))
        upcoming = order.upcoming(rng.randrange(6))

        assert len(set(upcoming)) == len(upcoming)
        assert set(upcoming) <= set(range(5))


def test_a_loop_that_never_returns_to_the_model_does_not_grow_forever() -> None:
    """Someone who calls inner modules by hand must not leak."""
    order = ExecutionOrder(2)
    for _ in range(10_000):
        order.observe(1)

    assert len(order._recording) < 1_000
