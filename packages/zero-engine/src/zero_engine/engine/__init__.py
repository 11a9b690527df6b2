"""Configuration of the engine, its loss scale, and the interface of monitors of its steps."""

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
