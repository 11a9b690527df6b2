"""ZeRO for a plain PyTorch loop: shard a model and its optimizer, keep the loop."""

from zero_partition import (
    backward_without_batch,
    clip_grad_norm_,
    full_state_dict,
    no_sync,
    release_buffers,
)

from .__about__ import __version__
from ._config import ZeroConfig
from ._errors import ConfigError
from ._shard import shard, unshard

__all__ = [
    "ConfigError",
    "ZeroConfig",
    "__version__",
    "backward_without_batch",
    "clip_grad_norm_",
    "full_state_dict",
    "no_sync",
    "release_buffers",
    "shard",
    "unshard",
]
