"""What a model must not contain when it is sharded: memory that sharding would part, or lacks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ._errors import PartitionError, StateError
from ._places import find_place


def check_content(model: nn.Module) -> None:
    """Raise PartitionError where parameters have no memory yet, or share it with others. Local."""
    owners: dict[int, str] = {}
    for name, param in model.named_parameters():
        if is_lazy(param):
            raise PartitionError(
                f"parameter {name!r} of a lazy module has no shape yet; run one forward of the "
                "model before building the optimizer and calling shard()"
            )
        _check_place(name, param)
        if param.layout is torch.strided and param.numel() and not param.is_meta:
            owners[param.untyped_storage().data_ptr()] = name
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided or not buffer.numel() or buffer.is_meta:
            continue
        owner = owners.get(buffer.untyped_storage().data_ptr())
        if owner is not None:
            raise PartitionError(
                f"buffer {name!r} is a view of parameter {owner!r}, whose values move into a flat "
                "buffer: it would keep those of today for ever. Compute it in forward, or give it "
                "memory of its own with .clone()"
            )


def _check_place(name: str, param: nn.Parameter) -> None:
    place = find_place(param)
    if place is None:
        return
    try:
        owner = type(place.sharded.model).__name__
    except StateError:
        return  # that model is gone
    raise PartitionError(
        f"parameter {name!r} belongs to a sharded {owner} already, as {place.name!r}, and can have "
        "one optimizer and one place; shard the models that share it as one nn.Module"
    )
