"""deepspeed.ops: optimizers."""

from . import adam

__all__ = ["adam"]
