"""Values of parameters, gradients and optimizer state by name, whole or in part, read and written.

Everything that looks into a sharded model between steps is here. A name is found as a `ParamRef`,
which says in which buffer of which model it lies and which elements this rank keeps. runs.py turns
names into runs of elements by rank, and optimizer state into parts that any layout can read.

- value.py: a parameter's values, its gradient or an entry of its optimizer state, whole or this
  rank's part, read and written. access.py has the public functions for that.
- gathered.py: `GatheredParameters` and `unsharded`: parameters whole inside a context.
- state_dict.py: whole state dicts in torch's formats, and their loading.
- load.py: a checkpoint's values into a model, by a plan that is complete before anything is
  written; split_readers.py and custom_loading.py read what is split over ranks or goes through
  module code.
- average.py: an average of parameters, sharded like them. offload_states.py: training state moved
  to a backup, and back.

Read runs.py first. What must never happen: values are changed before every rank has found that all
of it fits; and a whole model is in memory where one parameter at a time would do.
"""
