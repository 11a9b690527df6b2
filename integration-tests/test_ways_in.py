"""Weights do not depend on how the model is entered, nor on how and when gradients are dropped."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable
from typing import Final

import parity
import pytest
import torch
import training
import ways
import zero_engine
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import assert_close, equal, on_cpu
from zero_engine import ZeroConfig
from zero_partition import StateError

EVERY_CELL = os.environ.get("ZERO_WAYS") == "all"


@pytest.mark.ranks(1, 2, 3, timeout_s=1800 if EVERY_CELL else 60)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_way_in_trains_as_plain_torch_with_averaged_gradients(
    group: Group, stage: int
) -> None:
    """Bookkeeping that hung on the model's call lost gradients, or added up old ones, in silence.

    In each pair of choices; with ZERO_WAYS=all, in each combination.
    """
    cells = ways.all_cells() if EVERY_CELL else ways.cells_with_every_pair()
    wrong = []
    for cell in [cell for cell in cells if cell.stage == stage]:
        try:
            weights = ways.found(cell, group)
        except (RuntimeError, StateError) as error:
            wrong.append(f"{cell}: {type(error).__name__}: {str(error)[:120]}")
            continue
        expected = ways.expected(cell, group.world_size) if weights else {}
        off = {
            name: float((on_cpu(value) - on_cpu(expected[name])).abs().max())
            for name, value in weights.items()
            if not torch.allclose(on_cpu(value), on_cpu(expected[name]), rtol=1e-9, atol=1e-12)
        }
        if off:
            wrong.append(f"{cell}: off by {max(off.values()):.2g} in {', '.join(off)}")

    assert not wrong, "\n".join([f"{len(wrong)} cells", *wrong[:60]])


@pytest.mark.ranks(1, timeout_s=120)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_of_gradients_make_legal_moves_only(group: Group, stage: int) -> None:
    """The sanitizer compares each with the table, and numbers are what they are without it."""
    for cell in [cell for cell in ways.cells_with_every_pair() if cell.stage == stage]:
        weights = ways.found(cell, group, sanitize=True)
        for name, value in ways.expected(cell, 1).items():
            assert_close(weights[name], value, msg=lambda m: f"{cell}: {m}")  # noqa: B023


def test_the_cells_that_are_always_run_have_every_pair_of_choices() -> None:
    """A choice that is never met is not stated."""
    cells = ways.cells_with_every_pair()
    counts = Counter((a, cell[a], b, cell[b]) for cell in cells for a in range(5) for b in range(a))

    numbers = list(map(len, ways.CHOICES))
    assert len(counts) == sum(numbers[a] * numbers[b] for a in range(5) for b in range(a))
    assert len(cells) < 120
    assert len(ways.all_cells()) > 1000


PENALTIES: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "L1": lambda p: p.abs().sum(),
    "L2": lambda p: p.square().sum(),
    "norm": Tensor.norm,
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_penalty_on_weights_survives_a_drop_before_its_backward(
    group: Group, stage: int, penalty: str
) -> None:
    """The graph reads parameters where they were: L1's gradient was lost, and L2's was NaN."""
    found = []
    for is_sharded in (False, True):
        model, optimizer = ways.build()
        if is_sharded:
            config = ZeroConfig(stage, min_unit_bytes=0)
            zero_engine.shard(model, optimizer, config, group=group)
        for _ in range(ways.NUM_STEPS):
            loss = model.loss(torch.ones(2, ways.WIDTH, dtype=torch.float64))
            loss = loss + sum(map(PENALTIES[penalty], model.parameters()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found.append(zero_engine.full_state_dict(model) if is_sharded else model.state_dict())

    plain, sharded = found
    for name, value in sharded.items():
        assert_close(value, plain[name])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("is_first", [True, False], ids=["before shard()", "after it"])
def test_an_optimizer_that_steps_inside_backward_is_refused(
    group: Group, stage: int, is_first: bool
) -> None:
    """It would step on this rank's gradient alone, and ranks drift apart without a word."""
    model, optimizer = ways.build()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []

    def step(param: nn.Parameter) -> None:
        seen.append(param.shape)
        own.step()

    config = ZeroConfig(stage, min_unit_bytes=0)
    if not is_first:
        zero_engine.shard(model, optimizer, config, group=group)
    handles = [param.register_post_accumulate_grad_hook(step) for param in model.parameters()]
    if is_first:
        zero_engine.shard(model, optimizer, config, group=group)

    with pytest.raises(StateError, match=r"let it step after backward|would write to parameter"):
        model.loss(torch.ones(2, ways.WIDTH, dtype=torch.float64)).backward()
    assert len(seen) == 1

    for handle in handles:
        handle.remove()
    optimizer.zero_grad()
    model.loss(torch.ones(2, ways.WIDTH, dtype=torch.float64)).backward()
    optimizer.step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_backward_that_fails_leaves_no_gradient_whatever_the_way_in(
    group: Group, stage: int
) -> None:
    """Loops that catch an exception go on with the next batch; no call of the model tells us so."""
    model, optimizer = ways.build()
    plain, plain_optimizer = ways.build()
    zero_engine.shard(model, optimizer, ZeroConfig(stage, min_unit_bytes=0), group=group)
    x = torch.ones(2, ways.WIDTH, dtype=torch.float64)

    for of, its_optimizer in ((model, optimizer), (plain, plain_optimizer)):
        for _ in range(2):
            with pytest.raises(KeyError, match="interrupted"):
                of.head(training.Interrupt.apply(of.encode(x))).sum().backward()
            of.zero_grad()
            of.encode(x).square().sum().backward()
            of.head(x).sum().backward()
            its_optimizer.step()
            its_optimizer.zero_grad()

    weights = zero_engine.full_state_dict(model)
    for name, value in weights.items():
        assert_close(value, plain.state_dict()[name])


