"""ZeRO++ and MiCS in `zero_optimization`, and what they make of the wire."""

from __future__ import annotations

from typing import Final

from zero_partition import Wire

from ._errors import ConfigError
from ._file_key import Becomes, CannotMatter, FileKey, NotBuilt, section
from ._value_kinds import FLAG, OBJECT, POSITIVE, integer

_QUANTIZED: Final = NotBuilt("quantized communication (ZeRO++)")

KEYS: Final = section(
    "zero_optimization",
    FileKey("zero_quantized_weights", FLAG, False, _QUANTIZED, min_stage=3),
    FileKey("zero_quantized_nontrainable_weights", FLAG, False, _QUANTIZED, min_stage=3),
    FileKey("zero_quantized_gradients", FLAG, False, _QUANTIZED),
    FileKey("zeropp_loco_param", OBJECT, None, _QUANTIZED),
    FileKey("zero_hpz_partition_size", POSITIVE, 1, Becomes("zero.wire.secondary"), min_stage=3),
    FileKey(
        "mics_shard_size",
        integer(-1),
        -1,
        Becomes("zero.wire.replicas"),
        neutral=(0,),
        min_stage=3,
    ),
    FileKey(
        "mics_hierarchical_params_gather",
        FLAG,
        False,
        CannotMatter(
            "how a collective is composed is chosen once per group, and gives the same values"
        ),
        gate="mics_shard_size",
    ),
)


def wire_of(*, secondary: int = 1, replicas: int = -1) -> Wire:
    """A Wire from the sizes that the file gives: ranks of a node, and ranks of a replica.

    Raises:
        ConfigError: Both are asked for.
    """
    if secondary > 1 and replicas > 0:
        raise ConfigError(
            f"zero_optimization.mics_shard_size: expected -1 together with zero_hpz_partition_size "
            f"{secondary}, got {replicas}: where each replica has all shards, there is nothing to "
            "keep a second time; leave one of them out"
        )
    if replicas > 0:
        return Wire(levels=replicas, replicas=True)
    return Wire(levels=secondary, secondary=True) if secondary > 1 else Wire()
