"""Optimizers that need rows, blocks or whole tensors train as they do under plain DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parity
import pytest
import structured
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from training import scaled_step
from zero_comm import AgreementError, Group, record_traffic
from zero_engine import ConfigError
from zero_partition import ChainedOptimizer, Cut, PartitionError, StateError, memory_report


@pytest.mark.parametrize(("name", "stages"), parity.in_turn(structured.OPTIMIZERS))
def test_two_ranks_train_as_ddp_does_bit_for_bit(
    group: Group, name: str, stages: tuple[int, ...]
) -> None:
    """The promise does not end where an optimizer looks at more than single elements."""
    chosen = parity.Recipe(structured.OPTIMIZERS[name], num_micro_batches=2, scheduler="after")
    expected = parity.train_ddp(group, chosen)

    for stage in stages:
        config = ZeroConfig(stage, cut=structured.CHOICES.get(name))
        curve = parity.train_sharded(group, chosen, config)
        parity.assert_same(curve, expected, rank=group.rank, what=f"{name}, stage {stage}")


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("name", "stages"), parity.in_turn(structured.CUTS))
def test_clipped_or_reduced_per_micro_batch_the_arithmetic_is_the_documented_one(
    group: Group, name: str, stages: tuple[int, ...]
) -> None:
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


@pytest.mark.parametrize(("cut", "stages"), parity.in_turn(["row", "tensor", "block(16)"]))
def test_a_cut_that_nobody_needs_changes_no_number(
    group: Group, cut: str, stages: tuple[int, ...]
) -> None:
    """A user who asks for it tunes memory and messages, not the result."""
    recipe = parity.Recipe(optimizer="adamw")
    expected = parity.train_ddp(group, recipe)

    for stage in stages:
        curve = parity.train_sharded(group, recipe, ZeroConfig(stage, cut=cut))
        parity.assert_same(curve, expected, rank=group.rank, what=f"{cut}, stage {stage}")


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


class Dropping(torch.optim.Optimizer):
    """Leaves no gradients behind, so that no loop has to drop them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-6})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # noqa: D102
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.add_(param.grad, alpha=-1e-6)
                param.grad = None


@pytest.mark.parametrize("cut", ["flat", "row", "tensor"])
def test_gradients_that_the_optimizer_drops_are_not_added_to(group: Group, cut: str) -> None:
    """What it was given in place of its shards of gradients must not bring them back."""
    weights: list[dict[str, Tensor]] = []
    for stage in (None, 1, 2, 3):
        torch.manual_seed(0)
        model = Matrices()
        optimizer = Dropping(model.parameters())
        if stage is not None:
            zero_engine.shard(model, optimizer, ZeroConfig(stage, cut=cut), group=group)
        for step in range(3):
            model(torch.full((1, 8), 1.0 + step)).sum().backward()
            optimizer.step()
        state = model.state_dict() if stage is None else zero_engine.full_state_dict(model)
        weights.append(state)
        if group.rank == 0:
            parity.assert_same_weights(state, weights[0], what=f"stage {stage}")


EXPECTED: dict[str, list[list[tuple[int, ...] | None]]] = {  # of 2 ranks
    "flat": [[(464,), (0,), (0,), (0,)], [(48,), (256,), (128,), (1,)]],
    "row": [[(56, 8), None, None, None], [(8, 8), (32, 8), (8, 4, 4), ()]],
    "tensor": [[(64, 8), None, None, None], [None, (32, 8), (8, 4, 4), ()]],
    "block(64)": [[(448,), None, None, None], [(64,), (256,), (128,), (1,)]],
}


@pytest.mark.parametrize("cut", EXPECTED)
def test_the_optimizer_sees_parameters_as_their_cut_says(ranks, cut: str) -> None:
    """Muon looks at the shape; and nothing of a matrix is not a matrix that it could divide by."""
    for stage, closure in ((1, False), (2, True), (3, False), (3, True)):
        seen = ranks(2).run(_see, stage=stage, cut=cut, closure=closure)

        kind = "GradientShard" if cut == "flat" else "Tensor"
        expected = [[s if s is None else (s, kind) for s in of] for of in EXPECTED[cut]]
        assert seen == expected, f"stage {stage}"


def _see(group: Group, stage: int, cut: str, closure: bool) -> list:
    torch.manual_seed(0)
    model = Matrices()
    optimizer = Seen(model.parameters())
    entry, entries = optimizer.param_groups[0], optimizer.param_groups
    zero_engine.shard(model, optimizer, ZeroConfig(stage, cut=cut), group=group)
    shards = list(entry["params"])

    def backward() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 8)).sum().backward()

    if not closure:
        backward()
    optimizer.step(backward if closure else None)

    assert optimizer.param_groups is entries and entries[0] is entry
    assert all(a is b for a, b in zip(entry["params"], shards, strict=True))
    assert all(type(param.grad).__name__ == "GradientShard" for param in shards)  # as before it
    with pytest.raises(StateError, match=r"norm was called on a gradient shard"):
        nn.utils.clip_grad_norm_(shards, 1.0)
    optimizer.zero_grad()
    assert all(param.grad is None for param in shards)
    return optimizer.seen


