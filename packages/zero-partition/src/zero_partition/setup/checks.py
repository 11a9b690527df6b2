"""Checks of a model before it is sharded: no wrappers, no memory that is shared or missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from zero_comm import Group

from zero_partition.dtensors import check_part, has_parts
from zero_partition.errors import PartitionError, StateError
from zero_partition.init.early_shard import CURRENT, find_early
from zero_partition.nested import is_wrapper
from zero_partition.plan.wire import pattern_of
from zero_partition.run.hooks import find_sharded
from zero_partition.run.sharded_model import find_param_ref
from zero_partition.torch_private import call_of

_WITHOUT: Final = "pass the model as it is before that: shard() does what it is for"
_WRAPPERS: Final = {
    "DistributedDataParallel": "pass the model inside it, ddp.module: shard() averages gradients",
    "DataParallel": "pass the model inside it, its .module, on one rank per device",
    "FullyShardedDataParallel": _WITHOUT,
    "FSDPModule": f"{_WITHOUT}, and fully_shard() has changed this one",
}


def check_model(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    group: Group,
    groups: Mapping[str, Group],
) -> None:
    """Raise PartitionError for what can be seen of a model without other ranks. Local.

    Args:
        model: Any.
        optimizer: Of its parameters.
        group: The ranks that train it.
        groups: Those of some parameters, by pattern of their names.
    """
    for name, module in model.named_modules():
        _check_not_wrapped(f"module {name!r} of the model" if name else "the model", module)
    if type(optimizer).__module__.startswith("accelerate."):
        raise PartitionError(
            f"the optimizer is wrapped by Accelerator.prepare() in an {type(optimizer).__name__}; "
            "pass the one inside, optimizer.optimizer, and the model as it is before prepare()"
        )
    if any(find_sharded(module) is not None for module in model.modules()):
        raise PartitionError(
            f"this {type(model).__name__}, or a module inside it, is sharded already; shard() "
            "the very model that was sharded, or unshard() it first"
        )
    if CURRENT.get() is not None:
        raise PartitionError(
            "shard() was called inside `with Init(...):`, which still watches every parameter; "
            "call it after the block"
        )
    for name, module in model.named_modules() if has_parts(model) else ():
        if call_of(module) is not None or type(module).__name__ == "OptimizedModule":
            raise PartitionError(
                f"module {name!r} was compiled, in a model whose parameters are DTensors: the "
                "compiler cannot follow the memory of these; leave out torch.compile()"
            )
    check_shapes(model)
    owners: dict[int, str] = {}
    for name, param in model.named_parameters():
        _check_param(name, param, groups.get(pattern_of(name, groups), group))
        if (
            param.layout is torch.strided
            and param.numel()
            and not (param.is_meta or is_wrapper(param))
        ):
            owners[param.untyped_storage().data_ptr()] = name
    for name, buffer in model.named_buffers():
        _check_device(name, buffer, group)
        if buffer.layout is not torch.strided or not buffer.numel() or buffer.is_meta:
            continue
        owner = owners.get(buffer.untyped_storage().data_ptr())
        if owner is not None:
            raise PartitionError(
                f"buffer {name!r} is a view of parameter {owner!r}, whose values move into a flat "
                "buffer: it would keep those of today for ever. Compute it in forward, or give it "
                "memory of its own with .clone()"
            )


def check_shapes(model: nn.Module) -> None:
    """Raise PartitionError where a parameter has no shape yet. Local."""
    for name, param in model.named_parameters():
        if is_lazy(param):
            raise PartitionError(
                f"parameter {name!r} of a lazy module has no shape yet; run one forward of the "
                "model before building the optimizer and calling shard()"
            )


def _check_not_wrapped(where: str, module: nn.Module) -> None:
    """Raise PartitionError for a module that is wrapped for training on several ranks.

    Wrappers are recognised by names of classes and attributes: nothing is imported for it.
    """
    for kind in type(module).__mro__:
        if kind.__module__.startswith("torch.") and kind.__name__ in _WRAPPERS:
            raise PartitionError(
                f"{where} is wrapped by torch's {kind.__name__}; {_WRAPPERS[kind.__name__]}"
            )
    own = vars(module)
    if "_is_accelerate_prepared" in own or {"_original_forward", "forward"} <= own.keys():
        raise PartitionError(
            f"{where} comes from Accelerator.prepare(); shard() the model and the optimizer in "
            "place of preparing them, and prepare only what else there is"
        )


def _check_param(name: str, param: nn.Parameter, group: Group) -> None:
    check_part(name, param, group)
    # For a parameter on meta, the plan of units says what to do.
    if not param.is_meta:
        _check_device(name, param, group)
    early = find_early(param)
    if early is not None and early.is_blank:
        raise PartitionError(
            f"parameter {name!r} was never initialised (rank {group.rank}); call "
            "zero_engine.materialise() or load its weights first"
        )
    if early is not None and early.group.process_group is not group.process_group:
        raise PartitionError(
            f"parameter {name!r} was sharded by Init over {early.group.world_size} ranks of "
            f"another group than the one of {group.world_size} ranks given to shard() (rank "
            f"{group.rank}); pass the same group to both"
        )
    try:
        param_ref = find_param_ref(param)
    except StateError:
        return  # that model was deleted
    if param_ref is not None:
        owner = type(param_ref.sharded.model).__name__
        raise PartitionError(
            f"parameter {name!r} belongs to a sharded {owner} already, as {param_ref.name!r}, and "
            "can have one optimizer and one place; shard the models that share it as one nn.Module"
        )


def _check_device(name: str, tensor: Tensor, group: Group) -> None:
    if tensor.device != group.device:
        raise PartitionError(
            f"{name!r} is on {tensor.device}, but the group communicates on {group.device} "
            f"(rank {group.rank}); move the model with model.to({str(group.device)!r}) before "
            "building the optimizer"
        )
