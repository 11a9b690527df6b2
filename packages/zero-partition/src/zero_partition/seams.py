"""What other packages build on: where values rest, what is saved and loaded, and by which ranks.

Building blocks for zero-engine and for packages like it. They may change between minor versions.
"""

from zero_partition.memory.seams import (
    AbstractGradientHome,
    AbstractRangeReader,
    AbstractShardHome,
    AbstractUpdater,
    Opening,
    Pending,
    ShardSize,
    UpdaterReport,
)
from zero_partition.memory.store import RestPlan
from zero_partition.public import park, unpark
from zero_partition.report import loco_facts, loco_state, restore_loco
from zero_partition.run.hooks import find_sharded
from zero_partition.run.norm import GradientReport
from zero_partition.run.residence import RoomPlan, plan_room
from zero_partition.run.sharded_model import ShardedModel
from zero_partition.run.unit import CodecErrors
from zero_partition.stand_in import AbstractKeeper
from zero_partition.values.access import ParameterStatus
from zero_partition.values.load import (
    LoadReport,
    StateLoad,
    StateSource,
    load_ranges,
    param_groups_of,
    plan_load,
)
from zero_partition.values.parts import Part, PartBatch, StateParts, WholeTensor, plan_parts

__all__ = [
    "AbstractGradientHome",
    "AbstractKeeper",
    "AbstractRangeReader",
    "AbstractShardHome",
    "AbstractUpdater",
    "CodecErrors",
    "GradientReport",
    "LoadReport",
    "Opening",
    "ParameterStatus",
    "Part",
    "PartBatch",
    "Pending",
    "RestPlan",
    "RoomPlan",
    "ShardSize",
    "ShardedModel",
    "StateLoad",
    "StateParts",
    "StateSource",
    "UpdaterReport",
    "WholeTensor",
    "find_sharded",
    "load_ranges",
    "loco_facts",
    "loco_state",
    "param_groups_of",
    "park",
    "plan_load",
    "plan_parts",
    "plan_room",
    "restore_loco",
    "unpark",
]