def test_a_step_that_fails_leaves_nothing_behind(group: Group) -> None:
    """A training loop may catch an exception of the optimizer, and go on."""
    losses = []
    for fails in (False, True):
        model = parity.build()
        optimizer = structured.OPTIMIZERS["adafactor"](model)
        zero_engine.shard(model, optimizer, ZeroConfig(2), group=group)
        if fails:
            _fail_a_step(model, optimizer, group)
        losses.append(parity.run_steps(model, optimizer, range(3), rank=group.rank))

    assert losses[0] == losses[1]


def _fail_a_step(model: nn.Module, optimizer: torch.optim.Optimizer, group: Group) -> None:
    parity.loss_of(model, parity.batch(7, 0, group.rank)).backward()
    rates = [entry.pop("eps") for entry in optimizer.param_groups]
    with pytest.raises(KeyError, match="eps"):
        optimizer.step()
    for entry, eps in zip(optimizer.param_groups, rates, strict=True):
        entry["eps"] = eps
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "stages"), parity.in_turn(name for name in structured.OPTIMIZERS if name != "lamb")
)
def test_state_that_the_optimizer_has_is_cut_as_its_parameter(
    group: Group, name: str, stages: tuple[int, ...]
) -> None:
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


def test_grad_scaler_agrees_where_a_rank_has_nothing_to_step(ranks) -> None:
    """The check for inf is a collective: a rank that left it out would leave the others waiting."""
    scales = ranks(4).run(_scale_and_overflow)

    assert scales == [[256.0, 128.0]] * 4


def _scale_and_overflow(group: Group) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    zero_engine.shard(model, optimizer, ZeroConfig(2), group=group)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
    scales = []
    for factor in (1.0, float("inf")):
        loss = model(torch.ones(2, 6)).sum() * (factor if group.rank == 3 else 1.0)
        scaled_step(scaler, model, optimizer, loss, max_norm=1.0)
        scales.append(scaler.get_scale())
    return scales


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


@pytest.mark.parametrize("world_size", [2, 4])
def test_whole_tensors_are_dealt_evenly_over_the_model(ranks, world_size: int) -> None:
    """Each unit has one matrix: if units did not take turns, one rank would keep all of them."""
    reports = ranks(world_size).run(_report_chain)

    block = 4 * 64 * 64
    fair = 8 // world_size * block
    for report in reports:
        assert report.trained_bytes_per_rank == (fair,) * world_size
        assert report.params_bytes == fair
        assert report.padding_bytes == 0


def _report_chain(group: Group) -> Any:
    model = parity.build(lambda: parity.Chain(num_blocks=8))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)
    return memory_report(model)


def test_a_gather_sends_what_a_rank_keeps_and_never_pads_to_the_largest(ranks) -> None:
    """Zero-copy and uneven: padding every rank to the largest matrix would send 4 times as much."""
    sent = ranks(4).run(_gather_uneven)

    numels = [96 * 32, 32 * 32, 8 * 32, 0]
    assert [payload for payload, _ in sent] == [3 * numel for numel in numels]
    assert all(padding == 0 for _, padding in sent)


