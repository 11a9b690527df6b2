"""What models and loops do besides calling layers: it works as in plain torch, or is refused.

All ranks see the same batch, so that the mean gradient of two is the gradient of one, bit for bit,
and plain torch in the same process is the oracle.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group
from zero_partition import PartitionError, StateError

STAGES = [0, 1, 2, 3]


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


def _train(model: nn.Module, *, group: Group | None, stage: int = 0) -> tuple[list[float], dict]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if group is not None:
        zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
    losses = []
    for step in range(3):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if group is None:
        return losses, model.state_dict()
    return losses, zero_engine.full_state_dict(model)


def _trains_as_plain(group: Group, make: str, stage: int) -> None:
    torch.manual_seed(0)
    plain = {"shared": _SharedBias, "prompted": _Prompted, "spectral": _spectral}[make]()
    sharded = copy.deepcopy(plain)
    losses, weights = _train(plain, group=None)

    ours, full = _train(sharded, group=group, stage=stage)

    assert ours == losses
    if group.rank == 0:
        assert full.keys() == weights.keys()
        assert all(torch.equal(full[key], value) for key, value in weights.items())


@pytest.mark.parametrize("stage", STAGES)
def test_a_tensor_that_blocks_hand_on_keeps_their_order(ranks, stage: int) -> None:
    """It carries the hook of every block that returned it; all fire when the first is reached."""
    ranks(2).run(_trains_as_plain, make="shared", stage=stage)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_unit_that_returns_its_parameter_trains_on(ranks, stage: int) -> None:
    """A hook on a leaf would stay and speak up in every later step."""
    ranks(2).run(_trains_as_plain, make="prompted", stage=stage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_hook_of_the_users_finds_whole_parameters(ranks, stage: int) -> None:
    """spectral_norm reads the weight in a pre-hook, and keeps what it computed from it."""
    ranks(2).run(_trains_as_plain, make="spectral", stage=stage)


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
        assert torch.equal(whole["twice"], whole["0.weight"] * 2)
    with pytest.raises(StateError, match=r"'twice' is neither a parameter nor a buffer"):
        _save_with(_add_derived, group, 3)
        if group.rank:
            raise StateError("'twice' is neither a parameter nor a buffer")  # rank 0 writes


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
