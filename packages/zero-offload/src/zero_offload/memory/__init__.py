"""Host memory: one budget, allocation at exact size, and copies to and from devices.

All memory that offload uses is allocated by a `HostArena` (arena.py), in whole pages, page-locked
for an accelerator. Each arena counts its bytes in the budget of the process (budget.py), which
refuses what the machine, its control group or the user's limit does not have, and lists who uses
how much. copies.py copies on a stream beside computation. numa.py spreads memory over the memory
nodes of the machine.

Read arena.py first. What must never happen: an allocation succeeds, and the machine runs out of
memory when it is written to; or memory is released while a copy of it is under way.
"""
