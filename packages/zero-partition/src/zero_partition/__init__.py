"""Who owns which elements of a model, and when a parameter is whole: ZeRO stages 0 to 3."""

# Floors, lowest first: errors, torch_private, nested, chained, plan, stand_in, memory, init, run,
# optimizer, values, enter, report, dry_run, redundancy, public, planning, seams.

from zero_partition.__about__ import __version__
from zero_partition.chained import ChainedOptimizer
from zero_partition.enter.partition import partition
from zero_partition.errors import (
    AtRestError,
    LayoutError,
    LoadError,
    LostEditError,
    OverlapError,
    PartitionError,
    StateError,
)
from zero_partition.init.context import Init
from zero_partition.init.materialize import materialise
from zero_partition.init.units import get_leaf_modules, set_leaf_modules, unset_leaf_modules
from zero_partition.memory.seams import MASTER
from zero_partition.plan.cuts import Cut
from zero_partition.plan.stages import AS_IT_IS, Precision
from zero_partition.plan.wire import Wire
from zero_partition.public import (
    backward_without_batch,
    coalesce_reduction,
    finish_update,
    no_sync,
    record_codec_errors,
    release_buffers,
)
from zero_partition.redundancy import ZeroRedundancyOptimizer
from zero_partition.report import (
    MemoryReport,
    ScheduleReport,
    ScheduleRow,
    memory_report,
    schedule_report,
    traffic_report,
)
from zero_partition.run.norm import clip_grad_norm_, clip_grad_value_, unscale_and_clip_
from zero_partition.stand_in import StateKind
from zero_partition.values.access import (
    full_grad,
    full_optimizer_state,
    full_param,
    local_grad,
    local_optimizer_state,
    local_param,
    parameter_status,
    set_full_grad,
    set_full_optimizer_state,
    set_full_param,
    set_local_grad,
    set_local_optimizer_state,
    set_local_param,
    update_full_grads,
)
from zero_partition.values.average import ShardedAverage
from zero_partition.values.gathered import (
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
    unsharded,
)
from zero_partition.values.optimizer_state_dict import (
    full_optimizer_state_dict,
    load_full_optimizer_state_dict,
)
from zero_partition.values.state_dict import full_state_dict
from zero_partition.values.unpartition import unpartition

__all__ = [
    "AS_IT_IS",
    "MASTER",
    "AtRestError",
    "ChainedOptimizer",
    "Cut",
    "GatheredParameters",
    "Init",
    "LayoutError",
    "LoadError",
    "LostEditError",
    "MemoryReport",
    "OverlapError",
    "PartitionError",
    "Precision",
    "ScheduleReport",
    "ScheduleRow",
    "ShardedAverage",
    "StateError",
    "StateKind",
    "Wire",
    "ZeroRedundancyOptimizer",
    "__version__",
    "backward_without_batch",
    "clip_grad_norm_",
    "clip_grad_value_",
    "coalesce_reduction",
    "finish_update",
    "full_grad",
    "full_optimizer_state",
    "full_optimizer_state_dict",
    "full_param",
    "full_state_dict",
    "get_leaf_modules",
    "load_full_optimizer_state_dict",
    "local_grad",
    "local_optimizer_state",
    "local_param",
    "materialise",
    "memory_report",
    "no_sync",
    "parameter_status",
    "partition",
    "record_codec_errors",
    "register_external_parameter",
    "release_buffers",
    "schedule_report",
    "set_full_grad",
    "set_full_optimizer_state",
    "set_full_param",
    "set_leaf_modules",
    "set_local_grad",
    "set_local_optimizer_state",
    "set_local_param",
    "traffic_report",
    "unpartition",
    "unregister_external_parameter",
    "unscale_and_clip_",
    "unset_leaf_modules",
    "unsharded",
    "update_full_grads",
]
