"""Optimizer state on the host or on disk, and the steps over it.

Parameters are cut into sub-groups (subgroups.py) that are moved and stepped together. A
`SubGroupState` (block.py) is one sub-group at run time: its pieces, an optimizer over them
(template.py chooses which: the native Adam where it fits, else torch's own), and their state in
memory. `OffloadedState` (offloaded_state.py) has all sub-groups, steps them one after the other,
and reads and writes single entries between steps. Where state is on disk, a `SwapWindow`
(swap_window.py) reads sub-groups ahead of their turn and writes them back behind it. staging.py
copies between a device and the host, and gradients.py takes reduced gradients off the device while
backward goes on. footprint.py is the formula of all bytes.

Read subgroups.py and block.py first. What must never happen: memory of a sub-group is used while a
transfer into it or out of it has not ended; and an exception leaves a sub-group half stepped that
the next step takes for whole (`OffloadedState` marks it torn until `mend`).
"""
