"""Where we are in the order that was recorded, and memory with changing owners."""

import random

import torch
from zero_partition.plan import ExecutionOrder, SlotPool, Use

CPU = torch.device("cpu")


def _use(unit: int) -> Use:
    return Use(unit, "forward", frozenset({unit}))


def _play(order: ExecutionOrder, sequence: list[int]) -> None:
    order.restart()
    for unit in sequence:
        order.observe(_use(unit))


def test_the_second_pass_goes_along_the_recording_until_the_order_changes() -> None:
    """Layers that are dropped or added cost one late gather, not an error."""
    order, sequence = ExecutionOrder(3), [0, 1, 2, 2, 1, 0]
    _play(order, sequence)
    order.restart()
    recorded, order.launches = order.recorded, {}
    for position, unit in enumerate(sequence):
        order.observe(_use(unit))
        assert order.position == position
    order.restart()
    assert order.misses == 0
    assert order.recorded is recorded and order.launches == {}  # what was computed from it holds

    _play(order, [1, 0, 2])
    missed = order.misses
    order.restart()
    assert missed > 0
    assert [use.unit for use in order.recorded] == [1, 0, 2] and order.launches is None
    _play(order, [1, 0, 2])
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
    _play(order, [1] * 10_000)
    order.restart()
    assert len(order.recorded) < 1_000


def test_slots_go_round_and_who_finds_none_free_gets_one_more() -> None:
    """Neighbours never share, nor two units in use at once; any three fit side by side."""
    pool = SlotPool.plan([100, 10, 10, 90, 10], num_slots=3, device=CPU, is_busy="busy".__eq__)
    assert [slot.num_bytes for slot in pool.ring] == [100, 90, 10]

    for turn in range(7):
        slot = pool.acquire(8)
        slot.owner = "in turn"
        assert slot.index == turn % 3
    assert (pool.conflicts, pool.num_bytes) == (0, 0)
    for slot in pool.ring:
        slot.owner = "busy"
    pool.acquire(8).allocate(CPU)  # memory is made at first use, and given back
    assert (pool.conflicts, pool.num_bytes, len(pool.extra)) == (1, 8, 1)
    pool.release()
    assert pool.num_bytes == 0
