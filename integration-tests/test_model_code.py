"""What models and loops do besides calling layers: it works as in plain torch, or is refused.

All ranks see the same batch, so that the mean gradient of two is the gradient of one, bit for bit,
and plain torch in the same process is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from training import assert_trains_as_plain, train
from zero_comm import Group
from zero_comm.testing import equal
from zero_partition import PartitionError, StateError

STAGES = (0, 1, 2, 3)


class _Biased(nn.Module):
    """Adds a bias that the first block makes and every block returns, as T5's layers do."""

    def __init__(self, makes_bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.bias = nn.Embedding(4, 16) if makes_bias else None

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.bias is not None:
            bias = self.bias(torch.arange(4))
        assert bias is not None, "the first block makes it"
        return torch.tanh(self.linear(x) + bias), bias


class _SharedBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Biased(index == 0) for index in range(6))

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


class _Prompt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(4, 16))

    def forward(self) -> Tensor:
        return self.prompt


class _Prompted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ModuleList(_Prompt() for _ in range(2))
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for prompt in self.prompts:
            x = x + prompt()
        return self.linear(x)


def _spectral() -> nn.Module:
    layers = [nn.utils.spectral_norm(nn.Linear(16, 16)) for _ in range(4)]
    return nn.Sequential(*layers)


def _loss(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "blocks hand on a tensor": (_SharedBias, STAGES),  # with the hook of each that returned it
    "units return their parameter": (_Prompted, (0, 1, 2)),  # where a hook would stay
    "hooks of the user read a weight": (_spectral, STAGES),  # and keep what they made of it
}


@pytest.mark.parametrize("what", MODELS)
def test_besides_calling_layers_it_trains_as_in_plain_torch(group: Group, what: str) -> None:
    """No model is rewritten for us."""
    make, stages = MODELS[what]
    run = partial(train, loss_of=_loss, num_steps=3)
    assert_trains_as_plain(group, make, run, *map(ZeroConfig, stages))


def test_a_gradient_penalty_at_stage_3_is_refused(group: Group) -> None:
    """Its second backward would read other units' weights without a word."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    zero_engine.shard(model, None, ZeroConfig(3), group=group)
    x = torch.randn(4, 16, requires_grad=True)
    with pytest.raises(StateError, match=r"create_graph=True.*or stage 2"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_an_optimizer_that_needs_matrices_is_refused_pieces_of_them(group: Group) -> None:
    """On 1-D shards it would train, differently."""
    model = nn.Linear(16, 16)
    with pytest.raises(PartitionError, match=r"Adafactor needs the cut 'tensor'.*'flat'"):
        optimizer = torch.optim.Adafactor(model.parameters())
        zero_engine.shard(model, optimizer, ZeroConfig(1, cut="flat"), group=group)


def _save_with(hook: Callable[..., Any], group: Group, stage: int) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.register_state_dict_post_hook(hook)
    zero_engine.shard(model, None, ZeroConfig(stage), group=group)
    return zero_engine.full_state_dict(model)


def _add_derived(module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
    state[prefix + "twice"] = state[prefix + "0.weight"] * 2


def test_what_a_hook_derives_from_shards_is_not_saved_as_weights(group: Group) -> None:
    """It would be NaN in the file."""
    whole = _save_with(_add_derived, group, 2)
    if group.rank == 0:
        assert equal(whole["twice"], whole["0.weight"] * 2)
    with pytest.raises(StateError, match=r"'0\.weight' are not here.*state_dict hook"):
        _save_with(_add_derived, group, 3)


def test_gradients_that_missed_unscaling_are_refused(group: Group) -> None:
    """They would be added 1024 times too large."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero_engine.shard(model, optimizer, ZeroConfig(2), group=group)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    with zero_engine.no_sync(model):
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    with pytest.raises(StateError, match="run the last micro-batch outside no_sync"):
        scaler.step(optimizer)


def test_the_data_of_a_guard_is_guarded(group: Group) -> None:
    """`p.grad.data.norm()` is how many loops log gradients."""
    model = nn.Linear(4, 4)
    zero_engine.shard(model, None, ZeroConfig(1), group=group)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(StateError, match="clip_grad_norm_"):
        model.weight.grad.data.norm()
