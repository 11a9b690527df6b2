"""The formulas in plain torch: what runs without a compiler, and what the kernels must equal.

Each operation is one torch operator on fp32, rounded on its own, in the order of csrc/kernels.h, so
that both give the same bits.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from zero_offload._native.library import Formula, Rule

from .batches import Batch

# Elements that are stepped at a time, which bounds the temporary tensors.
CHUNK_NUMEL: Final = 2**20
MASK: Final = 0xFFFFFFFF


@torch.no_grad()
def step_batch(batch: Batch, rule: Rule) -> None:
    """Step every run of the batch in place. Local, blocking."""
    for k, (start, stop) in enumerate(zip(batch.starts, batch.stops, strict=True)):
        whole = [each[k].view(-1) if each else None for each in batch.tensors.values()]
        for low in range(start, stop, CHUNK_NUMEL):
            span = slice(low, min(low + CHUNK_NUMEL, stop))
            tensors: list[Any] = [None if t is None else t[span] for t in whole]
            param, grad, *state, out = tensors
            value = _FORMULAS[rule.formula](param.float(), grad, state, rule)
            for to in (param, out):
                if to is not None:
                    to.copy_(_rounded(value, to.dtype, rule, batch.indices[k] + low))


def _adam(param: Tensor, grad: Tensor, state: list[Any], rule: Rule) -> Tensor:
    first, second, largest = state
    grad = _gradient(param, grad, rule)
    if rule.decoupled:
        param = param * rule.shrink
    mean = _lerp(first.float(), grad, rule.one_minus_beta1, rule.beta1)
    square = second.float() * rule.beta2 + grad * rule.one_minus_beta2 * grad
    first.copy_(mean)
    second.copy_(square)
    if largest is not None:
        square = torch.maximum(largest.float(), square)
        largest.copy_(square)
    below = _root(square) * rule.unbias + rule.eps
    return param + mean * rule.rate / below


def _adagrad(param: Tensor, grad: Tensor, state: list[Any], rule: Rule) -> Tensor:
    total = state[0]
    grad = _gradient(param, grad, rule)
    sum_of_squares = total.float() + grad * grad
    total.copy_(sum_of_squares)
    return param + grad * rule.rate / (_root(sum_of_squares) + rule.eps)


def _lion(param: Tensor, grad: Tensor, state: list[Any], rule: Rule) -> Tensor:
    first = state[0]
    grad = _gradient(param, grad, rule)
    if rule.decoupled:
        param = param * rule.shrink
    mean = first.float()
    way = _lerp(mean, grad, rule.one_minus_beta1, rule.beta1)
    first.copy_(_lerp(mean, grad, rule.one_minus_beta2, rule.beta2))
    return param + way.sign() * rule.rate


_FORMULAS: Final = {Formula.ADAM: _adam, Formula.ADAGRAD: _adagrad, Formula.LION: _lion}


def _gradient(param: Tensor, grad: Tensor, rule: Rule) -> Tensor:
    grad = grad.float() * (-rule.factor if rule.maximize else rule.factor)
    if not rule.decoupled and rule.weight_decay:
        grad = grad + param * rule.weight_decay
    return grad


def _lerp(start: Tensor, end: Tensor, weight: float, rest: float) -> Tensor:
    """Interpolate from start to end by weight, as torch's lerp does: from the nearer end."""
    way = end - start
    return start + way * weight if weight < 0.5 else end - way * rest


def _root(square: Tensor) -> Tensor:
    """Return the square root, correctly rounded, which torch's is not on every processor."""
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sqrt(square.numpy()))


def _rounded(value: Tensor, dtype: torch.dtype, rule: Rule, index: int) -> Tensor:
    """Round to nearest even, or stochastically to bf16 where the rule says so."""
    if not rule.stochastic or dtype != torch.bfloat16:
        return value.to(dtype)
    noise = torch.arange(index, index + value.numel(), device=value.device) & MASK
    noise = (noise * 0x9E3779B9 + rule.seed) & MASK
    noise = _times(noise ^ (noise >> 16), 0x85EBCA6B)
    noise = _times(noise ^ (noise >> 13), 0xC2B2AE35)
    noise = (noise ^ (noise >> 16)) >> 16
    bits = ((value.view(torch.int32).long() + noise) >> 16).to(torch.int16)
    return torch.where(value.isfinite(), bits.view(torch.bfloat16), value.to(dtype))


def _times(factor: Tensor, other: int) -> Tensor:
    # An overflow of int64 wraps around, which leaves the lower 32 bits right.
    return (factor * other) & MASK
