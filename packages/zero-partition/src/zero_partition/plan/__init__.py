"""Layouts, cuts, units and schedules of parameters. Arithmetic, no communication.

Building blocks for planners and tests. They may change between minor versions.
"""

from zero_partition.plan.config import PartitionConfig
from zero_partition.plan.cuts import Cut, CutChoice
from zero_partition.plan.layout import BufferPlan, FlatLayout, ParameterPlan, Piece, Span, UnitPlan
from zero_partition.plan.slots import (
    ExecutionOrder,
    Extent,
    Limits,
    PlannedGather,
    SlotPool,
    Use,
    choose_slots,
    plan_gathers,
)
from zero_partition.plan.split import Split
from zero_partition.plan.stages import (
    STAGES,
    Placement,
    Placements,
    Stage,
    check_names,
    names_fields,
    nearest,
)
from zero_partition.plan.wire import Routes, ranks_of, whole_of, wire_of

__all__ = [
    "STAGES",
    "BufferPlan",
    "Cut",
    "CutChoice",
    "ExecutionOrder",
    "Extent",
    "FlatLayout",
    "Limits",
    "ParameterPlan",
    "PartitionConfig",
    "Piece",
    "Placement",
    "Placements",
    "PlannedGather",
    "Routes",
    "SlotPool",
    "Span",
    "Split",
    "Stage",
    "UnitPlan",
    "Use",
    "check_names",
    "choose_slots",
    "names_fields",
    "nearest",
    "plan_gathers",
    "ranks_of",
    "whole_of",
    "wire_of",
]
