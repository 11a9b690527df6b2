"""Bytes per rank are the formula of the stage, and what comes on top is counted apart."""

from __future__ import annotations

import time

import parity
import pytest
import torch
import zero_engine
from attrs import asdict
from parity import ZeroConfig
from torch import nn
from zero_comm import Group
from zero_partition import memory_report
from zero_partition.seams import find_sharded

WIDTH = 64
NUM_BLOCKS = 4
BLOCK_BYTES = 4 * WIDTH * WIDTH
PSI = NUM_BLOCKS * WIDTH * WIDTH  # parameters of parity.Chain


@pytest.mark.ranks(1, 2, 4)
def test_what_is_alive_is_what_the_report_counts(group: Group) -> None:
    """A number that leaves something out is worse than none: it is what a user plans with."""
    for stage in parity.STAGES:
        parity.count_from_here()
        model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
        _assert_report_is_complete(model, f"stage {stage}, new")

        parity.run_steps(model, optimizer, range(2), rank=group.rank)
        _assert_report_is_complete(model, f"stage {stage}, between steps")

        with zero_engine.unsharded(model):
            _assert_report_is_complete(model, f"stage {stage}, whole")
        with zero_engine.GatheredParameters([model.scale, model.blocks[0].up.weight]):
            _assert_report_is_complete(model, f"stage {stage}, partly whole")

        parity.loss_of(model, parity.batch(2, 0, group.rank)).backward()
        _assert_report_is_complete(model, f"stage {stage}, before the step")
        del model, optimizer

        model = parity.build(parity.Chain)  # all parameters get a gradient on every rank
        optimizer = parity.adamw(model)
        zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
        _step(model, optimizer)
        _assert_report_is_complete(model, f"stage {stage}, nothing unused")
        del model, optimizer


def _assert_report_is_complete(model: nn.Module, what: str) -> None:
    report = memory_report(model)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    alive = parity.live_bytes(at_most=report.total_bytes + buffers)
    assert alive == report.total_bytes + buffers, f"{what}: {alive} bytes alive, {report}"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_model_state_is_the_formula_of_the_stage(ranks, world_size: int) -> None:
    """The table of the ZeRO paper: 4 + 8/N bytes per parameter at stages 1 and 2, 12/N at 3."""
    for stage in parity.STAGES:
        reports = ranks(world_size).run(_report, stage=stage)

        params, optimizer = (1, world_size) if stage == 3 else (world_size, 1)
        optimizer = world_size if stage == 0 else 1
        assert sum(report["params_bytes"] for report in reports) == 4 * PSI * params
        assert sum(report["optimizer_bytes"] for report in reports) == 8 * PSI * optimizer
        assert all(report["gradients_bytes"] == 0 for report in reports)
        assert all(report["padding_bytes"] == 0 for report in reports)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gradients_rest_as_shards_until_they_are_dropped(ranks, world_size: int) -> None:
    """4/N more per parameter from backward to zero_grad(); whole ones only at stage 0."""
    for stage in parity.STAGES:
        reports = ranks(world_size).run(_report, stage=stage, with_gradients=True)

        copies = world_size if stage == 0 else 1
        assert sum(report["gradients_bytes"] for report in reports) == 4 * PSI * copies


def _report(group: Group, stage: int, with_gradients: bool = False) -> dict[str, int]:
    model = parity.build(parity.Chain)
    optimizer = parity.adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
    _step(model, optimizer)
    if with_gradients:
        model(torch.ones(1, WIDTH)).sum().backward()
    return asdict(memory_report(model))


