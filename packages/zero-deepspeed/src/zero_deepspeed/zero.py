"""deepspeed.zero: models that are sharded while they are built, parameters gathered for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from enum import Enum, StrEnum
from typing import Any, final
from weakref import ref

import torch
import torch.distributed as dist
import zero_comm
import zero_engine
import zero_partition
from torch import nn
from zero_comm import Group, Levels
from zero_engine import ConfigError, Engine, GatheredParameters, NotBuiltError, ZeroConfig
from zero_engine.engine.initialize import check_mpu, shard_group_of
from zero_partition import StateError, Wire, unregister_external_parameter
from zero_partition.stand_in import ShardedParam, find_owner

from .configuration.settings import stage_and_wire_of
from .tiling import TiledLinear, TiledLinearReturnBias

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]


class OffloadDeviceEnum(StrEnum):
    """Devices that state is offloaded to; `Engine.offload_states` takes `cpu`."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """Kinds of state for the argument `include` of `Engine.offload_states`."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroParamStatus(Enum):
    """Availability of a parameter's values on this rank, as `param.ds_status` has it."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


@final
class _Status:
    """The status of a parameter when it is asked for: equal to a member of `ZeroParamStatus`."""

    __slots__ = ("_param",)

    def __init__(self, param: nn.Parameter) -> None:
        self._param = ref(param)

    def _now(self) -> ZeroParamStatus:
        param = self._param()
        is_sharded = isinstance(param, ShardedParam) and not find_owner(param).is_gathered
        return ZeroParamStatus.NOT_AVAILABLE if is_sharded else ZeroParamStatus.AVAILABLE

    def __eq__(self, other: object) -> bool:
        return self._now() is (other._now() if isinstance(other, _Status) else other)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return repr(self._now())

    def __reduce__(self) -> Any:
        return ZeroParamStatus, (self._now().value,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now(), name)


@final
class _LocalPart:
    """Attributes of this rank's shard of a parameter, a 1-D tensor, looked up at each access."""

    __slots__ = ("_param",)

    def __init__(self, param: nn.Parameter) -> None:
        self._param = ref(param)

    def __getattr__(self, name: str) -> Any:
        param = self._param()
        assert param is not None, "the attribute of a parameter that lives"
        local = zero_engine.local_param(param)
        return local.numel() if name == "ds_numel" else getattr(local, name)

    def __reduce__(self) -> Any:
        return type(None), ()


def name_parameters(model: nn.Module, threshold: int) -> None:
    """Give parameters the attributes that DeepSpeed's have at stage 3. Local.

    `ds_id`, `ds_shape`, `ds_numel` and `ds_persist` are fixed values; `ds_status` and `ds_tensor`
    are looked up at each access. Parameters that are not sharded have the attributes, too.

    Args:
        model: Sharded at stage 3.
        threshold: Parameters of at most this many elements are not sharded: `ds_persist` is True.
    """
    for index, param in enumerate(model.parameters()):
        vars(param).update(
            ds_id=index,
            ds_shape=param.shape,
            ds_numel=param.numel(),
            ds_persist=param.numel() <= threshold,
            ds_status=_Status(param),
            ds_tensor=_LocalPart(param),
        )


