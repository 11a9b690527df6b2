"""deepspeed.ops.adam.cpu_adam: `zero_offload.CPUAdam`."""

from __future__ import annotations

from typing import Any

import torch
from zero_offload import CPUAdam

__all__ = ["DeepSpeedCPUAdam"]


class DeepSpeedCPUAdam(CPUAdam):
    """`zero_offload.CPUAdam`, with the arguments in DeepSpeed's order.

    Parameters may be on a GPU until `initialize`, whose `offload_optimizer` brings what is stepped
    to the host. 16-bit ones have no masters of their own: `initialize` keeps them. amsgrad works.

    Args:
        model_params: As `params` there, as are all others that are not named here.
        lr: As there.
        bias_correction: As there.
        betas: As there.
        eps: As there.
        weight_decay: As there.
        amsgrad: As there.
        adamw_mode: Decay shrinks parameters (AdamW); added to gradients (Adam) when False.
        fp32_optimizer_states: False keeps moments in the parameter's dtype.
    """

    def __init__(  # noqa: PLR0917 - the order is DeepSpeed's
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            decoupled_weight_decay=adamw_mode,
            bias_correction=bias_correction,
            masters=False,
            state_dtype=torch.float32 if fp32_optimizer_states else None,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; `step` refuses what is not on the CPU then."""
        torch.optim.Optimizer.add_param_group(self, param_group)
