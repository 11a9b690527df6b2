"""ZeRO++ and MiCS in `zero_optimization`, and what they make of the wire."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from zero_comm import CodecError, Loco
from zero_partition import Wire

from ._errors import ConfigError
from ._file_key import Becomes, CannotMatter, FileKey, section
from ._value_kinds import FLAG, OBJECT, POSITIVE, integer


def _codec(name: str) -> Callable[[bool], str | None]:
    """Of a flag."""
    return lambda is_on: name if is_on else None


def _loco(said: Mapping[str, Any]) -> Loco:
    known = {"err_beta", "reset_T"}
    if set(said) - known:
        raise ConfigError(
            f"zero_optimization.zeropp_loco_param: expected err_beta and reset_T, got "
            f"{sorted(set(said) - known)} besides; leave out what is not known"
        )
    try:
        return Loco(**said)
    except (CodecError, TypeError) as error:
        raise ConfigError(f"zero_optimization.zeropp_loco_param: {error}") from error


WIRE_KEYS: Final = section(
    "zero_optimization",
    FileKey(
        "zero_quantized_weights",
        FLAG,
        False,
        Becomes("zero.wire.params", _codec("int8")),
        min_stage=1,
    ),
    FileKey(
        "zero_quantized_nontrainable_weights",
        FLAG,
        False,
        Becomes("zero.wire.frozen", _codec("int8")),
        min_stage=3,
    ),
    FileKey(
        "zero_quantized_gradients",
        FLAG,
        False,
        Becomes("zero.wire.gradients", _codec("int4")),
        min_stage=1,
    ),
    FileKey(
        "zeropp_loco_param",
        OBJECT,
        None,
        Becomes("zero.wire.loco", _loco),
        gate="zero_quantized_gradients",
    ),
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
            "it would give the same values; ranks of a replica are taken to be near each other, "
            "and over NCCL each shard enters a machine once anyway"
        ),
        gate="mics_shard_size",
    ),
)


def wire_of(
    *,
    secondary: int = 1,
    replicas: int = -1,
    params: str | None = None,
    gradients: str | None = None,
    frozen: str | None = None,
    loco: Loco | None = None,
) -> Wire:
    """A Wire from what the file gives: ranks of a node, ranks of a replica, and codecs.

    Gradients are reduced by the same nodes; where no size is given, torchrun says what a node is.

    Raises:
        ConfigError: Some of it excludes other.
    """
    if secondary > 1 and replicas > 0:
        raise ConfigError(
            f"zero_optimization.mics_shard_size: expected -1 together with zero_hpz_partition_size "
            f"{secondary}, got {replicas}: where each replica has all shards, there is nothing to "
            "keep a second time; leave one of them out"
        )
    if replicas > 0 and loco is not None:
        raise ConfigError(
            "zero_optimization.zeropp_loco_param: expected none together with mics_shard_size "
            f"{replicas}: what is lost across replicas has no feedback; leave one of them out"
        )
    has_nodes = replicas > 0 or secondary > 1
    return Wire(
        levels=max(replicas, secondary) if has_nodes else None,
        secondary=secondary > 1,
        replicas=replicas > 0,
        params=params,
        gradients=gradients,
        frozen=frozen,
        loco=loco,
    )
