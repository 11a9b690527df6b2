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
    ANYTHING,
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
    idle,
    integer,
    not_built,
    number,
    section,
    several,
)

_OPTIMIZERS: Final = ("adam", "adamw", "sgd", "adagrad", "lion", "muon")
_SCHEDULERS: Final = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")

_ZERO: Final = "zero_optimization"
_PRECISION: Final = "zero.precision"  # which several keys make together
_AT_LEAST_0: Final = number(0)
_SHARE: Final = number(0, 1)
_BETA: Final = number(0, below=1)
_RATES: Final = either(_AT_LEAST_0, several(_AT_LEAST_0))  # of all param groups, or of each


def _as_steps(value: Any) -> int | None:
    if value == math.inf:  # for never, as accelerate writes it
        return None
    return POSITIVE.convert(value) if POSITIVE.fits(value) else 0  # training goes on without


def _idle_interval(value: Callable[[str], Any]) -> str | None:
    is_none = value("steps_per_print") == 0
    return "it is no number of steps, so that nothing is printed" if is_none else None


_STEPS: Final = ValueKind("a number of steps", lambda _: True, _as_steps)
_FACTOR: Final = number(2.0**-126, below=2.0**127)  # its inverse is in the range of fp32 too


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
    FileKey("steps_per_print", _STEPS, None, "steps_per_print", (0,), idle=_idle_interval),
    FileKey("dataloader_drop_last", FLAG, False, "drop_last"),
    not_built("sparse_gradients", False, "gradients of embeddings are dense"),
    idle("zero_allow_untested_optimizer", False, "any torch optimizer is taken, and tried"),
    idle("zero_force_ds_cpu_optimizer", True, "any optimizer steps where its state is"),
    *section(
        "optimizer",
        FileKey("type", choice(*_OPTIMIZERS), None, "optimizer"),
        idle("legacy_fusion", False, "there is no fused LAMB"),
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
        FileKey("type", choice(*_SCHEDULERS), None, "scheduler"),
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


def _idle_without_zero(value: Callable[[str], Any]) -> str | None:
    if value("zero_optimization.stage") != 0 or value("optimizer.type") is None:
        return None
    return "at stage 0, DeepSpeed's own optimizers halve the scale at every overflow"


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
        FileKey("hysteresis", POSITIVE, 2, "loss_scale", idle=_idle_without_zero),
        FileKey("consecutive_hysteresis", FLAG, False, "loss_scale", idle=_idle_without_zero),
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
        idle("immediate_grad_update", False, "gradients are accumulated as they arrive"),
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
        not_built(
            "lower_precision_safe_modules",
            None,
            "torch.autocast chooses by operation; leave it out",
            NAMES,
        ),
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


_PER_UNIT: Final = "a unit's gradients travel together, small ones waiting for each other"
_BY_BACKEND: Final = "collectives are composed of what the group's backend does well"


def _stage_3(key: FileKey) -> FileKey:
    """A key of stage 3: DeepSpeed takes it with and without its prefix."""
    aliases = (key.path, *key.aliases)
    return attrs.evolve(key, path=f"stage3_{key.path}", aliases=aliases, min_stage=3)


def _at_least_1(numel: int) -> int:
    """At 0, nothing but what the running unit needs: the same as at 1."""
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
    idle("module_granularity_threshold", 0, "ZeroConfig.min_unit_bytes joins modules", COUNT),
    idle("use_all_reduce_for_fetch_params", False, _BY_BACKEND),
    idle("allgather_sequential", False, _BY_BACKEND),
)
_SCHEDULE: Final = (
    FileKey("stage", integer(0, 3), 0, "zero.stage"),
    *map(_stage_3, _STAGE_3),
    FileKey("leaf_module.classes", NAMES, LEAF_CLASSES, "leaf_modules", ((),), min_stage=3),
    FileKey("leaf_module.names", NAMES, (), "leaf_modules", min_stage=3),
    FileKey("leaf_module.name_suffixes", NAMES, (), "leaf_modules", min_stage=3),
    idle("memory_efficient_linear", True, "no linear layer keeps gathered weights"),
    idle("override_module_apply", True, "Module.apply sees whole values in zero_engine.Init"),
    idle("log_trace_cache_warnings", False, "another order of modules is recorded anew"),
    idle("contiguous_gradients", True, "gradients are always copied to contiguous memory"),
    idle("reduce_scatter", True, _BY_BACKEND),
    idle("reduce_bucket_size", 5 * 10**8, _PER_UNIT, POSITIVE),
    idle("use_multi_rank_bucket_allreduce", True, _PER_UNIT),
    idle("allgather_partitions", True, "nothing in DeepSpeed reads it either"),
    idle("allgather_bucket_size", 5 * 10**8, "a unit's parameters travel together", COUNT),
    idle("overlap_comm", None, "communication overlaps wherever the backend can"),
    idle("compute_grad_norm", True, "the norm comes with the overflow check"),
    idle("load_from_fp32_weights", True, "masters are saved and restored as they were"),
    idle("elastic_checkpoint", False, "every checkpoint loads at any world size"),
    idle("pipeline_loading_checkpoint", False, "each rank reads only what it keeps"),
    idle("ignore_unused_parameters", True, "parameters without gradient are never an error"),
    not_built("legacy_stage1", False, "there is one stage 1; DeepSpeed refuses it too"),
    idle("round_robin_gradients", False, "every rank has a part of every unit's gradients"),
    idle("parameter_alignment", False, "parameters are always aligned"),
    idle("enable_sanity_checks", False, "the checks are always on"),
)


