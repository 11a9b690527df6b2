"""Building blocks for other packages: offload, saving and loading, and groups of ranks.

They are for zero-engine and for packages like it. They may change between minor versions.
"""

import warnings
from typing import Any, Final

from zero_partition.chained import SeparateOptimizers, members_of
from zero_partition.dtensors import is_dtensor, local_of
from zero_partition.errors import SanitizerError
from zero_partition.memory.seams import (
    AbstractRangeReader,
    DelayedOffload,
    GradOffload,
    OffloadedBytes,
    Opening,
    OpenState,
    OptimizerOffload,
    ParamOffload,
    Pending,
)
from zero_partition.plan.wire import pattern_of
from zero_partition.report import loco_facts, loco_state, restore_loco
from zero_partition.run.hooks import find_sharded, require_sharded
from zero_partition.run.norm import GradientReport
from zero_partition.run.residence import (
    OffloadAllocation,
    OffloadBackends,
    OffloadPolicy,
    plan_allocation,
)
from zero_partition.run.sharded_model import ModelPhase, ParamRef, ShardedModel
from zero_partition.run.source import CodecErrors
from zero_partition.stand_in import Backup
from zero_partition.values.access import ParameterStatus
from zero_partition.values.custom_loading import StateDictLayout, describe_state_dict
from zero_partition.values.load import (
    StateLoad,
    StateLoadReport,
    StateSource,
    load_ranges,
    param_groups_of,
    plan_load,
)
from zero_partition.values.offload_states import offload_states, reload_states
from zero_partition.values.runs import Part, PartBatch, StateParts, WholeTensor, plan_parts
from zero_partition.values.split_readers import SplitReader

__all__ = [
    "AbstractRangeReader",
    "Backup",
    "CodecErrors",
    "DelayedOffload",
    "GradOffload",
    "GradientReport",
    "ModelPhase",
    "OffloadAllocation",
    "OffloadBackends",
    "OffloadPolicy",
    "OffloadedBytes",
    "OpenState",
    "Opening",
    "OptimizerOffload",
    "ParamOffload",
    "ParamRef",
    "ParameterStatus",
    "Part",
    "PartBatch",
    "Pending",
    "SanitizerError",
    "SeparateOptimizers",
    "ShardedModel",
    "SplitReader",
    "StateDictLayout",
    "StateLoad",
    "StateLoadReport",
    "StateParts",
    "StateSource",
    "WholeTensor",
    "describe_state_dict",
    "find_sharded",
    "is_dtensor",
    "load_ranges",
    "local_of",
    "loco_facts",
    "loco_state",
    "members_of",
    "offload_states",
    "param_groups_of",
    "pattern_of",
    "plan_allocation",
    "plan_load",
    "plan_parts",
    "reload_states",
    "require_sharded",
    "restore_loco",
]

_RENAMED: Final = {  # since 0.2
    "Footprint": "OffloadedBytes",
    "GradientHome": "GradOffload",
    "Homes": "OffloadBackends",
    "LoadReport": "StateLoadReport",
    "RestPlan": "OffloadPolicy",
    "RoomPlan": "OffloadAllocation",
    "TensorHome": "ParamOffload",
    "plan_room": "plan_allocation",
}


def __getattr__(name: str) -> Any:
    """Return what an old name refers to, with a DeprecationWarning (PEP 562)."""
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"{__name__}.{name} is {__name__}.{_RENAMED[name]} now; zero 0.3 forgets the old name",
        DeprecationWarning,
        stacklevel=2,
    )
    found = globals()[name] = globals()[_RENAMED[name]]
    return found
