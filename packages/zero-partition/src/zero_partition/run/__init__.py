"""Training steps: units are gathered, gradients are reduced, the optimizer updates shards.

A `Unit` (unit.py) is what is gathered and reduced together: one or more flat buffers. It is
sharded, being gathered, or unsharded, and its slot is filled from one source (source.py). A
`Schedule` (schedule.py) decides when: it records the order in which units are used, assigns them
slots of memory, and launches gathers ahead. A `GradientReducer` (gradients.py) collects gradients
by buffer, launches their reductions in one order on every rank, and leaves the mean where the
optimizer reads it. A `ShardedModel` (sharded_model.py) has all three, and one phase: idle, in
backward, or failed.

The way of a step:

1. A hook around a module's call (hooks.py, the only file that registers any) asks the schedule to
   make its unit whole, and to reshard it afterwards.
2. A hook on the call's output makes the unit whole again in backward. As gradients arrive, another
   hook hands them to the reducer.
3. At the end of backward every reduction has ended, and `grad` of each shard is set.
4. The optimizer's step (step.py; norm.py clips before it) changes shards. The units' versions go
   up, so that what was gathered before is out of date.

Read unit.py first, then schedule.py. What must never happen: two ranks launch collectives in
different order, so nothing here may decide a launch by something that only one rank knows; and a
view of a slot is read while another unit has the slot.
"""
