"""deepspeed.runtime.engine: the engine's class, for isinstance and annotations."""

from zero_engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
