"""Plans of the memory, traffic and files of a model, an optimizer and a configuration.

Building blocks for planners. They may change between minor versions.
"""

from zero_partition.dry_run import (
    PlannedMemory,
    PlannedOperation,
    PlannedSave,
    plan_memory,
    plan_save,
    plan_traffic,
)
from zero_partition.init.units import choose_units, plan_units
from zero_partition.optimizer.needs import choose_cuts
from zero_partition.optimizer.shards import (
    EntryInfo,
    PlainEntry,
    TensorEntry,
    part_of_entry,
    plan_entry,
)
from zero_partition.plan.slots import keeps_free_memory
from zero_partition.setup.model_plan import ModelPlan, plan_model

__all__ = [
    "EntryInfo",
    "ModelPlan",
    "PlainEntry",
    "PlannedMemory",
    "PlannedOperation",
    "PlannedSave",
    "TensorEntry",
    "choose_cuts",
    "choose_units",
    "keeps_free_memory",
    "part_of_entry",
    "plan_entry",
    "plan_memory",
    "plan_model",
    "plan_save",
    "plan_traffic",
    "plan_units",
]
