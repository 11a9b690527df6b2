"""Adam and AdamW over CPU tensors."""

from __future__ import annotations

import math
from typing import Any, Literal, TypedDict, Unpack, final

import torch
from torch import Tensor

from .batches import Formula, Rule
from .cpu_optimizer import AbstractCPUOptimizer


class Kept(TypedDict, total=False):
    """Arguments that all take: what is kept beside the parameters. `CPUAdam` describes them."""

    masters: bool
    state_dtype: torch.dtype | None
    rounding: Literal["nearest", "stochastic"]
    seed: int
    keeps_last_step: bool


def _as_deepspeed(fp32_optimizer_states: bool) -> Kept:
    return {"masters": False, "state_dtype": torch.float32 if fp32_optimizer_states else None}


def check_at_least(low: float, **numbers: Any) -> None:
    """Raise ValueError for a number below `low`, naming it."""
    for name, number in numbers.items():
        if not float(number) >= low:
            raise ValueError(f"{name}={number}: expected at least {low}")


def check_betas(betas: Any) -> None:
    """Raise ValueError unless there are two, each in [0, 1)."""
    if len(betas) != 2 or not all(0 <= float(beta) < 1 for beta in betas):
        raise ValueError(f"betas={betas}: expected two numbers, each at least 0 and below 1")


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
        **kept: Unpack[Kept],
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
        super().__init__(params, defaults, **kept)

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
            **_as_deepspeed(fp32_optimizer_states),
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
        kept: masters, state_dtype, rounding, seed, keeps_last_step: as for `CPUAdam`.

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
        **kept: Unpack[Kept],
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
        super().__init__(params, defaults, **kept)

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
            **_as_deepspeed(fp32_optimizer_states),
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
        kept: masters, state_dtype, rounding, seed, keeps_last_step: as for `CPUAdam`.

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
        **kept: Unpack[Kept],
    ) -> None:
        check_at_least(0.0, lr=lr, weight_decay=weight_decay)
        check_betas(betas)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, **kept)

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
            **_as_deepspeed(fp32_optimizer_states),
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
