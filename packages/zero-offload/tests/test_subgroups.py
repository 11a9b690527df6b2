"""The plan of sub-groups is arithmetic: coverage, sizes and shares follow from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from zero_offload.testing import (
    ALIGN_BYTES,
    CUT_NUMEL,
    PAGE_BYTES,
    Entry,
    Item,
    Residence,
    Shares,
    SubGroup,
    plan_subgroups,
)

MOMENTS = (Entry("exp_avg", torch.float32), Entry("exp_avg_sq", torch.float32))


def _random_items(rng: np.random.Generator) -> list[Item]:
    dtypes = (torch.float32, torch.bfloat16)
    kinds = [
        tuple(Entry(f"entry{k}", dtypes[rng.integers(2)]) for k in range(rng.integers(0, 4)))
        for _ in range(3)
    ]
    return [
        Item(
            numel=int(rng.choice([0, 1, 63, 64, 1000, 20_000])) + int(rng.integers(0, 3)),
            entries=kinds[rng.integers(3)],
            is_divisible=bool(rng.integers(2)),
            place=str(rng.choice(["cpu", "cuda:0"])),
        )
        for _ in range(rng.integers(1, 20))
    ]


def _plan(rng: np.random.Generator, items: list[Item]) -> tuple[tuple[SubGroup, ...], int]:
    device, host = rng.random(2) * rng.choice([0, 0.5, 0.5])
    shares = Shares(
        Residence.DISK,
        float(device),
        float(host),
        subgroup_bytes=int(rng.integers(1, 100_000)),
        small_bytes=int(rng.choice([0, 1000])),
    )
    return plan_subgroups(items, shares), shares.subgroup_bytes


def test_every_element_has_one_place_and_entries_lie_apart_in_bounded_subgroups() -> None:
    """Else an element is stepped twice or never; and three slots are all the memory there is."""
    for seed in range(100):
        rng = np.random.default_rng(seed)
        items = _random_items(rng)

        groups, subgroup_bytes = _plan(rng, items)

        pieces = [piece for group in groups for piece in group.pieces]
        for index, item in enumerate(items):
            own = [piece for piece in pieces if piece.item == index]
            assert [piece.start for piece in own] == [0, *(piece.stop for piece in own[:-1])]
            assert own[-1].stop == item.numel
            assert len(own) == 1 or item.is_divisible
        for group in groups:
            end = 0
            for entry in group.entries:
                assert entry.offset_bytes >= end
                assert entry.offset_bytes % ALIGN_BYTES == 0
                end = entry.offset_bytes + entry.numel * entry.dtype.itemsize
            unit = PAGE_BYTES if group.residence is Residence.DISK else ALIGN_BYTES
            assert end <= group.nbytes < end + unit
            assert group.nbytes % unit == 0
            least = max(items[p.item].nbytes(min(CUT_NUMEL, p.numel)) for p in group.pieces)
            full = [piece for piece in group.pieces if piece.numel]
            is_alone = len(full) == 1 and not items[full[0].item].is_divisible
            assert is_alone or end <= max(subgroup_bytes, least)
            assert len({items[piece.item].place for piece in group.pieces}) == 1
            assert len(group.entries) == sum(len(items[p.item].entries) for p in group.pieces)


def test_shares_are_kept_to_one_cut() -> None:
    """A fraction is how a user fits memory: twice as much on the device does not fit."""
    for seed in range(100):
        rng = np.random.default_rng(seed)
        numels = rng.integers(0, 50_000, size=rng.integers(1, 9)).tolist()
        device, host = (rng.random(2) / 2).tolist()
        items = [Item(numel, MOMENTS, is_divisible=True) for numel in numels]

        shares = Shares(Residence.DISK, device, host, subgroup_bytes=4096, small_bytes=0)
        groups = plan_subgroups(items, shares)

        total = sum(numels) * 8
        for residence, share in ((Residence.DEVICE, device), (Residence.HOST, host)):
            held = sum(group.nbytes for group in groups if group.residence is residence)
            assert abs(held - total * share) <= CUT_NUMEL * 8 * 2 + ALIGN_BYTES * 2 * len(numels)


def test_small_subgroups_stay_in_memory() -> None:
    """A transfer of a few bytes costs a device as long as one of a mebibyte."""
    items = [Item(100_000, MOMENTS, is_divisible=True), Item(10, MOMENTS, is_divisible=True)]

    shares = Shares(Residence.DISK, subgroup_bytes=800_000, small_bytes=1000)
    groups = plan_subgroups(items, shares)

    assert [group.residence for group in groups] == [Residence.DISK, Residence.HOST]


@pytest.mark.parametrize(
    ("fraction", "message"),
    [
        ({"disk": 0.5}, "fraction names 'disk'"),
        ({"device": 0.7, "host": 0.7}, "together at most 1"),
        ({"host": -0.1}, "shares of 1"),
    ],
    ids=["unknown", "too-much", "negative"],
)
def test_shares_that_make_no_whole_are_refused(fraction: dict[str, float], message: str) -> None:
    """A mistyped share must not quietly rest everything on disk."""
    with pytest.raises(ValueError, match=message):
        Shares.of("disk", fraction, subgroup_bytes=1, small_bytes=0)
