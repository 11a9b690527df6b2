"""deepspeed.runtime: what scripts import from inside DeepSpeed."""

from . import config, engine, lr_schedules, zero

__all__ = ["config", "engine", "lr_schedules", "zero"]
