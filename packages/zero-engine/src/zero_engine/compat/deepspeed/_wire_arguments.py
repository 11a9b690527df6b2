"""Arguments of `zero.Init` that the configuration says as well: both must say the same."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from zero_comm import Group, Levels
from zero_partition import Wire

from zero_engine import ConfigError

# NOTE(said twice): DeepSpeed's parameters keep what `Init` was told, or else its configuration.
# Here a model that is built in parts knows nothing of the wire, which `initialize` makes of its
# configuration: so that is where it must be said, and the argument may say it too.


def check_wire_arguments(
    wire: Wire | None,
    *,
    weights: bool,
    nontrainable_weights: bool,
    param_group: Any,
    group: Group,
) -> None:
    """Raise ConfigError for what is asked for and is not in the configuration.

    Collective where there is a `param_group`.

    Args:
        wire: Of the configuration; None: there is none.
        weights: Whether shards are to travel in 8 bits.
        nontrainable_weights: Whether those of frozen parameters are to rest in 8 bits.
        param_group: Of torch: the ranks that keep secondary shards together; None: not asked for.
        group: All ranks.
    """
    is_said = wire or Wire()
    for name, is_asked, codec in (
        ("zero_quantized_weights", weights, is_said.params),
        ("zero_quantized_nontrainable_weights", nontrainable_weights, is_said.frozen),
    ):
        if is_asked and codec is None:
            _refuse(f"{name}=True", f"{name}: true", wire)
    if param_group is None:
        return
    ranks = dist.get_process_group_ranks(param_group)
    what = f"zero_param_parallel_group=<ranks {ranks}>"
    if not is_said.secondary:
        _refuse(what, f"zero_hpz_partition_size: {len(ranks)}", wire)
    levels = is_said.levels
    if not isinstance(levels, Levels):
        levels = Levels.of_nodes(group, levels)
    node = dist.get_process_group_ranks(levels.inside.process_group)
    if sorted(ranks) != sorted(node):
        raise ConfigError(
            f"deepspeed.zero.Init({what}): expected the ranks of this rank's node, {node}, as the "
            f"configuration has it, got others (rank {group.rank}); leave out the argument, and "
            "say in zero_optimization.zero_hpz_partition_size how many ranks make a node"
        )


def _refuse(argument: str, key: str, wire: Wire | None) -> None:
    got = "no configuration" if wire is None else "a configuration that does not"
    raise ConfigError(
        f"deepspeed.zero.Init({argument}): expected a configuration that says so too, since it is "
        f"by the configuration that initialize() trains, got {got}; write "
        f"zero_optimization.{key} there, and pass it as config_dict_or_path or leave out the "
        "argument"
    )
