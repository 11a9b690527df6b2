"""Engine with the shape of DeepSpeed's: forward, backward and step count micro-batches.

`initialize` (initialize.py) makes an `Engine` (engine.py) from a model, an optimizer, a scheduler
and an `EngineConfig` (engine_config.py). It calls `shard()`, so that everything about memory and
communication is in zero_partition. The engine adds what a loop around it does otherwise: it
accumulates gradients over micro-batches, scales the loss (loss_scale.py), clips, steps the
scheduler, skips a step that overflowed, and saves and loads these counters with the model.

A package above this one reads DeepSpeed's configuration files into an `EngineConfig`; nothing here
knows a key of them. Read engine.py first, from its notes to `step`. What must never happen: a
skipped step advances the scheduler or the step counter, or ranks disagree about which step was
skipped.
"""

from .engine_config import AbstractMonitor, EngineConfig, SourceRow
from .loss_scale import DynamicLossScale, LossScaler, StaticLossScale

__all__ = [
    "AbstractMonitor",
    "DynamicLossScale",
    "EngineConfig",
    "LossScaler",
    "SourceRow",
    "StaticLossScale",
]
