"""Activation checkpointing with tracked randomness."""

from .__about__ import __version__
from ._apply import CheckpointedModules, checkpoint_modules
from ._checkpointer import Checkpointer
from ._errors import CheckpointError, NondeterminismError, SeedInUseError, UnknownRngError
from ._policy import (
    MATMULS,
    ModulePolicy,
    OperatorCall,
    OperatorPolicy,
    by_name,
    by_operator,
    by_type,
    every_nth,
    inside,
    within_bytes,
)
from ._savers import AbstractKept, AbstractSaver, KeepSaver
from ._tracker import RngTracker

__all__ = [
    "MATMULS",
    "AbstractKept",
    "AbstractSaver",
    "CheckpointError",
    "CheckpointedModules",
    "Checkpointer",
    "KeepSaver",
    "ModulePolicy",
    "NondeterminismError",
    "OperatorCall",
    "OperatorPolicy",
    "RngTracker",
    "SeedInUseError",
    "UnknownRngError",
    "__version__",
    "by_name",
    "by_operator",
    "by_type",
    "checkpoint_modules",
    "every_nth",
    "inside",
    "within_bytes",
]
