"""The section `activation_checkpointing` of a configuration file, through `initialize`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zero_ckpt
import zero_engine
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from zero_ckpt import CheckpointError, KeepSaver, PackedSaver
from zero_ckpt.testing import fresh_default
from zero_comm import Group

_FILE = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}


class _Net(nn.Module):
    """Megatron-style code: it imports the function and knows no engine."""

    def __init__(self, run: Callable[..., Any] = zero_ckpt.checkpoint) -> None:
        super().__init__()
        self.run = run
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.run(layer, x)
        return x.square().mean()


def _train(model: nn.Module, section: dict[str, Any] | None) -> list[float]:
    config = _FILE | ({} if section is None else {"activation_checkpointing": section})
    kind = next(model.parameters()).device.type
    mesh = init_device_mesh(kind, (1, 2), mesh_dim_names=("dp", "tp"))
    engine, *_ = zero_engine.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 0.5), mpu=mesh, config=config
    )
    losses = []
    for step in range(3):
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(step))
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_the_section_decides_how_checkpoints_keep_their_inputs(group: Group) -> None:
    """Scripts say it in the file, and call `checkpoint` in the model."""
    section = {
        "partition_activations": True,
        "contiguous_memory_optimization": True,
        "number_checkpoints": 3,
    }
    with fresh_default() as checkpointer:
        expected = _train(_Net(lambda layer, x: layer(x)), None)
        assert not zero_ckpt.is_configured()

        assert _train(_Net(), section) == expected

        assert isinstance(checkpointer.saver, PackedSaver)
        # Three slots for half of an input each: 2 x 6 floats.
        assert checkpointer.saver.reserved_bytes() == {group.device: 3 * 6 * 4}


def test_what_was_configured_before_stays(group: Group) -> None:
    """An explicit call beats the file, as in DeepSpeed."""
    with fresh_default() as checkpointer:
        zero_ckpt.configure(None)
        _train(_Net(), {"partition_activations": True})

        assert isinstance(checkpointer.saver, KeepSaver)


def test_contiguous_buffers_without_a_number_are_refused_before_anything_is_sharded(
    group: Group,
) -> None:
    """By the file's own key, with the model as it was."""
    model = _Net()
    with fresh_default():
        with pytest.raises(CheckpointError, match="number_checkpoints in the section"):
            _train(model, {"contiguous_memory_optimization": True})
        _train(model, None)
