"""What lies between parameters and shards, to align them: no number ever comes from there."""

from __future__ import annotations

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group
from zero_partition.plan import FlatLayout
from zero_partition.seams import find_sharded


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.ranks(2, 3)
def test_nan_in_padding_reaches_nothing(group: Group, stage: int) -> None:
    """Memory that nobody has written is often zero where one tests, and NaN where one trains."""
    expected = _train(group, stage, poisons=False)
    ours = _train(group, stage, poisons=True)

    assert ours[:2] == expected[:2]
    parity.assert_same_weights(ours[2], expected[2], what=f"stage {stage}")


def _train(group: Group, stage: int, *, poisons: bool) -> tuple[list[float], list[float], dict]:
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage, window=2))
    losses, norms = [], []
    for step in range(3):
        loss = parity.loss_of(model, parity.batch(step, 0, group.rank))
        if poisons:
            _poison(model, group.rank)
        loss.backward()
        if poisons:
            _poison(model, group.rank)
        losses.append(loss.item())
        norms.append(zero_engine.clip_grad_norm_(model, 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, zero_engine.full_state_dict(model)


def _poison(model: nn.Module, rank: int) -> None:
    """Everywhere that a flat buffer is kept, whole or as a shard."""
    sharded = find_sharded(model)
    for unit in sharded.units:
        for index, buffer in enumerate(unit.buffers):
            layout = buffer.plan.layout
            whole = [buffer.whole, *unit._full[index : index + 1]]
            shards = [buffer.shard]
            for gradients in sharded.reducer.gradients:
                if gradients.buffer is buffer:
                    whole.append(gradients.accumulator)
                    shards.append(gradients.shard)
            for memory in whole:
                _write_nan(memory, [(span.start, span.stop) for span in layout.spans])
            for memory in shards:
                parts = [piece.in_shard for piece in layout.pieces(rank)]
                _write_nan(memory, [(part.start, part.stop) for part in parts])


def _write_nan(memory: Tensor | None, used: list[tuple[int, int]]) -> None:
    if memory is None or not memory.untyped_storage().nbytes():
        return
    is_padding = torch.ones(memory.numel(), dtype=torch.bool)
    for start, stop in used:
        is_padding[start:stop] = False
    with torch.no_grad():
        memory[is_padding] = torch.nan


def test_there_is_padding_to_poison() -> None:
    """The model above has odd sizes; without padding the test of it would say nothing."""
    layout = FlatLayout.plan([13, 3], world_size=2)
    assert layout.numel > layout.payload_numel
