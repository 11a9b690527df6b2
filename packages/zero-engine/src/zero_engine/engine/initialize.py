"""initialize(): make an Engine from the arguments of DeepSpeed's function of this name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, Literal, final

import torch
import zero_ckpt
import zero_comm
import zero_partition
from attrs import evolve
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from zero_comm import AnyRanks, Group, collective
from zero_offload import CPUAdam, FusedAdam
from zero_partition import AS_IT_IS
from zero_partition.plan import ranks_of, whole_of
from zero_partition.seams import pattern_of

from zero_engine.checks import default_group
from zero_engine.config import ZeroConfig
from zero_engine.errors import ConfigError
from zero_engine.readers import reader_for
from zero_engine.sharding import shard
from zero_engine.torch_private import accelerator

from .engine import Engine
from .engine_config import EngineConfig

AnyConfig = Mapping[str, Any] | str | os.PathLike[str] | EngineConfig | ZeroConfig


@collective
@zero_partition.Init.suspended()
def initialize(  # noqa: PLR0917 - the order is DeepSpeed's
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: AnyConfig | None = None,
    *,
    group: AnyRanks | None = None,
    auto: Mapping[str, Any] | None = None,
) -> tuple[Engine, torch.optim.Optimizer | None, Loader | None, Any]:
    """Shard a model, and wrap it with its optimizer, batches and scheduler. Collective.

    A thin layer over `shard`: the plain loop has everything that the engine has.

    Args:
        args: Anything; its attribute `deepspeed_config` is the configuration, where there is one.
        model: Moved to the group's device, and changed in place.
        optimizer: An instance, or what makes one from `model_parameters`. The configuration's
            otherwise; with neither, the engine is for inference.
        model_parameters: Parameters or param groups to train; those that require a gradient when
            None. Not looked at where `optimizer` is an instance.
        training_data: A dataset with `__getitem__` and `__len__`, divided among the ranks.
        lr_scheduler: An instance, or what makes one from the optimizer. The configuration's
            otherwise.
        mpu: Its `get_data_parallel_group()` is the process group to shard over; norms and overflow
            are those of its `get_model_parallel_group()` as well, where that has several ranks.
            Parameters marked by `allreduce` = False, or by `moe` = True in their param group, have
            the ranks of its `get_expert_data_parallel_group()`, unless `ZeroConfig.groups` says
            otherwise. Or a DeviceMesh: of one axis, or of two with one named "dp", "data" or
            "data_parallel". The other axis splits the model or, named "sp", "cp", "sequence" or the
            like, sequences. If sequences are split, by a mesh or by an mpu that has
            `get_sequence_data_parallel_group()`, the model is sharded over all ranks of the mesh or
            of that group. Gradients are then added up over ranks that share a sample, and averaged
            over samples, as DeepSpeed's are.
        dist_init_required: False: raise where torch.distributed is needed and not initialised.
            Otherwise the job that torchrun describes is joined if need be.
        collate_fn: Makes a batch from a list of samples of `training_data`.
        config: DeepSpeed's dict, the path of such a JSON file, or its base64; an EngineConfig; or a
            ZeroConfig, for one micro-batch per step. With fp16 or bf16 in such a file and stage 0,
            stage 1 is used: fp32 masters are sharded, which gives the same numbers in less memory.
            With these, inputs of the model are not cast, as `Precision.cast_inputs` would do:
            DeepSpeed leaves that to the script.
        group: The ranks to shard over, as for `shard`, instead of `mpu`.
        auto: Values by path for what the file leaves "auto", as in `{"gradient_clipping": 1.0}`.
            What follows from arguments needs none: options of an `optimizer` that is an instance,
            16-bit sections from the dtype of the model, batch sizes and clipping that `args` has as
            attributes of these names, and one batch size from the other two.

    Returns:
        The engine, its optimizer, the loader of `training_data`, and the scheduler; None for what
        there is not. An optimizer or scheduler that was passed is the same object.

    Raises:
        ConfigError: Names the argument or the key, what was expected and what came.
        zero_partition.PartitionError: The model or the optimizer cannot be distributed as it is.
        zero_comm.AgreementError: Ranks have different models, optimizers or settings.
        zero_comm.CommError: A rank did not take part in time.
        zero_ckpt.CheckpointError: The file's section `activation_checkpointing` is wrong.
    """
    _check_kinds(model, collate_fn, group)
    check_mpu(mpu, what="initialize()")
    assert model is not None, "its kind was checked"
    chosen = _choose_config(args, config)
    # Says which ranks share a sample; None if `group` was passed.
    unit = mpu if group is None else None
    ranks = _join(mpu, dist_init_required) if group is None else group
    group = whole_of(ranks)
    across = model_group_of(mpu, what="initialize()")
    data = group if unit is None else data_group_of(unit, what="initialize()")
    settings = _as_engine_config(
        chosen,
        auto,
        model=model,
        world_size=data.world_size,
        args=args,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
    )
    if optimizer is not None or settings.optimizer is not None:
        _check_trains(model)
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    # Tensors on meta are left to `shard`, which checks them.
    if not devices <= {group.device, torch.device("meta")}:
        model.to(group.device)
    if model_parameters is None:
        model_parameters = [param for param in model.parameters() if param.requires_grad]
    made = _choose_optimizer(optimizer, model_parameters, settings)
    scheduler = _choose_scheduler(lr_scheduler, made, settings.scheduler)
    loader = None
    if training_data is not None:
        loader = _make_loader(training_data, collate_fn, settings, data)
    if settings.activation_checkpointing and not zero_ckpt.is_configured():
        section = {"activation_checkpointing": settings.activation_checkpointing}
        zero_ckpt.configure(model_part_of(mpu), section)
    if settings.prepare is not None:
        settings.prepare(model)
    if settings.zero.offload is not None and settings.zero.offload.path is not None:
        # If this fails, `shard` raises an error on all ranks that says why.
        with suppress(OSError):
            settings.zero.offload.path.mkdir(parents=True, exist_ok=True)
    _, wire = ranks_of(ranks, settings.zero.wire, settings.zero.placements)
    precision = settings.zero.precision
    # Ranks that share a sequence add up the parts of its gradients.
    if data.world_size != group.world_size:
        precision = evolve(precision or AS_IT_IS, mean_over=data.world_size)
    own = settings.zero.groups
    if not own and group.world_size > 1:
        own = _expert_groups(model, made, mpu)
    zero = evolve(settings.zero, wire=wire, precision=precision, groups=own)
    settings = evolve(settings, zero=zero)
    # Comes last, so that an error above leaves the model unchanged.
    shard(model, made, settings.zero, group=group)
    groups: dict[str, Any] = {"group": group, "data": data, "across": across}
    engine = Engine(model, made, settings, lr_scheduler=scheduler, **groups)
    return engine, made, loader, scheduler


def _check_kinds(model: Any, collate_fn: Any, group: Any) -> None:
    for name, value, fits, expected in (
        ("model", model, isinstance(model, nn.Module), "be a torch.nn.Module"),
        ("collate_fn", collate_fn, collate_fn is None or callable(collate_fn), "be a function"),
        ("group", group, isinstance(group, AnyRanks | None), "be a zero_comm.Group or a mesh"),
    ):
        if not fits:
            raise ConfigError(f"initialize(): expected {name} to {expected}, got {value!r}")


def _check_trains(model: nn.Module) -> None:
    params = list(model.parameters())
    if not any(param.requires_grad for param in params):
        raise ConfigError(
            "initialize(): expected a model to train, as there is an optimizer, got a "
            f"{type(model).__name__} of {len(params)} parameters, none of which requires a "
            "gradient; unfreeze what is to be trained, or leave the optimizer out for inference"
        )


def _choose_config(args: Any, config: AnyConfig | None) -> AnyConfig:
    of_args = getattr(args, "deepspeed_config", None)
    if config is not None and of_args is not None and config != of_args:
        raise ConfigError(
            f"initialize(): expected one configuration, got args.deepspeed_config={of_args!r} and "
            "config=...; leave one of them out"
        )
    chosen = of_args if config is None else config
    if chosen is None:
        raise ConfigError(
            "initialize(): expected config to be a dict, a path, an EngineConfig or a ZeroConfig, "
            "got none; pass config=..., or args with the attribute deepspeed_config"
        )
    return chosen


def _join(mpu: Any, dist_init_required: bool | None) -> Group:
    """Return the ranks to shard over. Collective where the job has to be joined."""
    if dist_init_required is False:
        # Raises if the process was started as one of several and has not joined them.
        default_group()
    group = zero_comm.init()
    return group if mpu is None else shard_group_of(mpu, what="initialize()")


def _as_engine_config(
    chosen: AnyConfig,
    auto: Mapping[str, Any] | None,
    *,
    world_size: int,
    # Other arguments of `initialize`.
    **said: Any,
) -> EngineConfig:
    if auto is not None and isinstance(chosen, ZeroConfig | EngineConfig):
        raise ConfigError(
            f"initialize(): expected auto with a configuration of DeepSpeed's, got it with a "
            f"{type(chosen).__name__}, in which nothing is left open"
        )
    if isinstance(chosen, ZeroConfig):
        return EngineConfig(zero=chosen, train_batch_size=world_size, micro_batch_size=1)
    if not isinstance(chosen, EngineConfig):
        reader = reader_for("initialize(config=)")
        return reader.config_of_engine(chosen, world_size=world_size, auto=auto, **said)
    expected = chosen.micro_batch_size * chosen.accumulation_steps * world_size
    if chosen.train_batch_size != expected:
        raise ConfigError(
            f"EngineConfig.train_batch_size: expected micro_batch_size {chosen.micro_batch_size} "
            f"times accumulation_steps {chosen.accumulation_steps} times world size {world_size}, "
            f"which is {expected}, got {chosen.train_batch_size}"
        )
    return chosen


def _choose_optimizer(
    given: Any, params: Iterable[Any], settings: EngineConfig
) -> torch.optim.Optimizer | None:
    if given is None and settings.optimizer is None:
        return None
    state_dtype, chosen = settings.state_dtype, settings.optimizer if given is None else given
    is_made = isinstance(chosen, torch.optim.Optimizer) or not callable(chosen)
    made = chosen if is_made else chosen(params)
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            "initialize(): expected optimizer to be a torch.optim.Optimizer, or to return one when "
            f"called with parameters, got {made!r}"
        )
    if given is not None and state_dtype not in (None, kept := _state_dtype_of(made)):
        raise ConfigError(
            f"bf16.bf16_optimizer_states: expected {str(kept is not torch.float32).lower()}, as "
            f"this {type(made).__name__} keeps {kept or 'fp32 masters besides'}, got what asks for "
            f"{state_dtype}; pass zero_offload.CPUAdam(masters=False, state_dtype=...) or an "
            "optimizer of torch's, or name Adam in the configuration"
        )
    return made


def _state_dtype_of(optimizer: torch.optim.Optimizer) -> torch.dtype | None:
    """Return the dtype of moments of bf16 parameters without masters; None if it keeps masters."""
    if isinstance(optimizer, FusedAdam):
        has_masters = any(group["masters"] for group in optimizer.param_groups)
        return None if has_masters else torch.float32
    if isinstance(optimizer, CPUAdam):
        return None if optimizer.keeps_masters else optimizer.state_dtype or torch.bfloat16
    return torch.bfloat16


def _choose_scheduler(given: Any, optimizer: torch.optim.Optimizer | None, configured: Any) -> Any:
    given = configured if given is None else given
    if given is None:
        return None
    if optimizer is None:
        raise ConfigError(
            "initialize(): expected an optimizer for the scheduler, got none; add a section "
            "'optimizer' to the file, or pass optimizer="
        )
    makes_one = isinstance(given, type) or (callable(given) and not hasattr(given, "step"))
    made = given(optimizer) if makes_one else given
    if not hasattr(made, "step"):
        raise ConfigError(
            "initialize(): expected lr_scheduler to have step(), or to return what has when called "
            f"with the optimizer, got {made!r}"
        )
    scheduled = getattr(made, "optimizer", optimizer)
    # A chain of optimizers has the param groups of its members.
    groups = [id(param_group) for param_group in optimizer.param_groups]
    if isinstance(made, LRScheduler) and not any(
        id(param_group) in groups for param_group in scheduled.param_groups
    ):
        raise ConfigError(
            f"initialize(): expected the {type(made).__name__} to be built from the optimizer that "
            f"trains, got one of another {type(scheduled).__name__}, so that it does not change "
            "the learning rate of training; pass lr_scheduler=lambda optimizer: ..."
        )
    return made


# ---- Batches of a dataset: each rank its own samples, in another order each epoch ----


@final
class Loader:
    """Loader of this rank's batches; each iteration is one epoch, `len` its number of batches.

    Attributes:
        epoch: Number of the next iteration's epoch. To go on with another one, set it.
    """

    def __init__(self, loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> None:
        self.epoch = 0
        self._loader = loader
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._sampler.set_epoch(self.epoch)
        self.epoch += 1
        return iter(self._loader)


def _make_loader(
    dataset: Dataset[Any],
    collate_fn: Callable[[list[Any]], Any] | None,
    settings: EngineConfig,
    group: Group,
) -> Loader:
    """Return a loader of batches that are shuffled, and divided among the ranks. Local.

    `torch.utils.data.DistributedSampler` divides: where the number of samples is no multiple of
    the world size, the first few of the epoch are taken twice, so that ranks have equally many.
    """
    has_items = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not has_items:
        raise ConfigError(
            "make_loader(): dataset: expected one with __getitem__ and __len__, got a "
            f"{type(dataset).__name__}. What can only be iterated over cannot be divided among "
            "ranks here: iterate over it yourself, each rank over its own part"
        )
    if len(dataset) == 0:  # type: ignore[arg-type]
        raise ConfigError("make_loader(): dataset: expected at least one sample, got an empty one")
    sampler = DistributedSampler(dataset, num_replicas=group.world_size, rank=group.rank)
    loader = DataLoader(
        dataset,
        batch_size=settings.micro_batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=settings.drop_last,
        pin_memory=accelerator() is not None,
    )
    return Loader(loader, sampler)


# ---- mpu: Megatron's model-parallel unit, which knows this rank's groups; or a device mesh ----

_DATA_AXES: Final = ("dp", "data", "data_parallel")
_SEQUENCE_AXES: Final = ("sp", "sequence", "sequence_parallel", "cp", "context", "context_parallel")


def _axis_of(mesh: DeviceMesh, kind: Literal["data", "sequence", "model"]) -> int | None:
    """Return the dimension over which data, sequences or the model are split; None if none is."""
    names = mesh.mesh_dim_names or ("data",) * mesh.ndim
    data = [axis for axis, name in enumerate(names) if mesh.ndim == 1 or name in _DATA_AXES]
    others = [axis for axis in range(mesh.ndim) if axis not in data]
    if kind == "data":
        return data[0]
    is_sequence = kind == "sequence"
    return next((a for a in others if (names[a] in _SEQUENCE_AXES) is is_sequence), None)


def check_mpu(mpu: Any, *, what: str) -> None:
    """Raise ConfigError unless an mpu is None, a mesh of known axes, or has the getters needed."""
    if mpu is None:
        return
    if isinstance(mpu, DeviceMesh):
        names = mpu.mesh_dim_names or ()
        is_known = mpu.ndim == 2 and len([name for name in names if name in _DATA_AXES]) == 1
        if mpu.ndim != 1 and not is_known:
            raise ConfigError(
                f"{what}: expected mpu to be a device mesh of one axis, or of two with one named "
                f"{' or '.join(map(repr, _DATA_AXES))}, got the axes {names or mpu.ndim}; flatten "
                "those over which the model is split into one"
            )
        return
    names = ["get_data_parallel_group"]
    # Without this method, the model is not split.
    if hasattr(mpu, "get_model_parallel_world_size"):
        names += ["get_model_parallel_world_size", "get_model_parallel_group"]
    # Without this method, sequences are not split.
    if hasattr(mpu, "get_sequence_parallel_world_size"):
        names += ["get_sequence_data_parallel_group"]
    missing = [f"{name}()" for name in names if not callable(getattr(mpu, name, None))]
    if missing:
        raise ConfigError(
            f"{what}: expected mpu to have {' and '.join(missing)}, got {mpu!r}; it is a device "
            "mesh, or an object or a module as Megatron's, with get_data_parallel_group() and, "
            "where the model is split, get_model_parallel_world_size() and "
            "get_model_parallel_group()"
        )


def _expert_groups(model: nn.Module, optimizer: Any, mpu: Any) -> dict[str, Group]:
    """Return groups of ranks by name pattern of parameters marked as experts. Collective in these.

    They are marked as Megatron's and DeepSpeed's are, by `allreduce` = False, or by `moe` = True in
    their param group, and the mpu knows their ranks. Names that differ in numbers alone make one
    pattern.
    """
    get = getattr(mpu, "get_expert_data_parallel_group", None)
    named = dict(model.named_parameters())
    groups = [group for group in getattr(optimizer, "param_groups", ()) if group.get("moe")]
    in_groups = {id(param) for group in groups for param in group["params"]}
    marked = {
        name
        for name, param in named.items()
        if getattr(param, "allreduce", True) is False or id(param) in in_groups
    }
    if in_groups and get is None:
        raise ConfigError(
            f"initialize(): parameter {min(marked)!r} is in a param group with moe=True, and "
            "nothing says which ranks have it: pass ZeroConfig(groups={'*.experts.*': group}), or "
            "an mpu with get_expert_data_parallel_group()"
        )
    if get is None or not marked:
        return {}
    group = _wrap(get(), "initialize(): mpu.get_expert_data_parallel_group()")
    patterns = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in sorted(marked))
    for name in named.keys() - marked:
        if pattern := pattern_of(name, patterns):
            raise ConfigError(
                f"initialize(): parameter {name!r} is not marked as an expert's (allreduce=False), "
                f"as others of {pattern!r} are; say which are, in ZeroConfig(groups=...)"
            )
    return dict.fromkeys(patterns, group)


def data_group_of(mpu: Any, *, what: str) -> Group:
    """Return the ranks among which samples are divided. Collective among them."""
    if isinstance(mpu, DeviceMesh):
        return Group.from_mesh(mpu, _axis_of(mpu, "data"))
    return _wrap(mpu.get_data_parallel_group(), f"{what}: mpu.get_data_parallel_group()")


def shard_group_of(mpu: Any, *, what: str) -> Group:
    """Return the ranks that have the same part of the model. Collective among them.

    These are the ranks among which samples are divided and, if sequences are split, those that
    share one.
    """
    if isinstance(mpu, DeviceMesh):
        axis = _axis_of(mpu, "sequence")
        return data_group_of(mpu, what=what) if axis is None else whole_of(mpu)
    if getattr(mpu, "get_sequence_parallel_world_size", lambda: 1)() == 1:
        return data_group_of(mpu, what=what)
    where = f"{what}: mpu.get_sequence_data_parallel_group()"
    return _wrap(mpu.get_sequence_data_parallel_group(), where)


def model_group_of(mpu: Any, *, what: str) -> Group | None:
    """Return the ranks that have the parts of one model; None where it has one part.

    Collective among them.
    """
    if isinstance(mpu, DeviceMesh):
        axis = _axis_of(mpu, "model")
        return None if axis is None or mpu.size(axis) == 1 else Group.from_mesh(mpu, axis)
    if getattr(mpu, "get_model_parallel_world_size", lambda: 1)() == 1:
        return None
    return _wrap(mpu.get_model_parallel_group(), f"{what}: mpu.get_model_parallel_group()")


def model_part_of(mpu: Any) -> Any:
    """Return the mpu or mesh for `zero_ckpt.configure`; None if the model is not split. Local."""
    if isinstance(mpu, DeviceMesh):
        axis = _axis_of(mpu, "model")
        return None if axis is None else mpu[(mpu.mesh_dim_names or ())[axis]]
    return None if getattr(mpu, "get_model_parallel_world_size", lambda: 1)() == 1 else mpu


def _wrap(process_group: Any, where: str) -> Group:
    try:
        return Group.from_process_group(process_group)
    except (TypeError, ValueError) as error:
        # torch raises these for a group that it does not know.
        raise ConfigError(
            f"{where}: expected a process group of torch.distributed, got {process_group!r}"
        ) from error
