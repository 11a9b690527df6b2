"""Memory and traffic of a training, planned before it starts.

sources.py builds a model on the meta device, and an optimizer, from a module, a Hugging Face
configuration or the sizes of a GPT. `plan` (plan.py) lays it out as `shard()` would, by
the same functions (`zero_partition.planning`), and returns a `Plan`: bytes of each kind on a rank,
bytes sent in a step, and bytes of a checkpoint. options.py plans every stage with every choice of
offload, and recommends the cheapest that fits. activations.py estimates activations. states.py
plans by formula from the number of parameters alone. tables.py prints.

Read plan.py first. Nothing here allocates the model's memory or communicates. A plan must never
differ from what `memory_report` and `traffic_report` say of the model in training.
"""

from zero_engine.planning.activations import estimate_activations
from zero_engine.planning.options import Option, Room, plan_options, recommend
from zero_engine.planning.plan import Plan, UnitRow
from zero_engine.planning.sources import GPTSize
from zero_engine.planning.tables import options_table, plan_table, save_picture

__all__ = [
    "GPTSize",
    "Option",
    "Plan",
    "Room",
    "UnitRow",
    "estimate_activations",
    "options_table",
    "plan_options",
    "plan_table",
    "recommend",
    "save_picture",
]
