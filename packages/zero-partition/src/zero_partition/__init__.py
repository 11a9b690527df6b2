"""Who owns which elements of a model, and when a parameter is whole: ZeRO stages 0 to 3."""

from .__about__ import __version__
from ._average import ShardedAverage
from ._buffer_plan import BufferPlan, ParameterPlan, UnitPlan
from ._chained import ChainedOptimizer
from ._codec_errors import CodecErrors
from ._cut import Cut, CutChoice
from ._errors import (
    AtRestError,
    LayoutError,
    LoadError,
    LostEditError,
    OverlapError,
    PartitionError,
    StateError,
)
from ._external import register_external_parameter, unregister_external_parameter
from ._gathered import GatheredParameters
from ._grad_access import (
    full_grad,
    local_grad,
    set_full_grad,
    set_local_grad,
    update_full_grads,
)
from ._gradient_home import AbstractGradientHome
from ._grouping import choose_units, plan_units
from ._hooks import find_sharded
from ._init_context import Init
from ._layout import FlatLayout, Piece
from ._leaves import get_leaf_modules, set_leaf_modules, unset_leaf_modules
from ._limits import Limits
from ._loading import LoadReport, load_ranges
from ._loco_state import loco_facts, loco_state, restore_loco
from ._materialise import materialise
from ._memory import MemoryReport
from ._memory_plan import PlannedMemory, plan_memory
from ._model_plan import ModelPlan, plan_model
from ._norm import GradientReport
from ._param_access import (
    ParameterStatus,
    full_param,
    local_param,
    parameter_status,
    set_full_param,
    set_local_param,
)
from ._parked import AbstractKeeper, StateKind
from ._partition import partition
from ._placement import STAGES, Placement, Placements, Stage
from ._precision import AS_IT_IS, Precision
from ._public import (
    backward_without_batch,
    clip_grad_norm_,
    clip_grad_value_,
    coalesce_reduction,
    finish_update,
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    memory_report,
    no_sync,
    park,
    record_codec_errors,
    release_buffers,
    schedule_report,
    traffic_report,
    unpark,
    unpartition,
    unscale_and_clip_,
)
from ._range_reader import AbstractRangeReader
from ._redundancy import ZeroRedundancyOptimizer
from ._rest_plan import RestPlan
from ._room_plan import RoomPlan, plan_room
from ._save_plan import PlannedSave, plan_save
from ._schedule_report import ScheduleReport, ScheduleRow
from ._shard_home import AbstractShardHome, Pending, ShardSize
from ._sharded_model import ShardedModel
from ._span import Span
from ._state_access import (
    full_optimizer_state,
    local_optimizer_state,
    set_full_optimizer_state,
    set_local_optimizer_state,
)
from ._state_load import StateLoad, StateSource, param_groups_of, plan_load
from ._state_parts import Part, PartBatch, StateParts, WholeTensor, plan_parts
from ._step_plan import PlannedStep, plan_step
from ._traffic_plan import PlannedOperation, plan_traffic
from ._unsharded import unsharded
from ._updater import MASTER, AbstractUpdater, Opening, UpdaterReport
from ._wire import Routes, Wire

__all__ = [
    "AS_IT_IS",
    "MASTER",
    "STAGES",
    "AbstractGradientHome",
    "AbstractKeeper",
    "AbstractRangeReader",
    "AbstractShardHome",
    "AbstractUpdater",
    "AtRestError",
    "BufferPlan",
    "ChainedOptimizer",
    "CodecErrors",
    "Cut",
    "CutChoice",
    "FlatLayout",
    "GatheredParameters",
    "GradientReport",
    "Init",
    "LayoutError",
    "Limits",
    "LoadError",
    "LoadReport",
    "LostEditError",
    "MemoryReport",
    "ModelPlan",
    "Opening",
    "OverlapError",
    "ParameterPlan",
    "ParameterStatus",
    "Part",
    "PartBatch",
    "PartitionError",
    "Pending",
    "Piece",
    "Placement",
    "Placements",
    "PlannedMemory",
    "PlannedOperation",
    "PlannedSave",
    "PlannedStep",
    "Precision",
    "RestPlan",
    "RoomPlan",
    "Routes",
    "ScheduleReport",
    "ScheduleRow",
    "ShardSize",
    "ShardedAverage",
    "ShardedModel",
    "Span",
    "Stage",
    "StateError",
    "StateKind",
    "StateLoad",
    "StateParts",
    "StateSource",
    "UnitPlan",
    "UpdaterReport",
    "WholeTensor",
    "Wire",
    "ZeroRedundancyOptimizer",
    "__version__",
    "backward_without_batch",
    "choose_units",
    "clip_grad_norm_",
    "clip_grad_value_",
    "coalesce_reduction",
    "find_sharded",
    "finish_update",
    "full_grad",
    "full_optimizer_state",
    "full_optimizer_state_dict",
    "full_param",
    "full_state_dict",
    "get_leaf_modules",
    "load_full_optimizer_state_dict",
    "load_ranges",
    "local_grad",
    "local_optimizer_state",
    "local_param",
    "loco_facts",
    "loco_state",
    "materialise",
    "memory_report",
    "no_sync",
    "param_groups_of",
    "parameter_status",
    "park",
    "partition",
    "plan_load",
    "plan_memory",
    "plan_model",
    "plan_parts",
    "plan_room",
    "plan_save",
    "plan_step",
    "plan_traffic",
    "plan_units",
    "record_codec_errors",
    "register_external_parameter",
    "release_buffers",
    "restore_loco",
    "schedule_report",
    "set_full_grad",
    "set_full_optimizer_state",
    "set_full_param",
    "set_leaf_modules",
    "set_local_grad",
    "set_local_optimizer_state",
    "set_local_param",
    "traffic_report",
    "unpark",
    "unpartition",
    "unregister_external_parameter",
    "unscale_and_clip_",
    "unset_leaf_modules",
    "unsharded",
    "update_full_grads",
]