class _KeepsLoss(nn.Module):
    """Returns nothing that backward could come back through."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(ways.WIDTH, ways.WIDTH) for _ in range(2)))

    def forward(self, x: Tensor) -> None:
        self.loss = self.layers(x).square().mean()


class _Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(ways.WIDTH, ways.WIDTH)
        self.heads = nn.ModuleList(_KeepsLoss() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for head in self.heads:
            head(x)
        return sum(head.loss for head in self.heads)  # type: ignore[return-value]


def test_a_unit_that_returns_no_loss_is_told_to(group: Group) -> None:
    """Nothing says when its backward runs, which would read the values of another unit."""
    model = _Losses()
    zero_engine.shard(model, None, ZeroConfig(3, min_unit_bytes=0), group=group)
    with pytest.raises(StateError, match=r"parameter 'heads\.\d.*return the loss"):
        model(torch.ones(2, ways.WIDTH)).backward()
    for stage in (1, 2):
        model = _Losses()
        zero_engine.shard(model, None, ZeroConfig(stage, min_unit_bytes=0), group=group)
        model(torch.ones(2, ways.WIDTH)).backward()


class _Speaks(nn.Module):
    """Returns what it computes, or keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(ways.WIDTH, ways.WIDTH)

    def forward(self, x: Tensor, *, is_quiet: bool = False) -> Tensor | None:
        y = self.layer(x).square()
        if is_quiet:
            self.kept = y.mean()
            return None
        return y


