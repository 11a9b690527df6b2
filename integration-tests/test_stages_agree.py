"""ZeRO moves bytes; it must not move the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from training import assert_weights_of
from zero_comm import Group
from zero_partition import Cut

ORDERS = {
    "plain": {},
    "clipped": {"max_norm": 0.5},
    "a-reduction-per-micro-batch": {"num_micro_batches": 3, "reduces_once": False},
    "accumulated-and-clipped": {"num_micro_batches": 2, "reduces_once": True, "max_norm": 0.5},
}


@pytest.mark.parametrize(
    ("optimizer", "num_micro_batches"), [(name, 3) for name in parity.OPTIMIZERS] + [("adamw", 1)]
)
def test_two_ranks_train_as_ddp_does_bit_for_bit(
    ranks, optimizer: str, num_micro_batches: int
) -> None:
    """A sum of two has one order, so there is nothing that could excuse a difference."""
    ranks(2).run(_stages_equal_ddp, optimizer=optimizer, num_micro_batches=num_micro_batches)


def _stages_equal_ddp(
    group: Group,
    *,
    stages: tuple[int, ...] = parity.STAGES,
    config: dict[str, Any] | None = None,
    **recipe: Any,
) -> None:
    chosen = parity.Recipe(**recipe)
    expected = parity.train_ddp(group, chosen)

    for stage in stages:
        curve = parity.train_sharded(group, chosen, ZeroConfig(stage, **(config or {})))
        parity.assert_same(curve, expected, rank=group.rank, what=f"stage {stage}, {config}")


# An optimizer that looks at single elements does not know how many ranks there are, nor in which
# order gradients were added: all of them at once where all that is ours is on, one for the rest.
# The sum of two in one reduction has the order of DDP: it is compared bit for bit above.
@pytest.mark.parametrize(
    ("world_size", "optimizer", "how"),
    [(4, "adamw", how) for how in ORDERS]
    + [(2, "adamw", "clipped"), (2, "adamw", "a-reduction-per-micro-batch")]
    + [(2, name, "accumulated-and-clipped") for name in ("sgd", "adagrad", "lion")]
    + [(1, name, "accumulated-and-clipped") for name in ("adamw", "adamw-fused")],
)
def test_every_stage_does_the_documented_arithmetic(
    ranks, world_size: int, optimizer: str, how: str
) -> None:
    """Where DDP adds in another order, the order that we document is what we can be held to."""
    ranks(world_size).run(_stages_equal_the_oracle, optimizer=optimizer, **ORDERS[how])


def _stages_equal_the_oracle(group: Group, *, cut: Cut = Cut.FLAT, **recipe: Any) -> None:
    chosen = parity.Recipe(**recipe)
    expected = parity.train_alone_by_stage(group, chosen, cut=cut)

    for stage in parity.STAGES:
        curve = parity.train_sharded(group, chosen, ZeroConfig(stage, cut=cut))
        parity.assert_same(curve, expected[stage], rank=group.rank, what=f"stage {stage}")


@pytest.mark.parametrize(
    ("world_size", "how"),
    [(2, "a-reduction-per-micro-batch")] + [(4, how) for how in ORDERS if how != "clipped"],
)
def test_another_order_of_adding_stays_close_to_ddp(ranks, world_size: int, how: str) -> None:
    """The oracle proves the arithmetic that we meant; DDP proves that we meant the right one."""
    ranks(world_size).run(_stages_are_close_to_ddp, **ORDERS[how])


def _stages_are_close_to_ddp(group: Group, **recipe: Any) -> None:
    chosen = parity.Recipe(optimizer="adamw", make=parity.tiny_float32, **recipe)
    ddp = parity.train_ddp(group, chosen, keeps_grads=True)
    for stage in (0, 3):  # the arithmetic of 1 and 2 is that of 3: see above
        curve = parity.train_sharded(group, chosen, ZeroConfig(stage), keeps_grads=True)
        parity.assert_close(curve, ddp, what=f"stage {stage}")


# ---- Options of ours that must not matter ----


@pytest.mark.parametrize("when", ["none", "before", "after"])
def test_a_scheduler_may_be_built_before_or_after_shard(ranks, when: str) -> None:
    """A scheduler holds the param-group dicts; others in their place would keep the first rate."""
    ranks(2).run(_stages_equal_ddp, scheduler=when)


@pytest.mark.parametrize(("window", "stages"), parity.in_turn([1, 2, 5]))
def test_the_window_changes_no_number(group: Group, window: int, stages: tuple[int, ...]) -> None:
    """It says how much memory may hide how much communication; 5 is most of the units."""
    _config_equals_ddp(group, stages, window=window)


UNITS = {
    "none": (),
    "one": ("blocks.1",),
    "nested": ("blocks.0.up", "blocks.0", "blocks.2", "lift", "adapter"),
    "tied-to-another": ("embed",),
}


@pytest.mark.parametrize(("units", "stages"), parity.in_turn(UNITS))
def test_any_choice_of_units_trains_the_same(
    group: Group, units: str, stages: tuple[int, ...]
) -> None:
    """A user who names units tunes memory, not the result."""
    _config_equals_ddp(group, stages, units=UNITS[units], window=1)


def _config_equals_ddp(group: Group, stages: tuple[int, ...], **options: Any) -> None:
    _stages_equal_ddp(group, stages=stages, config=options, num_micro_batches=2)


@pytest.mark.ranks(2, 4)
def test_shards_of_whole_tensors_train_the_same(group: Group) -> None:
    """Uneven shards, some of them empty, travel by the same collectives."""
    _stages_equal_the_oracle(group, cut=Cut.TENSOR, optimizer="adagrad", max_norm=0.5)


# ---- Loops that are written in another way ----


@pytest.mark.parametrize(("optimizer", "stages"), parity.in_turn(["adamw-fused", "adagrad", "sgd"]))
def test_state_that_the_optimizer_has_is_sharded_and_not_lost(
    group: Group, optimizer: str, stages: tuple[int, ...]
) -> None:
    """A run that goes on from a checkpoint loads its moments before it shards."""
    never, never_optimizer = parity.build_with_optimizer(optimizer)
    parity.run_steps(never, never_optimizer, range(2), rank=0)
    losses = parity.run_steps(
        parity.as_ddp(never, group), never_optimizer, range(2, 5), rank=group.rank
    )

    for stage in stages:
        model, used = parity.build_with_optimizer(optimizer)
        parity.run_steps(model, used, range(2), rank=0)
        zero_engine.shard(model, used, ZeroConfig(stage), group=group)
        after = parity.run_steps(model, used, range(2, 5), rank=group.rank)

        assert after == losses, f"stage {stage}"
        assert_weights_of(model, never, group=group, what=f"stage {stage}")


@pytest.mark.parametrize(
    ("how", "stages"), parity.in_turn(["to-none", "to-zero", "by-model", "by-hand"])
)
def test_every_way_to_drop_gradients_drops_them(
    group: Group, how: str, stages: tuple[int, ...]
) -> None:
    """What survives a zero_grad is added to the next step's gradient, and nobody notices."""
    drop: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
        "to-none": lambda model, optimizer: optimizer.zero_grad(),
        "to-zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        "by-model": lambda model, optimizer: model.zero_grad(),
        "by-hand": _set_none_by_hand,
    }

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, wrapped: nn.Module) -> list:
        losses = []
        for step in range(4):
            loss = parity.loss_of(wrapped, parity.batch(step, 0, group.rank))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            drop[how](model, optimizer)
        return losses

    _equals_ddp(group, train, stages, "sgd")


