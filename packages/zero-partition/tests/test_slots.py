"""Memory with changing owners."""

import torch
from attrs import define
from zero_partition.plan import SlotPool


@define(eq=False)
class _Owner:
    num_bytes: int
    busy: bool = False


def _pool(sizes: list[int], num_slots: int) -> SlotPool[_Owner]:
    return SlotPool.plan(
        sizes, num_slots=num_slots, device=torch.device("cpu"), is_busy=lambda owner: owner.busy
    )


def test_any_window_of_owners_fits_side_by_side() -> None:
    """Without every slot being as large as the largest owner."""
    pool = _pool([100, 10, 10, 90, 10], num_slots=3)

    assert [slot.num_bytes for slot in pool.ring] == [100, 90, 10]


def test_a_chain_of_equal_owners_goes_round_the_ring() -> None:
    """Neighbours never share, so the next can be gathered while one is in use."""
    pool = _pool([8] * 7, num_slots=3)
    for turn in range(7):
        slot = pool.take(8)
        slot.owner = _Owner(8)
        assert slot.index == turn % 3
    assert pool.conflicts == 0


def test_a_busy_owner_keeps_its_slot_and_the_conflict_is_counted() -> None:
    """Two units in use at once never share memory, whatever the window."""
    pool = _pool([8, 8], num_slots=1)
    first = _Owner(8, busy=True)
    pool.take(8).owner = first

    second = pool.take(8)

    assert second is pool.extra[0]
    assert pool.conflicts == 1


def test_memory_is_made_at_first_use_and_given_back() -> None:
    """A phase without training can have it."""
    pool = _pool([64, 64], num_slots=2)
    at_first = pool.num_bytes
    pool.take(64).allocate(torch.device("cpu"))

    assert (at_first, pool.num_bytes) == (0, 64)

    pool.release()

    assert pool.num_bytes == 0