class Uneven(nn.Module):
    """One unit of three matrices, each far larger than the next."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(96, 32))
        self.b = nn.Parameter(torch.randn(32, 32))
        self.c = nn.Parameter(torch.randn(8, 32))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x @ self.a.T @ self.a @ self.b @ self.c.T


def _gather_uneven(group: Group) -> tuple[int, int]:
    model = parity.build(Uneven)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)
    with record_traffic(group) as traffic, torch.no_grad():
        model(torch.ones(1, 32))
    gathers = traffic.operations["all_gather"]
    return gathers.payload_numel, gathers.padding_bytes


# ---- Who decides ----


def test_a_choice_may_be_by_name_by_pattern_by_function_or_by_param_group(group: Group) -> None:
    """Embeddings, matrices and the rest often want something else each."""

    def by_dims(name: str, param: nn.Parameter) -> str | None:
        return "row" if param.dim() > 1 and name.startswith("blocks.") else None

    for cut in ({"blocks.*.weight": "row", "*": "flat"}, by_dims):
        model = parity.build(parity.tiny_float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zero_engine.shard(model, optimizer, ZeroConfig(2, cut=cut), group=group)
        found = _dims_of_shards(model, optimizer)
        assert found["blocks.0.up.weight"] == found["blocks.2.down.weight"] == 2
        assert found["embed.weight"] == found["lift.weight"] == 1

    model = parity.build(parity.tiny_float32)
    entries = [
        {"params": structured.matrices(model), "cut": "tensor"},
        {"params": structured.others(model)},
    ]
    optimizer = torch.optim.SGD(entries, lr=0.1)
    zero_engine.shard(model, optimizer, ZeroConfig(2, cut={"embed.weight": "row"}), group=group)
    shards = [param for entry in optimizer.param_groups for param in entry["params"]]
    assert [param.dim() for param in shards[:3]] == [2, 2, 2]
    rows = torch.tensor([float(len(shards[0]))])
    torch.distributed.all_reduce(rows, group=group.process_group)
    assert 0 < len(shards[0]) < rows.item() == parity.VOCABULARY  # the user's word counts first


def _dims_of_shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, (p.dim() for p in optimizer.param_groups[0]["params"]), strict=True))


def _muon_flat(model: nn.Module, group: Group) -> None:
    optimizer = structured.OPTIMIZERS["muon"](model)
    zero_engine.shard(model, optimizer, ZeroConfig(3, cut="flat"), group=group)


def _int8_in_other_blocks(model: nn.Module, group: Group) -> None:
    optimizer = structured.OPTIMIZERS["int8"](model)
    zero_engine.shard(model, optimizer, ZeroConfig(3, cut="block(24)"), group=group)


def _lamb_without_a_word(model: nn.Module, group: Group) -> None:
    zero_engine.shard(model, structured.OPTIMIZERS["lamb"](model), ZeroConfig(1), group=group)


def _no_such_parameter(model: nn.Module, group: Group) -> None:
    optimizer = parity.adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(3, cut={"layers.*": "row"}), group=group)


def _no_such_cut_in_a_group(model: nn.Module, group: Group) -> None:
    optimizer = torch.optim.SGD([{"params": [model.scale], "cut": "whole"}], lr=0.1)
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)


def _lbfgs_in_a_chain(model: nn.Module, group: Group) -> None:
    lbfgs = torch.optim.LBFGS(structured.others(model))
    optimizer = ChainedOptimizer(torch.optim.Muon(structured.matrices(model)), lbfgs)
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)


def _column_state_by_rows(model: nn.Module, group: Group) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.embed.weight]["columns"] = torch.zeros(1, parity.WIDTH)
    zero_engine.shard(model, optimizer, ZeroConfig(3, cut="row"), group=group)


REFUSED: dict[Callable[[nn.Module, Group], None], str] = {
    _muon_flat: r"'embed\.weight' of shape \(11, 6\): a Muon needs the cut 'tensor'.*'flat'",
    _int8_in_other_blocks: r"a BlockwiseInt8 needs the cut 'block\(16\)'.*cut 'block\(24\)'",
    _lamb_without_a_word: r"a Lamb cannot work.*like parameter.*update differs.*cut='tensor'",
    _no_such_parameter: r"cut: 'layers\.\*' matches no parameter; see model\.named_parameters",
    _no_such_cut_in_a_group: r"'cut' in param group 0 of the SGD: expected a Cut, or 'flat'",
    _lbfgs_in_a_chain: r"a LBFGS keeps parameters in its attribute '_params'",
    _column_state_by_rows: r"'embed\.weight': optimizer state 'columns' has shape \(1, 6\)",
}


@pytest.mark.parametrize("mistake", REFUSED, ids=lambda mistake: mistake.__name__.strip("_"))
def test_a_wrong_pairing_is_refused_with_the_reason(group: Group, mistake: Callable) -> None:
    """It would train, and to something else than the user's optimizer does."""
    with pytest.raises(PartitionError, match=REFUSED[mistake]):
        mistake(parity.build(), group)


def test_ranks_that_cut_differently_are_told(group: Group) -> None:
    """Their shards would not be parts of one whole."""
    model, optimizer = parity.build_with_optimizer()
    cut = {"blocks.1.up.weight": "row" if group.rank else "tensor"}
    with pytest.raises(AgreementError, match=r"'blocks\.1\.up\.weight'.*cut (row|tensor)"):
        zero_engine.shard(model, optimizer, ZeroConfig(3, cut=cut), group=group)


@pytest.mark.parametrize("cut", ["rows", "block", "block(0)", "flat(3)", 3, {"a": "whole"}, Cut])
def test_a_misspelt_cut_is_a_config_error(cut: Any) -> None:
    """Found where it was written, not where the model is sharded."""
    with pytest.raises(ConfigError, match=r"ZeroConfig\.cut: expected"):
        ZeroConfig(3, cut=cut)


def test_two_optimizers_are_told_to_be_chained() -> None:
    """A user with Muon and AdamW passes both first."""
    model = parity.build()
    pair = structured.muon_and_adamw(model).optimizers

    with pytest.raises(ConfigError, match=r"expected one optimizer, got 2; .*ChainedOptimizer\("):
        zero_engine.shard(model, pair, ZeroConfig(3))
