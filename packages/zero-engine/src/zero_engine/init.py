"""Models that are built, and filled, in parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import zero_partition
from torch import nn
from zero_comm import Group
from zero_partition.plan import Placement

from .checks import default_group
from .config import ZeroConfig


def Init(
    module: nn.Module | None = None,
    *,
    group: Group | None = None,
    config: ZeroConfig | None = None,
) -> AbstractContextManager[Any]:
    """Build a model of which each rank keeps its part only. Collective.

        with zero_engine.Init(config=config):
            model = Model()
        optimizer = torch.optim.AdamW(model.parameters())
        zero_engine.shard(model, optimizer, config)

    See `zero_partition.Init` for what happens inside: values are those of plain construction on
    rank 0. Below stage 3 parameters rest whole anyway, and this does nothing.

    Args:
        module: A module that exists already: sharded at once, with or without `with`.
        group: As for `shard`; the same for both.
        config: As for `shard`.

    Raises:
        ConfigError: Several ranks, but torch.distributed is not initialised.
        zero_partition.PartitionError: A parameter cannot be sharded, or is on another device.
        zero_comm.AgreementError: Ranks build different models.
        zero_comm.CommError: A rank did not take part in time.
    """
    config = ZeroConfig() if config is None else config
    group = default_group(module) if group is None else group
    if config.placements.params is Placement.REPLICATED:
        return nullcontext()
    return zero_partition.Init(
        module, group=group, timeout_s=config.timeout_s, state_dict=config.state_dict
    )


def materialise(
    model: nn.Module,
    init: Callable[[nn.Module], object] | None = None,
    *,
    group: Group | None = None,
    config: ZeroConfig | None = None,
) -> None:
    """Give a model on the meta device memory and values; each rank holds its part. Collective.

    Args:
        model: Built under `torch.device("meta")`; changed in place, ties kept.
        init: Called with every module, children before parents; `reset_parameters()` of each
            module when None.
        group: As for `shard`; the same for both.
        config: For `timeout_s`.

    Raises:
        ConfigError: Several ranks, but torch.distributed is not initialised.
        zero_partition.PartitionError: Names every parameter, buffer and tensor attribute that
            `init` left unwritten.
        zero_comm.AgreementError: Ranks hold different models.
        zero_comm.CommError: A rank did not take part in time.
    """
    config = ZeroConfig() if config is None else config
    zero_partition.materialise(
        model,
        init,
        group=default_group(model) if group is None else group,
        timeout_s=config.timeout_s,
    )
