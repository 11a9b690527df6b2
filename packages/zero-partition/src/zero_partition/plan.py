"""Planners, as building blocks: who owns which elements, what is whole when, and where it lies.

Pure arithmetic over sizes and orders: no process group, no model's values, nothing that a training
step does. Who builds another schedule, or wants to know what ours would do, calls these; training
itself goes through `partition`. They may change with a minor version.

- Layouts: `FlatLayout`, `Cut` and `choose_cuts`, `plan_units`, `BufferPlan`.
- State: `plan_entry` finds the whole of an optimizer's entry from what each rank has of it.
- The trace: `ExecutionOrder` records in which order units are used (`Use`).
- Slots: `choose_slots` and `plan_gathers` say which units (`Extent`) share memory, and when each
  `Gather` is launched; `SlotPool` is the memory before a trace is there.
"""

from ._buffer_plan import BufferPlan, ParameterPlan
from ._cut import Cut
from ._gather_plan import Extent, Gather, choose_slots, plan_gathers
from ._grouping import choose_units, plan_units
from ._layout import FlatLayout
from ._limits import Limits
from ._needs import choose_cuts
from ._order import ExecutionOrder, Use
from ._slots import SlotPool
from ._span import Span
from ._state_entry import PlainEntry, Said, TensorEntry, part_of_entry, plan_entry

__all__ = [
    "BufferPlan",
    "Cut",
    "ExecutionOrder",
    "Extent",
    "FlatLayout",
    "Gather",
    "Limits",
    "ParameterPlan",
    "PlainEntry",
    "Said",
    "SlotPool",
    "Span",
    "TensorEntry",
    "Use",
    "choose_cuts",
    "choose_slots",
    "choose_units",
    "part_of_entry",
    "plan_entry",
    "plan_gathers",
    "plan_units",
]
