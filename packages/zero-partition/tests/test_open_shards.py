"""Memory that a shard is written into is not cleared, but for what no parameter writes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from zero_partition._flat_buffer import FlatBuffer
from zero_partition._layout import FlatLayout
from zero_partition._open_shards import _clear_padding


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_padding_does_not_show_what_the_memory_held_before(rank: int) -> None:
    """It travels with every gather and every file, and two runs of one job must be the same."""
    layout = FlatLayout.plan([5, 0, 33, 7], world_size=3)
    pieces = layout.pieces(rank)
    shard = torch.full((layout.splits[rank],), torch.nan)

    _clear_padding(cast("FlatBuffer", SimpleNamespace(pieces=pieces)), shard)

    written = torch.zeros(len(shard), dtype=torch.bool)
    for piece in pieces:
        written[piece.in_shard.as_slice()] = True
    assert bool(shard[written].isnan().all())
    assert not shard[~written].any()
    assert bool((~written).any())
