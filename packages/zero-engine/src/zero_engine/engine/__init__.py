"""The engine's configuration, its loss scale, and what may watch its steps."""

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