_DEVICE: Final = choice("none", "cpu", "nvme")
_DISK: Final = DiskSettings()

_OWN_BUFFERS: Final = "buffers are planned from what passes through them"
_OVERLAPS: Final = "reading, stepping and writing always overlap"
_SUBMISSION: Final = "requests are handed over in batches, while earlier ones run"

_ADAM_BYTES_PER_ELEMENT: Final = 12  # fp32: master, first and second moment
_LEAST_SUBGROUP_BYTES: Final = 2**20
_PAGE_BYTES: Final = 4096
_MAX_BLOCK_BYTES: Final = 2**30


_PARAM: Final = f"{_ZERO}.offload_param.device"
_OPTIMIZER: Final = f"{_ZERO}.offload_optimizer.device"
_PARAM_ON_DISK: Final[dict[str, Any]] = {"gates": (_PARAM,), "opened_by": "nvme"}
_STATE_ON_DISK: Final[dict[str, Any]] = {"gates": (_OPTIMIZER,), "opened_by": "nvme"}
_ON_HOST: Final = (f"{_ZERO}.cpu_offload", f"{_ZERO}.cpu_offload_param")  # as older files say it


def _subgroup_bytes(numel: int) -> int:
    """An upper bound: the files say 1e9 by habit, which is 12 GB in each of three slots.

    And no tiny one: DeepSpeed cuts no parameter into sub-groups, so there 8 means one parameter
    each, where pieces of eight elements would take a hundred times as long.
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
        idle("buffer_count", 5, _OWN_BUFFERS, COUNT),
        idle("buffer_size", 10**8, _OWN_BUFFERS, COUNT),
        FileKey("max_in_cpu", COUNT, 0, "zero.offload.max_host_numel", (10**9,), **_PARAM_ON_DISK),
        _PINNED,
        gates=(_PARAM,),
    ),
    *section(
        "offload_optimizer",
        FileKey("device", _DEVICE, "none", "zero.offload.optimizer", convert=_AS_OURS, min_stage=1),
        FileKey("nvme_path", FOLDER, None, "zero.offload.path", **_STATE_ON_DISK),
        idle("buffer_count", 4, _OWN_BUFFERS, COUNT),
        _PINNED,
        idle("pipeline_read", False, _OVERLAPS),
        idle("pipeline_write", False, _OVERLAPS),
        idle("fast_init", False, "masters are always written from the parameters, once"),
        FileKey("ratio", _SHARE, 1.0, "zero.offload.fraction", convert=float),
        not_built(
            "super_offload", False, "stepping before the norm is known, and back (SuperOffload)"
        ),
        idle("cpuadam_cores_perc", 0.8, "only SuperOffload binds cores", _SHARE),
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
        "Muon's momentum rests where the other state does",
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
    _aio("thread_count", "num_workers", 1),  # an older name
    idle("single_submit", False, _SUBMISSION),
    idle("overlap_events", True, _SUBMISSION),
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
    idle(
        "mics_hierarchical_params_gather",
        False,
        "it gives the same values; over NCCL each shard enters a machine once anyway",
        gates=(f"{_ZERO}.mics_shard_size",),
    ),
)


_OUTSIDE: Final = "it is outside of ZeRO"
_METHODS: Final = "what the engine's methods say"

_FOLDER: Final = (
    FileKey("enabled", FLAG, False, "monitoring"),
    FileKey("output_path", TEXT, "", "monitoring"),
    FileKey("job_name", TEXT, "DeepSpeedJobName", "monitoring"),
)
_ADDED_UP: Final = "all calls of a step are added up; zero_engine.timeline() has each"

# What they show changes no number of a training.
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
        *(idle(name, False, _ADDED_UP) for name in ("verbose", "debug")),
        idle("prof_all", True, _ADDED_UP),
        idle("prof_ops", (), _ADDED_UP, NAMES),
        gates=("comms_logger.enabled",),
    ),
    *section(
        "flops_profiler",
        FileKey("enabled", FLAG, False, "monitoring"),
        FileKey("profile_step", COUNT, 1, "monitoring"),
        FileKey("module_depth", integer(-1), -1, "monitoring"),
        FileKey("detailed", FLAG, True, "monitoring"),
        FileKey("output_file", TEXT, None, "monitoring"),
        idle("top_modules", 1, "the table has all modules down to module_depth", POSITIVE),
        idle("recompute_fwd_factor", 0.0, "what is computed again is counted", _AT_LEAST_0),
        gates=("flops_profiler.enabled",),
    ),
    FileKey("wall_clock_breakdown", FLAG, False, "monitoring"),
    FileKey("memory_breakdown", FLAG, False, "monitoring"),
    idle("comet", None, f"not built yet; log {_METHODS}", ANYTHING),
    idle("dump_state", False, "print(config.table()) shows it", ANYTHING),
)

_OTHERS: Final = (
    *section(
        "timers.throughput",
        idle("enabled", True, "no throughput is timed"),
        idle("synchronized", True, "no throughput is timed"),
    ),
    idle("log_level", None, "the level belongs to Python's logging", TEXT),
    *section(
        "checkpoint",
        idle(
            "tag_validation",
            "Warn",
            "ranks that pass different tags end in an error",
            choice("Ignore", "Warn", "Fail"),
        ),
        idle("load_universal", False, "every checkpoint loads at any world size and stage"),
        not_built(
            "use_node_local_storage",
            False,
            "folders that only one node sees; save to one that every rank sees",
        ),
        idle("parallel_write.pipeline_stage", False, "every rank writes files of its own"),
        idle("checkpoint_serialization", True, "nothing is pickled, with it or not"),
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
    not_built("sequence_parallel_size", 1, "sequence parallelism", POSITIVE),
    idle(
        "seq_parallel_communication_data_type", None, "there is no sequence-parallel group", DTYPE
    ),
    idle("use_data_before_expert_parallelism", False, "there are no expert-parallel groups"),
    idle("pipeline", None, "only DeepSpeed's PipelineModule reads it", OBJECT),
    idle("seed_layers", False, "only DeepSpeed's PipelineModule reads it"),
    not_built("graph_harvesting", False, "CUDA graphs"),
    idle("vocabulary_size", None, "DeepSpeed warns about its alignment only", POSITIVE),
    idle("disable_allgather", False, "DeepSpeed does not read it either"),
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

# As written in a file: aliases too.
WRITTEN: Final[dict[str, FileKey]] = {path: key for key in _ALL for path in key.paths}

SECTIONS: Final[frozenset[str]] = frozenset(
    path.rsplit(".", depth)[0] for path in WRITTEN for depth in range(1, path.count(".") + 1)
)


def unknown_key(path: str) -> ConfigError:
    """The error for a path that is not in the table; it names the nearest that is."""
    nearest = _nearest(path)
    hint = f"; did you mean {nearest}?" if nearest else ""
    return ConfigError(f"{path}: expected a key of DeepSpeed's configuration, got this name{hint}")


def _nearest(path: str) -> str | None:
    known = [*WRITTEN, *sorted(SECTIONS)]
    prefix, dot, name = path.rpartition(".")
    section = prefix + dot
    inside = {
        other.removeprefix(section).lower(): other for other in known if other.startswith(section)
    }
    # A slip is likelier than the right name in the wrong section, and that than a similar name.
    close = difflib.get_close_matches(name.lower(), inside, n=1, cutoff=0.5)
    if close and difflib.SequenceMatcher(a=close[0], b=name.lower()).ratio() >= 0.8:
        return inside[close[0]]
    moved = [other for other in known if other.rpartition(".")[2] == name]
    if moved:
        return max(moved, key=lambda other: difflib.SequenceMatcher(a=path, b=other).ratio())
    if close:
        return inside[close[0]]
    names = {other.rpartition(".")[2]: other for other in known}
    elsewhere = difflib.get_close_matches(name, names, n=1)
    return names[elsewhere[0]] if elsewhere else None
