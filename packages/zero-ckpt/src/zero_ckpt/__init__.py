"""Activation checkpointing with tracked randomness."""

from .__about__ import __version__
from ._checkpointer import Checkpointer
from ._errors import CheckpointError, NondeterminismError, SeedInUseError, UnknownRngError
from ._profile import Timing
from ._savers import AbstractKept, AbstractSaver, KeepSaver
from ._tracker import RngTracker
from ._verify import Verification

__all__ = [
    "AbstractKept",
    "AbstractSaver",
    "CheckpointError",
    "Checkpointer",
    "KeepSaver",
    "NondeterminismError",
    "RngTracker",
    "SeedInUseError",
    "Timing",
    "UnknownRngError",
    "Verification",
    "__version__",
]
