"""Engine with the shape of DeepSpeed's: forward, backward and step count micro-batches.

`initialize` (initialize.py) makes an `Engine` (engine.py) from a model, an optimizer, a scheduler
and an `EngineConfig` (engine_config.py). It calls `shard()`, so that everything about memory and
communication is in zero_partition. The engine adds the steps of a training loop: it accumulates
gradients over micro-batches, scales the loss (loss_scale.py), clips, steps the scheduler, skips a
step that overflowed, and saves and loads its counters with the model.

A package above this one reads DeepSpeed's configuration files into an `EngineConfig`; no key of
them is named here. Read engine.py first, from its notes to `step`. A skipped step must never
advance the scheduler, and ranks must never disagree about which step was skipped.
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
