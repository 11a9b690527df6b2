"""All other sections: monitors, profilers, checkpoints, and features outside of ZeRO."""

from __future__ import annotations

from typing import Any, Final

from ._file_key import Becomes, CannotMatter, FileKey, NotBuilt, not_built, section
from ._value_kinds import (
    ANYTHING,
    COUNT,
    FLAG,
    NAMES,
    OBJECT,
    POSITIVE,
    TEXT,
    choice,
    either,
    number,
    several,
)

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
