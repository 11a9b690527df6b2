"""Bytes per rank are the formula of the stage, and what comes on top is counted apart."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import parity
import parking
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import nn
from zero_comm import Group
from zero_comm.testing import assert_close
from zero_engine import Precision
from zero_partition import memory_report
from zero_partition.planning import keeps_free_memory

WIDTH = 64
NUM_BLOCKS = 4
BLOCK_BYTES = 4 * WIDTH * WIDTH
PSI = NUM_BLOCKS * WIDTH * WIDTH  # parameters of parity.Chain


@pytest.mark.ranks(1, 3)
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

        model, optimizer = _chain(group, stage)
        _step(model, optimizer)
        _assert_report_is_complete(model, f"stage {stage}, nothing unused")
        del model, optimizer


def _assert_report_is_complete(model: nn.Module, what: str) -> None:
    report = memory_report(model)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    alive = parity.live_bytes(at_most=report.total_bytes + buffers)
    assert alive == report.total_bytes + buffers, f"{what}: {alive} bytes alive, {report}"


@pytest.mark.ranks(1, 4)
def test_model_state_is_the_formula_of_the_stage(group: Group) -> None:
    """The table of the ZeRO paper: 4 + 8/N bytes per parameter at stages 1 and 2, 12/N at 3."""
    for stage in parity.STAGES:
        model, optimizer = _chain(group, stage)
        _step(model, optimizer)
        report = memory_report(model)

        size = group.world_size if stage else 1
        assert report.params_bytes == 4 * PSI // (size if stage == 3 else 1)
        assert report.optimizer_bytes == 8 * PSI // size
        assert report.gradients_bytes == report.padding_bytes == 0
        model(torch.ones(1, WIDTH)).sum().backward()
        assert memory_report(model).gradients_bytes == 4 * PSI // size


def test_release_buffers_leaves_model_state_only(group: Group) -> None:
    """Between phases others have the memory; training goes on as if it had never left."""
    for stage in parity.STAGES:
        build = partial(parity.build_sharded, group, ZeroConfig(stage))
        parking.assert_same_bits(group, build, zero_engine.release_buffers)
        parity.count_from_here()
        model, optimizer = build()
        parity.run_steps(model, optimizer, range(2), rank=group.rank)
        zero_engine.release_buffers(model)
        report = memory_report(model)
        assert (report.slots_bytes, report.reduction_bytes) == (0, 0)
        _assert_report_is_complete(model, f"stage {stage}")
        del model, optimizer


@pytest.mark.parametrize("is_copied", [False, True], ids=["adopted", "copied"])
@pytest.mark.parametrize("window", [1, 2, 9])
def test_the_peak_of_a_stage_3_step_is_the_sum_of_its_parts(
    group: Group, window: int, is_copied: bool
) -> None:
    """What the user sets is what stage 3 holds beside the shards; never the whole model."""
    samples: list[int] = []

    def sample(*_: object) -> None:
        samples.append(parity.live_bytes(at_least=BLOCK_BYTES // 2))  # activations are smaller

    parity.count_from_here()
    precision = Precision(predivide_factor=2.0 if is_copied else 1.0)  # else only read
    model, optimizer = _chain(group, 3, window=window, precision=precision)
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

    at_rest = 12 * PSI // 2
    gradient_shards = 4 * PSI // 2
    slots = min(window, NUM_BLOCKS) * BLOCK_BYTES
    reduction = 2 * BLOCK_BYTES if is_copied else 0
    report = memory_report(model)
    assert len(samples) == 4 * NUM_BLOCKS + 2
    if keeps_free_memory(group.device):
        whole_gradients = 3 * BLOCK_BYTES if is_copied else 2 * BLOCK_BYTES
        assert max(samples) == at_rest + gradient_shards + slots + whole_gradients
        assert report.slots_bytes == slots
        assert report.reduction_bytes == reduction + gradient_shards
        return
    # A gradient arrives; the one before it travels; each has a shard when it has travelled, and
    # its block is not whole any more.
    blocks = [
        min(window, NUM_BLOCKS - earlier) + earlier / 2 + min(earlier + 1, 2)
        for earlier in range(NUM_BLOCKS)
    ]
    assert max(samples) == at_rest + max(blocks) * BLOCK_BYTES
    assert (report.slots_bytes, report.reduction_bytes) == (0, 0)


def _chain(group: Group, stage: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = parity.build(parity.Chain)  # all parameters get a gradient on every rank
    optimizer = parity.adamw(model)
    return zero_engine.shard(model, optimizer, ZeroConfig(stage, **options), group=group)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parity.finish_step(model(torch.ones(1, WIDTH)).sum(), optimizer)


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


class _Mixed(nn.Sequential):
    """An embedding, layers and a head in one container, as in many scripts."""

    def __init__(self) -> None:
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0) for _ in range(4)]
        super().__init__(nn.Embedding(100, WIDTH), *layers, nn.Linear(WIDTH, 100))


def test_a_container_of_several_classes_is_whole_by_parts(group: Group) -> None:
    """It was one unit, and stage 3 kept the whole model whole."""
    plain = parity.build(_Mixed)
    model = parity.build(_Mixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    its_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    zero_engine.shard(model, optimizer, ZeroConfig(3, window=1, min_unit_bytes=0), group=group)
    for step in range(2):
        tokens = [(torch.arange(24).view(3, 8) * (step + rank + 2)) % 100 for rank in range(2)]
        for rank in range(2):
            (plain(tokens[rank]).square().mean() / 2).backward()
        its_optimizer.step()
        its_optimizer.zero_grad()
        loss = model(tokens[group.rank]).square().mean()
        slots = memory_report(model).slots_bytes
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    largest = max(sum(param.nbytes for param in part.parameters()) for part in plain)
    assert largest <= slots < 1.1 * largest
    weights = zero_engine.full_state_dict(model)
    for name in weights:
        assert_close(weights[name], plain.state_dict()[name])


@pytest.mark.slow
def test_a_unit_that_is_most_of_the_model_is_said_so(group: Group) -> None:
    """Stage 3 would save nothing, in silence."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(2**14 + 1, 1024)
            self.blocks = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(2))

    with pytest.warns(UserWarning, match=r"unit 'table' has 64 MiB.*table\.weight.*units="):
        zero_engine.shard(Model(), None, ZeroConfig(3), group=group)
    for quiet in (ZeroConfig(3, units=["table"]), ZeroConfig(3, units=[]), ZeroConfig(2)):
        zero_engine.shard(Model(), None, quiet, group=group)
