"""Activation checkpointing with tracked randomness."""

# Layers, lowest first: errors, torch_private, call, rng, inputs, verify, frame, layers, policies,
# keep, profile, configuration, checkpointer, apply, megatron, testing.

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from zero_ckpt.__about__ import __version__

if TYPE_CHECKING:
    from zero_ckpt.apply import CheckpointedModules, checkpoint_modules
    from zero_ckpt.checkpointer import Checkpointer
    from zero_ckpt.errors import (
        CheckpointError,
        NondeterminismError,
        SeedInUseError,
        UnknownRngError,
    )
    from zero_ckpt.inputs.packed import PackedSaver
    from zero_ckpt.inputs.savers import AbstractKept, AbstractSaver, KeepSaver
    from zero_ckpt.megatron import (
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
    from zero_ckpt.policies import (
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
    from zero_ckpt.rng import RngTracker
    from zero_ckpt.verify import Verification

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

# Module -> public names that it has; a module is loaded on first use.
_NAMES: Final = {
    "zero_ckpt.apply": "CheckpointedModules checkpoint_modules",
    "zero_ckpt.checkpointer": "Checkpointer",
    "zero_ckpt.errors": "CheckpointError NondeterminismError SeedInUseError UnknownRngError",
    "zero_ckpt.inputs.packed": "PackedSaver",
    "zero_ckpt.inputs.savers": "AbstractKept AbstractSaver KeepSaver",
    "zero_ckpt.megatron": (
        "CheckpointFunction checkpoint configure default_checkpointer get_cuda_rng_tracker "
        "is_configured model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed "
        "non_reentrant_checkpoint partition_activations_in_checkpoint reset set_num_layers"
    ),
    "zero_ckpt.policies": (
        "MATMULS ModulePolicy OperatorCall OperatorPolicy by_name by_operator by_type every_nth "
        "inside within_bytes"
    ),
    "zero_ckpt.rng": "RngTracker",
    "zero_ckpt.verify": "Verification",
}
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Load what a name needs when it is first asked for (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_MODULES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
