"""Activation checkpointing with tracked randomness."""

# Layers, lowest first: errors, torch_private, call, rng, inputs, verify, frame, layers, policies,
# keep, profile, configuration, checkpointer, apply, megatron, testing.

from zero_ckpt.inputs.packed import PackedSaver
from zero_ckpt.inputs.savers import AbstractKept, AbstractSaver, KeepSaver

from .__about__ import __version__
from .apply import CheckpointedModules, checkpoint_modules
from .checkpointer import Checkpointer
from .errors import CheckpointError, NondeterminismError, SeedInUseError, UnknownRngError
from .megatron import (
    CheckpointFunction,
    checkpoint,
    configure,
    default_checkpointer,
    get_cuda_rng_tracker,
    is_configured,
    model_parallel_cuda_manual_seed,
    model_parallel_reconfigure_tp_seed,
    non_reentrant_checkpoint,
    partition_activations_in_checkpoint,
    reset,
    set_num_layers,
)
from .policies import (
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
from .profile import Timing
from .rng import RngTracker
from .verify import Verification

__all__ = [
    "MATMULS",
    "AbstractKept",
    "AbstractSaver",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointedModules",
    "Checkpointer",
    "KeepSaver",
    "ModulePolicy",
    "NondeterminismError",
    "OperatorCall",
    "OperatorPolicy",
    "PackedSaver",
    "RngTracker",
    "SeedInUseError",
    "Timing",
    "UnknownRngError",
    "Verification",
    "__version__",
    "by_name",
    "by_operator",
    "by_type",
    "checkpoint",
    "checkpoint_modules",
    "configure",
    "default_checkpointer",
    "every_nth",
    "get_cuda_rng_tracker",
    "inside",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
    "within_bytes",
]
