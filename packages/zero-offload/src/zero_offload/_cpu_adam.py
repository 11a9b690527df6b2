"""Adam and AdamW over CPU tensors."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from ._cpu_optimizer import AbstractCPUOptimizer
from ._host_state import StatePolicy
from ._ranges import check_at_least, check_betas
from ._rule import Formula, Rule


class CPUAdam(AbstractCPUOptimizer):
    """Adam or AdamW over CPU tensors, in one pass over memory by native threads.

    The result is torch's up to the last bits, and the same bits on every processor and for every
    number of threads (`torch.set_num_threads`). State and param groups are torch's: a state dict of
    `torch.optim.AdamW` or `Adam` loads here and one of this there; a 16-bit parameter has an fp32
    "master" besides.

    Args:
        params: Parameters or groups, as torch takes them: dense CPU tensors of fp32, bf16 or fp16,
            of any strides; contiguous ones are stepped where they lie, others by way of a copy.
            Gradients may be of any of the three dtypes.
        lr: Step size; a scheduler may change it.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled from the gradient, as in AdamW, unless the next says otherwise.
        amsgrad: Divide by the largest second moment so far.
        maximize: Step uphill.
        decoupled_weight_decay: False adds weight decay to the gradient, as `torch.optim.Adam`.
        bias_correction: False leaves moments as they are in the first steps.
        masters: Whether 16-bit parameters have an fp32 master that is stepped; without, the
            parameter itself is, and loses what rounding takes.
        state_dtype: Of moments: fp32, bf16 or fp16; None for the parameter's own.
        rounding: Of bf16 parameters: "nearest" (ties to even) or "stochastic", which loses nothing
            on average and so makes up for a missing master.
        seed: Of stochastic rounding; with the step count it gives the random bits.
        keeps_last_step: Whether `rollback()` is possible; costs a copy of parameters and state.

    Raises:
        UnsupportedTensorError: A parameter is not a dense CPU tensor of these dtypes.
        ValueError: A number is out of range.
    """

    def __init__(  # noqa: PLR0917 - the order is torch's
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = True,
        bias_correction: bool = True,
        masters: bool = True,
        state_dtype: torch.dtype | None = torch.float32,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        seed: int = 0,
        keeps_last_step: bool = False,
    ) -> None:
        check_at_least(0.0, lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
            "bias_correction": bias_correction,
        }
        policy = StatePolicy(masters=masters, state_dtype=state_dtype, rounding=rounding, seed=seed)
        super().__init__(params, defaults, policy, keeps_last_step=keeps_last_step)

    @classmethod
    def from_deepspeed(  # noqa: PLR0917 - the order is DeepSpeed's
        cls,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> CPUAdam:
        """What `DeepSpeedCPUAdam` makes of the same arguments: 16-bit parameters without masters.

        `adamw_mode` is our `decoupled_weight_decay`; `fp32_optimizer_states=False` is our
        `state_dtype=None`. amsgrad, which it refuses, works.
        """
        return cls(
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

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        names = ("exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if group["amsgrad"] else names

    def _rule(self, group: dict[str, Any], step: int) -> Rule:
        lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
        is_corrected, is_decoupled = group["bias_correction"], group["decoupled_weight_decay"]
        return Rule(
            formula=Formula.ADAM,
            rate=-(lr / (1 - beta1**step) if is_corrected else lr),
            maximize=group["maximize"],
            decoupled=is_decoupled,
            weight_decay=group["weight_decay"],
            shrink=1 - lr * group["weight_decay"] if is_decoupled else 1.0,
            beta1=beta1,
            beta2=beta2,
            unbias=1 / math.sqrt(1 - beta2**step) if is_corrected else 1.0,
            eps=group["eps"],
        )
