"""The section `zero_optimization`, but for offload and the wire."""

from __future__ import annotations

import sys
from typing import Any, Final

from ._file_key import Becomes, CannotMatter, FileKey, NotBuilt, section
from ._leaf_modules import LEAF_CLASSES
from ._value_kinds import COUNT, FLAG, NAMES, POSITIVE, ValueKind, integer


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
