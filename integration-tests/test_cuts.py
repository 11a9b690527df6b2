"""Optimizers that need rows, blocks or whole tensors train as they do under plain DDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import parity
import pytest
import structured
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from training import assert_weights_of, scaled_step
from zero_comm import AgreementError, Group, record_traffic
from zero_engine import ConfigError
from zero_partition import ChainedOptimizer, Cut, PartitionError, StateError, memory_report

Stages = tuple[int, ...]
TRAININGS: dict[str, tuple[Any, str | None]] = {
    **{name: (make, structured.CHOICES.get(name)) for name, make in structured.OPTIMIZERS.items()},
    **{f"adamw by {cut}": ("adamw", cut) for cut in ("row", "tensor", "block(16)")},  # needs none
}


@pytest.mark.parametrize(("name", "stages"), parity.in_turn(TRAININGS))
def test_two_ranks_train_as_ddp_does_bit_for_bit(group: Group, name: str, stages: Stages) -> None:
    """The promise does not end where an optimizer looks at more than single elements."""
    make, cut = TRAININGS[name]
    chosen = parity.Recipe(make, num_micro_batches=2, scheduler="after")
    expected = parity.train_ddp(group, chosen)

    for stage in stages:
        curve = parity.train_sharded(group, chosen, ZeroConfig(stage, cut=cut))
        parity.assert_same(curve, expected, rank=group.rank, what=f"{name}, stage {stage}")


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("name", "stages"), parity.in_turn(structured.CUTS))
def test_clipping_is_the_documented_arithmetic(group: Group, name: str, stages: Stages) -> None:
    """Norms are added by rank, and which rank has what is another matter under each cut."""
    cut = structured.CUTS[name]
    recipe = parity.Recipe(
        optimizer=structured.OPTIMIZERS[name],
        num_micro_batches=2,
        reduces_once=False,
        max_norm=0.5,
    )
    expected = parity.train_alone_by_stage(group, recipe, cut=cut)

    for stage in stages:
        curve = parity.train_sharded(group, recipe, ZeroConfig(stage, cut=cut))
        parity.assert_same(curve, expected[stage], rank=group.rank, what=f"stage {stage}")


# ---- What the optimizer sees ----


class Seen(torch.optim.Optimizer):
    """Writes down the shape and kind of what it would update."""

    needs_cut = "flat"

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.seen: list[tuple[tuple[int, ...], str] | None] = []

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # noqa: D102
        if closure is not None:
            closure()
        params = [param for group in self.param_groups for param in group["params"]]
        self.seen = [
            None if p.grad is None else (tuple(p.shape), type(p.grad).__name__) for p in params
        ]
        assert all(p.grad is None or p.grad.shape == p.shape for p in params)


class Matrices(nn.Module):
    """One unit: a matrix, another of half its size, a tensor of three dims, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.randn(64, 8))
        self.small = nn.Parameter(torch.randn(32, 8))
        self.cube = nn.Parameter(torch.randn(8, 4, 4))
        self.scalar = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return ((x @ self.large.T @ self.large) * self.scalar + self.cube.sum()) @ self.small.T


class Dropping(parity.PerParameter):
    """Leaves no gradients behind, so that no loop has to drop them."""

    def update(self, param: Tensor, grad: Tensor, state: dict, group: dict) -> None:  # noqa: D102
        param.add_(grad, alpha=-group["lr"])
        param.grad = None


@pytest.mark.parametrize("cut", ["flat", "row", "tensor"])
def test_gradients_that_the_optimizer_drops_are_not_added_to(group: Group, cut: str) -> None:
    """What it was given in place of its shards of gradients must not bring them back."""
    plain = parity.build(Matrices)
    for stage in (None, 2, 3):
        model = plain if stage is None else parity.build(Matrices)
        optimizer = Dropping(model.parameters(), lr=1e-6)
        if stage is not None:
            zero_engine.shard(model, optimizer, ZeroConfig(stage, cut=cut), group=group)
        for step in range(3):
            model(torch.full((1, 8), 1.0 + step)).sum().backward()
            optimizer.step()
        if stage is not None:
            assert_weights_of(model, plain, group=group, what=f"stage {stage}")


