"""Adagrad over CPU tensors."""

from __future__ import annotations

from typing import Any, Literal, final

import torch
from torch import Tensor

from ._cpu_optimizer import AbstractCPUOptimizer
from ._host_state import StatePolicy
from ._ranges import check_at_least
from ._rule import Formula, Rule


@final
class CPUAdagrad(AbstractCPUOptimizer):
    """Adagrad over CPU tensors; all else as `CPUAdam`, the state as `torch.optim.Adagrad`'s.

    Args:
        params: As for `CPUAdam`.
        lr: Step size.
        lr_decay: The step size is divided by 1 + lr_decay times the number of earlier steps.
        weight_decay: Added to the gradient times the parameter.
        initial_accumulator_value: What sums of squares begin with.
        eps: Added to their root.
        maximize: Step uphill.
        masters: As for `CPUAdam`, like what follows.
        state_dtype: Of the sum of squares.
        rounding: Of bf16 parameters.
        seed: Of stochastic rounding.
        keeps_last_step: Whether `rollback()` is possible.

    Raises:
        UnsupportedTensorError: A parameter is not a dense CPU tensor of fp32, bf16 or fp16.
        ValueError: A number is out of range.
    """

    def __init__(  # noqa: PLR0917 - the order is torch's
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        masters: bool = True,
        state_dtype: torch.dtype | None = torch.float32,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        seed: int = 0,
        keeps_last_step: bool = False,
    ) -> None:
        check_at_least(0.0, lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps)
        check_at_least(0.0, initial_accumulator_value=initial_accumulator_value)
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "maximize": maximize,
        }
        policy = StatePolicy(masters=masters, state_dtype=state_dtype, rounding=rounding, seed=seed)
        super().__init__(params, defaults, policy, keeps_last_step=keeps_last_step)

    @classmethod
    def from_deepspeed(  # noqa: PLR0917 - the order is DeepSpeed's
        cls,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> CPUAdagrad:
        """What `DeepSpeedCPUAdagrad` makes of the same arguments: no masters.

        Raises:
            ValueError: amsgrad, which has no meaning for Adagrad and is ignored there.
        """
        if amsgrad:
            raise ValueError("amsgrad=True: Adagrad has no such variant; leave it out")
        return cls(
            model_params,
            lr,
            weight_decay=weight_decay,
            eps=eps,
            masters=False,
            state_dtype=torch.float32 if fp32_optimizer_states else None,
        )

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        del group
        return ("sum",)

    def _start(self, group: dict[str, Any]) -> float:
        return group["initial_accumulator_value"]

    def _rule(self, group: dict[str, Any], step: int) -> Rule:
        return Rule(
            formula=Formula.ADAGRAD,
            rate=-float(group["lr"]) / (1 + (step - 1) * group["lr_decay"]),
            maximize=group["maximize"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )
