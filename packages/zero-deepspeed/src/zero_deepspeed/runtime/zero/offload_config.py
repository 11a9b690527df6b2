"""deepspeed.runtime.zero.offload_config: the names that `Engine.offload_states` takes."""

from __future__ import annotations

from enum import StrEnum


class OffloadDeviceEnum(StrEnum):
    """Where state rests; `Engine.offload_states` takes `cpu`."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """What `Engine.offload_states` takes as `include`."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
