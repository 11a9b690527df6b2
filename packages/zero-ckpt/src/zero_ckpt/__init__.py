"""Activation checkpointing with tracked randomness."""

from .__about__ import __version__
from ._checkpointer import Checkpointer
from ._errors import CheckpointError, NondeterminismError, SeedInUseError, UnknownRngError
from ._savers import AbstractKept, AbstractSaver, KeepSaver
from ._tracker import RngTracker

__all__ = [
    "AbstractKept",
    "AbstractSaver",
    "CheckpointError",
    "Checkpointer",
    "KeepSaver",
    "NondeterminismError",
    "RngTracker",
    "SeedInUseError",
    "UnknownRngError",
    "__version__",
]
