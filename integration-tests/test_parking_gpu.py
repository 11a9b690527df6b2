"""Parking the state of a model on a GPU. Skipped without one; docs/gpu.md says what has run."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import torch
import zero_engine
import zero_partition
from parity import ZeroConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("place", ["host", "pageable", "non-blocking", "disk"])
def test_a_gpu_gets_the_memory_and_training_its_bits(stage: int, place: str, tmp_path) -> None:
    """What generation needs between training phases, by CUDA's own count."""
    options: dict[str, dict[str, Any]] = {
        "host": {},
        "pageable": {"pin": False},
        "non-blocking": {"non_blocking": True},
        "disk": {"to": "disk", "path": tmp_path},
    }
    expected = _train(stage, None)

    assert _train(stage, options[place]) == expected


def _train(stage: int, options: dict[str, Any] | None) -> list[float]:
    model = parity.build(lambda: parity.Chain(4, 1024)).cuda()
    optimizer = parity.adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(stage))
    losses = []
    for _ in range(3):
        loss = model(torch.linspace(-1, 1, 2048, device="cuda").view(2, 1024)).square().mean()
        loss.backward()
        losses.append(loss.item())
        del loss
        if options is not None:
            zero_engine.release_buffers(model)
            before = torch.cuda.memory_allocated()
            zero_engine.offload_states(model, **options)
            parked = zero_partition.memory_report(model).parked_bytes
            fall = before - torch.cuda.memory_allocated()
            assert parked >= 2 * 4 * 2**20 * 4
            assert parked - 2**16 < fall <= parked
            poison = torch.full((parked // 4,), float("nan"), device="cuda")
            del poison
            zero_engine.reload_states(model, non_blocking=options.get("non_blocking", False))
        optimizer.step()
        optimizer.zero_grad()
    return losses
