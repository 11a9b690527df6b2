"""shard() for plain PyTorch loops; Init() and materialise(), which build models already sharded."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import itemgetter
from typing import Any, Final, NoReturn, TypeVar

import torch
import torch.distributed as dist
import zero_partition
from attrs import evolve
from torch import nn
from torch.nn.parameter import is_lazy
from zero_comm import AnyRanks, collective, failure
from zero_comm.logs import warn_user
from zero_offload import DiskSettings
from zero_partition import partition, unpartition
from zero_partition.plan import Placement, ranks_of, shown
from zero_partition.seams import SeparateOptimizers, ShardedModel, find_sharded, members_of

from .checks import default_group, own_masters
from .config import ZeroConfig
from .errors import ConfigError
from .offload import backends_of

Model = TypeVar("Model", bound=nn.Module)
AnyOptimizer = TypeVar(
    "AnyOptimizer", bound=torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
)

# 16-bit dtypes, and the sections of a file for DeepSpeed that turn them on.
_NARROW: Final = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_LOG: Final = logging.getLogger("zero_engine")


@collective
def shard(
    model: Model,
    optimizer: AnyOptimizer = None,  # type: ignore[assignment]
    config: ZeroConfig | None = None,
    *,
    group: AnyRanks | None = None,
    **unknown: NoReturn,
) -> tuple[Model, AnyOptimizer]:
    """Distribute a model and its optimizer over all ranks; the training loop stays as it is.

    Collective. Both objects are changed in place and returned; all ranks take the values of rank 0.
    Optimizer state that exists is sharded, and a scheduler built before goes on working.

    A model that is already sharded can be sharded again at any moment between steps. With another
    optimizer, that one gets the shards, and no rank ever gathers more than one unit at a time; the
    previous optimizer loses its state, and raises if it is stepped again. With the same optimizer,
    its state is gathered for a moment. With none, the model keeps the optimizer that it has.

    Args:
        model: A model on the device of the group, its parameters dense, of any strides.
        optimizer: Any torch optimizer built from `model.parameters()`; None for inference. One that
            is not elementwise restricts how parameters are cut, or is refused: `ZeroConfig.cut`.
            Several in a list are stepped, zeroed and clipped one by one, in any order, as those of
            a GAN; optimizers that step together are one `ChainedOptimizer`.
        config: `ZeroConfig()`, stage 3, when None. Without a `precision`, a 16-bit model has no
            fp32 masters, which rank 0 warns of.
        group: The ranks to distribute over: a Group, a ProcessGroup, or a DeviceMesh of one
            dimension, or of two, of which the first has replicas and the second shards (as
            `Wire.replicas` does, too). All ranks when None, or just this process if
            torch.distributed was not initialised.
        **unknown: Nothing; a setting given here, such as `stage=3`, is refused by name.

    Returns:
        The same model and the same optimizer.

    Raises:
        ConfigError: `config`, `model` or `optimizer` is of the wrong type, or there are several
            ranks but torch.distributed is not initialised.
        zero_partition.PartitionError: The model or the optimizer cannot be distributed as it is.
        zero_comm.AgreementError: Ranks have different models, optimizers or settings.
        zero_comm.CommError: A rank did not take part in time.
    """
    if unknown:
        named = ", ".join(f"{name}={value!r}" for name, value in unknown.items())
        raise ConfigError(
            f"shard(): expected model, optimizer, config and group, got {named}; settings are in "
            f"the configuration: shard(model, optimizer, ZeroConfig({named}))"
        )
    is_bare = config is None and optimizer is None and isinstance(model, nn.Module)
    if is_bare and find_sharded(model) is not None:
        return model, optimizer
    config = ZeroConfig() if config is None else config
    chosen: Any = optimizer
    if isinstance(optimizer, list | tuple) and isinstance(model, nn.Module):
        chosen = _as_one(model, optimizer, config)
    # `Group.of` says so.
    is_outside = group is dist.GroupMember.NON_GROUP_MEMBER
    file = "; for a file of DeepSpeed's, ZeroConfig.from_deepspeed() or initialize()"
    for name, value, kind in (
        ("model", model, nn.Module),
        ("optimizer", chosen, torch.optim.Optimizer | None),
        ("config", config, ZeroConfig),
        ("group", None if is_outside else group, AnyRanks | None),
    ):
        if not isinstance(value, kind):
            expected = getattr(kind, "__name__", str(kind))
            if name == "optimizer":
                expected = (
                    "torch.optim.Optimizer, as torch.optim.AdamW(model.parameters()), or None"
                )
            raise ConfigError(
                f"shard(): expected {name} to be a {expected}, got {shown(value)}; call "
                f"shard(model, optimizer, ZeroConfig(stage=3)){file if name == 'config' else ''}"
            )
    if group is None:
        group = default_group(model, timeout_s=config.timeout_s)
    group, wire = ranks_of(group, config.wire, config.placements)
    config = evolve(config, wire=wire)
    if _LOG.isEnabledFor(logging.INFO):
        from .planning.tables import line_of  # noqa: PLC0415 (imported for a log only)

        try:
            line = line_of(model, chosen, config, group)
        # Whatever is wrong with the model, partition() raises the right error below.
        except Exception as error:
            line = f"bytes cannot be planned ({error!r})"
        _LOG.info("sharding a %s: %s", type(model).__name__, line)
    if config.precision is None and group.rank == 0:
        _warn_without_masters(chosen)
    failure.install(model, group, _write_report)
    offload = config.offload
    if config.sanitize and offload is not None and offload.path is not None:
        disk = evolve(offload.disk or DiskSettings(), has_checksums=True)
        offload = evolve(offload, disk=disk)
    backends = partial(backends_of, offload, group.device)
    partition(model, chosen, config.for_partition, group=group, backends=backends)
    return model, optimizer


def _warn_without_masters(optimizer: torch.optim.Optimizer | None) -> None:
    """Warn that 16-bit parameters are updated without masters, where the user has not chosen so.

    If 16-bit parameters are at most half of all, they are a choice of the model: no warning.
    """
    for each in members_of(optimizer):
        numel = Counter[torch.dtype]()
        for group in each.param_groups:
            for param in group["params"]:
                if not is_lazy(param):
                    numel[param.dtype] += param.numel() * param.requires_grad
        dtype, most = max(numel.items(), key=itemgetter(1), default=(torch.float32, 0))
        is_narrow = dtype in _NARROW and 2 * most > numel.total()
        if is_narrow and own_masters(each) is None:
            warn_user(
                f"shard(): {type(each).__name__} updates parameters of {dtype} without fp32 "
                "masters, so that an update below half of a parameter's last bit is lost: with a "
                "learning rate of 1e-5, most are. Pass ZeroConfig(precision=Precision()), at "
                "stage 1, 2 or 3, which keeps masters with the optimizer's state (in a file for "
                f'DeepSpeed: "{_NARROW[dtype]}": {{"enabled": true}}); '
                "Precision(masters=None) says that none are wanted, without this warning",
            )
            return


def _as_one(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], config: ZeroConfig
) -> SeparateOptimizers:
    """Combine optimizers into one, since a partition has one; each is still stepped by itself."""
    owners: dict[int, int] = {}
    names = {id(param): name for name, param in model.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"shard(): expected optimizer to be one or several torch optimizers, got "
                f"{optimizers!r} of type {type(optimizers).__name__}"
            )
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if owners.setdefault(id(param), number) != number:
                name, other = names.get(id(param), "?"), owners[id(param)]
                raise ConfigError(
                    f"shard(): parameter {name!r} is in two of the optimizers, {other} and "
                    f"{number}; leave it to one of them"
                )
    sharded = find_sharded(model)
    known = None if sharded is None else sharded.optimizer
    if isinstance(known, SeparateOptimizers) and [*known.optimizers] == [*optimizers]:
        return known
    left = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in owners]
    if left:
        raise ConfigError(
            f"shard(): expected each trainable parameter in one of the {len(optimizers)} "
            f"optimizers, got {', '.join(left[:3])} in none; add them, or freeze them"
        )
    if config.offload is not None and config.offload.optimizer != "device":
        raise ConfigError(
            "shard(): expected optimizer state on the device where several optimizers step by "
            "themselves, got an Offload of it; leave it out, or chain them if they step together: "
            "ChainedOptimizer(muon, adamw)"
        )
    return SeparateOptimizers(*optimizers)


def has_optimizer(sharded: ShardedModel, given: Any) -> bool:
    """Return whether `given` is None, or the optimizer (or all of several) sharded with a model."""
    own = sharded.optimizer
    if isinstance(given, list | tuple):
        return isinstance(own, SeparateOptimizers) and [*own.optimizers] == [*given]
    return given is None or given is own


def _write_report(*what: Any) -> None:
    from .failure import write  # noqa: PLC0415 (imported after an error only)

    write(*what)


@collective
def unshard(
    model: Model,
    optimizer: AnyOptimizer = None,  # type: ignore[assignment]
) -> tuple[Model, AnyOptimizer]:
    """Undo `shard`: the full model and optimizer on every rank, without our hooks. Collective.

    For exporting, copying or compiling a model, or to shard it in another way. Existing gradients
    are gathered into `param.grad`. Every rank needs memory for the full model and optimizer.

    Args:
        model: The very module that `shard` returned.
        optimizer: The one that was sharded with it; it is undone also when it is not given.

    Returns:
        The same model and the same optimizer.

    Raises:
        ConfigError: `optimizer` was not sharded together with `model`.
        zero_partition.StateError: Not sharded, a forward or backward is running, or an entry of the
            optimizer's state cannot be put together from its shards; nothing was done.
        zero_comm.CommError: A rank did not take part in time.
    """
    sharded = find_sharded(model)
    if sharded is not None and not has_optimizer(sharded, optimizer):
        raise ConfigError(
            f"unshard(): expected the optimizer that was sharded with the model, got another "
            f"{type(optimizer).__name__}; pass what shard() returned"
        )
    unpartition(model)
    return model, optimizer


def Init(
    module: nn.Module | None = None,
    *,
    group: AnyRanks | None = None,
    config: ZeroConfig | None = None,
) -> AbstractContextManager[Any]:
    """Build a model of which each rank keeps only its shards. Collective.

        with zero_engine.Init(config=config):
            model = Model()
        optimizer = torch.optim.AdamW(model.parameters())
        zero_engine.shard(model, optimizer, config)

    See `zero_partition.Init` for what happens inside: values are those of plain construction on
    rank 0. Below stage 3 parameters are not sharded, and this does nothing.

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
    return zero_partition.Init(module, group=group, timeout_s=config.timeout_s)


def materialise(
    model: nn.Module,
    init: Callable[[nn.Module], object] | None = None,
    *,
    group: AnyRanks | None = None,
    config: ZeroConfig | None = None,
) -> None:
    """Allocate and fill a model on the meta device; each rank keeps its shards. Collective.

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
        zero_comm.AgreementError: Ranks have different models.
        zero_comm.CommError: A rank did not take part in time.
    """
    config = ZeroConfig() if config is None else config
    zero_partition.materialise(
        model,
        init,
        group=default_group(model) if group is None else group,
        timeout_s=config.timeout_s,
    )