def _set_none_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = None


def test_step_takes_a_closure(group: Group) -> None:
    """Gradients then arrive after step() has begun."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, wrapped: nn.Module) -> list:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = parity.loss_of(wrapped, parity.batch(next(steps), 0, group.rank))
            loss.backward()
            return loss

        steps = iter(range(3))
        return [optimizer.step(closure).item() for _ in range(3)]

    _equals_ddp(group, train)


class _Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 5)
        self.right = nn.Linear(3, 5)
        self.both = nn.Linear(5, 1)

    def forward(self, x: Tensor, use: str) -> Tensor:
        return self.both(getattr(self, use)(x)).mean()


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])
def test_ranks_may_use_different_parameters(group: Group, set_to_none: bool) -> None:
    """One rank's gradient is another's zero, and a step may leave out what the last one used."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, wrapped: nn.Module) -> list:
        losses = []
        for step in range(5):
            generator = torch.Generator().manual_seed(2 * step + group.rank)
            x = torch.randn(4, 3, generator=generator)
            use = "right" if step in (1, 3) and (group.rank or step == 3) else "left"
            loss = wrapped(x, use)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return losses

    _equals_ddp(group, train, make=_Branching)


def _equals_ddp(
    group: Group,
    train: Callable[[nn.Module, torch.optim.Optimizer, nn.Module], list[float]],
    stages: tuple[int, ...] = parity.STAGES,
    name: str = "adamw",
    make: Callable[[], nn.Module] = parity.Tiny,
) -> None:
    """A loop over a model, its optimizer, and what is called, which for DDP is another object."""
    ddp, ddp_optimizer = parity.build_with_optimizer(name, make)
    expected = train(ddp, ddp_optimizer, parity.as_ddp(ddp, group))

    for stage in stages:
        model, optimizer = parity.build_sharded(group, ZeroConfig(stage), name, make)
        assert train(model, optimizer, model) == expected, f"stage {stage}"
        assert_weights_of(model, ddp, group=group, what=f"stage {stage}")
