"""The time that a plan gives for a step, against the clock."""

from __future__ import annotations

import time

import parity
import torch
import zero_engine
from parity import ZeroConfig
from zero_comm import Group

TOKENS = 256


def test_a_step_takes_about_as_long_as_is_estimated(ranks) -> None:
    """Within five times, as other work comes and goes: bits for bytes would be off by eight."""
    for stage, measured, least, most in ranks(2).run(_measure, timeout_s=60)[0]:
        assert least / 5 <= measured <= 5 * most, f"stage {stage}"


def _measure(group: Group) -> list[tuple[int, float, float, float]]:
    found = []
    for stage in (0, 2, 3):
        rates = zero_engine.probe(group, size=0.25)  # just before: other work comes and goes
        model = parity.Chain(8, 512)
        optimizer = parity.adamw(model)
        plan = zero_engine.plan(
            parity.Chain(8, 512),
            ZeroConfig(stage),
            world_size=2,
            device="cpu",
            reads_peers=group.peers is not None,
        )
        zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
        x, times = torch.ones(TOKENS, 512), []
        for _ in range(8):
            begun = time.perf_counter()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - begun)
        estimate = zero_engine.estimate_step(plan, rates, tokens=TOKENS)
        measured = min(times[2:])
        found.append((stage, measured, estimate.least_s, estimate.most_s))
    return found