@pytest.mark.ranks(2, 4)
def test_padding_is_the_layouts(group: Group) -> None:
    """The plan predicts what is allocated, because the same arithmetic made both."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(3))
    parity.run_steps(model, optimizer, range(1), rank=group.rank)

    report = memory_report(model)

    layouts = [
        (buffer.plan.layout, buffer.plan.dtype.itemsize)
        for unit in find_sharded(model).units
        for buffer in unit.buffers
    ]
    rank = group.rank
    assert report.padding_bytes == sum(
        (layout.splits[rank] - layout.payload_splits[rank]) * itemsize
        for layout, itemsize in layouts
    )
    assert report.params_bytes == sum(
        layout.payload_splits[rank] * itemsize for layout, itemsize in layouts
    )


# ---- Slots and reduction buffers ----


@pytest.mark.parametrize("window", [1, 2, 3, 9])
def test_slots_are_a_window_of_units(ranks, window: int) -> None:
    """What the user sets is what stage 3 holds beside the shards; reduction takes two more."""
    kept_shards = 4 * PSI // 2  # of gradients, for the next step

    for report in ranks(2).run(_report_with_window, window=window):
        assert report["slots_bytes"] == min(window, NUM_BLOCKS) * BLOCK_BYTES
        assert report["reduction_bytes"] == 2 * BLOCK_BYTES + kept_shards


def _report_with_window(group: Group, window: int) -> dict[str, int]:
    model = parity.build(parity.Chain)
    optimizer = parity.adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(3, window=window), group=group)
    for _ in range(2):
        _step(model, optimizer)
    return asdict(memory_report(model))


def test_release_buffers_leaves_model_state_only(group: Group) -> None:
    """Between phases others have the memory; training goes on as if it had never left."""
    for stage in parity.STAGES:
        undisturbed, its_optimizer = parity.build_sharded(group, ZeroConfig(stage))
        expected = parity.run_steps(undisturbed, its_optimizer, range(4), rank=group.rank)
        weights = zero_engine.full_state_dict(undisturbed)
        parity.count_from_here()
        model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
        losses = parity.run_steps(model, optimizer, range(2), rank=group.rank)

        zero_engine.release_buffers(model)

        report = memory_report(model)
        assert (report.slots_bytes, report.reduction_bytes) == (0, 0), f"stage {stage}"
        _assert_report_is_complete(model, f"stage {stage}")
        losses += parity.run_steps(model, optimizer, range(2, 4), rank=group.rank)
        assert losses == expected, f"stage {stage}"
        after = zero_engine.full_state_dict(model)
        parity.assert_same_weights(after, weights, what=f"stage {stage}")
        del model, optimizer


# ---- The peak of a step ----


@pytest.mark.parametrize("window", [1, 2, 3])
def test_the_peak_of_a_stage_3_step_is_the_sum_of_its_parts(ranks, window: int) -> None:
    """At rest + gradient shards + slots + reduction buffers; never the whole model on one rank."""
    for peak in ranks(2).run(_peak_of_a_step, window=window):
        at_rest = 12 * PSI // 2
        gradient_shards = 4 * PSI // 2
        slots = window * BLOCK_BYTES
        reduction = 2 * BLOCK_BYTES
        in_autograds_hands = BLOCK_BYTES  # one gradient, about to be copied

        assert peak == at_rest + gradient_shards + slots + reduction + in_autograds_hands


def _peak_of_a_step(group: Group, window: int) -> int:
    samples: list[int] = []

    def sample(*_: object) -> None:
        samples.append(parity.live_bytes(at_least=BLOCK_BYTES // 2))  # activations are smaller

    parity.count_from_here()
    model = parity.build(parity.Chain)
    optimizer = parity.adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(3, window=window), group=group)
    _step(model, optimizer)
    for layer in model.layers:
        layer.register_forward_pre_hook(sample)
        layer.register_forward_hook(sample)
    for param in model.parameters():
        param.register_hook(sample)
        param.register_post_accumulate_grad_hook(sample)
    optimizer.register_step_pre_hook(sample)
    optimizer.register_step_post_hook(sample)
    _step(model, optimizer)

    assert len(samples) == 4 * NUM_BLOCKS + 2
    return max(samples)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- Afterwards ----


def test_a_deleted_model_is_freed(group: Group) -> None:
    """Hooks hold our buffers and autograd holds hooks: a cycle that gc cannot see leaks it all."""
    for stage in parity.STAGES:
        parity.count_from_here()
        model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
        parity.run_steps(model, optimizer, range(1), rank=group.rank)
        parity.loss_of(model, parity.batch(1, 0, group.rank)).backward()
        del model, optimizer

        # A rank's shards stay until its peers have deleted theirs: they may still read them.
        deadline = time.monotonic() + 5
        while parity.live_bytes() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert parity.live_bytes() == 0, f"stage {stage}"
