"""Recomputation inside sharded training: it gathers units again, and draws the same masks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import parity
import pytest
import torch
import training
import zero_engine
from torch import Tensor, nn
from zero_ckpt import Checkpointer, PackedSaver, RngTracker
from zero_comm import Group
from zero_engine import Precision, ZeroConfig

pytestmark = pytest.mark.xdist_group("ranks")

Run = Callable[..., Any]


def _plainly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class _Block(nn.Module):
    def __init__(self, tracker: RngTracker, rank_of_adapter: int) -> None:
        super().__init__()
        self.tracker = tracker
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12)
        self.drop = nn.Dropout(0.25)
        if rank_of_adapter:
            self.requires_grad_(False)
            self.into = nn.Linear(12, rank_of_adapter, bias=False)
            self.out = nn.Linear(rank_of_adapter, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with self.tracker.fork():
            hidden = self.drop(self.up(self.norm(x)).relu())
        y = x + self.drop(self.down(hidden))
        return y + self.out(self.into(x)) if hasattr(self, "into") else y


class _Stack(nn.Module):
    """Blocks that share their first one, each called by `run`; `nests` adds a call around two."""

    def __init__(self, run: Run, tracker: RngTracker, *, rank_of_adapter: int, nests: bool) -> None:
        super().__init__()
        self.run, self.nests = run, nests
        self.embed = nn.Embedding(20, 12)
        self.blocks = nn.ModuleList(_Block(tracker, rank_of_adapter) for _ in range(4))
        if rank_of_adapter:
            self.embed.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for two in (self.blocks[:2], self.blocks[2:]):
            x = self.run(self._pass, x, two) if self.nests else self._pass(x, two)
        return self.run(self.blocks[0], x) @ self.embed.weight.T

    def _pass(self, x: Tensor, blocks: nn.ModuleList) -> Tensor:
        for block in blocks:
            x = self.run(block, x)
        return x


def _train(group: Group, run: Run, tracker: RngTracker, config: ZeroConfig, **options: Any) -> Any:
    torch.manual_seed(0)
    tracker.reset()
    tracker.add("model-parallel-rng", 100 + group.rank)
    model = _Stack(run, tracker, **options)
    trainable = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    zero_engine.shard(model, optimizer, config, group=group)
    losses = training.train(
        model, optimizer, partial(training.token_loss, rank=group.rank), num_steps=3
    )
    states = [torch.get_rng_state(), *tracker.get_states().values()]
    return losses, states, zero_engine.full_state_dict(model)


@pytest.mark.parametrize(
    ("stage", "rank_of_adapter", "nests"),
    [(stage, rank, bool((stage + rank // 2) % 2)) for stage in parity.STAGES for rank in (0, 2)],
)
def test_a_sharded_model_trains_the_same_with_and_without(
    ranks, stage: int, rank_of_adapter: int, nests: bool
) -> None:
    """What users checkpoint is what does not fit, and so is what they shard."""
    ranks(2).run(_compare, config=ZeroConfig(stage), rank_of_adapter=rank_of_adapter, nests=nests)


@pytest.mark.parametrize("stage", [1, 3])
def test_so_does_one_in_bf16_with_masters(ranks, stage: int) -> None:
    """Gathers of rounded values into slots come in another order, and may change no bit."""
    config = ZeroConfig(stage, precision=Precision(params=torch.bfloat16))
    ranks(2).run(_compare, config=config, rank_of_adapter=0, nests=False)


def _compare(group: Group, config: ZeroConfig, **options: Any) -> None:
    tracker = RngTracker("cpu")
    train = partial(_train, group, tracker=tracker, config=config, **options)
    losses, states, weights = train(_plainly)

    found_losses, found_states, found = train(Checkpointer(tracker=tracker).checkpoint)

    assert found_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(found_states, states, strict=True))
    if group.rank == 0:
        parity.assert_same_weights(found, weights, what="checkpointed")


def test_an_exception_in_the_second_run_leaves_the_model_usable(group: Group) -> None:
    """Units that were gathered for it have to be put down again."""
    calls = 0

    def fail(function: Callable[..., Any], *args: Any) -> Any:
        def counted(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            result = function(*args)
            if calls == 7:  # five in forward
                raise KeyError("in the middle")
            return result

        return Checkpointer(tracker=tracker, stops_early=False).checkpoint(counted, *args)

    tracker = RngTracker("cpu")
    tracker.add("model-parallel-rng", 1)
    torch.manual_seed(0)
    model = _Stack(fail, tracker, rank_of_adapter=0, nests=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)
    ids = torch.arange(6).reshape(1, 6)
    before = zero_engine.full_state_dict(model)
    with pytest.raises(KeyError, match="in the middle"):
        model(ids).square().sum().backward()
    optimizer.zero_grad()
    model.run = Checkpointer(tracker=tracker).checkpoint

    model(ids).square().sum().backward()
    optimizer.zero_grad()

    after = zero_engine.full_state_dict(model)
    if group.rank == 0:
        parity.assert_same_weights(after, before, what="after an exception")


# ---- Inputs as shards ----


class _PackedStack(nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(9), nn.Linear(9, 9), nn.GELU(), nn.Dropout(0.2))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x


def _train_packed(group: Group, run: Callable[..., Any], stage: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = _PackedStack(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
    numbers = []
    for _ in range(3):
        x = torch.randn(5, 9)  # the same on all ranks, as in a model-parallel group
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        numbers += [loss.detach(), torch.get_rng_state()]
    return numbers + list(zero_engine.full_state_dict(model).values())


@pytest.mark.parametrize("stage", [1, 3])
def test_one_group_gathers_parameters_and_inputs(group: Group, stage: int) -> None:
    """Messages of the two must not be taken for each other, nor in another order."""
    expected = _train_packed(group, lambda function, *args: function(*args), stage)
    for num_slots in (None, 4):
        saver = PackedSaver(group=group, num_slots=num_slots)
        found = _train_packed(group, Checkpointer(saver=saver).checkpoint, stage)

        assert all(map(torch.equal, found, expected))
        assert saver.kept_bytes() == {}