EXPECTED: dict[str, list[list[tuple[int, ...] | None]]] = {  # of 2 ranks
    "flat": [[(464,), (0,), (0,), (0,)], [(48,), (256,), (128,), (1,)]],
    "row": [[(56, 8), None, None, None], [(8, 8), (32, 8), (8, 4, 4), ()]],
    "tensor": [[(64, 8), None, None, None], [None, (32, 8), (8, 4, 4), ()]],
    "block(64)": [[(448,), None, None, None], [(64,), (256,), (128,), (1,)]],
}


@pytest.mark.parametrize("cut", EXPECTED)
def test_the_optimizer_sees_parameters_as_their_cut_says(group: Group, cut: str) -> None:
    """Muon looks at the shape; and nothing of a matrix is not a matrix that it could divide by."""
    kind = "GradientShard" if cut == "flat" else "Tensor"
    expected = [shape if shape is None else (shape, kind) for shape in EXPECTED[cut][group.rank]]
    for stage, closure in ((1, False), (2, True), (3, False), (3, True)):
        model = parity.build(Matrices)
        optimizer = Seen(model.parameters())
        entry, entries = optimizer.param_groups[0], optimizer.param_groups
        zero_engine.shard(model, optimizer, ZeroConfig(stage, cut=cut), group=group)
        shards = list(entry["params"])

        def backward(model: nn.Module = model, optimizer: Seen = optimizer) -> None:
            optimizer.zero_grad()
            model(torch.ones(1, 8)).sum().backward()

        if not closure:
            backward()
        optimizer.step(backward if closure else None)

        assert optimizer.seen == expected, f"stage {stage}"
        assert optimizer.param_groups is entries and entries[0] is entry
        assert all(a is b for a, b in zip(entry["params"], shards, strict=True))
        assert all(type(param.grad).__name__ == "GradientShard" for param in shards)  # as before
        with pytest.raises(StateError, match=r"norm was called on a gradient shard"):
            nn.utils.clip_grad_norm_(shards, 1.0)
        optimizer.zero_grad()
        assert all(param.grad is None for param in shards)


def test_a_step_that_fails_leaves_nothing_behind(group: Group) -> None:
    """A training loop may catch an exception of the optimizer, and go on."""
    losses = []
    for fails in (False, True):
        model = parity.build()
        optimizer = structured.OPTIMIZERS["adafactor"](model)
        zero_engine.shard(model, optimizer, ZeroConfig(2), group=group)
        if fails:
            parity.loss_of(model, parity.batch(7, 0, group.rank)).backward()
            options = [dict(entry) for entry in optimizer.param_groups]
            del optimizer.param_groups[0]["eps"]
            with pytest.raises(KeyError, match="eps"):
                optimizer.step()
            optimizer.param_groups[0].update(options[0])
            optimizer.zero_grad()
        losses.append(parity.run_steps(model, optimizer, range(3), rank=group.rank))

    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("name", "stages"), parity.in_turn(name for name in structured.OPTIMIZERS if name != "lamb")
)
def test_state_is_cut_as_its_parameter(group: Group, name: str, stages: Stages) -> None:
    """Factored, per row, per block or of any shape: a run that goes on from a checkpoint has it."""
    make = structured.OPTIMIZERS[name]
    never = parity.build()
    never_optimizer = make(never)
    parity.run_steps(never, never_optimizer, range(2), rank=0)
    losses = parity.run_steps(
        parity.as_ddp(never, group), never_optimizer, range(2, 4), rank=group.rank
    )

    for stage in stages:
        model = parity.build()
        used = make(model)
        parity.run_steps(model, used, range(2), rank=0)
        zero_engine.shard(model, used, ZeroConfig(stage), group=group)
        after = parity.run_steps(model, used, range(2, 4), rank=group.rank)
        assert after == losses, f"stage {stage}"

        saved = zero_engine.full_optimizer_state_dict(model)
        zero_engine.load_full_optimizer_state_dict(model, saved)
        parity.run_steps(model, used, range(4, 5), rank=group.rank)


@pytest.mark.ranks(4)
def test_grad_scaler_agrees_where_a_rank_has_nothing_to_step(group: Group) -> None:
    """The check for inf is a collective: a rank that left it out would leave the others waiting."""
    model = parity.build(partial(parity.Chain, num_blocks=2, width=6))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    zero_engine.shard(model, optimizer, ZeroConfig(2), group=group)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
    for factor, scale in ((1.0, 256.0), (float("inf"), 128.0)):
        loss = model(torch.ones(2, 6)).sum() * (factor if group.rank == 3 else 1.0)
        scaled_step(scaler, model, optimizer, loss, max_norm=1.0)
        assert scaler.get_scale() == scale


