"""Lion over CPU tensors."""

from __future__ import annotations

from typing import Any, Literal, final

import torch
from torch import Tensor

from ._cpu_optimizer import AbstractCPUOptimizer
from ._host_state import StatePolicy
from ._ranges import check_at_least, check_betas
from ._rule import Formula, Rule


@final
class CPULion(AbstractCPUOptimizer):
    """Lion (arXiv 2302.06675) over CPU tensors; all else as `CPUAdam`.

    The parameter moves by `lr` against the sign of a mean of gradients, and shrinks by
    `lr * weight_decay`. Its state is "exp_avg" and "step".

    Args:
        params: As for `CPUAdam`.
        lr: Step size; usually a third to a tenth of Adam's.
        betas: The gradient's share in the direction, and decay of the mean that is kept.
        weight_decay: Decoupled from the gradient; usually three to ten times Adam's.
        maximize: Step uphill.
        masters: As for `CPUAdam`, like what follows.
        state_dtype: Of the mean.
        rounding: Of bf16 parameters.
        seed: Of stochastic rounding.
        keeps_last_step: Whether `rollback()` is possible.

    Raises:
        UnsupportedTensorError: A parameter is not a dense CPU tensor of fp32, bf16 or fp16.
        ValueError: A number is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        masters: bool = True,
        state_dtype: torch.dtype | None = torch.float32,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        seed: int = 0,
        keeps_last_step: bool = False,
    ) -> None:
        check_at_least(0.0, lr=lr, weight_decay=weight_decay)
        check_betas(betas)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        policy = StatePolicy(masters=masters, state_dtype=state_dtype, rounding=rounding, seed=seed)
        super().__init__(params, defaults, policy, keeps_last_step=keeps_last_step)

    @classmethod
    def from_deepspeed(
        cls,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> CPULion:
        """What `DeepSpeedCPULion` makes of the same arguments: no masters."""
        return cls(
            model_params,
            lr,
            betas,
            weight_decay,
            masters=False,
            state_dtype=torch.float32 if fp32_optimizer_states else None,
        )

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        del group
        return ("exp_avg",)

    def _rule(self, group: dict[str, Any], step: int) -> Rule:
        del step
        lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
        return Rule(
            formula=Formula.LION,
            rate=-lr,
            maximize=group["maximize"],
            decoupled=True,
            shrink=1 - lr * group["weight_decay"],
            beta1=beta1,
            beta2=beta2,
        )
