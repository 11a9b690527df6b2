"""DistributedDataParallel with gradients that this package reduces."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transports import each_world, over
from zero_comm import Blockwise, Group, ddp_hook, record_traffic
from zero_comm.testing import assert_close, equal


@each_world(2, 3)
def test_gradients_are_the_mean_in_rank_order(group: Group, transport: str) -> None:
    """Who registers it trains as before: with two ranks in every bit, else as documented."""
    chosen = over(group, transport)
    models = []
    for _ in range(3):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 1)))
    by_torch, by_us, alone = models
    options = {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True}  # many buckets
    replicas = [DistributedDataParallel(model, **options) for model in (by_torch, by_us)]
    replicas[1].register_comm_hook(None, ddp_hook(chosen))
    for step in range(3):  # buckets are made anew after the first
        batches = [
            torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
            for rank in range(group.world_size)
        ]
        for replica in replicas:
            replica.zero_grad()
            replica(batches[group.rank]).square().sum().backward()
        each = [torch.autograd.grad(alone(b).square().sum(), alone.parameters()) for b in batches]
        for theirs, ours, *grads in zip(
            by_torch.parameters(), by_us.parameters(), *each, strict=True
        ):
            mean = sum(grads[1:], grads[0]) / group.world_size
            assert equal(ours.grad, mean)
            assert_close(ours.grad, theirs.grad)
            if group.world_size == 2:
                assert equal(ours.grad, theirs.grad)


@each_world(2, 3)
def test_gradients_travel_encoded(group: Group, transport: str) -> None:
    """With a codec every rank has the same gradients, close to the mean, in a quarter the bytes."""
    chosen, codec = over(group, transport), Blockwise(bits=8)
    torch.manual_seed(0)
    exact = DistributedDataParallel(nn.Linear(256, 8, bias=False))  # a row is a block
    encoded = DistributedDataParallel(copy.deepcopy(exact.module))
    encoded.register_comm_hook(None, ddp_hook(chosen, codec=codec))
    batch = torch.randn(4, 256, generator=torch.Generator().manual_seed(group.rank))

    exact(batch).square().sum().backward()
    with record_traffic(chosen) as traffic:
        encoded(batch).square().sum().backward()

    ours, theirs = encoded.module.weight.grad, exact.module.weight.grad
    own = torch.autograd.grad(exact.module(batch).square().sum(), exact.module.weight)[0]
    largest = own.abs().amax(1, keepdim=True)
    torch.distributed.all_reduce(largest)
    # A contribution is off by half a scale at most, and so is the result.
    assert ((ours - theirs).abs() <= 2.02 * largest / group.world_size / 254).all()
    assert not equal(ours, theirs)
    all_ranks = [torch.empty_like(ours) for _ in range(group.world_size)]
    torch.distributed.all_gather(all_ranks, ours)
    assert all(equal(other, ours) for other in all_ranks)
    sent = traffic.operations["all_reduce"]
    assert sent.payload_bytes == sent.payload_numel  # one byte for each value
