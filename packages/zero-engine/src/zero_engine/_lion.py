"""Lion: the sign of an average as the update (arXiv 2302.06675, program 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from ._checks import check_number
from ._errors import ConfigError


@final
class Lion(torch.optim.Optimizer):
    """Steps by the sign of an average of gradients; one entry of state per parameter.

    With gradient g and average m: p = (1 - lr weight_decay) p - lr sign(beta1 m + (1 - beta1) g),
    then m = beta2 m + (1 - beta2) g. Elementwise, so that parameters may be cut anywhere.

    Args:
        params: Parameters, or param groups, as of any torch optimizer.
        lr: The size of every element's step; a tenth of what AdamW wants, or less.
        betas: Weights of the average in the update, and in the next average.
        weight_decay: Decoupled, as AdamW's.

    Raises:
        ConfigError: Names the option, what was expected and what came.
    """

    needs_cut = "flat"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, once its options were checked."""
        options = {**self.defaults, **param_group}
        for name in ("lr", "weight_decay"):
            if not isinstance(options[name], Tensor):
                check_number(f"Lion.{name}", options[name], minimum=0)
        if not isinstance(options["betas"], list | tuple) or len(options["betas"]) != 2:
            raise ConfigError(f"Lion.betas: expected two numbers, got {options['betas']!r}")
        for i, beta in enumerate(options["betas"]):
            check_number(f"Lion.betas[{i}]", beta, minimum=0, below=1)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update(params, group)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        grads: list[Any] = [param.grad for param in params]
        for param in params:
            if not self.state[param]:
                self.state[param]["exp_avg"] = torch.zeros_like(param)
        averages = [self.state[param]["exp_avg"] for param in params]
        updates = torch._foreach_mul(averages, beta1)
        torch._foreach_add_(updates, grads, alpha=1 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(updates, lr)
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_sub_(params, updates)
        torch._foreach_mul_(averages, beta2)
        torch._foreach_add_(averages, grads, alpha=1 - beta2)
