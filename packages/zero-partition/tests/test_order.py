"""Where we are in the order that was recorded."""

import random

from zero_partition.plan import ExecutionOrder, Use


def _use(unit: int) -> Use:
    return Use(unit, "forward", frozenset({unit}))


def _play(order: ExecutionOrder, sequence: list[int]) -> None:
    order.restart()
    for unit in sequence:
        order.observe(_use(unit))


def test_the_second_pass_goes_along_the_recording() -> None:
    """Prefetching is right from the second step on."""
    order, sequence = ExecutionOrder(3), [0, 1, 2, 2, 1, 0]
    _play(order, sequence)
    order.restart()
    for position, unit in enumerate(sequence):
        order.observe(_use(unit))
        assert order.position == position
    assert order.misses == 0


def test_an_equal_recording_is_the_same_object_and_another_is_not() -> None:
    """What was computed from it holds as long as the object does."""
    order = ExecutionOrder(3)
    _play(order, [0, 1])
    order.restart()
    recorded, order.launches = order.recorded, {}

    _play(order, [0, 1])
    order.restart()

    assert order.recorded is recorded
    assert order.launches == {}

    _play(order, [1, 0])
    order.restart()

    assert [use.unit for use in order.recorded] == [1, 0]
    assert order.launches is None


def test_a_changed_order_is_recorded_again() -> None:
    """Layers that are dropped or added cost one late gather, not an error."""
    order = ExecutionOrder(4)
    _play(order, [0, 1, 2, 3])
    _play(order, [0, 2, 1, 3])
    missed = order.misses
    _play(order, [0, 2, 1, 3])

    assert missed > 0
    assert order.misses == missed


def test_no_sequence_breaks_it() -> None:
    """Whatever a model does, the position is one of the recording, or before it."""
    rng = random.Random(0)
    order = ExecutionOrder(5)
    for _ in range(4000):
        if rng.random() < 0.1:
            order.restart()
        unit = rng.randrange(5)
        order.observe(_use(unit))

        assert -1 <= order.position < max(1, len(order.recorded))
        if unit in [use.unit for use in order.recorded]:
            assert order.recorded[order.position].unit == unit


def test_a_loop_that_never_returns_to_the_model_does_not_grow_forever() -> None:
    """Someone who calls inner modules by hand must not leak."""
    order = ExecutionOrder(2)
    for _ in range(10_000):
        order.observe(_use(1))

    order.restart()
    assert len(order.recorded) < 1_000
