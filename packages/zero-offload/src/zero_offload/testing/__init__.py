"""For tests: disks that fail, stores that record, machines as a test describes them, kernels.

`faults` makes values for `DiskStore(system=)`: one call of the operating system does something
else. `RecordingStore` is for `OffloadedOptimizer(store=)`, `budget` and `budget_of` for
`HostArena(budget=)`. `native` chooses what is compiled, `elsewhere` what counts as a device.
Planners and single kernels, which are arithmetic, are here to be tested by themselves.
"""

from zero_offload.residence import OffloadedShards

from . import faults
from .faults import SYSTEM, System
from .kernels import (
    Batch,
    Formula,
    Rule,
    checksums_in_pieces,
    fused_step,
    load,
    native,
    native_isas,
    share,
    step,
)
from .machine import budget, budget_of, elsewhere, interleave, nodes_of_process, spread
from .plans import (
    ALIGN_BYTES,
    CUT_NUMEL,
    PAGE_BYTES,
    Entry,
    Item,
    Residence,
    Shares,
    SubGroup,
    fused_pieces,
    plan_subgroups,
)
from .recording_store import RecordingStore

__all__ = [
    "ALIGN_BYTES",
    "CUT_NUMEL",
    "PAGE_BYTES",
    "SYSTEM",
    "Batch",
    "Entry",
    "Formula",
    "Item",
    "OffloadedShards",
    "RecordingStore",
    "Residence",
    "Rule",
    "Shares",
    "SubGroup",
    "System",
    "budget",
    "budget_of",
    "checksums_in_pieces",
    "elsewhere",
    "faults",
    "fused_pieces",
    "fused_step",
    "interleave",
    "load",
    "native",
    "native_isas",
    "nodes_of_process",
    "plan_subgroups",
    "share",
    "spread",
    "step",
]
