"""deepspeed.runtime.zero: names for what ZeRO does."""

from zero_deepspeed.zero import (
    GatheredParameters,
    Init,
    register_external_parameter,
)

__all__ = ["GatheredParameters", "Init", "register_external_parameter"]