def Init(  # noqa: PLR0917 - the order is DeepSpeed's
    module: nn.Module | None = None,
    data_parallel_group: Any = None,
    mem_efficient_linear: bool = True,
    remote_device: str | None = None,
    pin_memory: bool = False,
    config_dict_or_path: Any = None,
    config: Any = None,
    enabled: bool = True,
    dtype: torch.dtype | None = None,
    mpu: Any = None,
    zero_param_parallel_group: Any = None,
    zero_quantized_weights: bool = False,
    zero_quantized_nontrainable_weights: bool = False,
    sequence_data_parallel_group: Any = None,
    param_swapper: Any = None,
) -> AbstractContextManager[Any]:
    """Build a model of which each rank keeps only its shards, by `zero_engine.Init`. Collective.

    `initialize` may be called inside. `state_dict()` has empty tensors for sharded parameters,
    inside and after. `from_pretrained` of transformers works inside: each rank reads the files, and
    keeps its shards. Where it converts dtypes, it does so ahead, on threads, and may have the whole
    model in memory; with HF_DEACTIVATE_ASYNC_LOAD=1 in the environment it does not.

    Args:
        module: One that exists already: sharded at once.
        data_parallel_group: The ranks; those of `mpu`, or else of the whole job, when None.
        mem_efficient_linear: Only for DeepSpeed's signature: `torch.nn.Linear` is left as it is.
        remote_device: "cpu" and "nvme" come with zero-offload, as `pin_memory` and `param_swapper`.
        pin_memory: See above.
        config_dict_or_path: Read for its stage and its `Wire`; other keys may be "auto". Below
            stage 3 parameters are not sharded, and this does nothing.
        config: Another name of `config_dict_or_path`.
        enabled: Do nothing at all when False.
        dtype: Dtype of floating-point tensors that are made without one. torch's default when
            None, also with fp16 or bf16 in the configuration: `initialize` rounds them later, and
            its masters have the values before that.
        mpu: Its `get_data_parallel_group()` is the group.
        zero_param_parallel_group: This rank's node, where the configuration has
            `zero_hpz_partition_size`: that says it already.
        zero_quantized_weights: Taken where the configuration says so, which is what `initialize`
            trains by.
        zero_quantized_nontrainable_weights: Likewise.
        sequence_data_parallel_group: The ranks, in place of `data_parallel_group`, where several
            share a sequence.
        param_swapper: See `remote_device`.

    Raises:
        zero_engine.NotBuiltError: Names the argument.
        zero_engine.ConfigError: `dtype` is no floating-point dtype, `mpu` knows no group, the
            configuration does not say what an argument says, or as `zero_engine.Init`.
    """
    if not enabled:
        return nullcontext()
    for name, value in (
        ("remote_device", remote_device not in (None, "none", "cuda") and remote_device),
        ("pin_memory", pin_memory),
        ("param_swapper", param_swapper),
    ):
        if value not in (None, False):
            raise NotBuiltError(f"deepspeed.zero.Init({name}={value!r}) is not built yet")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(
            "deepspeed.zero.Init(): expected dtype to be a floating-point torch.dtype, got "
            f"{dtype!r}"
        )
    check_mpu(mpu, what="deepspeed.zero.Init()")
    if data_parallel_group is not None or sequence_data_parallel_group is not None:
        group = Group.from_process_group(sequence_data_parallel_group or data_parallel_group)
    elif mpu is not None:
        group = shard_group_of(mpu, what="deepspeed.zero.Init()")
    else:
        group = zero_comm.init()
    settings = config_dict_or_path if config is None else config
    stage, wire = 3, None
    if isinstance(settings, ZeroConfig):
        wire = settings.wire
    elif settings is not None:
        stage, wire = stage_and_wire_of(settings)
    _check_wire_arguments(
        wire,
        weights=zero_quantized_weights,
        nontrainable_weights=zero_quantized_nontrainable_weights,
        param_group=zero_param_parallel_group,
        group=group,
    )
    if not isinstance(settings, ZeroConfig):
        settings = ZeroConfig(stage)
    sharding = zero_engine.Init(module, group=group, config=settings)
    return sharding if dtype is None else _both(sharding, dtype)


def MiCS_Init(
    module: nn.Module | None = None, data_parallel_group: Any = None, **options: Any
) -> AbstractContextManager[Any]:
    """`Init`, with its arguments, for a model that `mics_shard_size` will replicate. Collective.

    While it is built, parameters are sharded over all ranks, which takes less memory than shards of
    a replica; `initialize` distributes those. The group is of all ranks, not those of a replica.
    """
    return Init(module, data_parallel_group, **options)


@contextmanager
def _both(sharding: AbstractContextManager[Any], dtype: torch.dtype) -> Iterator[Any]:
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, before)
        torch.set_default_dtype(dtype)
        yield stack.enter_context(sharding)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that a module's forward uses another module's parameter. The same on every rank.

    Such a use works without it; `zero_partition.register_external_parameter` lets the parameter be
    prefetched. Before the parameter's model is sharded, when DeepSpeed has to be told, this does
    nothing.

    Raises:
        TypeError: `parameter` is no parameter.
    """
    if not isinstance(parameter, nn.Parameter):
        raise TypeError(
            "register_external_parameter(): expected a torch.nn.Parameter, got a "
            f"{type(parameter).__name__}"
        )
    # A StateError means that the module or parameter is in no sharded model yet.
    with suppress(StateError):
        zero_partition.register_external_parameter(module, parameter)


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Gather all parameters inside, so that forwards communicate nothing. Collective to enter.

    Args:
        model: The engine, or its module.

    Yields:
        The module.
    """
    with zero_engine.unsharded(model.module if isinstance(model, Engine) else model) as module:
        yield module


# NOTE(said twice): DeepSpeed's parameters keep the arguments of `Init`, or its configuration. Here
# a model that is built in parts knows nothing of the wire, which `initialize` makes from its own
# configuration. So the configuration must set it, and the argument may set it too.


def _check_wire_arguments(
    wire: Wire | None,
    *,
    weights: bool,
    nontrainable_weights: bool,
    param_group: Any,
    group: Group,
) -> None:
    """Raise ConfigError for an argument that the configuration does not ask for as well.

    Collective where there is a `param_group`, of torch: the ranks that keep secondary shards.
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