class _Repeats(nn.Module):
    """Calls its units in turn, and the first of them quietly at some place besides."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(_Speaks() for _ in range(4))

    def forward(self, x: Tensor, *, quiet_at: int = -1) -> Tensor:
        kept = 0.0
        for number, head in enumerate(self.heads):
            if number == quiet_at:
                self.heads[0](x, is_quiet=True)
                kept = self.heads[0].kept
            x = head(x)
        return x.mean() + kept


@pytest.mark.parametrize("quiet_at", [0, 2])
def test_a_unit_that_kept_one_loss_of_two_is_told_to(group: Group, quiet_at: int) -> None:
    """Its gradients come when the other call has made it whole: values were wrong in silence."""
    model = _Repeats()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero_engine.shard(model, optimizer, ZeroConfig(3, min_unit_bytes=0), group=group)
    x = torch.ones(2, ways.WIDTH)
    for _ in range(2):
        with pytest.raises(StateError, match=r"unit 'heads\.0'.*return the loss"):
            model(x, quiet_at=quiet_at).backward()
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("times", [1, 2])
def test_forwards_without_a_graph_leave_nothing_around_the_calls_that_follow(
    group: Group, times: int
) -> None:
    """Transforms of torch.func and code that forbids hooks on saved tensors met ours."""
    model = parity.build(lambda: _Shares(False, times))
    plain = copy.deepcopy(model)
    zero_engine.shard(model, None, ZeroConfig(3, min_unit_bytes=0), group=group)
    x = torch.linspace(-1, 1, 2 * ways.WIDTH).view(2, ways.WIDTH)
    for _ in range(2):
        model(x).backward()
        with torch.no_grad(), torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            assert equal(model(x), plain(x))
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert equal(model(x), plain(x))


class _Balances(nn.Module):
    """Keeps a second loss, before it computes what it returns or after."""

    def __init__(self, is_late: bool) -> None:
        super().__init__()
        self.main, self.router = nn.Linear(ways.WIDTH, ways.WIDTH), nn.Linear(ways.WIDTH, 3)
        self.is_late = is_late

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_late:
            self.kept = self.router(x.tanh()).softmax(-1).square().mean()
        y = self.main(x).tanh()
        if self.is_late:
            self.kept = self.router(x.tanh()).softmax(-1).square().mean()
        return y


class _Shares(nn.Module):
    """Runs its units twice in a forward, or once."""

    def __init__(self, is_late: bool, times: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Balances(is_late) for _ in range(4))
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in [*self.blocks] * self.times:
            x = block(x)
            kept.append(block.kept)
        return x.mean() + sum(kept)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("num_forwards", [1, 2])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_second_loss_is_right_or_refused(
    group: Group, is_late: bool, num_forwards: int, times: int
) -> None:
    """A router's or a codebook's: computed last, its backward runs before any hook of the unit."""
    model = parity.build(lambda: _Shares(is_late, times))
    plain = copy.deepcopy(model)
    optimizer, its = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    zero_engine.shard(model, optimizer, ZeroConfig(3, min_unit_bytes=0, window=2), group=group)

    def step(module: nn.Module, chosen: torch.optim.Optimizer, number: int) -> None:
        losses = [module(torch.ones(2, ways.WIDTH) * (number + at)) for at in range(num_forwards)]
        sum(losses).backward()
        chosen.step()
        chosen.zero_grad()

    if is_late:
        with pytest.raises(StateError, match="return the loss"):
            step(model, optimizer, 0)
        return
    for number in range(3):
        step(model, optimizer, number)
        step(plain, its, number)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(zero_engine.full_param(ours), theirs.detach())


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_is_entered_by_any_way(group: Group, stage: int) -> None:
    """DeepSpeed's scripts call methods of `engine.module`, and parts of it."""
    for name, way in ways.WAYS.items():
        plain = [ways.build() for _ in range(group.world_size)]
        model, optimizer = ways.build()
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
        }
        engine, *_ = zero_engine.initialize(
            model=model, optimizer=optimizer, config=config, group=group
        )
        for step in range(ways.NUM_STEPS):
            for number in range(2):
                engine.backward(way(engine.module, ways.batch(step, number, group.rank)))
                engine.step()
                for rank, (each, _) in enumerate(plain):
                    (way(each, ways.batch(step, number, rank)) / 2).backward()
            ways.average([each for each, _ in plain])
            for _, by in plain:
                by.step()
                by.zero_grad()
        for key, value in zero_engine.full_state_dict(model).items():
            assert_close(
                value,
                plain[0][0].state_dict()[key],
                msg=lambda m: f"{name}: {m}",  # noqa: B023
            )
