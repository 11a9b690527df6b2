"""Oracle of training with codecs: one process that encodes and decodes where we document it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import parity
import torch
from torch import Tensor, nn
from zero_comm import AbstractCodec
from zero_partition import BufferPlan, choose_units, plan_units


def train_coded(
    recipe: parity.Recipe,
    *,
    params: AbstractCodec | None = None,
    gradients: AbstractCodec | None = None,
    frozen: AbstractCodec | None = None,
    world_size: int = 4,
    ranks_per_node: int = 4,
) -> list[parity.Curve]:
    """Every rank's gradients in turn; as each rank sees it.

    - All compute with what each rank's shard of a flat buffer decodes to; what is stepped is exact.
    - Frozen ones may rest so, and then are that from the start.
    - Of gradients, each rank's chunk for each other is encoded; decoded ones are added in float32,
      in rank order. Nodes' sums are encoded and added in the same way, in the order of nodes.
    - Where there is one rank, or one node, to add, nothing is encoded.
    """
    model = parity.build(recipe.make)  # what is computed with
    exact = copy.deepcopy(model)
    assert isinstance(recipe.optimizer, str)
    optimizer = parity.OPTIMIZERS[recipe.optimizer](parity.param_groups(exact))
    scheduler = parity.scheduler_for(optimizer)
    buffers = _plan(exact, optimizer, world_size)
    _round(exact, exact, [plan for plan in buffers if not plan.trainable], frozen)
    curves = [parity.Curve() for _ in range(world_size)]
    for step in range(recipe.num_steps):
        _round(model, exact, [plan for plan in buffers if plan.trainable], params)
        _round(model, exact, [plan for plan in buffers if not plan.trainable], frozen or params)
        local = []
        for peer in range(world_size):
            loss = recipe.loss_of(model, recipe.batch(step, 0, peer))
            loss.backward()
            curves[peer].losses.append(loss.item())
            local.append({name: param.grad for name, param in model.named_parameters()})
            model.zero_grad()
        for plan in buffers:
            if plan.trainable:
                _reduce(exact, plan, local, gradients, ranks_per_node)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    curves[0].weights = exact.state_dict()
    return curves


def round_trip(values: Tensor, codec: AbstractCodec, dtype: torch.dtype | None = None) -> Tensor:
    """What comes back."""
    out = torch.empty_like(values, dtype=dtype or values.dtype)
    return codec.decode(codec.encode(values.contiguous()), out)


def _plan(model: nn.Module, optimizer: torch.optim.Optimizer, world_size: int) -> list[BufferPlan]:
    groups = enumerate(optimizer.param_groups)
    group_of = {id(param): index for index, group in groups for param in group["params"]}
    names = choose_units(model, max_unit_bytes=parity.ZeroConfig().max_unit_bytes)
    units = plan_units(model, names, world_size=world_size, group_of=group_of)
    return [buffer for unit in units for buffer in unit.buffers]


def _flat(plan: BufferPlan, values: Mapping[str, Tensor | None]) -> Tensor:
    whole = torch.zeros(plan.layout.numel, dtype=plan.dtype)
    for span, param in zip(plan.layout.spans, plan.params, strict=True):
        value = values[param.name]
        if value is not None:
            whole[span.as_slice()] = value.detach().flatten()
    return whole


@torch.no_grad()
def _round(
    model: nn.Module,
    exact: nn.Module,
    buffers: Sequence[BufferPlan],
    codec: AbstractCodec | None,
) -> None:
    computed, kept = dict(model.named_parameters()), dict(exact.named_parameters())
    for plan in buffers:
        whole = _flat(plan, kept)
        if codec is not None:
            shards = whole.split(plan.layout.splits)
            whole = torch.cat([round_trip(shard, codec) for shard in shards])
        for span, param in zip(plan.layout.spans, plan.params, strict=True):
            computed[param.name].copy_(whole[span.as_slice()].view(param.shape))


def _reduce(
    exact: nn.Module,
    plan: BufferPlan,
    local: Sequence[Mapping[str, Tensor | None]],
    codec: AbstractCodec | None,
    ranks_per_node: int,
) -> None:
    """Put the mean where the optimizer reads it."""
    rows = [_flat(plan, grads).split(plan.layout.splits) for grads in local]
    chunks = [_mean(each, codec, ranks_per_node) for each in zip(*rows, strict=True)]
    whole, params = torch.cat(chunks).to(plan.dtype), dict(exact.named_parameters())
    for span, param in zip(plan.layout.spans, plan.params, strict=True):
        if any(grads[param.name] is not None for grads in local):
            params[param.name].grad = whole[span.as_slice()].view(param.shape).clone()


def _mean(chunks: Sequence[Tensor], codec: AbstractCodec | None, ranks_per_node: int) -> Tensor:
    """Of one chunk on all ranks, in float32."""
    if codec is None:
        return parity.mean([[chunk] for chunk in chunks])[0]
    starts = range(0, len(chunks), ranks_per_node)
    nodes = [_sum(chunks[start : start + ranks_per_node], codec) for start in starts]
    return _sum(nodes, codec) / len(chunks)


def _sum(chunks: Sequence[Tensor], codec: AbstractCodec) -> Tensor:
    if len(chunks) == 1:
        return chunks[0].float()
    first, *others = (round_trip(chunk, codec, torch.float32) for chunk in chunks)
    for other in others:
        first = first + other
    return first
