"""What is in DeepSpeed's shape: its file, its engine, its schedules."""

from zero_engine.deepspeed.engine_config import EngineConfig, NamedSpec
from zero_engine.deepspeed.loss_scale import DynamicLossScale, LossScaler, StaticLossScale
from zero_engine.deepspeed.schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

__all__ = [
    "DynamicLossScale",
    "EngineConfig",
    "LRRangeTest",
    "LossScaler",
    "NamedSpec",
    "OneCycle",
    "StaticLossScale",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
]
