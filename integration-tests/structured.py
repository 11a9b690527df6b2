"""Optimizers that look at more than single elements, as users write them, and what they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import parity
import torch
from parity import PerParameter
from torch import Tensor, nn
from zero_partition import ChainedOptimizer, Cut


class Shampoo(PerParameter):
    """Two preconditioners per matrix: the largest state there is, and of no shape we know."""

    needs_cut = Cut.TENSOR

    def update(self, param: Tensor, grad: Tensor, state: dict, group: dict) -> None:  # noqa: D102
        if param.dim() != 2:
            param.add_(grad, alpha=-group["lr"])
            return
        if not state:
            state["left"] = torch.eye(param.shape[0]) * 1e-3
            state["right"] = torch.eye(param.shape[1]) * 1e-3
        matrix = grad.float()
        state["left"] += matrix @ matrix.T
        state["right"] += matrix.T @ matrix
        update = _root(state["left"].float()) @ matrix @ _root(state["right"].float())
        param.add_(update.to(param.dtype), alpha=-group["lr"])


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ values.clamp(min=1e-6).pow(-0.25).diag() @ vectors.T


class Lamb(PerParameter):
    """A norm per tensor, and no word about what it needs."""

    def update(self, param: Tensor, grad: Tensor, state: dict, group: dict) -> None:  # noqa: D102
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 0.1)
        state["exp_avg_sq"].lerp_(grad * grad, 0.01)
        update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-6)
        ratio = param.norm() / update.norm() if param.any() and update.any() else 1.0
        param.add_(update * ratio, alpha=-group["lr"])


class NormedRows(PerParameter):
    """Momentum, divided by the running norm of each row: state of one number per row."""

    needs_cut = "row"

    def update(self, param: Tensor, grad: Tensor, state: dict, group: dict) -> None:  # noqa: D102
        rows = grad.reshape(len(grad), -1) if grad.dim() else grad.reshape(1, 1)
        if not state:
            state["momentum"] = torch.zeros_like(param)
            state["row_norm"] = rows.new_zeros(len(rows))
        state["momentum"].mul_(0.9).add_(grad)
        state["row_norm"].mul_(0.9).add_(rows.norm(dim=1))
        norms = state["row_norm"].view(-1, *[1] * (param.dim() - 1)) + 1e-6
        param.sub_(group["lr"] * state["momentum"] / norms.view(norms.shape if param.dim() else ()))


class BlockwiseInt8(PerParameter):
    """Momentum in int8, with one scale per block of 16 elements."""

    BLOCK: Final = 16
    needs_cut = Cut.block(BLOCK)

    def update(self, param: Tensor, grad: Tensor, state: dict, group: dict) -> None:  # noqa: D102
        numel = param.numel()
        num_blocks = -(-numel // self.BLOCK)
        if not state:
            state["quantised"] = torch.zeros(num_blocks, self.BLOCK, dtype=torch.int8)
            state["scale"] = torch.zeros(num_blocks, 1)
        padded = torch.zeros(num_blocks, self.BLOCK)
        padded.view(-1)[:numel] = grad.reshape(-1)
        momentum = state["quantised"].float() * state["scale"] * 0.9 + padded
        state["scale"] = momentum.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
        state["quantised"] = (momentum / state["scale"]).round().to(torch.int8)
        seen = (state["quantised"].float() * state["scale"]).view(-1)[:numel].view(param.shape)
        param.add_(seen.to(param.dtype), alpha=-group["lr"])


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """What Muon takes."""
    return [param for param in model.parameters() if param.dim() == 2 and param.requires_grad]


def others(model: nn.Module) -> list[nn.Parameter]:
    """What it does not."""
    return [param for param in model.parameters() if param.dim() != 2 and param.requires_grad]


def muon_and_adamw(model: nn.Module) -> ChainedOptimizer:
    """What people train transformers with."""
    return ChainedOptimizer(
        torch.optim.Muon(matrices(model), lr=0.02),
        torch.optim.AdamW(others(model), lr=0.01, foreach=False),
    )


OPTIMIZERS: Final[dict[str, Callable[[nn.Module], torch.optim.Optimizer]]] = {
    "muon": lambda model: torch.optim.Muon(matrices(model), lr=0.02),
    "muon-and-adamw": muon_and_adamw,
    "adafactor": lambda model: torch.optim.Adafactor(parity.param_groups(model), lr=0.05),
    "shampoo": lambda model: Shampoo(parity.param_groups(model), lr=0.05),
    "rows": lambda model: NormedRows(parity.param_groups(model), lr=0.02),
    "int8": lambda model: BlockwiseInt8(parity.param_groups(model), lr=0.05),
    "lamb": lambda model: Lamb(parity.param_groups(model), lr=0.02),
}
CHOICES: Final = {"lamb": "tensor"}  # what the user must say
CUTS: Final = {  # asked for by name, for every parameter
    "adafactor": Cut.TENSOR,
    "shampoo": Cut.TENSOR,
    "lamb": Cut.TENSOR,
    "rows": Cut.ROW,
    "int8": Cut.block(16),
}
