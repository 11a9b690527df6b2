"""Arithmetic of a partition: what is cut where, and when memory is used. No communication.

A stage is a row of `Placements` (stages.py). A model is a sequence of units (`UnitPlan`), each with
flat buffers (`BufferPlan`), in which every parameter has a span (layout.py). A `Cut` (cuts.py) says
where a parameter may be divided into shards, a `Split` (split.py) along which dimension. slots.py
records the order in which units are used and plans the memory in which they take turns. wire.py has
the groups and codecs of communication, precision.py the dtypes. `PartitionConfig` (config.py) is
all choices as one value.

Plans are frozen values, made alike on all ranks from names and shapes; the runtime and planners
share them. Read layout.py first. What must never happen: two ranks plan different layouts.

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
    shown,
    shown_all,
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
    "shown",
    "shown_all",
    "whole_of",
    "wire_of",
]
