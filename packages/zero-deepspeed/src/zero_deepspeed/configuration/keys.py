"""Every documented key of DeepSpeed's file, by path, and the nearest to a wrong one."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
from zero_comm import CodecError, Loco
from zero_engine import ConfigError
from zero_engine.engine.loss_scale import LARGEST_SCALE, SMALLEST_SCALE
from zero_engine.offload import RESIDENCES, SUBGROUP_BYTES
from zero_offload import DiskSettings

from zero_deepspeed.leaf_modules import LEAF_CLASSES

from .file_key import (
    COUNT,
    DTYPE,
    FLAG,
    FOLDER,
    NAMES,
    OBJECT,
    POSITIVE,
    TEXT,
    FileKey,
    ValueKind,
    choice,
    either,
    foreign,
    ignored,
    integer,
    not_built,
    number,
    section,
    several,
)

_OPTIMIZERS: Final = ("adam", "adamw", "sgd", "adagrad", "lion", "muon")
# In place of a type that the file does not know.
_AS_OBJECT: Final = "Pass any other as an object to initialize(), and leave this section out"
_SCHEDULERS: Final = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")

_ZERO: Final = "zero_optimization"
# Field that several keys set together.
_PRECISION: Final = "zero.precision"
_AT_LEAST_0: Final = number(0)
_SHARE: Final = number(0, 1)
_BETA: Final = number(0, below=1)
# One number for all param groups, or a list with one for each.
_RATES: Final = either(_AT_LEAST_0, several(_AT_LEAST_0))


def _as_steps(value: Any) -> int | None:
    # accelerate writes infinity for "never".
    if value == math.inf:
        return None
    # 0 stands for a value that is no number of steps: nothing is printed, and training goes on.
    return POSITIVE.convert(value) if POSITIVE.fits(value) else 0


def _prints_nothing(value: Callable[[str], Any]) -> bool:
    """Return whether the value of `steps_per_print` is no number of steps, which is kept as 0."""
    return bool(value("steps_per_print") == 0)


_STEPS: Final = ValueKind("a number of steps", lambda _: True, _as_steps)
# In the range of fp32, as is its inverse.
_FACTOR: Final = number(2.0**-126, below=2.0**127)


def _params(section: str, kind: ValueKind, *names: str) -> tuple[FileKey, ...]:
    return tuple(FileKey(f"params.{name}", kind, None, section) for name in names)


_TRAINING: Final = (
    FileKey("train_batch_size", POSITIVE, None, "train_batch_size"),
    FileKey("train_micro_batch_size_per_gpu", POSITIVE, None, "micro_batch_size"),
    FileKey("gradient_accumulation_steps", POSITIVE, None, "accumulation_steps"),
    FileKey("managed_gradient_accumulation", FLAG, True, "manages_accumulation"),
    FileKey("gradient_clipping", _AT_LEAST_0, 1.0, "max_norm", convert=float),
    FileKey("prescale_gradients", FLAG, False, _PRECISION),
    FileKey("gradient_predivide_factor", _FACTOR, 1.0, _PRECISION),
    FileKey("gradient_allreduce_op", choice("mean", "sum"), "mean", _PRECISION),
    FileKey("communication_data_type", DTYPE, None, _PRECISION),
    FileKey("steps_per_print", _STEPS, None, "steps_per_print", (0,), idle=_prints_nothing),
    FileKey("dataloader_drop_last", FLAG, False, "drop_last"),
    not_built("sparse_gradients", False, "gradients of embeddings are dense"),
    *ignored("zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"),
    *section(
        "optimizer",
        FileKey("type", choice(*_OPTIMIZERS, remedy=_AS_OBJECT), None, "optimizer"),
        *ignored("legacy_fusion"),
        not_built(
            "params.max_grad_norm",
            None,
            "it is called gradient_clipping",
            _AT_LEAST_0,
            off=(0,),
        ),
        not_built(
            "params.fp32_optimizer_states",
            True,
            "state has the dtype of the masters; leave it at true",
        ),
        not_built("params.per_head_muon", False, "Muon takes whole matrices"),
        *_params("optimizer", FLAG, "bias_correction", "amsgrad", "adam_w_mode", "torch_adam"),
        *_params("optimizer", FLAG, "decoupled_weight_decay", "set_grad_none", "nesterov"),
        *_params("optimizer", FLAG, "maximize", "foreach", "fused", "capturable", "differentiable"),
        *_params("optimizer", _AT_LEAST_0, "lr", "muon_lr", "adam_lr", "lr_decay", "eps"),
        *_params("optimizer", _AT_LEAST_0, "weight_decay", "momentum", "initial_accumulator_value"),
        *_params("optimizer", several(_BETA, exactly=2), "betas"),
        *_params("optimizer", number(), "dampening"),
        *_params("optimizer", choice("standard", "gram"), "ns_method"),
        *_params("optimizer", several(number(), exactly=3), "ns_coefficients"),
        *_params("optimizer", POSITIVE, "ns_steps"),
        *_params("optimizer", choice("original", "match_rms_adamw"), "adjust_lr_fn"),
    ),
    *section(
        "scheduler",
        FileKey("type", choice(*_SCHEDULERS, remedy=_AS_OBJECT), None, "scheduler"),
        *_params("scheduler", _RATES, "warmup_min_lr", "warmup_max_lr", "lr_range_test_min_lr"),
        *_params("scheduler", _RATES, "cycle_min_lr", "cycle_max_lr"),
        *_params("scheduler", choice("log", "linear"), "warmup_type"),
        *_params("scheduler", COUNT, "warmup_num_steps", "total_num_steps", "decay_step_size"),
        *_params("scheduler", POSITIVE, "cycle_first_step_size", "lr_range_test_step_size"),
        *_params("scheduler", COUNT, "cycle_second_step_size"),
        *_params("scheduler", COUNT, "cycle_first_stair_count", "cycle_second_stair_count"),
        *_params("scheduler", _SHARE, "warmup_min_ratio", "cos_min_ratio"),
        *_params("scheduler", FLAG, "cycle_momentum", "lr_range_test_staircase"),
        *_params("scheduler", either(_BETA, several(_BETA)), "cycle_min_mom", "cycle_max_mom"),
        *_params("scheduler", _AT_LEAST_0, "decay_lr_rate", "lr_range_test_step_rate"),
        *_params("scheduler", number(), "decay_mom_rate"),
        *_params("scheduler", integer(-1), "last_batch_iteration"),
    ),
)


_SCALE: Final = number(SMALLEST_SCALE, below=2 * LARGEST_SCALE)
_LOSS_SCALE: Final = attrs.evolve(
    either(_SCALE, integer(0, 0)),
    expected="0, for a scale that changes by itself, or a scale in the range of fp32",
)


def _halves_at_once(value: Callable[[str], Any]) -> bool:
    """Return whether DeepSpeed halves the scale at every overflow.

    Its own optimizers do, without ZeRO.
    """
    return value("zero_optimization.stage") == 0 and value("optimizer.type") is not None


_DTYPES: Final = (
    *section(
        "fp16",
        FileKey("enabled", FLAG, False, _PRECISION),
        not_built(
            "auto_cast",
            False,
            "give the model fp16 inputs, or turn torch_autocast on in place of fp16",
        ),
        FileKey("loss_scale", _LOSS_SCALE, 0, "loss_scale"),
        FileKey("initial_scale_power", integer(0, 127), 16, "loss_scale"),
        FileKey("loss_scale_window", POSITIVE, 1000, "loss_scale"),
        FileKey("hysteresis", POSITIVE, 2, "loss_scale", idle=_halves_at_once),
        FileKey("consecutive_hysteresis", FLAG, False, "loss_scale", idle=_halves_at_once),
        FileKey("min_loss_scale", number(0, below=2 * LARGEST_SCALE), 1, "loss_scale"),
        not_built(
            "fp16_master_weights_and_grads",
            False,
            "master weights are fp32 with fp16; DeepSpeed has it with CPU offload only",
        ),
        gates=("fp16.enabled",),
    ),
    *section(
        "bf16",
        FileKey("enabled", FLAG, False, _PRECISION),
        *ignored("immediate_grad_update"),
        FileKey("check_grad_overflow", FLAG, True, "checks_overflow"),
        FileKey("bf16_master_weights_and_grads", FLAG, False, _PRECISION),
        FileKey("bf16_optimizer_states", FLAG, False, _PRECISION),
        gates=("bf16.enabled",),
        alias="bfloat16",
    ),
    *section(
        "torch_autocast",
        FileKey("enabled", FLAG, False, "autocast_dtype"),
        FileKey("dtype", DTYPE, None, "autocast_dtype"),
        FileKey("lower_precision_safe_modules", NAMES, None, _PRECISION),
        gates=("torch_autocast.enabled",),
    ),
    *section(
        "data_types",
        FileKey("grad_accum_dtype", DTYPE, None, _PRECISION),
        FileKey("param_dtype", DTYPE, None, _PRECISION),
        not_built("buffer_dtype", None, "buffers keep their dtype; cast them yourself", DTYPE),
        not_built(
            "keep_in_fp32_modules",
            (),
            "all parameters of a model get one dtype; give an empty list",
            either(choice("auto"), NAMES),
        ),
    ),
)


def _stage_3(key: FileKey) -> FileKey:
    """A key of stage 3: DeepSpeed takes it with and without its prefix."""
    aliases = (key.path, *key.aliases)
    return attrs.evolve(key, path=f"stage3_{key.path}", aliases=aliases, min_stage=3)


def _at_least_1(numel: int) -> int:
    """Raise a limit of 0 to 1: at both, only what the running unit needs is gathered."""
    return max(numel, 1)


def _bounded(numel: int) -> int | None:
    return None if numel >= sys.maxsize else numel


_ENDLESS: Final = (sys.maxsize,)
_STAGE_3: Final = (
    FileKey("max_live_parameters", COUNT, None, "zero.max_live_numel", (10**9,), _at_least_1),
    FileKey("prefetch_bucket_size", COUNT, None, "zero.prefetch_numel", (5 * 10**7,)),
    FileKey("max_reuse_distance", COUNT, None, "zero.max_reuse_numel", (10**9,)),
    FileKey("param_persistence_threshold", COUNT, 0, "zero.small_param_numel", (10**5,)),
    FileKey("model_persistence_threshold", COUNT, None, "zero.max_small_numel", _ENDLESS, _bounded),
    FileKey(
        *("gather_16bit_weights_on_model_save", FLAG, False, "zero.state_dict"),
        convert={False: "names", True: "gather"}.__getitem__,
        aliases=("stage3_gather_fp16_weights_on_model_save",),
    ),
    *ignored("module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential"),
)
_SCHEDULE: Final = (
    FileKey("stage", integer(0, 3), 0, "zero.stage"),
    *map(_stage_3, _STAGE_3),
    FileKey("leaf_module.classes", NAMES, LEAF_CLASSES, "leaf_modules", ((),), min_stage=3),
    FileKey("leaf_module.names", NAMES, (), "leaf_modules", min_stage=3),
    FileKey("leaf_module.name_suffixes", NAMES, (), "leaf_modules", min_stage=3),
    not_built("legacy_stage1", False, "there is one stage 1; DeepSpeed refuses it too"),
    *ignored(
        "memory_efficient_linear override_module_apply log_trace_cache_warnings "
        "contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce "
        "allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm "
        "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint "
        "ignore_unused_parameters round_robin_gradients parameter_alignment enable_sanity_checks"
    ),
)


_DEVICE: Final = choice("none", "cpu", "nvme")
_DISK: Final = DiskSettings()

# Bytes of an fp32 master and of its first and second moment.
_ADAM_BYTES_PER_ELEMENT: Final = 12
_LEAST_SUBGROUP_BYTES: Final = 2**20
_PAGE_BYTES: Final = 4096
_MAX_BLOCK_BYTES: Final = 2**30


_PARAM: Final = f"{_ZERO}.offload_param.device"
_OPTIMIZER: Final = f"{_ZERO}.offload_optimizer.device"
_PARAM_ON_DISK: Final[dict[str, Any]] = {"gates": (_PARAM,), "opened_by": "nvme"}
_STATE_ON_DISK: Final[dict[str, Any]] = {"gates": (_OPTIMIZER,), "opened_by": "nvme"}
# Keys of older files for offloading to the host.
_ON_HOST: Final = (f"{_ZERO}.cpu_offload", f"{_ZERO}.cpu_offload_param")


def _subgroup_bytes(numel: int) -> int:
    """Return the bytes of a sub-group of `numel` elements, within a lower and an upper bound.

    The upper bound: files have 1e9 by habit, which is 12 GB in each of three slots. The lower
    bound: DeepSpeed cuts no parameter into sub-groups, so 8 means one parameter each there; here,
    pieces of eight elements would take a hundred times as long.
    """
    return min(max(numel * _ADAM_BYTES_PER_ELEMENT, _LEAST_SUBGROUP_BYTES), SUBGROUP_BYTES)


def _whole_pages(num_bytes: int) -> int:
    return min(-(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES, _MAX_BLOCK_BYTES)


_AS_OURS: Final = RESIDENCES.__getitem__
_HOST: Final = {False: "device", True: "host"}.__getitem__
_PINNED: Final = FileKey("pin_memory", FLAG, True, "zero.offload.pin")

_OFFLOAD: Final = (
    *section(
        "offload_param",
        FileKey("device", _DEVICE, "none", "zero.offload.params", convert=_AS_OURS, min_stage=3),
        FileKey("nvme_path", FOLDER, None, "zero.offload.path", **_PARAM_ON_DISK),
        *ignored("buffer_count buffer_size"),
        FileKey("max_in_cpu", COUNT, 0, "zero.offload.max_host_numel", (10**9,), **_PARAM_ON_DISK),
        _PINNED,
        gates=(_PARAM,),
    ),
    *section(
        "offload_optimizer",
        FileKey("device", _DEVICE, "none", "zero.offload.optimizer", convert=_AS_OURS, min_stage=1),
        FileKey("nvme_path", FOLDER, None, "zero.offload.path", **_STATE_ON_DISK),
        *ignored("buffer_count pipeline_read pipeline_write fast_init cpuadam_cores_perc"),
        _PINNED,
        FileKey("ratio", _SHARE, 1.0, "zero.offload.fraction", convert=float),
        not_built(
            "super_offload", False, "stepping before the norm is known, and back (SuperOffload)"
        ),
        gates=(_OPTIMIZER,),
    ),
    FileKey("cpu_offload", FLAG, None, "zero.offload.optimizer", (False,), _HOST, min_stage=1),
    FileKey("cpu_offload_param", FLAG, None, "zero.offload.params", (False,), _HOST, min_stage=3),
    FileKey("cpu_offload_use_pin_memory", FLAG, None, "zero.offload.pin", (True,), gates=_ON_HOST),
    FileKey(
        *("sub_group_size", COUNT, None, "zero.offload.subgroup_bytes", (10**9,), _subgroup_bytes),
        gates=(_OPTIMIZER, f"{_ZERO}.cpu_offload"),
    ),
    not_built(
        "save_muon_momentum_buffer_in_memory",
        False,
        "Muon's momentum is on disk with the other state",
        **_STATE_ON_DISK,
    ),
    not_built("zenflow", None, "ZenFlow", OBJECT),
)


def _aio(name: str, field: str, theirs: int, **more: Any) -> FileKey:
    default, field = getattr(_DISK, field), f"zero.offload.disk.{field}"
    return FileKey(name, POSITIVE, default, field, (theirs,), **more)


_AIO: Final = section(
    "aio",
    _aio("block_size", "block_bytes", 2**20, convert=_whole_pages),
    _aio("queue_depth", "queue_depth", 8),
    _aio("intra_op_parallelism", "num_workers", 1),
    _aio("thread_count", "num_workers", 1),  # older name
    *ignored("single_submit overlap_events"),
    not_built(
        "use_gds",
        False,
        "transfers between disk and device that pass the host by (GPUDirect Storage)",
    ),
    gates=(_OPTIMIZER, _PARAM),
    opened_by="nvme",
)


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


_INT8: Final = {False: None, True: "int8"}.__getitem__
_INT4: Final = {False: None, True: "int4"}.__getitem__
_FROZEN: Final = "zero_quantized_nontrainable_weights"
_QUANTIZES: Final = f"{_ZERO}.zero_quantized_gradients"

_WIRE: Final = (
    FileKey("zero_quantized_weights", FLAG, False, "zero.wire.params", convert=_INT8, min_stage=1),
    FileKey(_FROZEN, FLAG, False, "zero.wire.frozen", convert=_INT8, min_stage=3),
    FileKey(
        "zero_quantized_gradients", FLAG, False, "zero.wire.gradients", convert=_INT4, min_stage=1
    ),
    FileKey(
        "zeropp_loco_param", OBJECT, None, "zero.wire.loco", convert=_loco, gates=(_QUANTIZES,)
    ),
    FileKey("zero_hpz_partition_size", POSITIVE, 1, "zero.wire.secondary", min_stage=3),
    FileKey("mics_shard_size", integer(-1), -1, "zero.wire.replicas", (0,), min_stage=3),
    *ignored("mics_hierarchical_params_gather", gates=(f"{_ZERO}.mics_shard_size",)),
)


_OUTSIDE: Final = "it is outside of ZeRO"

_FOLDER: Final = (
    FileKey("enabled", FLAG, False, "monitoring"),
    FileKey("output_path", TEXT, "", "monitoring"),
    FileKey("job_name", TEXT, "DeepSpeedJobName", "monitoring"),
)

# Monitors do not change the numbers of a training.
_MONITORS: Final = (
    *section("tensorboard", *_FOLDER, gates=("tensorboard.enabled",)),
    *section("csv_monitor", *_FOLDER, gates=("csv_monitor.enabled",)),
    *section(
        "wandb",
        FileKey("enabled", FLAG, False, "monitoring"),
        *(FileKey(name, TEXT, None, "monitoring") for name in ("group", "team")),
        FileKey("project", TEXT, "deepspeed", "monitoring"),
        gates=("wandb.enabled",),
    ),
    *section(
        "comms_logger",
        FileKey("enabled", FLAG, False, "monitoring"),
        *ignored("verbose debug prof_all prof_ops"),
        gates=("comms_logger.enabled",),
    ),
    *section(
        "flops_profiler",
        FileKey("enabled", FLAG, False, "monitoring"),
        FileKey("profile_step", COUNT, 1, "monitoring"),
        FileKey("module_depth", integer(-1), -1, "monitoring"),
        FileKey("detailed", FLAG, True, "monitoring"),
        FileKey("output_file", TEXT, None, "monitoring"),
        *ignored("top_modules recompute_fwd_factor"),
        gates=("flops_profiler.enabled",),
    ),
    FileKey("wall_clock_breakdown", FLAG, False, "monitoring"),
    FileKey("memory_breakdown", FLAG, False, "monitoring"),
    *ignored("comet dump_state", off=(False,)),
)

_OTHERS: Final = (
    *ignored("timers.throughput.enabled timers.throughput.synchronized log_level"),
    *section(
        "checkpoint",
        *ignored("tag_validation parallel_write.pipeline_stage checkpoint_serialization"),
        FileKey("load_universal", FLAG, False, "reader"),
        not_built(
            "use_node_local_storage",
            False,
            "folders that only one node sees; save to one that every rank sees",
        ),
        foreign("writer", "other writers of checkpoints than zero_engine.save()", None),
    ),
    *section(
        "activation_checkpointing",
        *(
            FileKey(path, FLAG, False, "activation_checkpointing")
            for path in (
                "partition_activations",
                "contiguous_memory_optimization",
                "cpu_checkpointing",
                "synchronize_checkpoint_boundary",
                "profile",
            )
        ),
        FileKey("number_checkpoints", POSITIVE, None, "activation_checkpointing"),
    ),
    foreign("amp", "apex is no more; use torch_autocast"),
    foreign("elasticity", "set the batch sizes yourself"),
    foreign("compile", "call torch.compile on the blocks instead", "deepcompile"),
    foreign("nebula", "Nebula's storage; engine.save_checkpoint() writes to folders"),
    foreign("expert_parallel", "expert parallelism"),
    foreign("tensor_parallel", "tensor parallelism", None),
    foreign("datastates_ckpt", "saving an engine's state", None),
    foreign("weight_quantization", "quantized weights", None),
    foreign("quantize_training", "quantized training", None),
    foreign("sparse_attention", _OUTSIDE, None),
    foreign("compression_training", _OUTSIDE, None),
    *(
        foreign(path, _OUTSIDE)
        for path in (
            "autotuning",
            "curriculum_learning",
            "data_efficiency",
            "eigenvalue",
            "hybrid_engine",
            "progressive_layer_drop",
        )
    ),
    not_built(
        "sequence_parallel_size",
        1,
        "leave it out, and say initialize(mesh_param=(data ranks, sequence ranks))",
        POSITIVE,
    ),
    *ignored(
        "seq_parallel_communication_data_type use_data_before_expert_parallelism pipeline "
        "seed_layers vocabulary_size disable_allgather"
    ),
    not_built("graph_harvesting", False, "CUDA graphs"),
    not_built("disable_python_gc", False, "call gc.disable() in the training loop"),
)


_ALL: Final = (
    *_TRAINING,
    *_DTYPES,
    *section(_ZERO, *_SCHEDULE, *_OFFLOAD, *_WIRE),
    *_AIO,
    *_MONITORS,
    *_OTHERS,
)
KEYS: Final[dict[str, FileKey]] = {key.path: key for key in _ALL}

# Path in a file -> key. Aliases are included.
WRITTEN: Final[dict[str, FileKey]] = {path: key for key in _ALL for path in key.paths}

SECTIONS: Final[frozenset[str]] = frozenset(
    path.rsplit(".", depth)[0] for path in WRITTEN for depth in range(1, path.count(".") + 1)
)


def unknown_key(path: str) -> ConfigError:
    """The error for a path that is not in the table; it names the nearest that is."""
    nearest = find_slip(path) or _nearest(path)
    hint = f"; did you mean {nearest}?" if nearest else ""
    return ConfigError(f"{path}: unknown; expected a key of DeepSpeed's configuration{hint}")


def find_slip(path: str) -> str | None:
    """The key that was meant: one of the section with nearly that name, or of another with it."""
    section, inside = _siblings(path)
    name = path.removeprefix(section)
    # A misspelt name is likelier than the right name in the wrong section.
    close = difflib.get_close_matches(name.lower(), inside, n=1, cutoff=0.8)
    if close:
        return inside[close[0]]
    moved = [other for other in _PLACES if other.rpartition(".")[2] == name]
    if moved:
        return max(moved, key=lambda other: difflib.SequenceMatcher(a=path, b=other).ratio())
    return None


def _nearest(path: str) -> str | None:
    """The key of the most similar name: of the section, else of any."""
    section, inside = _siblings(path)
    name = path.removeprefix(section)
    close = difflib.get_close_matches(name.lower(), inside, n=1, cutoff=0.5)
    # Of "learning_rate" they are "lr".
    initials = "".join(word[:1] for word in name.lower().split("_"))
    for each in (*close, initials):
        if each in inside:
            return inside[each]
    names = {other.rpartition(".")[2]: other for other in _PLACES}
    elsewhere = difflib.get_close_matches(name, names, n=1)
    return names[elsewhere[0]] if elsewhere else None


_PLACES: Final = (*WRITTEN, *sorted(SECTIONS))


def _siblings(path: str) -> tuple[str, dict[str, str]]:
    """Return a path's section, with its dot, and the section's paths by name in lower case."""
    prefix, dot, _ = path.rpartition(".")
    section = prefix + dot
    return section, {
        other.removeprefix(section).lower(): other for other in _PLACES if other.startswith(section)
    }
