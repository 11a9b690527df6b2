"""ZeRO for a plain PyTorch loop: shard a model and its optimizer, keep the loop."""

from zero_partition import (
    ChainedOptimizer,
    Cut,
    backward_without_batch,
    clip_grad_norm_,
    full_state_dict,
    get_leaf_modules,
    no_sync,
    release_buffers,
    set_leaf_modules,
    unset_leaf_modules,
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
    "backward_without_batch",
    "clip_grad_norm_",
    "full_state_dict",
    "get_leaf_modules",
    "no_sync",
    "release_buffers",
    "set_leaf_modules",
    "shard",
    "unset_leaf_modules",
]
