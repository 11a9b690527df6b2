"""Who owns which elements of a model, and when a parameter is whole: ZeRO stages 0 to 3."""

from .__about__ import __version__
from ._buffer_plan import BufferPlan, ParameterPlan
from ._chained import ChainedOptimizer
from ._cut import Cut
from ._errors import LayoutError, PartitionError, StateError
from ._grouping import UnitPlan, choose_units, plan_units
from ._hooks import find_sharded
from ._layout import FlatLayout, Piece
from ._leaves import get_leaf_modules, set_leaf_modules, unset_leaf_modules
from ._memory import MemoryReport
from ._needs import CutChoice
from ._partition import partition
from ._placement import STAGES, Placement, Placements, Stage
from ._public import (
    backward_without_batch,
    clip_grad_norm_,
    full_state_dict,
    memory_report,
    no_sync,
    release_buffers,
)
from ._sharded_model import ShardedModel
from ._span import Span

__all__ = [
    "STAGES",
    "BufferPlan",
    "ChainedOptimizer",
    "Cut",
    "CutChoice",
    "FlatLayout",
    "LayoutError",
    "MemoryReport",
    "ParameterPlan",
    "PartitionError",
    "Piece",
    "Placement",
    "Placements",
    "ShardedModel",
    "Span",
    "Stage",
    "StateError",
    "UnitPlan",
    "__version__",
    "backward_without_batch",
    "choose_units",
    "clip_grad_norm_",
    "find_sharded",
    "full_state_dict",
    "get_leaf_modules",
    "memory_report",
    "no_sync",
    "partition",
    "plan_units",
    "release_buffers",
    "set_leaf_modules",
    "unset_leaf_modules",
]
