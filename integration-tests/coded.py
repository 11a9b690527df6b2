"""Oracle of training with codecs: one process that encodes and decodes where we document it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import parity
import torch
from torch import Tensor, nn
from zero_comm import AbstractCodec, even_splits
from zero_partition.plan import BufferPlan
from zero_partition.planning import choose_units, plan_units


def train_coded(
    recipe: parity.Recipe,
    *,
    params: AbstractCodec | None = None,
    gradients: AbstractCodec | None = None,
    frozen: AbstractCodec | None = None,
    world_size: int = 4,
    ranks_per_node: int = 4,
    replicas: bool = False,
    stage: int = 3,
    dtype: torch.dtype | None = None,
) -> list[parity.Curve]:
    """Every rank's gradients in turn; as each rank sees it.

    - All compute with what each rank's shard of a flat buffer decodes to; what is stepped is exact.
    - Frozen ones may rest so, and then are that from the start. At stages 1 and 2 nobody gathers
      them, and they are exact.
    - With a dtype, shards are masters in float32, rounded to it before they are encoded.
    - Of gradients, each rank's chunk for each other is encoded; decoded ones are added in float32,
      in rank order. Nodes' sums are encoded and added in the same way, in the order of nodes.
    - Where there is one rank, or one node, to add, nothing is encoded.
    - With replicas, ranks of a node have all shards. A node's mean is what its ranks' contributions
      decode to; then each of the nodes adds up an equal part of it, from what these decode to, and
      encodes the mean again.
    """
    model = parity.build(recipe.make)  # what is computed with
    exact = copy.deepcopy(model)
    if dtype is not None:
        model, exact = model.to(dtype), exact.float()
    assert isinstance(recipe.optimizer, str)
    optimizer = parity.OPTIMIZERS[recipe.optimizer](parity.param_groups(exact))
    scheduler = parity.scheduler_for(optimizer)
    reduce = _mean_of_means if replicas else _mean
    buffers = _plan(model, exact, optimizer, ranks_per_node if replicas else world_size)
    _round(exact, exact, [plan for plan in buffers if not plan.trainable], frozen)
    curves = [parity.Curve() for _ in range(world_size)]
    for step in range(recipe.num_steps):
        _round(model, exact, [plan for plan in buffers if plan.trainable], params)
        of_frozen = frozen or (params if stage == 3 else None)
        _round(model, exact, [plan for plan in buffers if not plan.trainable], of_frozen)
        local = []
        for peer in range(world_size):
            loss = recipe.loss_of(model, recipe.batch(step, 0, peer))
            loss.backward()
            curves[peer].losses.append(loss.item())
            local.append({name: param.grad for name, param in model.named_parameters()})
            model.zero_grad()
        for plan in buffers:
            if plan.trainable:
                chunks = [
                    reduce(each, gradients, ranks_per_node)
                    for each in zip(
                        *(_flat(plan, grads).split(plan.layout.splits) for grads in local),
                        strict=True,
                    )
                ]
                _hand_over(exact, plan, local, torch.cat(chunks).to(plan.dtype))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    curves[0].weights = _as_at_rest(exact, model)
    return curves


def round_trip(values: Tensor, codec: AbstractCodec, dtype: torch.dtype | None = None) -> Tensor:
    """What comes back."""
    out = torch.empty_like(values, dtype=dtype or values.dtype)
    return codec.decode(codec.encode(values.contiguous()), out)


def round_params(
    model: nn.Module,
    exact: nn.Module,
    optimizer: torch.optim.Optimizer,
    codec: AbstractCodec,
    num_shards: int,
) -> None:
    """Let a model compute with what shards of its trainable parameters, in its dtype, decode to."""
    plans = _plan(model, exact, optimizer, num_shards)
    _round(model, exact, [plan for plan in plans if plan.trainable], codec)


def _plan(
    model: nn.Module, exact: nn.Module, optimizer: torch.optim.Optimizer, num_shards: int
) -> list[BufferPlan]:
    """Of parameters in the dtypes of `model`, grouped as the optimizer has those of `exact`."""
    groups = enumerate(optimizer.param_groups)
    index_of = {id(param): index for index, group in groups for param in group["params"]}
    pairs = zip(model.parameters(), exact.parameters(), strict=True)
    group_of = {id(mine): index_of[id(other)] for mine, other in pairs if id(other) in index_of}
    names = choose_units(model, max_unit_bytes=parity.ZeroConfig().max_unit_bytes)
    units = plan_units(model, names, world_size=num_shards, group_of=group_of)
    return [buffer for unit in units for buffer in unit.buffers]


def _as_at_rest(exact: nn.Module, model: nn.Module) -> dict[str, Tensor]:
    """Exact values, in the dtype in which the model computes."""
    dtypes = {name: value.dtype for name, value in model.state_dict().items()}
    return {name: value.to(dtypes[name]) for name, value in exact.state_dict().items()}


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


def _hand_over(
    exact: nn.Module, plan: BufferPlan, local: Sequence[Mapping[str, Tensor | None]], whole: Tensor
) -> None:
    """Put the mean where the optimizer reads it."""
    params = dict(exact.named_parameters())
    for span, param in zip(plan.layout.spans, plan.params, strict=True):
        if any(grads[param.name] is not None for grads in local):
            target = params[param.name]
            target.grad = whole[span.as_slice()].view(param.shape).to(target.dtype, copy=True)


def _mean(chunks: Sequence[Tensor], codec: AbstractCodec | None, ranks_per_node: int) -> Tensor:
    """Of one chunk on all ranks, in float32."""
    if codec is None:
        return parity.mean([[chunk] for chunk in chunks])[0]
    starts = range(0, len(chunks), ranks_per_node)
    nodes = [_sum(chunks[start : start + ranks_per_node], codec) for start in starts]
    return _sum(nodes, codec) / len(chunks)


def _mean_of_means(
    chunks: Sequence[Tensor], codec: AbstractCodec | None, ranks_per_node: int
) -> Tensor:
    """The same with replicas of so many ranks."""
    starts, dtype = range(0, len(chunks), ranks_per_node), chunks[0].dtype
    nodes = [chunks[start : start + ranks_per_node] for start in starts]
    if codec is None:
        return parity.mean([[_mean(node, None, ranks_per_node)] for node in nodes])[0]
    means = [(_sum(node, codec) / len(node)).to(dtype) for node in nodes]
    parts = zip(*(mean.split(even_splits(len(mean), len(nodes))) for mean in means), strict=True)
    sums = [_sum(part, codec) / len(nodes) for part in parts]
    return torch.cat([round_trip(each.to(dtype), codec) for each in sums])


def _sum(chunks: Sequence[Tensor], codec: AbstractCodec) -> Tensor:
    if len(chunks) == 1:
        return chunks[0].float()
    first, *others = (round_trip(chunk, codec, torch.float32) for chunk in chunks)
    for other in others:
        first = first + other
    return first
