"""Ranks that do not mean the same thing hear of it, by name."""

from __future__ import annotations

import time
from typing import Any

import pytest
from zero_comm import AgreementError, CommError, Group, all_gather_json, check_agreement


@pytest.mark.ranks(1, 2, 3)
def test_ranks_that_agree_go_on(group: Group) -> None:
    """Any text may be a fact, however long."""
    check_agreement({"layout": "x" * 5000, "π": "∞", "empty": ""}, group=group)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("first", "other", "text"),
    [
        (
            {"seed": "1", "stage": "2"},
            {"seed": "1", "stage": "3"},
            r"disagree on stage: rank 0 has 2, rank 1 has 3 \(seen on rank {rank}\)",
        ),
        (
            {"unit a": "5"},
            {"unit b": "5"},
            r"rank 0 has unit a where rank 1 has unit b \(seen on rank {rank}\)",
        ),
        ({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, r"rank 0 has a where rank 1 has b"),
        ({"a": "1", "b": "2"}, {"a": "1"}, r"only rank 0 has b \(2\), comparing ranks 0 and 1"),
        ({"a": "1"}, {"a": "1", "b": "2"}, r"only rank 1 has b \(2\), comparing ranks 0 and 1"),
        ({}, {"a": "a" * 3000}, r"only rank 1 has a"),
        ({"a": "1", "c": "3"}, {"a": "1", "b": "2", "c": "3"}, r"only rank 1 has b \(2\)"),
        ({"a": "1", "b": "2", "c": "3"}, {"a": "1", "c": "3"}, r"only rank 0 has b \(2\)"),
    ],
    ids=["value", "name", "order", "0-more", "1-more", "nothing", "1-between", "0-between"],
)
def test_every_rank_hears_what_differs(
    group: Group, first: dict[str, str], other: dict[str, str], text: str
) -> None:
    """The fact, the ranks and both values, on all ranks: only one of the logs may be at hand."""
    with pytest.raises(AgreementError, match=text.format(rank=group.rank)):
        check_agreement(other if group.rank == 1 else first, group=group)


def test_a_rank_that_stays_away_is_an_error_in_seconds(group: Group) -> None:
    """The check exists because ranks go astray; it must not itself wait for ever."""
    started = time.monotonic()
    if group.rank == 0:
        with pytest.raises(CommError, match=r" did not finish within 0.5 s"):
            check_agreement({"a": "1"}, group=group, timeout_s=0.5)
    assert time.monotonic() - started < 10


@pytest.mark.ranks(1, 3)
def test_every_rank_hears_what_every_rank_says(group: Group) -> None:
    """Of different length each, and of every kind that JSON has."""
    with pytest.raises(TypeError):
        all_gather_json({1}, group=group)  # no message was sent
    heard = all_gather_json(_words(group.rank), group=group)
    assert heard == [_words(rank) for rank in range(group.world_size)]


def _words(rank: int) -> Any:
    return {"rank": rank, "list": ["ü"] * 100 * rank, "none": None, "big": 2**70, "x": 0.1, "": {}}
