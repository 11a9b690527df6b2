"""The section `zero_optimization`, but for offload and the wire."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from zero_comm import CodecError, Loco
from zero_offload import DiskSettings
from zero_partition import Wire

from zero_engine.errors import ConfigError
from zero_engine.offload import RESIDENCES, SUBGROUP_BYTES

from .file_key import (
    COUNT,
    FLAG,
    FOLDER,
    NAMES,
    OBJECT,
    POSITIVE,
    Becomes,
    CannotMatter,
    FileKey,
    Gate,
    NotBuilt,
    ValueKind,
    choice,
    integer,
    number,
    section,
)
from .leaf_modules import LEAF_CLASSES


def _stage_3(
    name: str,
    kind: ValueKind,
    default: Any,
    answer: Becomes | CannotMatter | NotBuilt,
    *,
    neutral: tuple[Any, ...] = (),
) -> FileKey:
    """A key of stage 3: DeepSpeed takes it with and without its prefix."""
    return FileKey(
        f"stage3_{name}",
        kind,
        default,
        answer,
        neutral=neutral,
        aliases=(name,),
        min_stage=3,
    )


_ONE_REDUCTION_PER_UNIT: Final = CannotMatter(
    "a unit's gradients travel together, small ones waiting for each other"
)
_CHOSEN_ONCE: Final = CannotMatter(
    "how a collective is composed is chosen once per group, from what its backend does well"
)
_LEAVES: Final = Becomes("leaf_modules")

_STAGE_3: Final = (
    _stage_3(
        "max_live_parameters",
        COUNT,
        None,
        # At 0, nothing but what the running unit needs: the same as at 1.
        Becomes("zero.max_live_numel", lambda numel: max(numel, 1)),
        neutral=(10**9,),
    ),
    _stage_3(
        "prefetch_bucket_size",
        COUNT,
        None,
        Becomes("zero.prefetch_numel"),
        neutral=(5 * 10**7,),
    ),
    _stage_3("max_reuse_distance", COUNT, None, Becomes("zero.max_reuse_numel"), neutral=(10**9,)),
    _stage_3(
        "param_persistence_threshold",
        COUNT,
        0,
        Becomes("zero.small_param_numel"),
        neutral=(10**5,),
    ),
    _stage_3(
        "model_persistence_threshold",
        COUNT,
        None,
        Becomes("zero.max_small_numel", lambda numel: None if numel >= sys.maxsize else numel),
        neutral=(sys.maxsize,),
    ),
    FileKey(
        "stage3_gather_16bit_weights_on_model_save",
        FLAG,
        False,
        Becomes("zero.state_dict", lambda gathers: "gather" if gathers else "raise"),
        aliases=("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
        min_stage=3,
    ),
    _stage_3(
        "module_granularity_threshold",
        COUNT,
        0,
        CannotMatter("modules are joined to units by their bytes: ZeroConfig.min_unit_bytes"),
    ),
    _stage_3("use_all_reduce_for_fetch_params", FLAG, False, _CHOSEN_ONCE),
    _stage_3("allgather_sequential", FLAG, False, _CHOSEN_ONCE),
    FileKey("leaf_module.classes", NAMES, LEAF_CLASSES, _LEAVES, neutral=((),), min_stage=3),
    FileKey("leaf_module.names", NAMES, (), _LEAVES, min_stage=3),
    FileKey("leaf_module.name_suffixes", NAMES, (), _LEAVES, min_stage=3),
    FileKey(
        "memory_efficient_linear",
        FLAG,
        True,
        CannotMatter("no linear layer keeps its gathered weight, and none is patched"),
    ),
    FileKey(
        "override_module_apply",
        FLAG,
        True,
        CannotMatter("zero_engine.Init patches nothing, and Module.apply sees whole values in it"),
    ),
    FileKey(
        "log_trace_cache_warnings",
        FLAG,
        False,
        CannotMatter("another order of modules is recorded anew and needs no warning"),
    ),
)

ZERO_KEYS: Final = section(
    "zero_optimization",
    FileKey("stage", integer(0, 3), 0, Becomes("zero.stage")),
    *_STAGE_3,
    FileKey(
        "contiguous_gradients",
        FLAG,
        True,
        CannotMatter("gradients are always copied into contiguous memory as they arrive"),
    ),
    FileKey("reduce_scatter", FLAG, True, _CHOSEN_ONCE),
    FileKey("reduce_bucket_size", POSITIVE, 5 * 10**8, _ONE_REDUCTION_PER_UNIT),
    FileKey("use_multi_rank_bucket_allreduce", FLAG, True, _ONE_REDUCTION_PER_UNIT),
    FileKey(
        "allgather_partitions",
        FLAG,
        True,
        CannotMatter("nothing in DeepSpeed reads it either"),
    ),
    FileKey(
        "allgather_bucket_size",
        COUNT,
        5 * 10**8,
        CannotMatter("a unit's parameters travel together"),
    ),
    FileKey(
        "overlap_comm",
        FLAG,
        None,
        CannotMatter("communication overlaps wherever the backend can, which changes no number"),
    ),
    FileKey(
        "compute_grad_norm", FLAG, True, CannotMatter("the norm comes with the overflow check")
    ),
    FileKey(
        "load_from_fp32_weights",
        FLAG,
        True,
        CannotMatter("masters are saved and restored as they were"),
    ),
    FileKey(
        "elastic_checkpoint",
        FLAG,
        False,
        CannotMatter("every checkpoint loads at any world size"),
    ),
    FileKey(
        "pipeline_loading_checkpoint",
        FLAG,
        False,
        CannotMatter("each rank reads only the elements that it keeps"),
    ),
    FileKey(
        "ignore_unused_parameters",
        FLAG,
        True,
        CannotMatter("parameters without gradient are never an error, with offload or without"),
    ),
    FileKey(
        "legacy_stage1", FLAG, False, NotBuilt("there is one stage 1; DeepSpeed refuses it too")
    ),
    FileKey(
        "round_robin_gradients",
        FLAG,
        False,
        CannotMatter("every rank has a part of every unit's gradients, so copies are spread"),
    ),
    FileKey("parameter_alignment", FLAG, False, CannotMatter("parameters are always aligned")),
    FileKey("enable_sanity_checks", FLAG, False, CannotMatter("the checks are always on")),
)


# ---- Offload in `zero_optimization`, and the section `aio` ----


_DEVICE: Final = choice("none", "cpu", "nvme")
_SHARE: Final = number(0, 1)

_PATH: Final = Becomes("zero.offload.path")
_PIN: Final = Becomes("zero.offload.pin")
_DISK: Final = DiskSettings()

_ON_DISK: Final = Gate(("device",), ("nvme",))
_ANY_ON_DISK: Final = Gate(("offload_optimizer.device", "offload_param.device"), ("nvme",)).within(
    "zero_optimization"
)

_OWN_BUFFERS: Final = CannotMatter("buffers are planned from what passes through them")
_OVERLAPS: Final = CannotMatter("reading, stepping and writing always overlap")
_SUBMISSION: Final = CannotMatter("requests are handed over in batches, while earlier ones run")

_ADAM_BYTES_PER_ELEMENT: Final = 12  # fp32: master, first and second moment
_LEAST_SUBGROUP_BYTES: Final = 2**20
_PAGE_BYTES: Final = 4096
_MAX_BLOCK_BYTES: Final = 2**30


def _residence(name: str) -> Becomes:
    return Becomes(f"zero.offload.{name}", RESIDENCES.__getitem__)


def _on_host(name: str) -> Becomes:
    return Becomes(f"zero.offload.{name}", lambda offloads: "host" if offloads else "device")


def _subgroup_bytes(numel: int) -> int:
    """An upper bound: the files say 1e9 by habit, which is 12 GB in each of three slots.

    And no tiny one: DeepSpeed cuts no parameter into sub-groups, so there 8 means one parameter
    each, where pieces of eight elements would take a hundred times as long.
    """
    return min(max(numel * _ADAM_BYTES_PER_ELEMENT, _LEAST_SUBGROUP_BYTES), SUBGROUP_BYTES)


def _whole_pages(num_bytes: int) -> int:
    return min(-(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES, _MAX_BLOCK_BYTES)


OFFLOAD_KEYS: Final = (
    *section(
        "zero_optimization.offload_param",
        FileKey("device", _DEVICE, "none", _residence("params"), min_stage=3),
        FileKey("nvme_path", FOLDER, None, _PATH, gate=_ON_DISK),
        FileKey("buffer_count", COUNT, 5, _OWN_BUFFERS),
        FileKey("buffer_size", COUNT, 10**8, _OWN_BUFFERS),
        FileKey(
            "max_in_cpu",
            COUNT,
            0,
            Becomes("zero.offload.max_host_numel"),
            neutral=(10**9,),
            gate=_ON_DISK,
        ),
        FileKey("pin_memory", FLAG, True, _PIN),
        gate="device",
    ),
    *section(
        "zero_optimization.offload_optimizer",
        FileKey("device", _DEVICE, "none", _residence("optimizer"), min_stage=1),
        FileKey("nvme_path", FOLDER, None, _PATH, gate=_ON_DISK),
        FileKey("buffer_count", COUNT, 4, _OWN_BUFFERS),
        FileKey("pin_memory", FLAG, True, _PIN),
        FileKey("pipeline_read", FLAG, False, _OVERLAPS),
        FileKey("pipeline_write", FLAG, False, _OVERLAPS),
        FileKey(
            "fast_init",
            FLAG,
            False,
            CannotMatter("masters are always written from the parameters, once"),
        ),
        FileKey("ratio", _SHARE, 1.0, Becomes("zero.offload.fraction", float)),
        FileKey(
            "super_offload",
            FLAG,
            False,
            NotBuilt("stepping before the norm is known, and back (SuperOffload)"),
        ),
        FileKey("cpuadam_cores_perc", _SHARE, 0.8, CannotMatter("only SuperOffload binds cores")),
        gate="device",
    ),
    *section(
        "zero_optimization",
        FileKey("cpu_offload", FLAG, None, _on_host("optimizer"), neutral=(False,), min_stage=1),
        FileKey("cpu_offload_param", FLAG, None, _on_host("params"), neutral=(False,), min_stage=3),
        FileKey(
            "cpu_offload_use_pin_memory",
            FLAG,
            None,
            _PIN,
            neutral=(True,),
            gate=Gate(("cpu_offload", "cpu_offload_param")),
        ),
        FileKey(
            "sub_group_size",
            COUNT,
            None,
            Becomes("zero.offload.subgroup_bytes", _subgroup_bytes),
            neutral=(10**9,),
            gate=Gate(("offload_optimizer.device", "cpu_offload")),
        ),
        FileKey(
            "save_muon_momentum_buffer_in_memory",
            FLAG,
            False,
            NotBuilt("Muon's momentum rests where the other state does"),
            gate=Gate(("offload_optimizer.device",), ("nvme",)),
        ),
        FileKey("zenflow", OBJECT, None, NotBuilt("ZenFlow")),
    ),
    FileKey(
        "aio.block_size",
        POSITIVE,
        _DISK.block_bytes,
        Becomes("zero.offload.disk.block_bytes", _whole_pages),
        neutral=(2**20,),
        gate=_ANY_ON_DISK,
    ),
    FileKey(
        "aio.queue_depth",
        POSITIVE,
        _DISK.queue_depth,
        Becomes("zero.offload.disk.queue_depth"),
        neutral=(8,),
        gate=_ANY_ON_DISK,
    ),
    *(
        FileKey(
            f"aio.{name}",
            POSITIVE,
            _DISK.num_workers,
            Becomes("zero.offload.disk.num_workers"),
            neutral=(1,),
            gate=_ANY_ON_DISK,
        )
        for name in ("intra_op_parallelism", "thread_count")  # today's name, and an older one
    ),
    FileKey("aio.single_submit", FLAG, False, _SUBMISSION, gate=_ANY_ON_DISK),
    FileKey("aio.overlap_events", FLAG, True, _SUBMISSION, gate=_ANY_ON_DISK),
    FileKey(
        "aio.use_gds",
        FLAG,
        False,
        NotBuilt("transfers between disk and device that pass the host by (GPUDirect Storage)"),
        gate=_ANY_ON_DISK,
    ),
)


# ---- ZeRO++ and MiCS in `zero_optimization`, and what they make of the wire ----


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
