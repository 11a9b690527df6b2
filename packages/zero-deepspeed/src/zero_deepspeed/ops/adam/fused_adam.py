"""deepspeed.ops.adam.fused_adam: torch's fused Adam."""

from __future__ import annotations

from typing import Any

import torch
from zero_engine import ConfigError

__all__ = ["FusedAdam"]


class FusedAdam(torch.optim.Adam):
    """`torch.optim.Adam(fused=True)`, with the arguments in DeepSpeed's order. amsgrad works.

    With `adam_w_mode` decay shrinks parameters (AdamW); else it is added to gradients. torch has no
    Adam without `bias_correction`, and gradients are always dropped, not zeroed: False for that, or
    for `set_grad_none`, is a ConfigError.
    """

    needs_cut = "flat"  # elementwise, which is not asked of subclasses of torch's

    def __init__(  # noqa: PLR0917 - the order is DeepSpeed's
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction:
            raise ConfigError(
                "FusedAdam(bias_correction=False): expected True, as torch's fused Adam has no "
                "other; on the CPU, DeepSpeedCPUAdam has"
            )
        if not set_grad_none:
            raise ConfigError(
                "FusedAdam(set_grad_none=False): expected True, as gradients are always dropped, "
                "not zeroed; leave it out"
            )
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            fused=True,
            decoupled_weight_decay=bool(adam_w_mode),
        )
