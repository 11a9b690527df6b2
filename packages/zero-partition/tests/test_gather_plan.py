"""Who shares a slot, and when gathers are launched."""

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from zero_partition import PartitionError
from zero_partition.plan import Extent, Limits, PlannedGather, Use, choose_slots, plan_gathers

Extents = dict[int, Extent]


def _chain(numels: Sequence[int]) -> tuple[list[Use], Extents]:
    """Forward through all units and back: each alone in use."""
    units = [*range(len(numels)), *reversed(range(len(numels)))]
    uses = [
        Use(unit, "forward" if position < len(numels) else "backward", frozenset({unit}))
        for position, unit in enumerate(units)
    ]
    return uses, {unit: Extent(numel, 4 * numel, False) for unit, numel in enumerate(numels)}


def _plan(
    uses: Sequence[Use], extents: Extents, limits: Limits
) -> tuple[dict[int, int], tuple[PlannedGather, ...]]:
    groups = choose_slots(uses, extents, limits)
    assert all(groups)  # no slot without a unit
    slot_of = {unit: slot for slot, group in enumerate(groups) for unit in group}
    return slot_of, plan_gathers(uses, extents, slot_of, prefetch_numel=limits.prefetch_numel)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 9])
def test_a_chain_goes_round_a_window_of_slots_and_gathers_no_more_than_it_must(window: int) -> None:
    """The units at the turn stay whole: 2n - window gathers, in `window` slots."""
    count = 8
    uses, extents = _chain([10] * count)

    slot_of, gathers = _plan(uses, extents, Limits(window))

    assert len(set(slot_of.values())) == min(window, count)
    assert len(gathers) == 2 * count - min(window, count)


def test_slots_go_round_even_where_nothing_is_prefetched() -> None:
    """Else a second backward without a step finds one unit whole where it could find three."""
    slot_of, gathers = _plan(*_chain([10] * 8), Limits(3, prefetch_numel=0))

    assert len({slot_of[0], slot_of[1], slot_of[2]}) == 3
    assert all(gather.launched == gather.used for gather in gathers)


def test_the_next_unit_is_launched_while_the_one_before_it_is_in_use() -> None:
    """Else there is nothing to hide its travel behind."""
    _, gathers = _plan(*_chain([10] * 8), Limits(2))

    assert [gather.launched for gather in gathers[:3]] == [-1, -1, 1]
    assert all(gather.launched < gather.used for gather in gathers)


def test_a_unit_used_again_soon_stays_whole() -> None:
    """A layer shared between others, as in Zamba or ALBERT, is gathered once, not at every turn."""
    sequence = [9, 0, 9, 1, 9, 2, 9, 3, 9, 4]
    uses = [Use(unit, "forward", frozenset({unit})) for unit in sequence]
    extents = {unit: Extent(10, 40, False) for unit in sequence}

    def gathers_of_shared(limits: Limits) -> int:
        _, gathers = _plan(uses, extents, limits)
        return sum(gather.unit == 9 for gather in gathers)

    assert gathers_of_shared(Limits(2, prefetch_numel=0)) == 1
    assert gathers_of_shared(Limits(2, prefetch_numel=0, max_reuse_numel=10)) == 1
    assert gathers_of_shared(Limits(2, prefetch_numel=0, max_reuse_numel=9)) == 5
    assert gathers_of_shared(Limits(1, prefetch_numel=0)) == 5


def test_the_live_limit_counts_elements_not_units() -> None:
    """Many small units fit where one large one does."""
    uses, extents = _chain([100, 10, 10, 10, 10])
    groups = choose_slots(uses, extents, Limits(max_live_numel=100, prefetch_numel=0))

    sizes = [max(extents[unit].num_bytes for unit in group) for group in groups]
    assert sum(sizes) == 4 * 100 + 3 * 4 * 10


def _random_case(seed: int) -> tuple[list[Use], Extents, Limits]:
    rng = random.Random(seed)
    count = rng.randint(1, 12)
    extents = {
        unit: Extent(numel := rng.randint(1, 50), 4 * numel, rng.random() < 0.2)
        for unit in range(count)
    }
    uses, running = [], list[int]()
    for _ in range(rng.randint(1, 40)):
        if running and rng.random() < 0.4:
            running.pop()
        unit = rng.randrange(count)
        uses.append(Use(unit, "forward", frozenset({unit, *running})))
        if rng.random() < 0.4:
            running.append(unit)
    pick = rng.choice([None, 0, 20, 60])
    limits = Limits(
        rng.randint(1, 5),
        max_live_numel=rng.choice([None, 30, 100]),
        prefetch_numel=pick,
        max_reuse_numel=rng.choice([None, 0, 40]),
    )
    return uses, extents, limits


def test_every_use_finds_its_unit_whole_and_no_launch_disturbs_another() -> None:
    """Played back: what a launch overwrites is in use by no one, and launches keep the order."""
    for seed in range(200):
        uses, extents, limits = _random_case(seed)
        slot_of, gathers = _plan(uses, extents, limits)
        assert set(slot_of) == {unit for use in uses for unit in use.in_use}
        for use in uses:
            assert len({slot_of[unit] for unit in use.in_use}) == len(use.in_use)

        launched = [gather.launched for gather in gathers]
        assert launched == sorted(launched)
        owner: dict[int, int] = {}
        waiting: set[int] = set()
        due = list(gathers)
        for position in range(-1, len(uses)):
            in_use: frozenset[int] = frozenset()
            if position >= 0:
                use = uses[position]
                in_use = use.in_use
                if due and (due[0].launched, due[0].used) == (position, position):  # at its use
                    owner[slot_of[use.unit]] = due.pop(0).unit
                assert owner[slot_of[use.unit]] == use.unit
                waiting.discard(use.unit)
            while due and due[0].launched == position and due[0].used > position:
                gather = due.pop(0)
                assert owner.get(slot_of[gather.unit]) not in in_use
                owner[slot_of[gather.unit]] = gather.unit
                waiting.add(gather.unit)
            if limits.prefetch_numel is not None:
                assert sum(extents[unit].numel for unit in waiting) <= limits.prefetch_numel
        assert not due


def test_a_bound_of_the_schedule_that_is_none_is_refused() -> None:
    """It would be found in the middle of a step."""
    bounds: list[tuple[str, Any, int]] = [
        *(("window", value, 1) for value in (0, 1.5, True)),
        *(("max_live_numel", 0, 1), ("prefetch_numel", -1, 0)),
        *(("max_reuse_numel", 1.5, 0), ("read_ahead", None, 0)),
    ]
    for name, value, least in bounds:
        says = re.escape(f"Limits.{name}: expected an int of at least {least}, got {value!r}")
        with pytest.raises(PartitionError, match=says):
            Limits(**{name: value})
