"""ZeRO for a plain PyTorch loop: shard a model and its optimizer, keep the loop."""

from zero_partition import (
    ChainedOptimizer,
    Cut,
    clip_grad_norm_,
    full_state_dict,
    no_sync,
    release_buffers,
)

from .__about__ import __version__
from ._config import ZeroConfig
from ._errors import ConfigError
from ._shard import shard

__all__ = [
    "ChainedOptimizer",
    "ConfigError",
    "Cut",
    "ZeroConfig",
    "__version__",
    "clip_grad_norm_",
    "full_state_dict",
    "no_sync",
    "release_buffers",
    "shard",
]
