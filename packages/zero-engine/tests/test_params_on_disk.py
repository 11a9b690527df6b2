"""Parameters on disk: what the memory that they pass through is bounded by, and what reads see."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
import zero_engine
from torch import nn
from zero_comm import Group
from zero_comm.testing import equal
from zero_engine import Offload, ZeroConfig
from zero_offload import host_memory

WIDTHS = [16 * (k + 1) for k in range(30)]  # so that layers all differ in size


def test_memory_does_not_grow_with_the_number_of_sizes(tmp_path: Path) -> None:
    """A model whose units all differ must not end with all of its shards in host memory."""
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(WIDTHS)))
    alone = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(WIDTHS)))
    alone.load_state_dict(model.state_dict())
    held: list[int] = []
    for layer in model:
        layer.register_forward_hook(lambda *_: held.append(sum(host_memory().values())))
    whole = sum(param.nbytes for param in model.parameters())
    optimizer, its = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone))
    config = ZeroConfig(3, min_unit_bytes=0, offload=Offload(params="disk", path=tmp_path))
    zero_engine.shard(model, optimizer, config, group=Group.solo())
    for step in range(3):
        for each, stepped in ((model, optimizer), (alone, its)):
            loss = each(torch.full((2, WIDTHS[0]), 0.01 * step)).square().sum()
            loss.backward()
            stepped.step()
            stepped.zero_grad()
    with zero_engine.unsharded(model):  # another home, which shares the store
        model(torch.ones(1, WIDTHS[0]))

    found = zero_engine.full_state_dict(model)
    assert all(equal(found[name], value) for name, value in alone.state_dict().items())
    largest = 4 * WIDTHS[-1] * WIDTHS[-2]
    # One is open and two are being written, as much again is free, and one is read ahead.
    assert 0 < max(held) <= 6 * largest < whole
    zero_engine.unshard(model, optimizer)
    assert not list(tmp_path.iterdir())
