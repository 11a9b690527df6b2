"""Every documented key of DeepSpeed's file, by path, and the nearest to a wrong one."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from typing import Any, Final

from zero_engine.errors import ConfigError

from .file_key import (
    ANYTHING,
    COUNT,
    DTYPE,
    FLAG,
    NAMES,
    OBJECT,
    POSITIVE,
    TEXT,
    Becomes,
    CannotMatter,
    FileKey,
    NotBuilt,
    ValueKind,
    choice,
    either,
    integer,
    not_built,
    number,
    section,
    several,
)
from .keys_of_zero import OFFLOAD_KEYS, WIRE_KEYS, ZERO_KEYS

_PRECISION: Final = Becomes("zero.precision")
_SCALE: Final = Becomes("loss_scale")
_ANY_SCALE: Final = either(
    number(2.0**-126, below=2.0**128), integer(0, 0)
)  # the loss is scaled in fp32
_LOSS_SCALE: Final = ValueKind(
    "0, for a scale that changes by itself, or a scale in the range of fp32", _ANY_SCALE.read
)


def _idle_without_zero(value: Callable[[str], Any]) -> str | None:
    if value("zero_optimization.stage") != 0 or value("optimizer.type") is None:
        return None
    return "at stage 0, DeepSpeed's own optimizers halve the scale at every overflow"


PRECISION_KEYS: Final = (
    *section(
        "fp16",
        FileKey("enabled", FLAG, False, _PRECISION),
        FileKey(
            "auto_cast",
            FLAG,
            False,
            NotBuilt("give the model fp16 inputs, or turn torch_autocast on in place of fp16"),
        ),
        FileKey("loss_scale", _LOSS_SCALE, 0, _SCALE),
        FileKey("initial_scale_power", integer(0, 127), 16, _SCALE),
        FileKey("loss_scale_window", POSITIVE, 1000, _SCALE),
        FileKey("hysteresis", POSITIVE, 2, _SCALE, idle=_idle_without_zero),
        FileKey("consecutive_hysteresis", FLAG, False, _SCALE, idle=_idle_without_zero),
        FileKey("min_loss_scale", number(0, below=2.0**128), 1, _SCALE),
        FileKey(
            "fp16_master_weights_and_grads",
            FLAG,
            False,
            NotBuilt("master weights are fp32 with fp16; DeepSpeed has it with CPU offload only"),
        ),
        gate="enabled",
    ),
    *section(
        "bf16",
        FileKey("enabled", FLAG, False, _PRECISION),
        FileKey(
            "immediate_grad_update",
            FLAG,
            False,
            CannotMatter("gradients are accumulated as they arrive"),
        ),
        FileKey("check_grad_overflow", FLAG, True, Becomes("checks_overflow")),
        FileKey("bf16_master_weights_and_grads", FLAG, False, _PRECISION),
        FileKey("bf16_optimizer_states", FLAG, False, _PRECISION),
        gate="enabled",
        alias="bfloat16",
    ),
    *section(
        "torch_autocast",
        FileKey("enabled", FLAG, False, Becomes("autocast_dtype")),
        FileKey("dtype", DTYPE, None, Becomes("autocast_dtype")),
        FileKey(
            "lower_precision_safe_modules",
            NAMES,
            None,
            NotBuilt("torch.autocast chooses by operation; leave it out"),
        ),
        gate="enabled",
    ),
    *section(
        "amp",
        FileKey("enabled", FLAG, False, NotBuilt("apex is no more; use torch_autocast")),
        FileKey("opt_level", TEXT, None, NotBuilt("apex is no more; use torch_autocast")),
        FileKey(
            "loss_scale",
            either(number(), TEXT),
            None,
            NotBuilt("apex is no more; use torch_autocast"),
        ),
        gate="enabled",
    ),
    *section(
        "data_types",
        FileKey("grad_accum_dtype", DTYPE, None, Becomes("zero.precision")),
        FileKey("param_dtype", DTYPE, None, Becomes("zero.precision")),
        FileKey(
            "buffer_dtype", DTYPE, None, NotBuilt("buffers keep their dtype; cast them yourself")
        ),
        FileKey(
            "keep_in_fp32_modules",
            either(choice("auto"), NAMES),
            (),
            NotBuilt("all parameters of a model get one dtype; give an empty list"),
        ),
    ),
    FileKey("communication_data_type", DTYPE, None, _PRECISION),
    FileKey(
        "seq_parallel_communication_data_type",
        DTYPE,
        None,
        CannotMatter("there is no sequence-parallel group"),
    ),
    FileKey("weight_quantization", OBJECT, None, NotBuilt("quantized weights"), neutral=({},)),
    FileKey("quantize_training", OBJECT, None, NotBuilt("quantized training"), neutral=({},)),
)


# ---- All other sections: monitors, profilers, checkpoints, and features outside of ZeRO ----


_ACTIVATIONS: Final = Becomes("activation_checkpointing")
_OUTSIDE: Final = "it is outside of ZeRO"


def _object(path: str, remedy: str, *off: Any) -> FileKey:
    """A section that is refused whole, whatever it says, unless it is empty or one of `off`."""
    return FileKey(path, OBJECT, None, NotBuilt(remedy), neutral=({}, *off))


# Whatever they say, training goes on without.
_MONITORS: Final = (
    *(
        FileKey(path, ANYTHING, default, CannotMatter(f"not built yet; {remedy}"))
        for path, default, remedy in (
            ("tensorboard", None, "write what the engine's methods say"),
            ("csv_monitor", None, "write what the engine's methods say"),
            ("wandb", None, "log what the engine's methods say"),
            ("comet", None, "log what the engine's methods say"),
            ("comms_logger", None, "zero_comm.record_traffic() counts calls and bytes"),
            ("flops_profiler", None, "torch.utils.flop_counter counts them"),
            ("wall_clock_breakdown", False, "torch.profiler has timers"),
            ("memory_breakdown", False, "torch.profiler has memory reports"),
        )
    ),
    *section(
        "timers.throughput",
        FileKey("enabled", FLAG, True, CannotMatter("no throughput is timed")),
        FileKey("synchronized", FLAG, True, CannotMatter("no throughput is timed")),
    ),
    FileKey("dump_state", ANYTHING, False, CannotMatter("print(config.table()) shows it")),
    FileKey("log_level", TEXT, None, CannotMatter("the level belongs to Python's logging")),
)

_FILES: Final = section(
    "checkpoint",
    FileKey(
        "tag_validation",
        choice("Ignore", "Warn", "Fail"),
        "Warn",
        CannotMatter("ranks that pass different tags end in an error"),
    ),
    FileKey(
        "load_universal",
        FLAG,
        False,
        CannotMatter("every checkpoint loads at any world size and stage"),
    ),
    FileKey(
        "use_node_local_storage",
        FLAG,
        False,
        NotBuilt("folders that only one node sees; save to one that every rank sees"),
    ),
    FileKey(
        "parallel_write.pipeline_stage",
        FLAG,
        False,
        CannotMatter("every rank writes files of its own"),
    ),
    FileKey(
        "checkpoint_serialization", FLAG, True, CannotMatter("nothing is pickled, with it or not")
    ),
    _object("writer", "other writers of checkpoints than zero_engine.save()"),
)

_ACTIVATION_CHECKPOINTING: Final = section(
    "activation_checkpointing",
    FileKey("partition_activations", FLAG, False, _ACTIVATIONS),
    FileKey("contiguous_memory_optimization", FLAG, False, _ACTIVATIONS),
    FileKey("cpu_checkpointing", FLAG, False, _ACTIVATIONS),
    FileKey("synchronize_checkpoint_boundary", FLAG, False, _ACTIVATIONS),
    FileKey("profile", FLAG, False, _ACTIVATIONS),
    FileKey("number_checkpoints", POSITIVE, None, _ACTIVATIONS),
)

_OTHER_FEATURES: Final = (
    *not_built(
        "elasticity",
        "set the batch sizes yourself",
        max_train_batch_size=POSITIVE,
        micro_batch_sizes=several(POSITIVE),
        min_gpus=POSITIVE,
        max_gpus=POSITIVE,
        min_time=COUNT,
        version=number(0),
        prefer_larger_batch=FLAG,
        ignore_non_elastic_batch_info=FLAG,
        num_gpus_per_node=POSITIVE,
        model_parallel_size=POSITIVE,
    ),
    *not_built(
        "autotuning",
        _OUTSIDE,
        fast=FLAG,
        results_dir=TEXT,
        exps_dir=TEXT,
        overwrite=FLAG,
        start_profile_step=COUNT,
        end_profile_step=COUNT,
        metric=TEXT,
        metric_path=TEXT,
        tuner_type=choice("gridsearch", "random", "model_based"),
        tuner_early_stopping=COUNT,
        tuner_num_trials=COUNT,
        arg_mappings=OBJECT,
        max_train_batch_size=POSITIVE,
        min_train_batch_size=POSITIVE,
        max_train_micro_batch_size_per_gpu=POSITIVE,
        min_train_micro_batch_size_per_gpu=POSITIVE,
        num_tuning_micro_batch_sizes=POSITIVE,
        mp_size=POSITIVE,
        model_info=OBJECT,
        model_info_path=TEXT,
    ),
    *not_built(
        "eigenvalue",
        _OUTSIDE,
        verbose=FLAG,
        max_iter=POSITIVE,
        tol=number(0),
        stability=number(0),
        gas_boundary_resolution=POSITIVE,
        layer_name=TEXT,
        layer_num=COUNT,
    ),
    *not_built("progressive_layer_drop", _OUTSIDE, theta=number(0, 1), gamma=number(0)),
    *not_built(
        "curriculum_learning",
        _OUTSIDE,
        curriculum_type=TEXT,
        min_difficulty=COUNT,
        max_difficulty=COUNT,
        schedule_type=TEXT,
        schedule_config=OBJECT,
    ),
    *not_built(
        "data_efficiency",
        _OUTSIDE,
        seed=COUNT,
        data_sampling=OBJECT,
        data_routing=OBJECT,
    ),
    *not_built(
        "hybrid_engine",
        _OUTSIDE,
        max_out_tokens=POSITIVE,
        inference_tp_size=POSITIVE,
        release_inference_cache=FLAG,
        pin_parameters=FLAG,
        tp_gather_partition_size=POSITIVE,
        enable_cuda_graph=FLAG,
    ),
    *not_built(
        "nebula",
        "Nebula's storage; engine.save_checkpoint() writes to folders",
        persistent_storage_path=TEXT,
        persistent_time_interval=COUNT,
        num_of_version_in_retention=COUNT,
        enable_nebula_load=FLAG,
        load_path=TEXT,
    ),
    *section(
        "compile",
        FileKey("deepcompile", FLAG, False, NotBuilt("call torch.compile on the blocks instead")),
        *(
            FileKey(name, either(either(FLAG, COUNT), NAMES), None, NotBuilt("DeepCompile"))
            for name in (
                "passes",
                "autoep_non_moe",
                "free_activation",
                "free_activation_threshold",
                "offload_activation",
                "offload_activation_pin_memory",
                "offload_opt_states",
                "offload_parameters",
                "double_buffer",
                "symmetric_memory",
                "debug_log",
                "sync_before_reduce",
                "sync_after_reduce",
                "sync_before_allgather",
                "sync_after_allgather",
                "keep_int_input_tensors",
                "keep_all_input_tensors",
            )
        ),
        gate="deepcompile",
    ),
    _object("tensor_parallel", "tensor parallelism", {"autotp_size": 0}),
    _object("expert_parallel", "expert parallelism", {"enabled": False}),
    FileKey("sequence_parallel_size", POSITIVE, 1, NotBuilt("sequence parallelism")),
    FileKey(
        "use_data_before_expert_parallelism",
        FLAG,
        False,
        CannotMatter("there are no expert-parallel groups"),
    ),
    FileKey("pipeline", OBJECT, None, CannotMatter("only DeepSpeed's PipelineModule reads it")),
    FileKey("seed_layers", FLAG, False, CannotMatter("only DeepSpeed's PipelineModule reads it")),
    _object("datastates_ckpt", "saving an engine's state", {"enabled": False}),
    _object("sparse_attention", _OUTSIDE),
    _object("compression_training", _OUTSIDE),
    FileKey("graph_harvesting", FLAG, False, NotBuilt("CUDA graphs")),
    FileKey(
        "vocabulary_size", POSITIVE, None, CannotMatter("DeepSpeed warns about its alignment only")
    ),
    FileKey("disable_allgather", FLAG, False, CannotMatter("DeepSpeed does not read it either")),
    FileKey("disable_python_gc", FLAG, False, NotBuilt("call gc.disable() in the training loop")),
)

REPORTS_KEYS: Final = (*_MONITORS, *_FILES, *_ACTIVATION_CHECKPOINTING, *_OTHER_FEATURES)


# ---- Batch sizes, accumulation, clipping, and the sections `optimizer` and `scheduler` ----


OPTIMIZERS: Final = ("adam", "adamw", "sgd", "adagrad", "lion", "muon")
SCHEDULERS: Final = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")


def _read_interval(value: Any) -> int | None:
    if isinstance(value, float) and value == math.inf:  # for never, as accelerate writes it
        return None
    try:
        return POSITIVE.read(value)
    except ValueError:
        return 0  # training goes on without


def _idle_interval(value: Callable[[str], Any]) -> str | None:
    is_none = value("steps_per_print") == 0
    return "it is no number of steps, so that nothing is printed" if is_none else None


_OPTIMIZER: Final = Becomes("optimizer")
_SCHEDULER: Final = Becomes("scheduler")
_AT_LEAST_0: Final = number(0)
_RATE: Final = either(_AT_LEAST_0, several(_AT_LEAST_0))  # of all param groups, or of each
_SHARE: Final = number(0, 1)
_BETA: Final = number(0, below=1)
_16_BIT_STATE: Final = NotBuilt("state has the dtype of the masters; leave it at true")
_INTERVAL: Final = ValueKind("a number of steps", _read_interval)
_FACTOR: Final = number(2.0**-126, below=2.0**127)  # its inverse is in the range of fp32 too


def _optimizer_params(**kinds: ValueKind) -> tuple[FileKey, ...]:
    return tuple(FileKey(f"params.{name}", kind, None, _OPTIMIZER) for name, kind in kinds.items())


def _scheduler_params(**kinds: ValueKind) -> tuple[FileKey, ...]:
    return tuple(FileKey(f"params.{name}", kind, None, _SCHEDULER) for name, kind in kinds.items())


TRAINING_KEYS: Final = (
    FileKey("train_batch_size", POSITIVE, None, Becomes("train_batch_size")),
    FileKey("train_micro_batch_size_per_gpu", POSITIVE, None, Becomes("micro_batch_size")),
    FileKey("gradient_accumulation_steps", POSITIVE, None, Becomes("accumulation_steps")),
    FileKey("managed_gradient_accumulation", FLAG, True, Becomes("manages_accumulation")),
    FileKey("gradient_clipping", _AT_LEAST_0, 1.0, Becomes("max_norm", float)),
    FileKey("prescale_gradients", FLAG, False, Becomes("zero.precision")),
    FileKey("gradient_predivide_factor", _FACTOR, 1.0, Becomes("zero.precision")),
    FileKey("gradient_allreduce_op", choice("mean", "sum"), "mean", Becomes("zero.precision")),
    FileKey("sparse_gradients", FLAG, False, NotBuilt("gradients of embeddings are dense")),
    FileKey(
        "steps_per_print", _INTERVAL, None, Becomes("steps_per_print"), (0,), idle=_idle_interval
    ),
    FileKey("dataloader_drop_last", FLAG, False, Becomes("drop_last")),
    FileKey(
        "zero_allow_untested_optimizer",
        FLAG,
        False,
        CannotMatter("any torch optimizer is taken; what it needs of its shards is found by trial"),
    ),
    FileKey(
        "zero_force_ds_cpu_optimizer",
        FLAG,
        True,
        CannotMatter("whatever optimizer is given steps where its state rests"),
    ),
    *section(
        "optimizer",
        FileKey("type", choice(*OPTIMIZERS), None, _OPTIMIZER),
        FileKey("legacy_fusion", FLAG, False, CannotMatter("there is no fused LAMB")),
        FileKey(
            "params.max_grad_norm",
            _AT_LEAST_0,
            None,
            NotBuilt("it is called gradient_clipping"),
            neutral=(0,),
        ),
        FileKey("params.fp32_optimizer_states", FLAG, True, _16_BIT_STATE),
        FileKey("params.per_head_muon", FLAG, False, NotBuilt("Muon takes whole matrices")),
        *_optimizer_params(
            set_grad_none=FLAG,
            lr=_AT_LEAST_0,
            betas=several(_BETA, exactly=2),
            eps=_AT_LEAST_0,
            weight_decay=_AT_LEAST_0,
            bias_correction=FLAG,
            amsgrad=FLAG,
            adam_w_mode=FLAG,
            torch_adam=FLAG,
            decoupled_weight_decay=FLAG,
            momentum=_AT_LEAST_0,
            dampening=number(),
            nesterov=FLAG,
            lr_decay=_AT_LEAST_0,
            initial_accumulator_value=_AT_LEAST_0,
            muon_lr=_AT_LEAST_0,
            adam_lr=_AT_LEAST_0,
            ns_method=choice("standard", "gram"),
            ns_coefficients=several(number(), exactly=3),
            ns_steps=POSITIVE,
            adjust_lr_fn=choice("original", "match_rms_adamw"),
            maximize=FLAG,
            foreach=FLAG,
            fused=FLAG,
            capturable=FLAG,
            differentiable=FLAG,
        ),
    ),
    *section(
        "scheduler",
        FileKey("type", choice(*SCHEDULERS), None, _SCHEDULER),
        *_scheduler_params(
            warmup_min_lr=_RATE,
            warmup_max_lr=_RATE,
            warmup_num_steps=COUNT,
            warmup_type=choice("log", "linear"),
            total_num_steps=POSITIVE,
            warmup_min_ratio=_SHARE,
            cos_min_ratio=_SHARE,
            cycle_min_lr=_RATE,
            cycle_max_lr=_RATE,
            decay_lr_rate=_AT_LEAST_0,
            cycle_first_step_size=POSITIVE,
            cycle_second_step_size=POSITIVE,
            cycle_first_stair_count=COUNT,
            cycle_second_stair_count=COUNT,
            decay_step_size=COUNT,
            cycle_momentum=FLAG,
            cycle_min_mom=_BETA,
            cycle_max_mom=_BETA,
            decay_mom_rate=_AT_LEAST_0,
            lr_range_test_min_lr=_RATE,
            lr_range_test_step_size=POSITIVE,
            lr_range_test_step_rate=_AT_LEAST_0,
            lr_range_test_staircase=FLAG,
            last_batch_iteration=integer(-1),
        ),
    ),
)


# ---- Every documented key of DeepSpeed's file, by path, and the nearest to a wrong one ----


KEYS: Final[dict[str, FileKey]] = {
    key.path: key
    for key in (
        *TRAINING_KEYS,
        *PRECISION_KEYS,
        *ZERO_KEYS,
        *OFFLOAD_KEYS,
        *WIRE_KEYS,
        *REPORTS_KEYS,
    )
}

# As written in a file: aliases too.
WRITTEN: Final[dict[str, FileKey]] = {path: key for key in KEYS.values() for path in key.paths}

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
