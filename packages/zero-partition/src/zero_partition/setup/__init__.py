"""The way into a partition and out of it.

`partition` (partition.py) checks the model (checks.py), finds parameters with ranks of their own
(groups.py), plans units and their buffers (model_plan.py), sees that all ranks planned the same,
moves values into flat buffers unit by unit, cuts the optimizer's state, and registers hooks.
life_cycle.py ends a partition, or prepares a second one of the same model.

Read partition.py from top to bottom. What must never happen: an error leaves a model that is
partitioned in part. All checks come before the first parameter is moved.
"""
