"""A model whose experts are spread over ranks, and the same model in one process."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

WIDTH, ROWS, NUM_EXPERTS = 8, 12, 4


@frozen(eq=False)
class ExpertRanks:
    """Ranks of the job that this rank shares experts with, and those that have other ones."""

    same: Any  # process group of the ranks with the same experts
    others: Any  # process group of the ranks that have all experts together
    index: int  # of this rank among the others
    num_parts: int  # over how many ranks experts are spread

    @property
    def numbers(self) -> list[int]:
        """Experts of this rank."""
        each = NUM_EXPERTS // self.num_parts
        return [*range(self.index * each, (self.index + 1) * each)]


@lru_cache(maxsize=2)
def expert_ranks(_: Any, num_parts: int) -> ExpertRanks:
    """Spread experts over so many consecutive ranks. Collective over the default group."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = {}
    for index in range(num_parts):
        ranks = [*range(index, world_size, num_parts)]
        made = dist.new_group(ranks)
        found |= {"same": made} if rank in ranks else {}
    for first in range(0, world_size, num_parts):
        ranks = [*range(first, first + num_parts)]
        made = dist.new_group(ranks)
        found |= {"others": made} if rank in ranks else {}
    return ExpertRanks(**found, index=rank % num_parts, num_parts=num_parts)


class _Gather(torch.autograd.Function):
    """Rows of all ranks of a group; each gets the sum of its rows' gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class _Scatter(torch.autograd.Function):
    """This rank's rows of the sum over a group."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = rows.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _Gather.apply(grad, ctx.group), None


class Mixture(nn.Module):
    """Each row goes to one expert, wherever that is. A dense layer leads to it."""

    def __init__(self, ranks: ExpertRanks | None, *, is_numbered: bool, calls_all: bool) -> None:
        super().__init__()
        self.ranks, self.calls_all = ranks, calls_all
        self.dense, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, NUM_EXPERTS)
        self.numbers = [*range(NUM_EXPERTS)] if ranks is None else ranks.numbers
        made = [_expert(number) for number in self.numbers]
        self.experts: Any = nn.ModuleList(made)
        if is_numbered:
            named = zip(map(str, self.numbers), made, strict=True)
            self.experts = nn.ModuleDict(dict(named))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = x + self.dense(x).tanh()
        weight, choice = self.router(x).softmax(-1).max(-1)
        rows = x
        if self.ranks is not None:
            rows = _Gather.apply(x, self.ranks.others)
            choice = _Gather.apply(choice, self.ranks.others)
        out = 0.0 * rows  # every rank takes part in what backward exchanges, with rows or without
        experts = self.experts.values() if isinstance(self.experts, nn.ModuleDict) else self.experts
        for number, expert in zip(self.numbers, experts, strict=True):
            at = (choice == number).nonzero().squeeze(1)
            if self.calls_all or at.numel():
                out = out.index_add(0, at, expert(rows[at]))
        if self.ranks is not None:
            out = _Scatter.apply(out, self.ranks.others)
        return x + weight.unsqueeze(-1) * out


def _expert(number: int) -> nn.Module:
    torch.manual_seed(100 + number)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def build_mixture(
    ranks: ExpertRanks | None, *, is_numbered: bool = False, calls_all: bool = True
) -> nn.Module:
    """Layers in float64; the last expert is never chosen, and so has no gradient by itself.

    One layer where not all experts are called: a rank whose gradients are all there waits for one
    that lacks some until the end of backward, and so must not be needed in what precedes.
    """
    torch.manual_seed(0)
    how: dict[str, Any] = {"is_numbered": is_numbered, "calls_all": calls_all}
    layers = []
    for _ in range(2 if calls_all else 1):
        layer = Mixture(ranks, **how)
        torch.manual_seed(7)
        for module in (layer.dense, layer.router):
            module.reset_parameters()
        with torch.no_grad():
            layer.router.bias[-1] = -100.0
        layers.append(layer)
    return nn.Sequential(*layers).double()


def loss_on(model: nn.Module, step: int, rank: int) -> Tensor:
    """Of the batch of a rank in a step."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64, device="cpu").to(device)
    return (model(x) - 2 * x).square().mean()


def parameters_by_expert(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the names that they have where one process has all experts."""
    found = {}
    for name, param in model.named_parameters():
        layer, kind, *rest = name.split(".")
        if kind == "experts" and isinstance(model[int(layer)].experts, nn.ModuleList):
            rest[0] = str(model[int(layer)].numbers[int(rest[0])])
        found[".".join((layer, kind, *rest))] = param
    return found


def nadamw(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that moves what has a gradient of zeros, and runs in float64 on the host too."""
    how = {"weight_decay": 0.1, "decoupled_weight_decay": True}
    return torch.optim.NAdam(model.parameters(), lr=1e-2, **how)


def train_alone(num_ranks: int, num_steps: int, **how: Any) -> tuple[nn.Module, list[Tensor]]:
    """One process that has all experts takes the batches of all ranks; the model, and norms."""
    model, norms = build_mixture(None, **how), []
    optimizer = nadamw(model)
    for step in range(num_steps):
        for rank in range(num_ranks):
            (loss_on(model, step, rank) / num_ranks).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return model, norms
