"""Memory and traffic of a training, planned before it starts."""

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