# ---- Memory and messages ----


@pytest.mark.parametrize("name", structured.OPTIMIZERS)
def test_what_is_alive_is_what_the_report_counts(group: Group, name: str) -> None:
    """Factored and quantised state has other shapes than its parameter, and costs all the same."""
    for stage in (1, 3):
        parity.count_from_here()
        model = parity.build()
        optimizer = structured.OPTIMIZERS[name](model)
        config = ZeroConfig(stage, cut=structured.CHOICES.get(name))
        zero_engine.shard(model, optimizer, config, group=group)
        parity.run_steps(model, optimizer, range(2), rank=group.rank)

        report = memory_report(model)

        values = [v for state in optimizer.state.values() for v in state.values()]
        several = sum(v.nbytes for v in values if isinstance(v, Tensor) and v.numel() > 1)
        assert report.optimizer_bytes >= several, f"stage {stage}: {report}"
        expected = report.total_bytes + sum(buffer.nbytes for buffer in model.buffers())
        alive = parity.live_bytes(at_most=expected)
        assert alive == expected, f"stage {stage}: {alive} bytes alive, {report}"
        del model, optimizer, values


@pytest.mark.ranks(2, 4)
def test_whole_tensors_are_dealt_evenly_over_the_model(group: Group) -> None:
    """Each unit has one matrix: if units did not take turns, one rank would keep all of them."""
    model = parity.build(partial(parity.Chain, num_blocks=8))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)
    report = memory_report(model)

    fair = 8 // group.world_size * 4 * 64 * 64
    assert report.trained_bytes_per_rank == (fair,) * group.world_size
    assert report.params_bytes == fair
    assert report.padding_bytes == 0


@pytest.mark.ranks(4)
def test_a_gather_sends_what_a_rank_keeps_and_never_pads_to_the_largest(group: Group) -> None:
    """Zero-copy and uneven: padding every rank to the largest matrix would send 4 times as much."""
    widths = ((32, 96), (96, 8), (8, 32))
    model = nn.Sequential(*(nn.Linear(*each, bias=False) for each in widths))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    zero_engine.shard(model, optimizer, ZeroConfig(3, units=[]), group=group)
    with record_traffic(group) as traffic, torch.no_grad():
        model(torch.ones(1, 32))
    gathers = traffic.operations["all_gather"]

    numels = [32 * 96, 96 * 8, 8 * 32, 0]
    assert gathers.payload_numel == 3 * numels[group.rank]
    assert gathers.padding_bytes == 0


# ---- Who decides ----


def test_what_a_trial_does_not_see_is_refused_with_the_reason(group: Group) -> None:
    """It would train, and to something else than the user's optimizer does."""
    model = parity.build()
    lbfgs = torch.optim.LBFGS(structured.others(model))
    chain = ChainedOptimizer(torch.optim.Muon(structured.matrices(model)), lbfgs)
    by_columns = torch.optim.SGD(model.parameters(), lr=0.1)
    by_columns.state[model.embed.weight]["columns"] = torch.zeros(1, parity.WIDTH)
    for optimizer, says in (
        (chain, r"LBFGS keeps parameters in its attribute '_params'"),
        (by_columns, r"'embed\.weight': optimizer state 'columns' has shape \(1, 6\)"),
    ):
        with pytest.raises(PartitionError, match=says):
            zero_engine.shard(model, optimizer, ZeroConfig(3, cut={"embed*": "row"}), group=group)


def test_ranks_that_cut_differently_are_told(group: Group) -> None:
    """Their shards would not be parts of one whole."""
    model, optimizer = parity.build_with_optimizer()
    cut = {"blocks.1.up.weight": "row" if group.rank else "tensor"}
    with pytest.raises(AgreementError, match=r"'blocks\.1\.up\.weight'.*cut (row|tensor)"):
        zero_engine.shard(model, optimizer, ZeroConfig(3, cut=cut), group=group)


@pytest.mark.parametrize("cut", ["rows", "flat(3)", 3, {"a": "whole"}, Cut])
def test_a_misspelt_cut_is_a_config_error(cut: Any) -> None:
    """Found where it was written, not where the model is sharded."""
    with pytest.raises(ConfigError, match=r"ZeroConfig\.cut: expected"):
        ZeroConfig(3, cut=cut)
