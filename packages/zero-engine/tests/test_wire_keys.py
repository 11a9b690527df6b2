"""What DeepSpeed's keys of ZeRO++ and MiCS mean here, one by one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from zero_engine import ConfigError, Wire, ZeroConfig


def _wire(**keys: Any) -> Wire:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ZeroConfig.from_deepspeed({"zero_optimization": {"stage": 3, **keys}}).wire


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, Wire()),
        # Ranks of a node, each of which keeps a part of what it has gathered; 1 is off.
        ({"zero_hpz_partition_size": 1}, Wire()),
        ({"zero_hpz_partition_size": 8}, Wire(levels=8, secondary=True)),
        # Ranks over which a replica is sharded; -1 is off. Over one, nothing is.
        ({"mics_shard_size": -1}, Wire()),
        ({"mics_shard_size": 8}, Wire(levels=8, replicas=True)),
        ({"mics_shard_size": 1}, Wire(levels=1, replicas=True)),
        (
            {"mics_shard_size": 8, "mics_hierarchical_params_gather": True},
            Wire(levels=8, replicas=True),
        ),
        ({"mics_shard_size": 8, "zero_hpz_partition_size": 1}, Wire(levels=8, replicas=True)),
    ],
    ids=str,
)
def test_sizes_of_groups_become_levels(keys: dict[str, Any], expected: Wire) -> None:
    """A file that says so many ranks must get groups of so many."""
    assert _wire(**keys) == expected


def test_both_at_once_is_refused_by_name() -> None:
    """With replicas a node has all shards: there is nothing to keep a second time."""
    with pytest.raises(ConfigError, match=r"mics_shard_size: .*zero_hpz_partition_size 4"):
        _wire(mics_shard_size=8, zero_hpz_partition_size=4)
