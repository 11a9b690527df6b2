"""Activation checkpointing with tracked randomness."""

from .__about__ import __version__
from ._checkpointer import Checkpointer
from ._default import (
    CheckpointFunction,
    checkpoint,
    configure,
    get_cuda_rng_tracker,
    is_configured,
    model_parallel_cuda_manual_seed,
    model_parallel_reconfigure_tp_seed,
    non_reentrant_checkpoint,
    partition_activations_in_checkpoint,
    reset,
    set_num_layers,
)
from ._errors import CheckpointError, NondeterminismError, SeedInUseError, UnknownRngError
from ._packed import PackedSaver
from ._savers import AbstractKept, AbstractSaver, KeepSaver
from ._tracker import RngTracker

__all__ = [
    "AbstractKept",
    "AbstractSaver",
    "CheckpointError",
    "CheckpointFunction",
    "Checkpointer",
    "KeepSaver",
    "NondeterminismError",
    "PackedSaver",
    "RngTracker",
    "SeedInUseError",
    "UnknownRngError",
    "__version__",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]
