"""ZeRO for a plain PyTorch loop: shard a model and its optimizer, keep the loop."""

from zero_partition import (
    GatheredParameters,
    clip_grad_norm_,
    full_grad,
    full_optimizer_state,
    full_param,
    full_state_dict,
    local_grad,
    local_optimizer_state,
    local_param,
    no_sync,
    parameter_status,
    register_external_parameter,
    release_buffers,
    set_full_grad,
    set_full_optimizer_state,
    set_full_param,
    set_local_grad,
    set_local_optimizer_state,
    set_local_param,
    unregister_external_parameter,
    unsharded,
    update_full_grads,
)

from .__about__ import __version__
from ._config import ZeroConfig
from ._errors import ConfigError
from ._shard import shard

__all__ = [
    "ConfigError",
    "GatheredParameters",
    "ZeroConfig",
    "__version__",
    "clip_grad_norm_",
    "full_grad",
    "full_optimizer_state",
    "full_param",
    "full_state_dict",
    "local_grad",
    "local_optimizer_state",
    "local_param",
    "no_sync",
    "parameter_status",
    "register_external_parameter",
    "release_buffers",
    "set_full_grad",
    "set_full_optimizer_state",
    "set_full_param",
    "set_local_grad",
    "set_local_optimizer_state",
    "set_local_param",
    "shard",
    "unregister_external_parameter",
    "unsharded",
    "update_full_grads",
]
