"""What DeepSpeed's keys of ZeRO++ and MiCS mean here, one by one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from zero_engine import ConfigError, Loco, Wire, ZeroConfig


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
        # Codecs; what a node is, torchrun says, unless the file does.
        ({"zero_quantized_weights": True}, Wire(params="int8")),
        ({"zero_quantized_nontrainable_weights": True}, Wire(frozen="int8")),
        ({"zero_quantized_weights": False, "zero_quantized_gradients": False}, Wire()),
        ({"zero_quantized_gradients": True}, Wire(gradients="int4")),
        (
            {
                "zero_quantized_weights": True,
                "zero_hpz_partition_size": 8,
                "zero_quantized_gradients": True,
            },
            Wire(params="int8", gradients="int4", levels=8, secondary=True),
        ),
        (
            {"mics_shard_size": 8, "zero_quantized_gradients": True},
            Wire(levels=8, replicas=True, gradients="int4"),
        ),
        (
            {
                "zero_quantized_gradients": True,
                "zeropp_loco_param": {"err_beta": 0.5, "reset_T": 16},
            },
            Wire(gradients="int4", loco=Loco(err_beta=0.5, reset_T=16)),
        ),
        # Without gradients to feed back to, it is not read.
        ({"zeropp_loco_param": {"err_beta": 0.5, "reset_T": 16}}, Wire()),
    ],
    ids=str,
)
def test_sizes_of_groups_become_levels(keys: dict[str, Any], expected: Wire) -> None:
    """A file that says so many ranks must get groups of so many."""
    assert _wire(**keys) == expected


@pytest.mark.parametrize(
    ("loco", "text"),
    [
        ({"err_beta": 1.5}, r"zeropp_loco_param: expected err_beta in \[0, 1\)"),
        ({"reset_T": 0}, "zeropp_loco_param: expected reset_T of at least 1"),
        ({"beta": 0.5}, r"zeropp_loco_param: .* got \['beta'\]"),
    ],
)
def test_wrong_feedback_is_named(loco: dict[str, Any], text: str) -> None:
    """A misspelt key would train with a default."""
    with pytest.raises(ConfigError, match=text):
        _wire(zero_quantized_gradients=True, zeropp_loco_param=loco)


def test_feedback_across_replicas_is_refused_by_name() -> None:
    """The second reduction of MiCS ends on every replica: there is no error of one's own."""
    with pytest.raises(ConfigError, match=r"zeropp_loco_param: .*mics_shard_size 8"):
        _wire(mics_shard_size=8, zero_quantized_gradients=True, zeropp_loco_param={})


def test_both_at_once_is_refused_by_name() -> None:
    """With replicas a node has all shards: there is nothing to keep a second time."""
    with pytest.raises(ConfigError, match=r"mics_shard_size: .*zero_hpz_partition_size 4"):
        _wire(mics_shard_size=8, zero_hpz_partition_size=4)
